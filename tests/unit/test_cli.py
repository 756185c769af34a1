"""The command line: what it prints and where, its JSON against the published schemas, its statuses, and its errors.

Most runs are calls of the program in this process on a tiny checkpoint; signals, pipes and terminals get a process of
their own.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import pytest

import polydraft
from polydraft import LLM, SamplingParams, __version__
from polydraft.cli import COMMANDS, main
from polydraft.cli.clashes import clashes
from polydraft.cli.prompts import Job
from polydraft.cli.run import Run
from polydraft.cli.typewriter import ACCEPTED, Typewriter, figures
from polydraft.contracts import COMPOSITES, REGISTRY
from polydraft.contracts.docs import render
from polydraft.contracts.features import FEATURES
from polydraft.output.request_output import RequestOutput
from polydraft.plugins import plugins
from tests.support import tiny
from tests.support.meddling import byte_checkpoint
from tests.support.project import ROOT
from tests.support.schemas import published

MODEL = "narrow"  # a checkpoint that needs no plugin
PROMPT = "w1 w2 w3"
DEMO_PROMPT = "def fibonacci(n):"


class Result(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one object on standard output, which fits its published schema."""
        assert self.out.count("\n") == 1, self.out
        answer = json.loads(self.out)
        published(answer["schema"]).validate(answer)
        return answer

    @property
    def error(self) -> str:
        """The one sentence on standard error."""
        assert self.err.startswith("polydraft: ")
        assert self.err.count("\n") == 1, self.err
        return self.err.removeprefix("polydraft: ").rstrip("\n")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run the program in this process; `stdin` is what standard input holds."""

    def call(*arguments: str, stdin: bytes | str = b"") -> Result:
        data = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        return Result(int(stopped.value.code or 0), *capsys.readouterr())

    return call


@pytest.fixture
def generate(run: Callable[..., Result]) -> Callable[..., Result]:
    """`polydraft generate` on the tiny model, with 12 new tokens unless said otherwise."""
    return lambda *arguments, **options: run(
        "generate",
        "--model",
        str(tiny.checkpoint(MODEL)),
        "--backend",
        "reference",
        "--max-new-tokens",
        "12",
        "--ignore-eos",
        "--draft-tokens",
        "3",
        *arguments,
        **options,
    )


@pytest.fixture
def lines(tmp_path: Path) -> Callable[..., str]:
    """Write a file of prompts, each entry a JSON value or a line as it is, and return its name."""

    def write(*entries: Any) -> str:
        file = tmp_path / "prompts.jsonl"
        text = [entry if isinstance(entry, str) else json.dumps(entry) for entry in entries]
        file.write_text("\n".join(text) + "\n", encoding="utf-8")
        return str(file)

    return write


# -- the program ---------------------------------------------------------------------------------------
def test_version(run: Callable[..., Result]):
    assert run("--version") == (0, f"polydraft {__version__}\n", "")


def test_the_package_is_the_command():
    done = subprocess.run([sys.executable, "-m", "polydraft", "--version"], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (f"polydraft {__version__}\n", "")


def test_the_package_lists_its_names():
    assert set(polydraft.__all__) <= set(dir(polydraft))


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)], ids=" ".join)
def test_help_has_examples(run: Callable[..., Result], command: tuple[str, ...]):
    result = run(*command, "--help")
    assert (result.status, result.err) == (0, "")
    assert f"Usage: {' '.join(('polydraft', *command))} " in result.out
    assert f"Examples:\n    polydraft {' '.join(command)}".rstrip() in result.out
    assert not command or all(option in result.out for option in ("--json", "--debug", "--help"))


def test_help_lists_every_command_and_no_argument_is_bad_usage(run: Callable[..., Result]):
    result = run("--help")
    assert all(re.search(rf"^  {name} +{re.escape(line)}$", result.out, re.MULTILINE) for name, line in COMMANDS.items())
    assert run() == (2, "", result.out)


def test_help_imports_nothing_heavy():
    code = f"""
        import sys
        from polydraft.cli import main
        for command in {[[], *([name] for name in COMMANDS)]}:
            main([*command, "--help"], standalone_mode=False)
        print(sorted({{"numpy", "rich", "tokenizers", "jinja2", "pluggy"}} & set(sys.modules)))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


# -- generate: JSON ------------------------------------------------------------------------------------
def direct(prompts: Sequence[Any], own: SamplingParams | Sequence[SamplingParams], **options: Any) -> list[RequestOutput]:
    """The same requests through Python."""
    config = {"model": str(tiny.checkpoint(MODEL)), "backend": "reference", "draft_tokens": 3, **options}
    return LLM(**config).generate(prompts, own)


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 12, "ignore_eos": True, **values})


def test_json(generate: Callable[..., Result]):
    result = generate(PROMPT, "--json")
    assert (result.status, result.err) == (0, "")
    answer, (output,) = result.json, direct([PROMPT], params())
    assert answer["requests"] == [
        {
            "id": "request-0",
            "prompt_ids": [1, 2, 3],
            "text": output.text,
            "token_ids": list(output.token_ids),
            "finish_reason": "length",
            "rounds": list(output.rounds),
            "drafted": output.drafted,
            "accepted": sum(output.rounds),
        }
    ]
    assert (answer["backend"], answer["device"], answer["model"]) == ("reference", "cpu", MODEL)
    assert answer["config"]["draft_tokens"] == 3
    assert "decisions" not in answer["config"]


def test_totals(generate: Callable[..., Result], lines: Callable[..., str]):
    file = lines(*({"prompt_ids": [i, i + 1], "stop": "w1 " if i % 2 else "w2"} for i in range(1, 7)))
    answer = generate("--prompts", file, "--json").json
    totals, requests = answer["totals"], answer["requests"]
    tokens = sum(len(request["token_ids"]) for request in requests)
    rounds = [accepted for request in requests for accepted in request["rounds"]]
    assert {request["finish_reason"] for request in requests} == {"stop", "length"}
    assert totals["new_tokens"] == tokens
    assert totals["tokens_per_round"] == (tokens - len(requests)) / len(rounds)
    assert totals["tokens_per_s"] == pytest.approx(tokens / (totals["prefill_s"] + totals["decode_s"]))
    drafted = sum(request["drafted"] for request in requests)
    shares = totals["acceptance_per_position"]
    assert len(shares) == 3
    assert sorted(shares, reverse=True) == shares  # what is accepted at a position was accepted before it
    assert 0 < sum(rounds) / drafted <= shares[0] <= 1
    assert totals["steps"] == totals["host_syncs"] >= max(len(request["rounds"]) for request in requests) + 1
    assert totals["graph_replays"] == 0
    assert totals["peak_memory_bytes"] > 100_000


def test_what_came_before_the_run_is_not_counted():
    engine = LLM(model=str(tiny.checkpoint(MODEL)), backend="reference").engine
    engine.device.synchronize()
    one = Run(engine, [Job([1, 2], params())])
    one.to_the_end(lambda output: None)
    totals = one.answer(explain=False)["totals"]
    assert totals["host_syncs"] == totals["steps"]


