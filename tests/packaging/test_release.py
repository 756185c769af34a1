"""The recipe of a release, `.github/workflows/wheels.yml`, as far as it can be tried without GitHub.

That the runners exist, that wheels run on macOS and on aarch64, and the upload itself are seen by the workflow alone.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from polydraft.cli import COMMANDS
from tests.packaging.conftest import Distributions, Installation, create_environment, run
from tests.support.project import ROOT, pyproject

pytestmark = pytest.mark.timeout(900)  # an index, and a compiler of 400 MB

WORKFLOW = ROOT / ".github" / "workflows" / "wheels.yml"
PINNED = re.compile(r"([\w-]+)==([\d.]+)")
ACTIONS = {"actions/checkout", "actions/setup-python", "actions/upload-artifact", "actions/download-artifact"}
UPLOAD = "pypa/gh-action-pypi-publish"
PLATFORMS = {("linux", "x86_64"), ("linux", "aarch64"), ("macos", "arm64")}
SYSTEMS = {"linux": "Operating System :: POSIX :: Linux", "macos": "Operating System :: MacOS"}
ZIG = "ziglang==0.17.1"
"""A compiler for every platform, which brings their headers and libraries along."""
TARGETS = {
    "linux x86_64": "x86_64-linux-gnu.2.28",
    "linux aarch64": "aarch64-linux-gnu.2.28",
    "macos arm64": "aarch64-macos.11.0",
}


def jobs() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"]
    return found


def commands() -> list[str]:
    """Every line that a step runs."""
    lines = (line for job in jobs().values() for step in job["steps"] for line in step.get("run", "").splitlines())
    return [line.strip() for line in lines]


def installed_by_it() -> dict[str, str]:
    """Package to version of what the workflow installs."""
    wanted = [part for line in commands() if "pip install" in line for part in line.partition("pip install ")[2].split()]
    found = [PINNED.fullmatch(part) for part in wanted]
    assert all(found), f"pinned, each of them: {wanted}"
    return {match[1]: match[2] for match in found if match}


def pythons() -> list[str]:
    """Versions that the metadata names."""
    return [line.rpartition(" ")[2] for line in pyproject()["project"]["classifiers"] if "Python :: 3." in line]


# -- what the recipe says -------------------------------------------------------------------------------------------------
def test_nothing_is_uploaded_without_a_tag():
    workflow = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
    assert workflow[True]["push"] == {"tags": ["v*"]}, "YAML takes `on` for a truth value"
    assert workflow["permissions"] == {"contents": "read"}
    uploading = {name for name, job in jobs().items() for step in job["steps"] if step.get("uses", "").startswith(UPLOAD)}
    assert uploading == {"upload"} == {name for name, job in jobs().items() if "permissions" in job or "environment" in job}
    upload = jobs()["upload"]
    assert "startsWith(github.ref, 'refs/tags/v')" in upload["if"]
    assert "||" not in upload["if"]
    assert upload["permissions"] == {"id-token": "write"}
    assert set(upload["needs"]) == set(jobs()) - {"upload"}, "all or nothing"
    assert not [line for line in commands() if "twine upload" in line or "secrets." in line]


def test_every_action_and_package_is_pinned():
    used = [step["uses"].partition("@") for job in jobs().values() for step in job["steps"] if "uses" in step]
    assert {name for name, _, _ in used} == ACTIONS | {UPLOAD}
    assert all(re.fullmatch(r"v\d+|release/v1", version) for _, _, version in used)
    assert set(installed_by_it()) == {"cibuildwheel", "build", "twine"}


def test_platforms_and_pythons_are_those_of_the_metadata():
    rows = jobs()["wheels"]["strategy"]["matrix"]["include"]
    assert {(row["platform"], row["arch"]) for row in rows} == PLATFORMS
    metadata = pyproject()
    systems = {line for line in metadata["project"]["classifiers"] if line.startswith("Operating System")}
    assert systems == {SYSTEMS[platform] for platform, _ in PLATFORMS}
    assert metadata["tool"]["cibuildwheel"]["build"] == [f"cp{version.replace('.', '')}-*" for version in pythons()]
    assert metadata["project"]["requires-python"] == f">={pythons()[0]}"
    (counted,) = (int(line.split()[-1]) for line in commands() if "*.whl | wc -l" in line)
    assert counted == len(PLATFORMS), "one wheel a platform, for every Python 3"


def test_what_tries_a_wheel_exists():
    recipe, project = pyproject()["tool"]["cibuildwheel"], pyproject()["project"]
    assert set(recipe["test-extras"]) <= set(project["optional-dependencies"])
    for command in recipe["test-command"]:
        program, name, *arguments = shlex.split(command)
        assert program in project["scripts"]
        assert name in COMMANDS
        options = [argument for argument in arguments if argument.startswith("--")]
        assert not options or set(options) <= options_of(name)


def options_of(command: str) -> set[str]:
    from polydraft.cli import Program

    found = Program().get_command(None, command)  # type: ignore[arg-type]
    return {option for parameter in found.params for option in parameter.opts}


@pytest.mark.parametrize(
    ("tag", "more", "holds"),
    [("v0.1.0", "", True), ("v0.1", "", False), ("v0.1.0", "polydraft-0.1.0.1.tar.gz", False), ("v0.1.1", "", False)],
)
def test_a_tag_that_is_not_the_version_is_refused(tmp_path: Path, tag: str, more: str, holds: bool):
    names = [f"polydraft-0.1.0-py3-none-{one}.whl" for one in ("manylinux_x86_64", "manylinux_aarch64", "macosx_arm64")]
    (tmp_path / "dist").mkdir()
    for name in (*names, more or "polydraft-0.1.0.tar.gz"):
        (tmp_path / "dist" / name).touch()
    (step,) = (step for step in jobs()["upload"]["steps"] if "run" in step)
    done = subprocess.run(
        ["bash", "-e", "-c", step["run"]],
        cwd=tmp_path,
        env={**os.environ, "GITHUB_REF_NAME": tag},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode == 0) == holds, done.stderr


# -- the tools of the recipe, at the versions that it pins ----------------------------------------------------------------
@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    environment = create_environment(tmp_path_factory.mktemp("tools") / "venv")
    environment.install(*(f"{name}=={version}" for name, version in installed_by_it().items()), "auditwheel>=6")
    return environment


@pytest.mark.deep
@pytest.mark.parametrize(("platform", "arch"), sorted(PLATFORMS))
def test_cibuildwheel_reads_the_recipe(tools: Installation, platform: str, arch: str):
    printed = run(
        tools.scripts / "cibuildwheel", "--platform", platform, "--archs", arch, "--print-build-identifiers", ROOT, cwd=ROOT
    )
    system = {"linux": "manylinux", "macos": "macosx"}[platform]
    assert printed.split() == [f"cp{version.replace('.', '')}-{system}_{arch}" for version in pythons()]


@pytest.mark.deep
def test_an_index_would_take_what_is_built(tools: Installation, distributions: Distributions):
    files = (distributions.wheel, distributions.sdist)
    assert run(tools.scripts / "twine", "--no-color", "check", "--strict", *files, cwd=ROOT).count("PASSED") == len(files)


@pytest.mark.deep
@pytest.mark.skipif(sys.platform != "linux", reason="the tool is one for wheels of Linux")
def test_a_wheel_of_linux_needs_libraries_of_the_system_alone(tools: Installation, distributions: Distributions):
    """What it needs is there on every Linux, of an age that the machine's compiler gives; that of the recipe's image is 2.28."""
    told = json.loads(run(tools.scripts / "auditwheel", "show", "--json", distributions.wheel, cwd=ROOT))
    assert "manylinux_" in json.dumps(told)


@pytest.mark.deep
def test_the_kernels_compile_for_every_platform(tmp_path: Path):
    """Compiled, neither linked nor run: by one compiler that knows all of them."""
    environment = create_environment(tmp_path / "venv")
    environment.install(ZIG)
    sources = sorted((ROOT / "backends" / "cpu").glob("*/src/*.cpp"))
    flags = re.search(r"^FLAGS = \[(.+)\]$", (ROOT / "setup.py").read_text(encoding="utf-8"), re.MULTILINE)
    assert flags
    given = [flag.replace("-O2", "-O0") for flag in json.loads(f"[{flags[1]}]")]
    assert set(TARGETS) == {" ".join(one) for one in PLATFORMS}
    zig = (environment.scripts / "python", "-m", "ziglang", "c++", "-c", "-fPIC", "-pthread", *given)
    environ = os.environ | {"ZIG_GLOBAL_CACHE_DIR": str(tmp_path / "zig")}
    for target, source in itertools.product(TARGETS.values(), sources):
        command = [*map(str, zig), "-target", target, str(source), "-o", str(tmp_path / "object.o")]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{source.name} for {target}: {done.stderr}"
    shutil.rmtree(tmp_path)
