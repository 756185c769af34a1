"""Which Paddle is installed: combinations that cannot be used are recognised without importing any of them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "backends" / "paddle"))
from polydraft_paddle import installation

from polydraft.errors import DeviceError


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
