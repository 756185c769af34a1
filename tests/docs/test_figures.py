"""Figures and claims of the README against what they rest on: committed results, a run of the demo, and what is refused."""

import html
import json
import re
from collections import defaultdict
from contextlib import closing
from importlib.metadata import entry_points
from typing import Any

import pytest

from bench import packing_acceptance
from bench.gpu_rounds import BATCHES, peer_ms
from polydraft import LLM, RequestOutput
from polydraft.bench.shapes import RandomCheckpoint
from polydraft.config import EngineConfig
from polydraft.contracts import REGISTRY
from polydraft.contracts.features import FEATURES
from polydraft.contracts.packing import PACKINGS
from polydraft.demo import demo_model_path
from polydraft.errors import CapabilityError
from polydraft.models import Checkpoint, FamilyRegistry
from polydraft.models.weights import sizes
from polydraft.plugins.plugins import Plugins
from polydraft.proposers.base import built_in
from polydraft.resolve import resolve
from tests.docs.pages import fences, read, rows, section
from tests.support.project import ROOT

README = read(ROOT / "README.md")


def result(text: str) -> tuple[dict[str, Any], str]:
    """The result that a marked table was made from, and the text behind the marker."""
    marker = re.search(r"<!-- figures: (\S+) -->", text)
    assert marker is not None, "the table of figures has no marker that names its result"
    return json.loads((ROOT / marker[1]).read_text(encoding="utf-8")), text[marker.end() :]


def test_tokens_per_round_are_those_of_the_result():
    measured, text = result(section(README, "Figures"))
    wanted = [
        [
            str(row["draft_tokens"]),
            f"`{row['verify']}`",
            f"{row['temperature']:g}",
            f"{row['top_p']:g}",
            f"{row['tokens_per_round']:.2f}",
            " ".join(f"{share:.0%}" for share in row["acceptance_per_position"]),
        ]
        for row in measured["rows"]
    ]
    assert rows(text) == wanted


def test_weights_of_models_with_experts_take_the_bytes_that_are_stated():
    taken = {"linear": tuple(PACKINGS), "experts": tuple(PACKINGS)}
    text = section(read(ROOT / "docs" / "checkpoints.md"), "Packed matrices")
    found = rows(text[text.index("Gigabytes") :].partition("\n\n")[2])
    packings = [re.findall("`(.*)`", head)[0] for head in text[text.index("| | bfloat16") :].splitlines()[0].split("|")[3:-1]]
    for (_, *stated), shape in zip(found, ("qwen3-30b", "glm45-air", "ernie21"), strict=True):
        with closing(RandomCheckpoint(ROOT / "bench" / "shapes" / f"{shape}.json")) as checkpoint:
            model = FamilyRegistry().describe(checkpoint)[0]
        ways: list[dict[str, Any]] = [{}, *({"packing": PACKINGS[one], "ignored": ("head",), "taken": taken} for one in packings)]
        wanted = [sum(sizes(model, model.weights(), dtype="bf16", **one).values()) for one in ways]
        assert stated == [f"{nbytes / 1e9:.1f}" for nbytes in wanted]


def test_what_packing_changes_is_that_of_the_result():
    measured, text = result(section(read(ROOT / "docs" / "checkpoints.md"), "Packed matrices"))
    assert text.partition("\n\n")[2].partition("\n\n")[0] == packing_acceptance.table(measured["rows"])
    by = {(row["packing"], *row["weights_ignore"]): row for row in measured["rows"]}
    assert set(by) == {("auto",), *((made, *left) for made in packing_acceptance.MADE for left in packing_acceptance.LEFT)}
    assert by[("auto",)]["same_tokens"] == 1.0, "the unpacked model agrees with itself"
    for made in packing_acceptance.MADE:
        assert by[(made, "head", "mtp")]["matrices"] < by[(made, "mtp")]["matrices"] < by[(made,)]["matrices"]


