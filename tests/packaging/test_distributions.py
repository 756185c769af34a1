"""The wheel and the source distribution: complete, with the compiled kernels, without leftovers, and small enough when installed.

All tests that need no further environment are in this file, because files go to different processes, and each
process builds and installs for itself.
"""

import json
import shutil
import tarfile
import zipfile
from configparser import ConfigParser
from email import message_from_bytes
from pathlib import Path, PurePosixPath

import pytest

from polydraft.cli.new_backend import write
from polydraft_cpu import library
from tests.packaging.conftest import Distributions, Installation, build, run
from tests.support.project import ROOT, pyproject

pytestmark = pytest.mark.timeout(600)  # building and installing wait for an index

MEGABYTE = 1_000_000
CORE_LIMIT = 180 * MEGABYTE
DEMO = "polydraft/demo/mimo-tiny-python"
LAZY = {"click", "jinja2", "rich", "tokenizers"}
KERNELS = "polydraft_cpu"
needs_cpp = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("c++")), reason="there is no C++ compiler (g++ or c++) here"
)


@pytest.fixture
def wheel(without_kernels: Distributions):
    with zipfile.ZipFile(without_kernels.wheel) as archive:
        yield archive


def in_dist_info(wheel: zipfile.ZipFile, name: str) -> bytes:
    (member,) = (member for member in wheel.namelist() if member.endswith(f".dist-info/{name}"))
    return wheel.read(member)


def test_wheel_has_every_module_of_core(wheel: zipfile.ZipFile):
    modules = {path.relative_to(ROOT / "core").as_posix() for path in (ROOT / "core").rglob("*.py")}
    assert modules <= set(wheel.namelist())


def test_wheel_has_the_demo_model_unchanged(wheel: zipfile.ZipFile):
    source = ROOT / "core" / DEMO
    names = {path.name for path in source.iterdir()}
    assert {PurePosixPath(name).name for name in wheel.namelist() if name.startswith(DEMO)} == names
    assert all(wheel.read(f"{DEMO}/{name}") == (source / name).read_bytes() for name in names)


