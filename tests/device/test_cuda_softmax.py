"""The running softmax of the attention kernels, in NumPy: how high a weight may become, and from which scores on rows are
computed again. The comparison and its constants are read from the kernels' source."""

import re

import numpy as np
import pytest

from polydraft_cuda.compiler import HEADERS

SOURCE = (HEADERS / "attention.cuh").read_text(encoding="utf-8")
SINGLE = np.float32


def constant(name: str) -> float:
    found = re.search(rf"\b{name} = ([^,;]*?)f[,;]", SOURCE)
    assert found, name
    return float.fromhex(found[1]) if "0x" in found[1] else float(found[1])


SLACK, LOUD, LOWEST = SINGLE(constant("SLACK")), constant("LOUD"), SINGLE(constant("LOWEST"))


def outgrows(high: np.float32, top: np.float32) -> bool:
    """Whether a top follows a score, as the source says it."""
    said = re.search(r"const float top = (.*?) \? high\[h\] : s\.top\[h\];", SOURCE)
    assert said
    assert SOURCE.count(said[1].replace("[h]", "[0]")) == 1, "what the warp asks is what a row does"
    return bool(eval(said[1], {"high": [high], "s": type("Softmax", (), {"top": [top]}), "h": 0, "SLACK": SLACK}))


def logarithms(scores: np.ndarray, scale: np.float32) -> tuple[np.ndarray, np.float32]:
    """Exponents of the weights of one row's scores, group by group, and its last top: a score's product with the scale is rounded
    where tops are compared and exact where a top is taken off."""
    top, found = LOWEST, []
    for group in scores.reshape(-1, 16):
        high = SINGLE(group.max() * scale)
        if outgrows(high, top):
            top = high
        found.append((group.astype(np.float64) * float(scale) - float(top)).astype(SINGLE))
    return np.concatenate(found), top


@pytest.mark.parametrize("power", [0, 8, 16, 20])
@pytest.mark.parametrize("sign", [1, -1])
def test_no_weight_is_higher_than_its_room(power: int, sign: int):
    rng = np.random.default_rng(power)
    for _ in range(50):
        rising = np.sort(rng.standard_normal(512)) if rng.random() < 0.5 else rng.standard_normal(512)
        exponents, top = logarithms((sign * np.abs(rising) * 2.0**power).astype(SINGLE), SINGLE(1.0201394))
        assert abs(top) < LOUD
        assert exponents.max() <= SLACK + 0.5


def test_tops_follow_scores_wherever_these_are():
    """Added to a high top, the room would be lost or doubled by rounding; a difference is exact."""
    for power in range(40):
        top = SINGLE(2.0**power)
        above = np.nextafter(top, SINGLE(np.inf))
        for high in (SINGLE(top + 9), SINGLE(top + 7), above, SINGLE(2 * top)):
            assert outgrows(high, top) == (float(high) - float(top) > SLACK), (power, high)
    assert outgrows(SINGLE(-3e38), LOWEST)
    assert not outgrows(SINGLE(-np.inf), LOWEST)


def test_beyond_some_scores_weights_are_lost_and_rows_are_computed_again():
    rng = np.random.default_rng(1)
    worst = 0.0
    for _ in range(200):
        exponents, top = logarithms((np.abs(rng.standard_normal(64)) * 2.0**28).astype(SINGLE), SINGLE(1.0201394))
        assert abs(top) >= LOUD
        worst = max(worst, abs(float(exponents.max())))
    assert worst > 8, "float16 has no such weight beside the others"
    for name in ("attention_decode.cu", "attention.cuh"):  # `store_tile` of the latter
        text = (HEADERS / name).read_text(encoding="utf-8")
        assert re.search(r"fabsf\((high|softmax\.top\[h\])\) (>=|<) LOUD", text), name
    for name in ("attention_prefill.cu", "attention_prompt.cu"):
        assert "store_tile<" in (HEADERS / name).read_text(encoding="utf-8"), name
    quantised = (HEADERS / "attention_quant.cu").read_text(encoding="utf-8")
    assert "soften(scores, 1.f, softmax, sums);" in quantised, "scores that have been multiplied are exact on both sides"