@pytest.mark.parametrize("arguments", [("--draft-tokens", "0"), ("--max-new-tokens", "1")], ids=" ".join)
def test_what_was_never_counted_is_null(generate: Callable[..., Result], arguments: tuple[str, ...]):
    totals = generate(PROMPT, *arguments, "--json").json["totals"]
    if arguments[0] == "--draft-tokens":
        assert (totals["tokens_per_round"], totals["acceptance_per_position"]) == (1.0, [])
    else:
        assert (totals["tokens_per_round"], totals["acceptance_per_position"]) == (None, [None] * 3)


def test_options_reach_the_engine(generate: Callable[..., Result]):
    options = {
        "draft_tokens": 2, "max_num_seqs": 3, "max_model_len": 64, "block_size": 8, "num_blocks": 40, "max_batched_tokens": 20,
        "overlap": 1, "seed": 11,
    }  # fmt: skip
    flags = itertools.chain.from_iterable((f"--{name.replace('_', '-')}", str(value)) for name, value in options.items())
    names = {"backend": "reference", "device": "cpu", "proposer": "mtp", "verify": "coupled", "graph": "off", "dtype": "f32"}
    named = itertools.chain.from_iterable((f"--{name}", value) for name, value in names.items())
    config = generate(PROMPT, *flags, *named, "--invariant", "--json").json["config"]
    assert {**options, **names, "invariant": True}.items() <= config.items()


def test_sampling_options_reach_the_request(generate: Callable[..., Result]):
    own = {
        "temperature": 0.9, "top_p": 0.8, "top_k": 20, "min_p": 0.01, "presence_penalty": 0.5, "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
    }  # fmt: skip
    flags = [*itertools.chain.from_iterable((f"--{name.replace('_', '-')}", str(value)) for name, value in own.items())]
    (request,) = generate(PROMPT, *flags, "--seed", "5", "--json").json["requests"]
    (output,) = direct([PROMPT], params(**own, seed=5))
    assert request["token_ids"] == list(output.token_ids) != list(direct([PROMPT], params())[0].token_ids)


@pytest.mark.parametrize("option", ["--presence-penalty", "--frequency-penalty", "--repetition-penalty", "--min-tokens"])
def test_options_of_processing_have_an_effect(generate: Callable[..., Result], lines: Callable[..., str], option: str):
    """On a greedy text that repeats itself, with its first token as a stop token."""
    (free,) = direct([PROMPT], params())
    stop = [free.token_ids[0]] if option == "--min-tokens" else []
    (request,) = generate("--prompts", lines({"prompt": PROMPT, "stop_token_ids": stop}), option, "2", "--json").json["requests"]
    assert request["token_ids"] != list(free.token_ids)
    assert len(request["token_ids"]) >= 2


def test_biases_and_bad_words_reach_every_request(generate: Callable[..., Result], lines: Callable[..., str]):
    """From the command line, and from a line of --prompts, whose own replace those."""
    free = direct([PROMPT], params())[0]
    unwanted, wanted = free.token_ids[0], free.token_ids[-1]
    word = free.text.split()[0]
    flags = ["--logit-bias", f"{unwanted}=-100", "--logit-bias", f"{wanted}=1.5", "--bad-word", word, "--bad-word", "zebra"]
    own = {"logit_bias": {str(unwanted): 100}, "bad_words": [[unwanted, unwanted]]}
    file = lines({"prompt": PROMPT}, {"prompt": PROMPT, **own}, {"prompt": PROMPT, "logit_bias": {}, "bad_words": []})
    requests = generate("--prompts", file, *flags, "--json").json["requests"]
    given = {"logit_bias": {unwanted: -100.0, wanted: 1.5}, "bad_words": (word, "zebra")}
    each: tuple[dict[str, Any], ...] = (given, own, {})
    for request, mine in zip(requests, each, strict=True):
        assert request["token_ids"] == list(direct([PROMPT], params(**mine))[0].token_ids)
    changed, pinned, untouched = (request["token_ids"] for request in requests)
    assert unwanted not in changed
    assert word not in requests[0]["text"]
    assert pinned[0] == unwanted != pinned[1]
    assert untouched == list(free.token_ids)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--logit-bias", "17"], "'17' is no ID=X, wanted a token id and a number, such as 17=-2.5"),
        (["--logit-bias", "the=2"], "'the=2' is no ID=X"),
        (["--logit-bias", "17=nan"], "logit_bias is ((17, nan),), wanted token ids of at least 0"),
        (["--logit-bias", "17=101"], "each with a number from -100 to 100"),
        (["--bad-word", ""], "bad_words is ('',), wanted texts that are not empty"),
    ],
)
def test_bad_biases_and_bad_words(generate: Callable[..., Result], flags: list[str], message: str):
    result = generate(PROMPT, *flags)
    assert result.status == 2
    assert message in result.err


@pytest.mark.parametrize("flags", [("--prompt-logprobs", "1"), ("--provenance",)], ids=" ".join)
def test_what_only_the_json_shows_is_refused_without_it(generate: Callable[..., Result], flags: tuple[str, ...]):
    result = generate(PROMPT, *flags)
    assert (result.status, result.out) == (2, "")
    assert f"{flags[0]} " in result.error
    assert generate(PROMPT, *flags, "--json").status == 0


def test_the_table_of_log_probabilities_shows_provenance(generate: Callable[..., Result]):
    assert "draft 1" in generate(PROMPT, "--logprobs", "0", "--provenance").out


def test_stop_may_be_repeated(generate: Callable[..., Result]):
    (free,) = direct([PROMPT], params())
    words = free.text.split()
    stops = (f"{words[7]} {words[8]}", f"{words[4]} {words[5]}")
    (request,) = generate(PROMPT, "--stop", stops[0], "--stop", stops[1], "--json").json["requests"]
    assert (request["text"], request["finish_reason"]) == (free.text[: free.text.index(stops[1])], "stop")


def test_logprobs_and_provenance_in_json(generate: Callable[..., Result], lines: Callable[..., str]):
    """Each request has what it asked for, and nothing else; the engine is built for the most."""
    file = lines({"prompt": PROMPT, "logprobs": 3}, {"prompt": PROMPT, "prompt_logprobs": 0}, {"prompt": PROMPT})
    answer = generate("--prompts", file, "--json", "--provenance").json
    assert (answer["config"]["logprobs"], answer["config"]["logprobs_mode"]) == (3, "raw_logprobs")
    several, of_prompt, plain = answer["requests"]
    llm = LLM(model=str(tiny.checkpoint(MODEL)), backend="reference", draft_tokens=3, logprobs=3)
    (output,) = llm.generate([PROMPT], params(logprobs=3))
    for told, record in zip(several["logprobs"], output.tokens, strict=True):
        assert told["token_id"] == record.token_id
        assert told["token"] == f"w{record.token_id}"
        assert (told["source"], told["draft_position"] or 0) == (record.source, record.draft_position)
        assert told["round"] == (None if record.round < 0 else record.round)
        assert told["logprob"] == pytest.approx(record.logprob, abs=1e-4)
        assert [(top["token_id"], top["logprob"]) for top in told["top_logprobs"]] == [
            (token, pytest.approx(value, abs=1e-4)) for token, value in record.top
        ]
    assert [len(drafts) for drafts in several["drafts"]] == list(output.round_drafts)
    of_drafts = generate("--prompts", file, "--json", "--draft-logprobs").json["requests"][0]["drafts"]
    assert [[len(one.pop("top_logprobs")) for one in drafts] for drafts in of_drafts] == [[3] * n for n in output.round_drafts]
    assert all(one.pop("logprob") <= 0.0 for drafts in of_drafts for one in drafts)
    assert [[{**one, "logprob": None} for one in drafts] for drafts in of_drafts] == several["drafts"]
    assert [one and one["token_id"] for one in of_prompt["prompt_logprobs"]] == [None, *of_prompt["prompt_ids"][1:]]
    assert "prompt_logprobs" not in several
    assert "logprobs" not in of_prompt
    assert {"logprobs", "prompt_logprobs", "drafts"} & set(plain) == set()
    assert [t["token_id"] for t in plain["tokens"]] == plain["token_ids"]


