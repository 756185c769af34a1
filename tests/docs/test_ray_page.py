"""The page about clusters: its figures are those of the committed result, its example is taken, its options are the command's."""

import json
import re

import click
import pytest
import yaml

from polydraft.cli.serve import command
from tests.docs.pages import read, rows
from tests.support.project import ROOT

PAGE = read(ROOT / "docs" / "ray.md")


def test_the_figures_are_those_of_the_result() -> None:
    result = json.loads((ROOT / "bench" / "results" / "ray.json").read_text(encoding="utf-8"))
    losses = [row for row in result["rows"] if "lost" in row]
    wanted = [[row["scene"], str(row["requests"]), str(row["lost"]), f"{row['seconds']:g}"] for row in losses]
    text = PAGE.partition("<!-- figures: bench/results/ray.json -->")[2]
    assert rows(text) == wanted
    (prefixes,) = (row for row in result["rows"] if "hit_share" in row)
    assert f"{prefixes['hit_share']:.0%} of all prompt tokens" in text
    assert f"{prefixes['hit_share_without']:.0%} with Serve's own router" in text


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
