"""A vendor's whole journey from the built wheel: `tests/mission.sh`, which anybody can run by hand."""

import os
import subprocess
import sys

import pytest

from tests.packaging.conftest import Distributions
from tests.support.project import ROOT

SCRIPT = ROOT / "tests" / "mission.sh"


@pytest.mark.deep
@pytest.mark.timeout(1800)  # environments, an index, and the kit four times
def test_the_mission_is_accomplished(distributions: Distributions):
    env = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(["sh", SCRIPT, distributions.wheel], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "-- mission accomplished"


def test_the_mission_is_a_script_without_mistakes():
    assert os.access(SCRIPT, os.X_OK)
    subprocess.run(["sh", "-n", SCRIPT], check=True)