def test_logprobs_as_a_table(generate: Callable[..., Result]):
    shown = generate(PROMPT, "--logprobs", "1").out
    assert "most likely" in shown
    assert "draft 1" in shown
    assert len([line for line in shown.splitlines() if "prefill" in line]) == 1


def test_explain_in_json(generate: Callable[..., Result]):
    config = generate(PROMPT, "--draft-tokens", "2", "--explain", "--json").json["config"]
    assert config.pop("captured") == []
    assert config.pop("packing_errors") == {}
    decisions = {decision["name"]: decision for decision in config.pop("decisions")}
    joined = {one["contracts"]: one for one in config.pop("joined")}
    assert joined["residual_add+rms_norm"]["launches"]["greedy.target"] >= 1
    assert {(one["by"], one["captured"]) for one in joined.values()} == {("reference", False)}
    assert {name: decision["chosen"] for name, decision in decisions.items()} == config
    assert (decisions["draft_tokens"]["asked"], decisions["proposer"]["asked"]) == (2, "auto")
    assert all(decision["reason"] for decision in decisions.values())


def test_what_packing_changed_is_told_by_layer(generate: Callable[..., Result]):
    given = (PROMPT, "--draft-tokens", "2", "--weights", "int4", "--weights-ignore", "head", "--explain")
    config = generate(*given, "--json").json["config"]
    assert config["weights"] == "int4-group32"
    assert 0.05 < config["packing_errors"]["layers.0.qkv"] < 0.15
    assert "lm_head" not in config["packing_errors"]
    told = generate(*given).out
    error = config["packing_errors"]["layers.0.down"]
    assert re.search(rf"layers\.0 .*qkv \d+\.\d\d%.* down {error:.2%}", told)


def test_drafts_of_steps_and_graphs_are_told(generate: Callable[..., Result]):
    graphs = ("--device", "queued", "--graph", "decode", "--max-num-seqs", "2")
    answer = generate(PROMPT, "--draft-tokens", "2", *graphs, "--explain", "--json").json
    assert answer["config"]["captured"] == [{"draft_tokens": 2, "buckets": [1, 2], "left_out": [], "graphs": 8, "bytes": 0}]
    assert answer["totals"]["drafts_per_step"] == [0, 0, answer["totals"]["steps"]]
    told = " ".join(generate(PROMPT, "--draft-tokens", "2", *graphs, "--explain").out.split())
    assert "drafts captured left out graphs bytes" in told
    assert "2 1, 2 none 8 not reported" in told


# -- generate: prompts ---------------------------------------------------------------------------------
TWO_GRAPHS = ("--device", "queued", "--graph", "decode", "--graph-sizes", "1,2")


@pytest.mark.parametrize(("prompts", "options", "slots"), [
    (1, (), 1), (3, (), 3), (9, (), 8), (1, ("--max-num-seqs", "2"), 2), (1, TWO_GRAPHS, 2), (3, TWO_GRAPHS, 3),
])  # fmt: skip
def test_there_are_as_many_slots_as_prompts_up_to_eight(
    prompts: int, options: tuple[str, ...], slots: int, generate: Callable[..., Result], lines: Callable[..., str]
):
    file = lines(*({"prompt": PROMPT, "max_new_tokens": 1} for _ in range(prompts)))
    answer = generate("--prompts", file, "--draft-tokens", "2", *options, "--json").json
    assert answer["config"]["max_num_seqs"] == slots
    assert len(answer["requests"]) == prompts


def test_lines_override_options_and_keep_their_order(generate: Callable[..., Result], lines: Callable[..., str]):
    file = lines(
        {"prompt": PROMPT},
        "",
        {"prompt_ids": [5, 6], "max_new_tokens": 3, "id": "mine"},
        {"prompt": "w7", "temperature": 1.0, "seed": 3, "stop_token_ids": [9]},
    )
    requests = generate("--prompts", file, "--max-num-seqs", "1", "--json").json["requests"]
    wanted = direct(
        [PROMPT, [5, 6], "w7"], [params(), params(max_new_tokens=3), params(temperature=1.0, seed=3, stop_token_ids=[9])]
    )
    assert [request["token_ids"] for request in requests] == [list(output.token_ids) for output in wanted]
    assert [request["prompt_ids"] for request in requests] == [[1, 2, 3], [5, 6], [7]]
    assert requests[1]["id"] == "mine"
    assert len({request["id"] for request in requests}) == 3


@pytest.mark.parametrize("data", [b'{"prompt": "w1 w2 w3"}', b'\xef\xbb\xbf{"prompt": "w1 w2 w3"}\r\n\r\n'])
def test_lines_of_standard_input(generate: Callable[..., Result], data: bytes):
    (request,) = generate("--prompts", "-", "--json", stdin=data).json["requests"]
    assert request["prompt_ids"] == [1, 2, 3]


def test_text_of_standard_input(generate: Callable[..., Result]):
    assert generate("-", "--json", stdin="w4\nw5\n").json["requests"][0]["prompt_ids"] == [4, 5]
    assert "standard input is no UTF-8 text" in generate("-", stdin=b"\xff").error


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            {"prompt": "w1", "temprature": 1},
            "unknown key 'temprature'; did you mean 'temperature'? known: prompt, prompt_ids, id",
        ),
        ({"prompt": "w1", "draft_tokens": 1}, "unknown key 'draft_tokens'"),
        ({"prompt": "w1", "temperature": -1}, "temperature is -1, wanted 0 or a number"),
        ({"prompt": "w1", "stop": 5}, "stop is 5, wanted a text or a list of texts"),
        ({"prompt": "w1", "prompt_ids": [1]}, "wanted either 'prompt' or 'prompt_ids'; give exactly one of them"),
        ({"max_new_tokens": 4}, "wanted either 'prompt' or 'prompt_ids'"),
        ({"prompt": ["w1"]}, 'prompt is ["w1"], wanted a text'),
        ({"prompt_ids": "w1"}, 'prompt_ids is "w1", wanted a list of token ids'),
        ({"prompt_ids": [1, 64]}, "prompt token 1 is 64, wanted an id from 0 to 63"),
        ({"prompt_ids": [[1], [1, 2]]}, "wanted a list of token ids"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": "w1 " * 200}, "the prompt has 200 tokens, wanted fewer than 96"),
        ({"prompt": "\ud800"}, "no valid Unicode text"),
        ({"prompt": "w1", "id": 7}, "id is 7, wanted a text that is not empty"),
        ({"prompt": "w1", "id": "first"}, "id 'first' is used by {file} line 1 already; choose another"),
        (["w1"], "holds a JSON list, wanted a JSON object"),
        ('"w1"', "holds a JSON str, wanted a JSON object"),
        ("{'prompt': 'w1'}", "is no valid JSON, got "),
    ],
)
def test_a_bad_line_is_named_and_nothing_runs(
    generate: Callable[..., Result], lines: Callable[..., str], line: Any, message: str
):
    file = lines({"prompt": "w1", "id": "first"}, "", line, {"prompt": "w2"})
    result = generate("--prompts", file)
    assert (result.status, result.out) == (2, "")
    assert result.error.startswith((f"{file} line 3: ", f"{file} line 3 is no valid JSON", f"{file} line 3 holds a JSON "))
    assert message.format(file=file) in result.error


