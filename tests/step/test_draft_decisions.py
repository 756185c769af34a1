"""What a draft policy has decided is written to a file, and decided so again: then a run is the same, round by round."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polydraft import RequestOutput, SamplingParams
from polydraft.errors import ConfigError
from polydraft.host.draft_decisions import SCHEMA, Decision, DraftRecorder, ReplayedDrafts, head
from polydraft.host.draft_policy import DraftPolicy, ladder
from tests.support.depth import deep
from tests.support.drafting import deciding, drawing
from tests.support.runs import Ask, drive, engine

MOST, SLOTS = 5, 3
PARAMS = SamplingParams(max_new_tokens=60, ignore_eos=True, temperature=1.0)
ASKS = [
    Ask(tuple(range(3, 9 + 4 * i)), replace(PARAMS, seed=i, max_drafts=2 if i == 2 else None), 7 * i, 30 if i == 3 else None)
    for i in range(6)
]


def served(given: Any, path: Path | None, **options: Any) -> list[RequestOutput]:
    """Results of `ASKS`; `given` puts a policy in place, and decisions are written to `path`."""
    options = {"draft_tokens": MOST, "max_num_seqs": SLOTS, "num_blocks": 24, "block_size": 4, **options}
    instruments = () if path is None else (DraftRecorder(path),)
    with given:
        one = engine("narrow", **options, instruments=instruments)
    outputs = drive(one, ASKS)
    one.close()
    return outputs


def replaying(path: Path) -> Any:
    """Engines that are built within decide as the file says."""
    return deciding(lambda limits: ReplayedDrafts.read(path))


def rounds(outputs: list[RequestOutput]) -> list[Any]:
    """What depends on the decisions."""
    return [(one.token_ids, one.rounds, one.finish_reason) for one in outputs]


@pytest.mark.parametrize(
    ("seed", "device"), [(1, "lazy-1"), *(deep((seed, device)) for seed in range(2, 6) for device in ("reference", "lazy-2"))]
)
@pytest.mark.parametrize("verify", ["rejection", "coupled"])
def test_a_run_is_the_same_round_by_round(seed: int, device: str, verify: str, tmp_path: Path) -> None:
    """With requests that arrive, wait for blocks, and are aborted, and windows of their own. Sampled texts of `rejection` depend
    on how many drafts are verified, so that other decisions make others."""
    options: dict[str, Any] = {"device": device, "verify": verify}
    first, again = tmp_path / "first", tmp_path / "again"
    wanted = served(drawing(seed), first, **options)
    assert rounds(served(replaying(first), again, **options)) == rounds(wanted)
    assert again.read_text() == first.read_text()
    others = served(drawing(seed + 100), None, **options)
    assert rounds(others) != rounds(wanted)
    assert ([one.token_ids for one in others] == [one.token_ids for one in wanted]) == (verify == "coupled")
    lines = [json.loads(line) for line in first.read_text().splitlines()]
    assert lines[0] == {"schema": SCHEMA, "rungs": list(ladder(MOST)), "slots": SLOTS}
    assert any("rows" in line for line in lines), "requests were told apart"
    assert len({line["drafts"] for line in lines[1:]}) > 3


def test_what_was_decided_is_there_where_the_run_ends_in_an_error(tmp_path: Path) -> None:
    class Ends:
        rungs = (0, 1)

        def __init__(self) -> None:
            self.count = 0

        def choose(self, view: Any) -> int:
            self.count += 1
            if self.count > 9:
                raise ConfigError("enough")
            return self.count % 2

    with deciding(lambda limits: Ends()):
        one = engine("narrow", draft_tokens=1, instruments=(DraftRecorder(tmp_path / "file"),))
    with pytest.raises(ConfigError, match="enough"):
        drive(one, ASKS[:1])
    assert len((tmp_path / "file").read_text().splitlines()) == 1 + 9, "before anybody closes it"
    one.close()


def test_behind_the_last_line_it_stays_as_it_was() -> None:
    policy: DraftPolicy = ReplayedDrafts((0, 1, 3), 2, [Decision(0, 3, None), Decision(2, 1, None)])
    view: Any = None
    assert [policy.choose(view) for _ in range(5)] == [3, 3, 1, 1, 1]


LIMITED = '{"step": 0, "drafts": 1, "rows": %s, "epochs": [0, 0]}'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read as draft decisions, got No such file"),
        ("", "cannot be read as draft decisions, got no lines"),
        ("{}", f"does not begin as draft decisions do, wanted {SCHEMA}"),
        (head((0, 1), 2) + "[1]", "line 2 holds a JSON list, wanted a JSON object"),
        (head((0, 1), 2) + "{", "line 2 is no valid JSON"),
        (head((0, 1), 2) + '{"step": 0, "drafts": 2}', r"line 2 is no draft decision of 2 slots among \(0, 1\)"),
        (head((0, 1), 2) + '{"step": -1, "drafts": 1}', "line 2 is no draft decision"),
        (head((0, 1), 2) + '{"step": true, "drafts": 1}', "line 2 is no draft decision"),
        (head((0, 1), 2) + LIMITED % "[1, 3]", "line 2 is no draft decision"),
        (head((0, 1), 2) + LIMITED % "[0, 1]", "line 2 is no draft decision"),
        (head((0, 1), 2) + LIMITED % "[1]", "line 2 is no draft decision"),
        (head((0, 1), 2) + LIMITED % "null", "line 2 is no draft decision"),
        (head((0, 1), 2) + '{"step": 1, "drafts": 1}\n{"step": 1, "drafts": 0}', "has steps out of order"),
    ],
    ids=str,
)
def test_what_is_no_such_file_is_refused(content: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        ReplayedDrafts.read(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_tokens": 3}, "with at most 5 drafts, and this one has 3; give --draft-tokens as it was then"),
        ({"draft_tokens": 5, "max_num_seqs": 4}, "with 3 slots, and this one has 4; give --max-num-seqs as it was then"),
    ],
)
@pytest.mark.parametrize("name", ["file", "without windows"])
def test_decisions_of_another_engine_are_refused(name: str, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    served(drawing(1), tmp_path / "file")
    (tmp_path / "without windows").write_text(head(ladder(MOST), SLOTS) + '{"step": 0, "drafts": 1}\n')
    policy = ReplayedDrafts.read(tmp_path / name)
    with pytest.raises(ConfigError, match=message), deciding(lambda limits: policy):
        engine("narrow", **options)
