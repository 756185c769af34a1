"""One distribution from several import roots: a wheel and an editable installation hold the packages of all of them.

A second root is added to a copy of the project in the way that pyproject.toml asks for.
"""

import json
from pathlib import Path

import pytest

from tests.packaging.conftest import Installation, build, create_environment

pytestmark = pytest.mark.timeout(600)  # building and installing wait for an index


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where packages lie has nothing to do with compiled kernels, and compiling them takes the longest of all."""
    for name in ("CC", "CXX"):
        monkeypatch.setenv(name, "no-such-compiler")


ORIGINS = """
import importlib.util, json
names = ["polydraft", "polydraft_second"]
print(json.dumps([importlib.util.find_spec(name).origin for name in names]))
"""


def origins(environment: Installation) -> list[Path]:
    """Return where the packages of both roots come from, the first without running it: its dependencies are absent."""
    return [Path(origin).resolve().parent for origin in json.loads(environment.python(ORIGINS))]


@pytest.mark.deep
def test_wheel_of_two_roots(two_roots: Path, tmp_path: Path):
    build("--wheel", "--outdir", tmp_path, two_roots, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    environment = create_environment(tmp_path / "venv")
    environment.install("--no-deps", wheel)
    packages = environment.packages.resolve()
    assert origins(environment) == [packages / "polydraft", packages / "polydraft_second"]
    assert environment.python("from polydraft_second.device import NAME; print(NAME)").strip() == "second"
    assert (packages / "polydraft" / "py.typed").is_file()


@pytest.mark.deep
def test_editable_installation_of_two_roots_follows_the_source(two_roots: Path, tmp_path: Path):
    environment = create_environment(tmp_path / "venv")
    environment.install("--no-deps", "--editable", two_roots)
    second = two_roots / "backends" / "second" / "polydraft_second"
    (second / "added_later.py").write_text("NAME = 'later'\n", encoding="utf-8")
    assert origins(environment) == [two_roots.resolve() / "core" / "polydraft", second.resolve()]
    assert environment.python("from polydraft_second.added_later import NAME; print(NAME)").strip() == "later"