@pytest.mark.parametrize(
    ("command", "what"),
    [
        (("generate", "w1", "--json-schema"), "--json-schema {file}"),
        (("generate", "w1", "--draft-vocab"), "--draft-vocab {file}"),
        (("generate", "--prompts"), "{file} line 1"),
        (("trace",), "{file}"),
        (("conform", "verify"), "the report {file}"),
        (("conform", "reference", "--waivers"), "the file of waivers {file}"),
    ],
    ids=[
        "generate --json-schema",
        "generate --draft-vocab",
        "generate --prompts",
        "trace",
        "conform verify",
        "conform --waivers",
    ],
)
def test_json_that_nests_without_end_is_no_bug(run: Callable[..., Result], tmp_path: Path, command: Sequence[str], what: str):
    file = tmp_path / "deep.json"
    file.write_text("[" * 100_000)
    result = run(*command, str(file))
    assert (result.status, result.out) == (2, "")
    assert f"{what.format(file=file)} is no valid JSON, got values that nest too deep, wanted " in result.error


def test_a_bad_line_is_told_before_anything_is_loaded(run: Callable[..., Result], lines: Callable[..., str]):
    assert "unknown key 'x'" in run("generate", "--prompts", lines({"x": 1}), "--model", "no/such/model").error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), 'there is no prompt, wanted a text, - for standard input, or --prompts; for example: polydraft generate "def'),
        (("w1", "--prompts", "-"), "got both PROMPT and --prompts"),
        (("--prompts", "no/such/file"), "--prompts no/such/file cannot be read: No such file or directory"),
        (("--prompts", "-"), "standard input has no requests, wanted one JSON object a line"),
        (("",), "the prompt is empty, wanted at least one token"),
    ],
)
def test_no_prompt(generate: Callable[..., Result], arguments: tuple[str, ...], message: str):
    result = generate(*arguments)
    assert (result.status, result.out) == (2, "")
    assert message in result.error


# -- errors --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "status", "kind", "message"),
    [
        (("--nonsense",), 2, "UsageError", "No such option"),
        (("--draft-tokens", "x"), 2, "UsageError", "'x' is neither a whole number nor auto"),
        (("--kernels", "a,,b"), 2, "UsageError", "'a,,b' has an empty name"),
        (("--temperature", "warm"), 2, "UsageError", "'warm' is not a valid float"),
        (("--draft-tokens", "-1"), 2, "ConfigError", "draft_tokens is -1, wanted a whole number of at least 0"),
        (("--seed", str(2**64)), 2, "ConfigError", f"of at least 0 and at most {2**64 - 1}"),
        (("--temperature", "-1"), 2, "RequestError", "temperature is -1.0, wanted 0 or a number"),
        (("--proposer", "hybird"), 2, "CapabilityError", "--proposer hybird"),
        (("--verify", "blindly"), 2, "ConfigError", "verify is 'blindly', wanted one of auto, greedy, coupled, rejection"),
        (("--graph", "decode"), 2, "CapabilityError", "--graph decode"),
        (("--dtype", "bf16"), 2, "CapabilityError", "--dtype bf16"),
        (("--backend", "nobody"), 2, "UnknownPluginError", "no plugin 'nobody' in polydraft.backends"),
        (("--plugin", "no_such_module_at_all"), 1, "PluginError", "no_such_module_at_all"),
        (("--device", "cuda:0"), 1, "DeviceError", "'cuda:0'"),
        (("--model", "no/such/model"), 1, "CheckpointError", "no/such/model"),
        (("--model", ""), 2, "ConfigError", "model is '', wanted the directory of a checkpoint; name one, or leave it out for"),
        (("--logprobs", "-1"), 2, "RequestError", "logprobs is -1, wanted a whole number from 0 to"),
        (("--logprobs", "65"), 2, "CapabilityError", "--logprobs 65: model narrow has 64 tokens"),
        (
            ("--logprobs-mode", "cooked"),
            2,
            "ConfigError",
            "logprobs_mode is 'cooked', wanted one of raw_logprobs, processed_logprobs",
        ),
        # Of features that are not built there is no option, so that none is ignored.
        (("--recording", "x"), 2, "UsageError", "--recording"),
    ],
)
def test_errors(generate: Callable[..., Result], arguments: tuple[str, ...], status: int, kind: str, message: str):
    result = generate(PROMPT, *arguments)
    assert (result.status, result.out) == (status, "")
    assert message in result.error
    told = generate(PROMPT, *arguments, "--json")
    assert told.json["error"] == {"type": kind, "message": result.error, "exit_code": status}
    assert (told.status, told.err) == (status, result.err)


@pytest.mark.parametrize(
    ("name", "told"), [("generat", "did you mean generate;"), ("x", "wanted one of generate, serve, doctor, contracts, conform,")]
)
def test_an_unknown_command(run: Callable[..., Result], name: str, told: str):
    result = run(name, "--json")
    assert (result.status, result.json["error"]["exit_code"]) == (2, 2)
    assert f"there is no command {name!r}, {told}" in result.error


def broken(error: BaseException) -> Callable[..., Any]:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (KeyError("lost"), 1, "unexpected KeyError: 'lost'; this is a bug, please report it with the output of --debug"),
        (
            MemoryError("Unable to allocate 1 PiB"),
            1,
            "this machine is out of memory (Unable to allocate 1 PiB); lower --num-blocks",
        ),
        (KeyboardInterrupt(), 130, "interrupted before there was a result"),
    ],
)
def test_what_nobody_expected_is_a_sentence_too(
    generate: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, error: BaseException, status: int, message: str
):
    monkeypatch.setattr("polydraft.cli.run.Run.to_the_end", broken(error))
    result = generate(PROMPT, "--json")
    assert result.status == result.json["error"]["exit_code"] == status
    assert result.err.strip() == f"polydraft: {result.json['error']['message']}"
    assert message in result.err


@pytest.mark.parametrize("by_environment", [True, False])
def test_a_traceback_only_when_asked_for(generate: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, by_environment: bool):
    assert "Traceback" not in generate(PROMPT, "--draft-tokens", "-1").err
    if by_environment:
        monkeypatch.setenv("POLYDRAFT_DEBUG", "1")
    result = generate(PROMPT, "--draft-tokens", "-1", *([] if by_environment else ["--debug"]))
    assert "Traceback (most recent call last)" in result.err
    assert result.err.splitlines()[-1].startswith("polydraft: draft_tokens is -1")


@pytest.mark.parametrize(("name", "value"), [("POLYDRAFT_DEBUGG", "1"), ("POLYDRAFT_DEBUG", "perhaps")])
def test_bad_variables_are_refused(run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, name: str, value: str):
    monkeypatch.setenv(name, value)
    result = run("doctor")
    assert (result.status, result.out) == (2, "")
    assert "POLYDRAFT_DEBUG" in result.error