def test_what_a_reduced_draft_vocabulary_accepts_is_that_of_the_result():
    measured, text = result(section(read(ROOT / "docs" / "verification.md"), "Drafts from a part of the vocabulary"))
    assert rows(text) == [
        [
            f"{row['draft_vocab']} of {row['vocab']}",
            f"{row['temperature']:g}",
            f"{row['tokens_per_round']:.2f}",
            " ".join(f"{share:.0%}" for share in row["acceptance_per_position"]),
        ]
        for row in measured["rows"]
    ]
    assert all(row["accept_schedule"] is None for row in measured["rows"])


def test_the_result_says_what_a_figure_must_say():
    measured, text = result(section(README, "Figures"))
    assert measured["schema"] == "polydraft.bench/1"
    assert all(measured[key] for key in ("date", "commit", "device", "versions", "method", "rows"))
    assert measured["date"] in text
    assert f"NumPy {measured['versions']['numpy']}" in text
    assert all(row["accept_schedule"] is None for row in measured["rows"]), "a synthetic schedule is called so in the text"


def test_what_is_said_of_speed_is_that_of_the_results():
    shown = rows(section(README, "Figures").partition("How fast that is")[2])
    cpu = json.loads((ROOT / "bench" / "results" / "cpu.json").read_text(encoding="utf-8"))["rows"]
    rate = {(row["name"], row["batch"]): row["tokens_per_s"] for row in cpu if row["shape"] == "demo"}
    speed = {key: f"{one:,.0f}" for key, one in rate.items()}
    best = {n: max(one for (name, size), one in rate.items() if name.startswith("vllm") and size == n) for n in (1, 8)}
    wanted = [
        [
            speed["cpu K=3", n],
            (
                f"polydraft at K = 0: {speed['cpu K=0', n]}, transformers {speed['transformers', n]}, "
                f"vLLM's CPU build {best[n]:,.0f}"
            ),
        ]
        for n in (1, 8)
    ]
    gpu = json.loads((ROOT / "bench" / "results" / "cuda.json").read_text(encoding="utf-8"))["rows"]
    rounds = {row["batch"]: row for row in gpu if (row["shape"], row["draft_tokens"]) == ("mimo-7b", 3)}
    others = dict(zip(BATCHES, peer_ms()["mimo-7b", 3], strict=True))
    wanted += [[f"{rounds[n]['ms_per_round']:.2f}", f"vLLM 0.26.0 {others[n]:.2f}"] for n in (1, 8, 64)]
    assert [row[2:] for row in shown] == wanted
    assert all(f"batch {n}" in row[1] for n, row in zip((1, 8, 1, 8, 64), shown, strict=True))


# -- the picture and the diagram show a run that anybody can repeat -------------------------------------------------------
@pytest.fixture(scope="module")
def demo_run() -> tuple[RequestOutput, list[str]]:
    """The run of the picture, whose every choice is clear in float64, and its tokens as text."""
    llm = LLM(backend="reference", draft_tokens=3)
    (output,) = llm.generate("def fibonacci(n):")
    tokens = [llm.engine.tokenizer.decode([token_id]) for token_id in output.token_ids]
    llm.close()
    return output, tokens


def drawn_lines(svg: str) -> list[str]:
    """The lines of a terminal picture as text; white space between pieces is not drawn, but their places are."""
    lines: dict[int, str] = defaultdict(str)
    for x, width, line, text in re.findall(r'<text [^>]*?x="([\d.]+)"[^>]*?Length="([\d.]+)"[^>]*?-line-(\d+)\)">([^<]*)<', svg):
        drawn = html.unescape(text).replace("\xa0", " ").rstrip("\n")
        if drawn:
            column = round(float(x) / (float(width) / len(drawn)))
            lines[int(line)] = lines[int(line)].ljust(column) + drawn
    return [lines[line].rstrip() for line in range(max(lines) + 1)]