def test_wheel_has_licence_notice_and_type_marker(wheel: zipfile.ZipFile):
    assert in_dist_info(wheel, "licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert b"demo model" in in_dist_info(wheel, "licenses/NOTICE")
    assert "polydraft/py.typed" in wheel.namelist()


def test_wheel_has_only_import_packages_of_polydraft(wheel: zipfile.ZipFile):
    top = {name.partition("/")[0] for name in wheel.namelist()}
    unexpected = {name for name in top if not name.startswith("polydraft")}
    assert not unexpected
    ours = [name for name in wheel.namelist() if not name.startswith("polydraft/template/")]  # which brings a vendor's first test
    assert not [name for name in ours if "/tests/" in name or name.endswith((".pyc", ".egg-info"))]


def test_wheel_declares_the_command_and_the_reference_backend(wheel: zipfile.ZipFile):
    entries = ConfigParser()
    entries.read_string(in_dist_info(wheel, "entry_points.txt").decode())
    assert dict(entries["console_scripts"]) == {"polydraft": "polydraft.__main__:main"}
    assert dict(entries["polydraft.backends"])["reference"] == "polydraft.reference"


def test_wheel_states_the_version_of_the_source_and_the_licence(wheel: zipfile.ZipFile):
    source: dict[str, str] = {}
    exec((ROOT / "core" / "polydraft" / "_version.py").read_text(encoding="utf-8"), source)
    metadata = message_from_bytes(in_dist_info(wheel, "METADATA"))
    assert metadata["Version"] == source["__version__"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
    assert set(metadata.get_all("Provides-Extra", [])) == set(pyproject()["project"]["optional-dependencies"])


def test_source_distribution_has_what_make_needs(without_kernels: Distributions):
    with tarfile.open(without_kernels.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"Makefile", ".ci/run", "pyproject.toml", "tests/conftest.py", "LICENSE", "NOTICE", "CONTRIBUTING.md"}
    wanted |= {".github/workflows/wheels.yml"}
    assert wanted <= names
    assert not [name for name in names if "__pycache__" in name]


@needs_cpp
@pytest.mark.deep
def test_a_wheel_holds_the_library_and_fits_every_python(distributions: Distributions):
    assert "-py3-none-" in distributions.wheel.name
    assert not distributions.wheel.name.endswith("-any.whl")
    with zipfile.ZipFile(distributions.wheel) as archive:
        sizes = {one.filename: one.file_size for one in archive.infolist()}
    assert f"{KERNELS}/{library.NOTE.name}" not in sizes
    assert sizes[f"{KERNELS}/{library.PATH.name}"] < 3 * MEGABYTE


@pytest.mark.deep
def test_installed_core_is_small(installed: Installation):
    sizes = {path: path.stat().st_size for path in installed.packages.rglob("*") if path.is_file()}
    folders: dict[str, int] = {}
    for path, size in sizes.items():
        top = path.relative_to(installed.packages).parts[0]
        folders[top] = folders.get(top, 0) + size
    largest = sorted(folders.items(), key=lambda item: -item[1])[:5]
    assert sum(sizes.values()) < CORE_LIMIT, f"largest: {largest}"


@pytest.mark.deep
def test_import_loads_no_library_that_only_some_commands_need(installed: Installation):
    loaded = json.loads(installed.python("import json, sys, polydraft; print(json.dumps(sorted(sys.modules)))"))
    assert "polydraft" in loaded
    assert not LAZY & set(loaded)


@pytest.mark.deep
def test_installed_demo_model_is_found(installed: Installation):
    found = Path(installed.python("from polydraft.demo import demo_model_path; print(demo_model_path())").strip())
    assert found == installed.packages / DEMO
    assert (found / "config.json").is_file()


@pytest.mark.deep
def test_installed_entry_point_loads(installed: Installation):
    load = "entry_points(group='polydraft.backends')['reference'].load()"
    loaded = installed.python(f"from importlib.metadata import entry_points; print({load}.__name__)")
    assert loaded.strip() == "polydraft.reference"


@needs_cpp
@pytest.mark.deep
def test_an_installed_wheel_computes_on_its_library(installed: Installation):
    code = "from polydraft import LLM; print(LLM(max_num_seqs=1).engine.resolved.backend)"
    assert installed.python(code).strip() == "cpu"


@pytest.mark.deep
def test_installed_command_generates_without_extras(installed: Installation):
    command = ("generate", "def fibonacci(n):", "--draft-tokens", "3", "--max-new-tokens", "8", "--json")
    answer = json.loads(run(installed.scripts / "polydraft", *command, cwd=installed.folder))
    assert answer["schema"] == "polydraft.generate/1"
    assert len(answer["requests"][0]["token_ids"]) == 8


@pytest.mark.deep
def test_installed_command_conforms_without_extras(installed: Installation):
    code = """
import json, subprocess, sys
from pathlib import Path
command = [str(Path(sys.executable).with_name("polydraft")), "conform", "reference", "--json"]
done = subprocess.run([*command, "--contract", "swiglu"], capture_output=True, text=True, check=True)
print(json.loads(done.stdout)["verdict"]["status"])
from polydraft.conformance.catalogue import must_own, must_pass
from polydraft.conformance.outcomes import PROFILES
print(all(names(profile, ("dense",)) for names in (must_pass, must_own) for profile in PROFILES))
"""
    assert installed.python(code).split() == ["0", "True"]


@pytest.mark.deep
def test_installed_command_writes_a_package_that_runs(installed: Installation):
    answer = json.loads(run(installed.scripts / "polydraft", "new-backend", "mychip", "--json", cwd=installed.folder))
    template = ROOT / "core" / "polydraft" / "template"
    kept = {path.relative_to(template).as_posix() for path in template.rglob("*") if path.suffix in {".md", ".py", ".toml"}}
    assert set(answer["files"]) == kept
    name = installed.python(
        f"import sys; sys.path.insert(0, {answer['folder']!r})\n"
        "import polydraft_mychip; print(polydraft_mychip.polydraft_backend_info().name)"
    )
    assert name.strip() == "mychip"


def test_a_written_package_brings_what_its_kernels_are_compiled_from(tmp_path: Path):
    write("mychip", tmp_path / "source")
    package = tmp_path / "source" / "polydraft_mychip"
    for name in ("linear.cl", "kernels/common/tile.h", "__pycache__/device.cpython-311.pyc"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("of the vendor\n", encoding="utf-8")
    build("--wheel", "--outdir", tmp_path, tmp_path / "source", cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name.partition("/")[2] for name in archive.namelist() if name.startswith("polydraft_mychip/")}
    assert names == {"__init__.py", "device.py", "kernels.py", "linear.cl", "kernels/common/tile.h"}