SPOILT = """
import dataclasses
import numpy as np
from tests.support.meddling import MeddlingPlugin

class Spoilt(MeddlingPlugin):
    def polydraft_backend_info(self, spec):
        return dataclasses.replace(super().polydraft_backend_info(spec), name="spoilt")
    polydraft_backend_info.polydraft_impl = MeddlingPlugin.polydraft_backend_info.polydraft_impl

def spoil(role, num_runs, logits, slots):
    if role == "target" and num_runs == 2:
        logits[slots == 0] = np.nan

plugin = Spoilt(spoil)
polydraft_backend_info, polydraft_open_device = plugin.polydraft_backend_info, plugin.polydraft_open_device
polydraft_kernels, polydraft_init_forward_meta = plugin.polydraft_kernels, plugin.polydraft_init_forward_meta
polydraft_collectives = plugin.polydraft_collectives
"""


def test_a_request_that_fails_is_told_and_the_others_are_there(
    generate: Callable[..., Result], lines: Callable[..., str], tmp_path: Path
):
    plugin = tmp_path / "spoilt.py"
    plugin.write_text(SPOILT, encoding="utf-8")
    file = lines({"prompt": "w1", "id": "one"}, {"prompt": "w2", "id": "two"})
    result = generate("--prompts", file, "--plugin", str(plugin), "--backend", "spoilt", "--json")
    assert result.status == 1
    assert result.error.startswith("request 'one': the model produced NaN logits")
    one, two = result.json["requests"]
    assert (one["finish_reason"], one["error"]) == ("error", result.error.removeprefix("request 'one': "))
    assert two["token_ids"] == list(direct(["w2"], params())[0].token_ids)
    assert "error" not in two


# -- generate: text ------------------------------------------------------------------------------------
def test_plain_text(generate: Callable[..., Result]):
    result, answer = generate(PROMPT), generate(PROMPT, "--json").json
    assert (result.status, result.err) == (0, "")
    text, _, line = result.out.rstrip("\n").partition("\n\n")
    assert text == answer["requests"][0]["text"]
    counted = r"12 tokens \| 1\.\d\d tokens per round \| accepted by position( \d+%){3} \| [\d,]+ tokens/s"
    assert re.fullmatch(rf"{counted} \| backend reference \| K = 3", line)


def test_explained_text(generate: Callable[..., Result]):
    result = generate(PROMPT, "--explain", "--draft-tokens", "2")
    head, *rows = result.out.splitlines()
    assert head.split() == ["decision", "asked", "chosen", "why"]
    assert any(row.split()[:3] == ["draft_tokens", "2", "2"] for row in rows)
    assert any(row.split()[:3] == ["proposer", "auto", "mtp"] for row in rows)
    assert any(row.split()[:4] == ["residual_add+rms_norm", "reference", "8", "programs"] for row in rows)
    assert result.out.endswith("K = 2\n")


def test_several_texts_have_headers_and_keep_their_order(generate: Callable[..., Result], lines: Callable[..., str]):
    """The first is the longest, so the others wait for it."""
    file = lines({"prompt": PROMPT}, {"prompt": "w9 " * 30, "max_new_tokens": 2}, {"prompt_ids": [7], "max_new_tokens": 1})
    result = generate("--prompts", file)
    outputs = direct([PROMPT, "w9 " * 30, [7]], [params(max_new_tokens=n) for n in (12, 2, 1)])
    wanted = [
        f"== 1/3 request-0: {PROMPT} (12 tokens, length)", outputs[0].text,
        f"== 2/3 request-1: {'w9 ' * 15}w9... (2 tokens, length)", outputs[1].text,
        "== 3/3 request-2: [7] (1 token, length)", outputs[2].text, "",
    ]  # fmt: skip
    assert result.out.splitlines()[:-1] == wanted
    assert result.out.splitlines()[-1].startswith("15 tokens | ")


def test_figures_without_drafts():
    totals: dict[str, Any] = {"new_tokens": 1, "tokens_per_round": None, "acceptance_per_position": [], "tokens_per_s": None}
    answer = {"totals": totals, "config": {"draft_tokens": 0}, "backend": "reference"}
    assert figures(answer) == "1 token | backend reference | K = 0"


class Pieces:
    """A screen that keeps what is written, one (text, style) a character."""

    def __init__(self) -> None:
        self.written: list[tuple[str, str]] = []

    def write(self, text: str, style: str = "") -> None:
        self.written += [(character, style) for character in text]

    def line(self, text: str = "", style: str = "") -> None:
        self.write(f"{text}\n", style)


@pytest.mark.parametrize("stop", [(), ("ü",), ("a\ufffd",)])
@pytest.mark.parametrize("streaming", [True, False])
def test_every_accepted_draft_has_its_colour(tmp_path: Path, streaming: bool, stop: tuple[str, ...]):
    """On texts of broken and whole characters, which span tokens, rounds and records."""
    llm = LLM(model=str(byte_checkpoint(tmp_path / "bytes")), backend="reference", draft_tokens=3)
    own, seen = SamplingParams(max_new_tokens=32, ignore_eos=True, stop=stop), set()
    for prompt in ([1, 2, 3 + i] for i in range(8)):
        screen = Pieces()
        writer = Typewriter(screen, llm.engine.tokenizer)  # type: ignore[arg-type]
        records = list(llm.stream([prompt], own)) if streaming else llm.generate([prompt], own)
        for record in records:
            writer.feed(record)
        output = records[-1]
        text = "".join(character for character, _ in screen.written)
        assert text == output.text + "\n" * (not output.text.endswith("\n"))
        kinds = [""] + [kind for accepted in output.rounds for kind in [ACCEPTED] * accepted + [""]]
        shown = [style for _, style in screen.written[: len(output.text)]]
        assert shown == expected_styles(llm.engine.tokenizer, output, kinds)
        seen |= set(shown)
    assert seen == {"", ACCEPTED}


def expected_styles(tokenizer: Any, output: RequestOutput, kinds: Sequence[str]) -> list[str]:
    """The style of each character: that of the token that makes it certain, naively over whole prefixes."""
    styles: list[str] = []
    for end, kind in zip(range(1, len(output.token_ids) + 1), kinds, strict=False):
        text = tokenizer.decode(output.token_ids[:end])
        certain = len(text) - text.endswith("\ufffd")
        styles += [kind] * (certain - len(styles))
    return (styles + [""] * len(output.text))[: len(output.text)]


# -- processes -----------------------------------------------------------------------------------------
# One thread: on a busy machine several would wait for each other. SIGINT may be ignored where tests run in the background.


def test_the_drafts_of_a_run_are_made_again(generate: Callable[..., Result], tmp_path: Path) -> None:
    """What it chose by measured times, on which sampled texts depend."""
    file = str(tmp_path / "decisions")
    arguments = (
        PROMPT, "--json", "--draft-tokens", "auto:5", "--verify", "rejection", "--temperature", "0.9", "--max-new-tokens", "80",
    )  # fmt: skip
    first, again = generate(*arguments, "--record-drafts", file), generate(*arguments, "--replay-drafts", file)
    assert first.json["requests"][0]["token_ids"] == again.json["requests"][0]["token_ids"]
    assert first.json["totals"]["drafts_per_step"] == again.json["totals"]["drafts_per_step"]
    wrong = generate(*arguments, "--record-drafts", file, "--replay-drafts", file)
    assert wrong.status == 2
    assert wrong.error == f"--replay-drafts and --record-drafts both name {file}, wanted a file for each; change one of them"