def test_the_picture_is_of_this_run(demo_run: tuple[RequestOutput, list[str]]):
    output, _ = demo_run
    lines = drawn_lines(read(ROOT / "docs" / "images" / "demo.svg"))
    per_round = (len(output.token_ids) - 1) / len(output.rounds)
    wanted = ["def fibonacci(n):", *(line.rstrip() for line in output.text.splitlines()[1:])]
    start = lines.index("def fibonacci(n):")
    assert lines[start : start + len(wanted)] == wanted
    figures = next(line for line in lines if " tokens per round" in line)
    assert figures.startswith(f"{len(output.token_ids)} tokens | {per_round:.2f} tokens per round | accepted by position ")
    shares = re.findall(r"\d+%", figures)
    assert f"{per_round:.2f} tokens per round" in README
    assert all(share in README.split("](docs/images/demo.svg)")[0] for share in shares), "the picture's description is of another"


def test_the_diagram_is_the_first_round_of_this_run(demo_run: tuple[RequestOutput, list[str]]):
    output, tokens = demo_run
    (diagram,) = (fence.text for fence in fences(section(README, "How it works"), "text"))
    known, *committed = (f"[{token}]".replace("\n", "\\n") for token in tokens[: 2 + output.rounds[0]])
    assert f"def fibonacci(n):{known}" in diagram
    assert "".join(committed) in diagram
    assert f"{len(committed)} tokens of text" in diagram
    assert f"{output.rounds[0]} accepted drafts" in diagram


# -- what is "to come" is refused, and nothing else is ----------------------------------------------------------------------
ASKED: dict[str, dict[str, Any]] = {
    "`--verify rejection`": {"verify": "rejection"},
    "`--sanitize`": {"sanitize": True},
    "`eagle3`": {"proposer": "eagle3"},
    "`ngram`": {"proposer": "ngram"},
    "`suffix`": {"proposer": "suffix"},
    "`hybrid`": {"proposer": "hybrid"},
}
"""What the table of states says of a wish, by the words it uses."""


def state(words: str) -> str:
    """The state of the one part whose row has these words."""
    found = [row[1] for row in rows(section(README, "Status")) if words in row[0]]
    assert len(found) == 1, f"{len(found)} rows of the README's table of states name {words}"
    return found[0]


def refused(**options: Any) -> str:
    """The refusal of these wishes on the reference backend and the demo model; empty where they can be met."""
    with Checkpoint(demo_model_path()) as checkpoint:
        model, _ = FamilyRegistry().describe(checkpoint)
    try:
        resolve(EngineConfig(**options), Plugins.load("reference").info(), model, proposers=built_in().needs())
    except CapabilityError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("words", ASKED)
def test_what_is_to_come_is_refused_by_name_and_nothing_else(words: str):
    (name,) = re.findall(r"[a-z]+", words)[-1:]
    refusal = refused(**ASKED[words])
    assert state(words).startswith("to come") == bool(refusal), f"the README's table of states is wrong about {words}"
    assert not refusal or name in refusal


def test_the_readme_knows_every_backend():
    own = [entry.name for entry in entry_points(group="polydraft.backends") if entry.value.startswith("polydraft")]
    assert own
    assert [name for name in own if not state(f"`{name}`")] == []


@pytest.mark.parametrize("name", ["cpu", "reference", "cuda", "paddle"])
def test_the_readme_says_what_features_a_backend_lacks(name: str):
    offered, said = Plugins.load(name).info().contract_versions, state(f"`{name}`")
    lacking = [one for one in FEATURES if any(c.feature == one and c.name not in offered for c in REGISTRY.of([one]))]
    named = re.match(r"every (?:contract|\[?feature\]?(?:\(\S+\))? but ((?:`\w+`(?:, | and )?)+))", said)
    assert named is not None, said
    assert re.findall(r"`(\w+)`", named[1] or "") == lacking
