"""Experts in Paddle operations: launches in several parts, which small cases do not fill."""

from __future__ import annotations

import pytest

from tests.support.depth import first
from tests.support.paddle import needs_device, script

IN_PARTS = """
from polydraft.conformance.kernel_checks import Options, checks
from polydraft.conformance.target import Target
target = Target("paddle", device="polyemu:0")
from polydraft_paddle.kernels import experts
{limits}
for check in checks(Options()):
    if check.id in ("L2/expert_mlp/seeds", "L2/expert_mlp/loads_differ", "L2/expert_mlp/more_rows_and_experts_than_a_tile"):
        result = check.result(target)
        assert result.outcome == "pass", result.message
        print(check.id)
"""


@needs_device
@pytest.mark.parametrize(
    "limits", first(1, ["experts.MOST_GATHERED = 1", "experts.MOST_ROWS = 3", "experts._by_choice = experts._by_expert"])
)
@pytest.mark.deep
def test_a_launch_in_parts_says_the_same(limits: str):
    run = script(IN_PARTS.format(limits=limits))
    assert run.returncode == 0, run.stderr[-2000:]
    assert len(run.stdout.splitlines()) >= 3