PROGRAM = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from polydraft.cli import main; main()"


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OPENBLAS_NUM_THREADS": "1", "COVERAGE_PROCESS_START": "", **more}


def start(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", PROGRAM, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), **options)


LONG = ("--max-new-tokens", "1900", "--ignore-eos")


def test_ctrl_c_prints_what_was_produced():
    process = start("generate", DEMO_PROMPT, "--backend", "reference", *LONG)
    assert process.stdout is not None
    begin = process.stdout.read(80)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=30)
    text, _, line = (begin + rest).decode().rstrip("\n").rpartition("\n\n")
    assert (process.returncode, err) == (130, b"")
    assert len(text) >= 70
    assert 10 < int(line.split()[0]) < 1900
    assert "tokens per round" in line


def test_ctrl_c_completes_the_json(tmp_path: Path):
    """The first request is done, the second one runs, the third one waits."""
    file = tmp_path / "prompts.jsonl"
    entries = [{"prompt": DEMO_PROMPT, "max_new_tokens": 1}, {"prompt": DEMO_PROMPT}, {"prompt": DEMO_PROMPT}]
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    plugin = tmp_path / "told.py"  # an observer that says when the steps have begun
    plugin.write_text(
        textwrap.dedent(
            """
            import sys
            from polydraft import hookimpl

            class Told:
                def step_finished(self, plan, outcome):
                    if plan.step_id == 5:
                        print("begun", file=sys.stderr, flush=True)

            @hookimpl
            def polydraft_step_observers():
                return [Told()]
            """
        )
    )
    process = start(
        "generate",
        "--backend",
        "reference",
        "--prompts",
        str(file),
        *LONG,
        "--max-num-seqs",
        "1",
        "--plugin",
        str(plugin),
        "--json",
    )
    assert process.stderr is not None
    assert process.stderr.readline() == b"begun\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    result = Result(process.returncode, out.decode(), err.decode())
    assert (result.status, result.err) == (130, "")
    first, second, third = result.json["requests"]
    assert [request["finish_reason"] for request in (first, second, third)] == ["length", "abort", "abort"]
    assert (len(first["token_ids"]), third["token_ids"]) == (1, [])
    assert 0 < len(second["token_ids"]) < 1900
    assert second["token_ids"][0] == first["token_ids"][0]


def test_a_closed_pipe_is_quiet():
    process = start("generate", DEMO_PROMPT, "--backend", "reference", *LONG)
    assert process.stdout is not None
    assert process.stderr is not None
    os.read(process.stdout.fileno(), 10)
    process.stdout.close()
    assert process.wait(timeout=30) == 1
    assert process.stderr.read() == b""
    process.stderr.close()


def test_a_text_that_the_terminal_cannot_encode(tmp_path: Path):
    model = byte_checkpoint(tmp_path / "bytes")
    command = [sys.executable, "-c", PROGRAM, "generate", "--model", str(model), "--prompts", "-", "--max-new-tokens", "8"]
    done = subprocess.run(
        command, input=b'{"prompt_ids": [1, 2, 3]}', capture_output=True, env=environment(PYTHONIOENCODING="ascii"), check=True
    )
    assert b"?" in done.stdout
    assert done.stderr == b""


def terminal(*arguments: str, **variables: str) -> tuple[int, str]:
    """Run on a pseudo-terminal; returns the status and everything that it was sent."""
    import pty

    screen, line = pty.openpty()
    command = [sys.executable, "-c", PROGRAM, *arguments]
    settings = environment(TERM="xterm-256color", **variables)
    process = subprocess.Popen(command, stdin=line, stdout=line, stderr=line, env=settings)
    os.close(line)
    sent = b""
    while select.select([screen], [], [], 30)[0]:
        try:
            data = os.read(screen, 65536)
        except OSError:  # how Linux says that the other end was closed
            break
        sent += data
        if not data:
            break
    os.close(screen)
    return process.wait(timeout=30), sent.decode().replace("\r\n", "\n")


COLOR = re.compile(r"\x1b\[[0-9;]*m")
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


def test_a_terminal_gets_colours_and_a_legend():
    llm = LLM(model=str(tiny.checkpoint(MODEL)), backend="reference", draft_tokens=3)
    (output,) = llm.generate([PROMPT], params(max_new_tokens=24))
    status, sent = terminal(*TINY)
    shown = sent[sent.index("\x1b[1;32maccepted draft\x1b[0m | target token\n") :]
    assert status == 0
    assert COLOR.sub("", shown).startswith(f"accepted draft | target token\n{PROMPT}{output.text}\n")
    assert shown.endswith("| backend reference | K = 3\n")
    kinds = [""] + [kind for accepted in output.rounds for kind in [ACCEPTED] * accepted + [""]]
    styles = expected_styles(llm.engine.tokenizer, output, kinds)
    drafts = "".join(re.findall(r"\x1b\[1;32m(.*?)\x1b\[0m", shown, re.DOTALL)).removeprefix("accepted draft")
    assert drafts == "".join(character for character, style in zip(output.text, styles, strict=True) if style)
    assert 0 < len(drafts) < len(output.text)


TINY = (
    "generate",
    PROMPT,
    "--backend",
    "reference",
    "--model",
    str(tiny.checkpoint(MODEL)),
    "--max-new-tokens",
    "24",
    "--ignore-eos",
    "--draft-tokens",
    "3",
)


@pytest.mark.parametrize(
    ("flags", "variables"),
    [
        pytest.param(("--no-color",), {}, id="flag"),
        pytest.param((), {"NO_COLOR": "1"}, id="variable", marks=pytest.mark.deep),  # `test_environment.py` reads it
    ],
)
def test_a_terminal_without_colours(flags: tuple[str, ...], variables: Mapping[str, str]):
    status, sent = terminal(*TINY, *flags, CI="1", **variables)
    assert status == 0
    assert "\x1b" not in sent
    assert "accepted draft" not in sent
    assert sent.startswith(f"{direct([PROMPT], params(max_new_tokens=24))[0].text}\n")


