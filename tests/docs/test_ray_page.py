"""The page about clusters: its example is taken, its options are the command's."""

import re

import click
import pytest
import yaml

from polydraft.cli.serve import command
from tests.docs.pages import read
from tests.support.project import ROOT

PAGE = read(ROOT / "docs" / "ray.md")


def test_the_example_for_kuberay_is_taken() -> None:
    found = re.search(r"```yaml\n(.+?)```", PAGE, re.DOTALL)
    assert found
    (application,) = yaml.safe_load(yaml.safe_load(found[1])["spec"]["serveConfigV2"])["applications"]
    settings = pytest.importorskip("polydraft.ray.settings", reason="the extra `serve` is not installed: no msgspec")
    wanted = settings.Deployment.from_mapping(application["args"])
    assert (wanted.slots, wanted.replicas, wanted.actor_options()) == (32, (2, 8), {"num_cpus": 8, "num_gpus": 1})
    assert application["import_path"] == "polydraft.ray.application:application"
    assert (ROOT / "core" / "polydraft" / "ray" / "application.py").is_file()


def test_the_options_are_those_of_the_command() -> None:
    own = {one.opts[0] for one in command.params if isinstance(one, click.Option) and one.opts[0].startswith("--ray")}
    named = {re.findall(r"--[\w-]+", row)[0] for row in PAGE.splitlines() if row.startswith("| `--ray")}
    assert named == own
