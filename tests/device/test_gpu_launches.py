"""A round by kernel, of launches that overlap as those of a GPU do; the record itself is made on one alone."""

import pytest

from bench import gpu_launches
from bench.gpu_launches import IDLE, ONCE, OTHERS, Launched
from polydraft.errors import DeviceError

ROUND = (
    Launched(0.0, 2.0, ONCE), Launched(1.0, 8.0, "linear_rows"), Launched(1.5, 8.0, "rms_norm"),
    Launched(8.0, 9.0, "attention_decode"), Launched(11.0, 15.0, "nvjet_sm90_tst"), Launched(12.0, 14.0, "screen_choose"),
)  # fmt: skip
"""Of 16 microseconds: a norm ends with the projection in front of it, and 9 to 11 and 15 to 16 nothing runs."""


def rounds(count: int) -> list[Launched]:
    return [Launched(one.begin + 16.0 * i, one.end + 16.0 * i, one.kernel) for i in range(count) for one in ROUND]


def test_a_launch_counts_by_how_far_it_ends_behind_the_others():
    recorded = [Launched(-3.0, -1.0, "argmax"), *reversed(rounds(3))]
    whole = gpu_launches.rounds_of(recorded)
    assert [len(one) for one in whole] == [len(ROUND)] * 2, "what is in front of the first round, and the last one, are left out"
    found = gpu_launches.by_kernel(whole)
    assert {kernel: figures["us"] for kernel, figures in found.items()} == {
        IDLE: 2.5, ONCE: 2.0, "linear_rows": 6.0, "rms_norm": 0.0, "attention_decode": 1.0, "nvjet_sm90_tst": 4.0,
        "screen_choose": 0.0,
    }  # fmt: skip
    assert {figures["launches"] for kernel, figures in found.items() if kernel != IDLE} == {1.0}


def test_kinds_have_the_kernels_of_their_name():
    row = {"kernels": gpu_launches.by_kernel(gpu_launches.rounds_of(rounds(2)))}
    wanted = {"projections": 10.0, "attention": 1.0, "experts": 0.0, "norms": 0.0, "heads": 0.0, OTHERS: 2.0, IDLE: 2.0}
    assert {kind: 1e3 * ms for kind, ms in gpu_launches.by_kind(row).items()} == pytest.approx(wanted)
    assert gpu_launches.kind_of("sum_and_add") == gpu_launches.kind_of("expert_tile") == "experts"
    assert gpu_launches.kind_of("linear_tile") == gpu_launches.kind_of("argmax_among") == "heads"


def test_a_record_without_a_whole_round_is_refused():
    wanted = "got 6 launches, 1 of them of reserve_blocks, wanted two or more of that; raise --steps"
    with pytest.raises(DeviceError, match=wanted):
        gpu_launches.rounds_of(rounds(1))