def test_several_texts_on_a_terminal(tmp_path: Path):
    """The bar comes and goes on the same terminal; what stays is the texts."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt_ids": [1, 2]}\n{"prompt_ids": [3, 4]}\n')
    model = str(tiny.checkpoint(MODEL))
    status, sent = terminal("generate", "--prompts", str(file), "--model", model, "--max-new-tokens", "8", "--ignore-eos")
    assert status == 0
    assert "2/2" in CONTROL.sub("", sent)
    for output in direct([[1, 2], [3, 4]], params(max_new_tokens=8)):
        assert f"\n{output.text}\n" in COLOR.sub("", sent)


SLOW = "import polydraft.loading as loading; loading.INTERVAL_S = 0.0\n"
"""As if every tensor and every size of step took ten seconds."""
CAPTURED = (
    "generate",
    DEMO_PROMPT,
    "--backend",
    "reference",
    "--device",
    "queued",
    "--draft-tokens",
    "3",
    "--max-num-seqs",
    "2",
    "--max-new-tokens",
    "2",
)


def test_a_pipe_is_told_how_far_a_slow_engine_is_that_is_built(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CI", raising=False)

    def run(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command, settings = [sys.executable, "-c", program, *CAPTURED], environment(**variables)
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env=settings, check=True)

    done = run(SLOW + PROGRAM)
    first, *_, loaded, begun, one, two = done.stderr.splitlines()
    assert re.fullmatch(r"polydraft: \d+ of \d+ MiB of weights loaded", first)
    assert re.fullmatch(r"polydraft: (\d+) of \1 MiB of weights loaded", loaded)
    assert (begun, one, two) == tuple(f"polydraft: {n} of 2 sizes of steps captured as graphs" for n in (0, 1, 2))
    assert "2 tokens | " in done.stdout
    assert run(SLOW + PROGRAM, CI="true").stderr == run(PROGRAM).stderr == ""


def test_standard_error_may_be_closed():
    command = ["/bin/sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-c", SLOW + PROGRAM, *CAPTURED]
    closed = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, env=environment(CI=""), check=True)
    assert "2 tokens | " in closed.stdout


def test_a_terminal_is_shown_how_far_an_engine_is_that_is_built():
    status, sent = terminal(*CAPTURED, CI="")
    assert status == 0
    shown = CONTROL.sub("", COLOR.sub("", sent))
    assert shown.index("loading the demo model") < shown.index("capturing steps of all sizes") < shown.index("accepted draft")
    assert "2/2" in shown


def test_generated_text_cannot_steer_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    from polydraft.cli.show import Screen

    text = "a\x1b[2J\rb\x9b3\x7f\tc\n"
    Screen().write(text)
    assert capsys.readouterr().out == text  # a pipe gets what was generated
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    Screen(color=False).write(text)
    assert capsys.readouterr().out == "a\u241b[2J\u240db\ufffd3\u2421\tc\n"


# -- doctor --------------------------------------------------------------------------------------------
def test_doctor(run: Callable[..., Result]):
    result = run("doctor")
    assert (result.status, result.err) == (0, "")
    assert re.search(rf"^reference {re.escape(__version__)}  available$", result.out, re.MULTILINE)
    count = len(REGISTRY.names())
    assert re.search(rf"^  contracts +{count} of {count}; \d+ composites$", result.out, re.MULTILINE)
    assert re.search(r"^  capabilities dtypes f32, row_invariant, ", result.out, re.MULTILINE)


def test_doctor_json(run: Callable[..., Result]):
    report = run("doctor", "--json").json
    (reference,) = [backend for backend in report["backends"] if backend["name"] == "reference"]
    assert reference["available"]
    assert (reference["version"], reference["package"], reference["devices"]) == (__version__, "polydraft", ["cpu", "queued"])
    assert reference["capabilities"]["row_invariant"] is True
    assert reference["contracts"]["implemented"] == REGISTRY.names()
    assert reference["contracts"]["missing"] == reference["overrides"] == []
    assert set(reference["contracts"]["composites"]) <= set(COMPOSITES)
    assert re.fullmatch("[0-9a-f]{16}", reference["digest"])


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """`doctor` looks at the reference and at what a test installs: the devices of the others take seconds, and `test_doctor` and
    `test_doctor_json` look at them."""
    survey, others = plugins.survey, {"cpu", "cuda", "emulator", "null", "paddle", "xpu"}
    monkeypatch.setattr(plugins, "survey", lambda: (found for found in survey() if found.name not in others))


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Install packages of one file each into a folder of their own, as pip would leave them."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))

    def add(name: str, source: str, *, group: str = "", module: str = "") -> None:
        module = module or name
        info = folder / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (folder / module).mkdir(exist_ok=True)
        (folder / module / "__init__.py").write_text(source)
        (info / "RECORD").write_text(f"{module}/__init__.py,,\n{name}-1.0.dist-info/METADATA,,\n")
        if group:
            (info / "entry_points.txt").write_text(f"[polydraft.{group}]\n{name} = {module}\n")

    yield add
    # These alone: a library that was imported on the way, such as Paddle, does not survive being imported twice.
    for name in [n for n, module in sys.modules.items() if str(getattr(module, "__file__", "")).startswith(str(folder))]:
        del sys.modules[name]


@pytest.mark.usefixtures("few")
def test_doctor_shows_what_is_broken_or_missing(run: Callable[..., Result], install: Callable[..., None]):
    install("shattered", "import no_such_library_at_all\n", group="backends")
    away = """
        import dataclasses
        from polydraft import hookimpl, reference
        from polydraft.reference import *

        @hookimpl
        def polydraft_backend_info():
            info = reference.polydraft_backend_info("")
            return dataclasses.replace(info, name="away", available=False, reason="there is no such chip; buy one", devices=(),
                                       contract_versions={"embed": 1})
    """
    install("away", textwrap.dedent(away), group="backends")
    result, report = run("doctor"), run("doctor", "--json").json
    assert result.status == 0
    found = {backend["name"]: backend for backend in report["backends"]}
    assert found["reference"]["available"]
    assert "shattered" in found["shattered"]["reason"]
    assert "no_such_library_at_all" in found["shattered"]["reason"]
    assert (found["shattered"]["available"], found["shattered"]["version"]) == (False, None)
    assert found["away"]["reason"] == "there is no such chip; buy one"
    assert found["away"]["contracts"]["implemented"] == ["embed"]
    assert re.search(r"^shattered  not available\n  reason +plugin 'shattered'", result.out, re.MULTILINE)
    assert re.search(r"^away \S+  not available\n  reason +there is no such chip; buy one$", result.out, re.MULTILINE)
    assert re.search(r"^  contracts +1 of \d+, lacks \w+, .*; 0 composites$", result.out, re.MULTILINE)


PACK = """
from types import SimpleNamespace
from polydraft import hookimpl
from polydraft.reference.table import NumpyTable

@hookimpl
def polydraft_kernels(device):
    table = NumpyTable(device)
    return SimpleNamespace(providers={"swiglu": table.providers["swiglu"]}, versions={"swiglu": table.versions["swiglu"]})
"""
STUCK = """
import dataclasses
from polydraft import hookimpl, reference
from polydraft.errors import DeviceError
from polydraft.reference import polydraft_collectives, polydraft_init_forward_meta, polydraft_kernels

@hookimpl
def polydraft_backend_info():
    return dataclasses.replace(reference.polydraft_backend_info(""), name="stuck")

@hookimpl
def polydraft_open_device(spec, options):
    raise DeviceError("the chip has no power; plug it in")
