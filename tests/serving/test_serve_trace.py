"""The script that sends a trace of requests to any server: what it draws is kept to, its figures are those of the answers."""

from __future__ import annotations

import argparse
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import serve_shape
from bench.serve_trace import BURST, Answer, measured, summary, table, trace
from polydraft.bench.shapes import RandomCheckpoint
from polydraft.models.checkpoint import Checkpoint

BOUNDS: tuple[tuple[int, int], tuple[int, int]] = ((4, 20), (2, 12))


def test_what_is_drawn_hangs_on_the_seed_alone_and_keeps_to_its_bounds():
    text = np.arange(100, 150)
    found = trace(text, 50, *BOUNDS, seed=3)
    assert found == trace(text, 50, *BOUNDS, seed=3)
    assert found != trace(text, 50, *BOUNDS, seed=4)
    assert {len(one.prompt) for one in found} <= set(range(4, 21))
    assert {2, 12} <= {one.new_tokens for one in trace(7, 500, *BOUNDS, seed=3)} <= set(range(2, 13))
    assert all(one.prompt == tuple(range(one.prompt[0], one.prompt[0] + len(one.prompt))) for one in found), (
        "a stretch of the text"
    )
    assert {token for one in trace(7, 50, *BOUNDS, seed=3) for token in one.prompt} == set(range(7))
    with pytest.raises(ValueError, match="the text has 10 tokens, prompts up to 20 were asked for"):
        trace(text[:10], 1, *BOUNDS, seed=0)


def test_figures_are_those_of_the_answers():
    answers = [Answer(1.0, 1.5, 3.5, 5), Answer(2.0, 2.1, 2.1, 1), Answer(2.5, error="status 503: full")]
    row = summary("ours", 2.0, answers)
    assert (row["requests"], row["errors"], row["first_error"]) == (3, 1, "status 503: full")
    assert row["tokens_per_s"] == 6 / 2.5
    assert row["first_token_p50_ms"] == pytest.approx(300)
    assert row["between_tokens_p50_ms"] == pytest.approx(500), "one token has none between"
    assert table([row]).splitlines()[-1] == "| ours | 2.00 | 2 | 300 | 496 | 500.0 | 500.0 | 1 |"
    with pytest.raises(ValueError, match="ours answered none of 1 requests: status 503: full"):
        summary("ours", None, answers[2:])


def options(model: str = "") -> argparse.Namespace:
    given = {"text": None, "vocab": 30, "requests": 6, "prompt_tokens": (4, 20), "new_tokens": (2, 12), "seed": 1}
    return argparse.Namespace(**given, model=model, temperature=0.8, top_p=0.95)


@pytest.mark.deep
def test_a_server_is_measured_in_a_burst_and_at_rates_that_follow_from_it(server: Any):
    rates: list[float] = []
    requests: list[Any] = []
    rows = measured("ours", server.url, options(), rates, requests)
    assert [row["requests_per_s"] for row in rows] == [BURST, *rates]
    assert rates == pytest.approx([share * rows[0]["requests_done_per_s"] for share in (0.5, 0.8, 1.0)])
    assert [row["errors"] for row in rows] == [0] * 4, rows[0]["first_error"]
    assert all(0 < row["first_token_p50_ms"] <= row["first_token_p99_ms"] for row in rows)
    assert len(requests) == 6
    again = measured("ours", server.url, options(), [1000.0], requests)
    assert [row["requests_per_s"] for row in again] == [BURST, 1000.0], "rates that are given are kept"


@pytest.mark.deep
def test_what_a_server_refuses_is_said(server: Any):
    with pytest.raises(ValueError, match=r"ours answered none of 6 requests: status 404: .*no-such"):
        measured("ours", server.url, options("no-such"), [], [])


def test_a_shape_that_is_written_is_read_as_it_was_drawn(tmp_path: Path):
    shape = Path(__file__).parents[2] / "bench" / "shapes" / "tiny.json"
    serve_shape.write(shape, tmp_path)
    with closing(RandomCheckpoint(shape)) as drawn, closing(Checkpoint(tmp_path)) as stored:
        assert stored.names() == drawn.names()
        for name in drawn.names():
            wanted = drawn.tensor(name)
            assert stored.dtype(name) == drawn.dtype(name) == "bfloat16"
            np.testing.assert_allclose(stored.tensor(name), wanted, rtol=2**-7)
        assert stored.config["num_hidden_layers"] == 8
