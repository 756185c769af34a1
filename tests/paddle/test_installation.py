"""Which Paddle is installed: combinations that cannot be used are recognised without importing any of them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "backends" / "paddle"))
sys.path.insert(0, str(Path(__file__).parents[2] / "backends" / "xpu"))
import polydraft_paddle
import polydraft_xpu
from polydraft_paddle import installation

from polydraft.errors import DeviceError
from tests.support.project import ROOT, pyproject


def pretend(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    known = {name.replace("_", "-"): version for name, version in versions.items()}

    def version(name: str) -> str:
        if name not in known:
            raise importlib.metadata.PackageNotFoundError(name)
        return known[name]

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_a_good_one(monkeypatch: pytest.MonkeyPatch):
    pretend(monkeypatch, paddlepaddle="3.3.1")
    assert installation.unusable() == ""


def test_two_distributions_clash(monkeypatch: pytest.MonkeyPatch):
    pretend(monkeypatch, paddlepaddle="3.3.1", paddlepaddle_gpu="3.1.0")
    assert installation.unusable() == (
        "paddlepaddle and paddlepaddle-gpu own the same import package; uninstall all of them, then install the one you want"
    )


def test_the_gpu_wheel_of_the_default_index_cannot_run_on_new_gpus(monkeypatch: pytest.MonkeyPatch):
    pretend(monkeypatch, paddlepaddle_gpu="2.6.2")
    assert "paddlepaddle-gpu 2.6.2 has no machine code for GPUs of compute capability 9.0" in installation.unusable()
    assert "Paddle's own index" in installation.unusable()


def test_an_old_one(monkeypatch: pytest.MonkeyPatch):
    pretend(monkeypatch, paddlepaddle="3.1.1")
    assert installation.unusable() == "paddlepaddle 3.1.1 is older than 3.2; pip install 'polydraft[paddle]'"


@pytest.mark.parametrize("version", ["3.2.0", "3.2.2", "3.3.1", "3.3.1.post2"])
def test_the_range(monkeypatch: pytest.MonkeyPatch, version: str):
    pretend(monkeypatch, paddlepaddle_xpu=version)
    assert installation.unusable() == ""


@pytest.mark.parametrize("version", ["3.4.0", "4.0.0b1"])
def test_one_that_nobody_has_tried(monkeypatch: pytest.MonkeyPatch, version: str):
    pretend(monkeypatch, paddlepaddle=version)
    wanted = f"paddlepaddle {version} is newer than 3.3, the newest that was tried; pip install 'polydraft[paddle]'"
    assert installation.unusable() == wanted


@pytest.mark.parametrize(("version", "on"), [("3.2.2", {"gpu"}), ("3.3.0", {"gpu", "xpu", "mychip"})])
def test_graphs_are_declared_where_the_installed_paddle_has_them(monkeypatch: pytest.MonkeyPatch, version: str, on: set[str]):
    pretend(monkeypatch, paddlepaddle=version)
    for backend in (polydraft_paddle, polydraft_xpu):
        found = {kind for kind in ("cpu", "gpu", "xpu", "mychip") if _captures(backend, "cpu" if kind == "cpu" else f"{kind}:0")}
        assert found == on


def _captures(backend: Any, spec: str) -> bool:
    return bool(backend.polydraft_backend_info(spec=spec).capabilities.graph_capture)


def test_pip_is_asked_for_the_same_range():
    extras = pyproject()["project"]["optional-dependencies"]
    low, (major, minor) = ".".join(map(str, installation.OLDEST)), installation.NEWEST
    for extra, name in (("paddle", ""), ("paddle-gpu", "-gpu"), ("xpu", "-xpu"), ("custom-device", "")):
        assert extras[extra] == [f"paddlepaddle{name}>={low},<{major}.{minor + 1}"]
    assert f"'paddlepaddle=={low}.0'" in (ROOT / "Makefile").read_text()


def test_none(monkeypatch: pytest.MonkeyPatch):
    pretend(monkeypatch)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert installation.unusable() == "Paddle is not installed; pip install 'polydraft[paddle]'"
    with pytest.raises(DeviceError, match="Paddle is not installed"):
        installation.import_paddle()


def test_one_that_does_not_load(monkeypatch: pytest.MonkeyPatch):
    pretend(monkeypatch, paddlepaddle="3.3.1")

    def fail(name: str) -> None:
        raise ImportError("libphi.so: cannot open shared object file")

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(DeviceError, match=r"the installed Paddle does not load \(libphi.so: cannot open shared object file\)"):
        installation.import_paddle()


AMD, INTEL = "vendor_id\t: AuthenticAMD\n", "vendor_id\t: GenuineIntel\n"
WIDE = "flags\t\t: fpu fma avx avx2 avx512f avx512dq avx512cd avx512bw avx512vl\n"


@pytest.mark.parametrize(
    ("cpuinfo", "wanted"),
    [
        (AMD + WIDE, "7"),
        (AMD + WIDE.replace(" avx512vl", ""), "5"),
        (AMD + "flags\t\t: fpu fma avx2\n", "5"),
        (AMD + "flags\t\t: fpu sse4_2 avx\n", ""),
        (INTEL + WIDE, ""),
        ("Processor\t: ARMv8\n", ""),
        (AMD + WIDE + "\n" + AMD + "flags\t\t: of another processor, which is not read\n", "7"),
    ],
)
def test_what_mkl_is_told_of_the_processor(tmp_path: Path, cpuinfo: str, wanted: str):
    """A number that is too high ends the process with an illegal instruction; none costs most of the speed."""
    file = tmp_path / "cpuinfo"
    file.write_text(cpuinfo)
    assert installation.mkl_type(file) == wanted
    assert installation.mkl_type(tmp_path / "missing") == ""