"""


@pytest.mark.usefixtures("few")
def test_a_device_that_does_not_open_hides_no_other_backend(run: Callable[..., Result], install: Callable[..., None]):
    install("quick", PACK, group="kernels")
    install("stuck", STUCK, group="backends")
    report = run("doctor", "--kernels", "quick", "--json").json
    found = {backend["name"]: backend for backend in report["backends"]}
    assert (found["stuck"]["misfit"], found["stuck"]["overrides"]) == ("the chip has no power; plug it in", [])
    assert [override["contract"] for override in found["reference"]["overrides"]] == ["swiglu"]


@pytest.mark.usefixtures("few")
def test_doctor_shows_what_a_pack_replaces(run: Callable[..., Result], install: Callable[..., None]):
    install("quick", PACK, group="kernels")
    assert "quick" in run("doctor", "--json").json["packs"]
    report = run("doctor", "--kernels", "quick", "--json").json
    (reference,) = [backend for backend in report["backends"] if backend["name"] == "reference"]
    assert [(o["contract"], o["pack"]) for o in reference["overrides"]] == [("swiglu", "quick")]
    assert re.search(r"^  overrides +swiglu by quick \([0-9a-f]{16}\)$", run("doctor", "--kernels", "quick").out, re.MULTILINE)
    assert "no plugin 'slow'" in run("doctor", "--kernels", "slow").error


@pytest.mark.usefixtures("few")
def test_doctor_shows_packages_that_overwrite_each_other(
    run: Callable[..., Result], install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
):
    names = ["framework", "Framework_Gpu", "unrelated"]
    for name in names:
        install(name, "", module="framework" if name != "unrelated" else "other")
    assert clashes() == []  # none of them is a requirement of polydraft's
    required = ["framework>=2; extra == 'one'", "framework-gpu[x]>=2 ; extra == 'two'", "unrelated", "numpy"]
    monkeypatch.setattr("polydraft.cli.clashes.requires", lambda name: required)
    (sentence,) = clashes()
    assert sentence.startswith("framework, framework-gpu all install the import package 'framework'")
    assert "uninstall" in sentence
    assert run("doctor", "--json").json["clashes"] == [sentence]
    assert f"clash: {sentence}" in run("doctor").out


# -- contracts -----------------------------------------------------------------------------------------
def test_contracts(run: Callable[..., Result]):
    result = run("contracts")
    assert (result.status, result.err) == (0, "")
    for contract in REGISTRY:
        facts = f"counts {contract.unit}; .+; {contract.deterministic}; feature {contract.feature}"
        assert re.search(rf"^{re.escape(contract.key)}\(.*\n  .+\n  {facts}$", result.out, re.MULTILINE)
    assert all(f"\n{name}\n" in result.out for name in COMPOSITES)


@pytest.mark.parametrize("profile", ["basic", "graph", "async", "full"])
def test_contracts_of_a_profile(run: Callable[..., Result], profile: str):
    from polydraft.conformance.catalogue import must_own

    found = run("contracts", "--profile", profile, "--json").json["profile"]
    assert (found["own"], found["features"]) == (list(must_own(profile, ("dense",))), ["dense"])
    assert sorted(found["own"] + found["offered"] + found["optional"]) == sorted(REGISTRY.names())
    assert (found["how_many_own"] == "one or more") == (profile == "basic")
    if profile == "basic":
        assert len(found["own"]) <= 12
        assert found["device_functions"] == ["allocate", "write", "read", "wait"]
    else:
        assert {"Device.upload", "Event.query"} <= set(found["device_functions"])
        assert ("GraphCapture.capture" in found["device_functions"]) == (profile != "async")
    text = run("contracts", "--profile", profile).out
    assert f"{found['how_many_own']} of these {len(found['own'])} kernels have to be the backend's own:" in text
    for feature in list(FEATURES)[1:]:
        assert f"\n{feature}, {len(REGISTRY.of([feature]))}: {FEATURES[feature].doc}" in text
    given = ("--profile", profile, "--feature", "sampling,grammar", "--feature", "schedule")
    more = run("contracts", *given, "--json").json["profile"]
    wanted = ("dense", "sampling", "rejection", "grammar", "schedule")
    assert (more["features"], more["own"]) == (list(wanted), list(must_own(profile, wanted)))
    assert more["optional"] == [name for name in REGISTRY.names() if REGISTRY[name].feature not in wanted]


def test_contracts_takes_a_name_or_a_profile(run: Callable[..., Result]):
    result = run("contracts", "linear", "--profile", "basic")
    assert (result.status, result.out) == (2, "")
    assert "leave them or NAME out" in result.err
    assert "leave them or NAME out" in run("contracts", "linear", "--feature", "dense").err
    assert "feature is 'densest', wanted some of dense, " in run("contracts", "--profile", "full", "--feature", "densest").err


def test_contracts_json(run: Callable[..., Result]):
    answer = run("contracts", "--json").json
    assert [contract["name"] for contract in answer["contracts"]] == [contract.name for contract in REGISTRY]
    assert {composite["name"]: composite["parts"] for composite in answer["composites"]} == {
        name: list(composite.parts) for name, composite in COMPOSITES.items()
    }
    assert all("page" not in contract for contract in answer["contracts"])


@pytest.mark.parametrize("name", ["swiglu", "swiglu/1"])
def test_the_page_of_one_contract(run: Callable[..., Result], name: str):
    page = render(REGISTRY["swiglu"])
    assert run("contracts", name) == (0, page, "")
    answer = run("contracts", name, "--json").json
    assert [contract["page"] for contract in answer["contracts"]] == [page]
    assert answer["composites"] == []


def test_the_page_of_one_composite(run: Callable[..., Result]):
    name, composite = next(iter(COMPOSITES.items()))
    result = run("contracts", name)
    assert result.out.startswith(f"# {name}\n\n{composite.doc}\n")
    assert all(f"`{part}`" in result.out for part in composite.parts)
    assert [entry["name"] for entry in run("contracts", name, "--json").json["composites"]] == [name]


def test_pages_of_several_contracts(run: Callable[..., Any]):
    several = run("contracts", "linear", "embed/1", "residual_add+rms_norm").out
    heads = re.findall(r"^# (\S+?)(?:, version 1)?$", several, re.MULTILINE)
    assert heads == ["linear", "embed", "residual_add+rms_norm"]
    feature = run("contracts", "--feature", "sampling,grammar").out
    names = [contract.name for contract in REGISTRY.of(["sampling", "grammar"])]
    assert re.findall(r"^# (\w+), version 1$", feature, re.MULTILINE) == names
    records = run("contracts", "--feature", "sampling,grammar", "--json").json["contracts"]
    assert [(record["name"], record["page"]) for record in records] == [(name, render(REGISTRY[name])) for name in names]


def test_an_unknown_contract(run: Callable[..., Result]):
    result = run("contracts", "swigl")
    assert (result.status, result.out) == (2, "")
    assert "no contract is called 'swigl'; did you mean 'swiglu'?" in result.error


# -- schemas -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("file", sorted((ROOT / "core" / "polydraft" / "schemas").iterdir()), ids=lambda path: path.stem)
def test_schemas_are_valid_and_closed(file: Path):
    content = json.loads(file.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(content)
    assert content["properties"]["schema"]["const"] == f"polydraft.{file.stem.replace('-', '/')}"
    assert content["additionalProperties"] is False


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_publishes_the_schema_of_its_json(name: str):
    assert (ROOT / "core" / "polydraft" / "schemas" / f"{name.replace('-', '_')}-1.json").is_file()


def test_a_schema_refuses_what_does_not_fit(generate: Callable[..., Result]):
    answer = generate(PROMPT, "--json").json
    validator = published("polydraft.generate/1")
    assert validator.is_valid(answer)
    for path, value in (
        (("totals", "steps"), -1), (("requests", 0, "finish_reason"), "tired"), (("requests", 0, "rounds"), [0.5]),
        (("extra",), 1), (("requests", 0, "extra"), 1), (("config", "overlap"), 3),
    ):  # fmt: skip
        changed = json.loads(json.dumps(answer))
        at: Any = changed
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value
        assert not validator.is_valid(changed), path
