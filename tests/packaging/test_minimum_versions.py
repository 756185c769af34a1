"""The minimum versions in pyproject.toml are true: with all of them at once, the installed command works the same."""

import json
from pathlib import Path

import pytest

from tests.packaging.conftest import Distributions, Installation, create_environment, run
from tests.support.project import pyproject


def generated(environment: Installation) -> list[int]:
    command = ("generate", "class Stack:", "--draft-tokens", "3", "--max-new-tokens", "32", "--json")
    answer = json.loads(run(environment.scripts / "polydraft", *command, cwd=environment.folder))
    ids: list[int] = answer["requests"][0]["token_ids"]
    return ids


@pytest.mark.deep
def test_oldest_dependencies_generate_the_same_text(distributions: Distributions, installed: Installation, tmp_path: Path):
    oldest = [line.replace(">=", "==", 1) for line in pyproject()["project"]["dependencies"]]
    assert all("==" in line.partition(";")[0] for line in oldest), "a dependency without a minimum"
    environment = create_environment(tmp_path / "venv")
    environment.install(distributions.wheel, *oldest)
    assert generated(environment) == generated(installed)
