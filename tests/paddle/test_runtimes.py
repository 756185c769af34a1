"""Runtimes of custom devices that do not fit the installed Paddle: recognised before anything is loaded, and named when one
breaks the import."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from polydraft_paddle import polydraft_backend_info, runtimes
from polydraft_paddle.machine import runs_with
from polydraft_paddle.visible import visible

from polydraft.cli import doctor
from polydraft.cli.doctor import examine
from polydraft.plugins.checks import BACKEND
from polydraft.plugins.plugins import Found, Loaded, identify
from tests.support.paddle import needs_paddle, polydraft
from tests.support.project import ROOT

PADDLE = "3.3.1"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in which Paddle looks for runtimes instead of its own, with one for `mychip`."""
    folder = tmp_path / "paddle_custom_device"
    folder.mkdir()
    (folder / "libpaddle-mychip.so").write_bytes(b"not a library")
    monkeypatch.setenv("CUSTOM_DEVICE_ROOT", str(folder))
    visible.cache_clear()
    yield folder
    visible.cache_clear()


def built_for(root: Path, version: str) -> None:
    (root / "libpaddle-mychip.paddle-version").write_text(f"{version}\n")


def test_one_that_nobody_says_anything_about_is_taken_to_fit(root: Path):
    assert runtimes.folders() == (root,)
    assert runtimes.misfits(PADDLE) == {}


@pytest.mark.parametrize(("built", "fits"), [("3.3.1", True), ("3.3.0", False), ("3.2.2", False), ("3.3", True), ("3.2", False)])
def test_one_of_ours_says_what_it_was_built_for(root: Path, built: str, fits: bool):
    built_for(root, built)
    sentence = (
        f"the runtime of device mychip was built for Paddle {built}, but 3.3.1 is installed; build or install the runtime for "
        f"3.3.1, or remove {root / 'libpaddle-mychip.so'}"
    )
    assert runtimes.misfits(PADDLE) == ({} if fits else {root / "libpaddle-mychip.so": sentence})


@pytest.mark.parametrize(("built", "again"), [("", True), ("3.2.0", True), (PADDLE, False)])
def test_what_was_built_for_another_paddle_is_built_again(root: Path, monkeypatch: pytest.MonkeyPatch, built: str, again: bool):
    """A checkout that builds for one Paddle and then for another: by their age the files of the first build are good."""
    setuptools: Any = pytest.importorskip("setuptools")
    monkeypatch.syspath_prepend(str(ROOT / "plugins" / "paddle-device-skeleton"))
    build_device: Any = importlib.import_module("build_device")
    monkeypatch.setattr(build_device, "paddle_version", lambda: PADDLE)
    forced: list[bool] = []
    monkeypatch.setattr(build_device.build_ext, "run", lambda self: forced.append(bool(self.force)))
    command = build_device.BuildDevice(setuptools.Distribution())
    command.get_outputs = lambda: [str(root / "libpaddle-mychip.so")]
    if built:
        built_for(root, built)
    command.run()
    assert forced == [again]
    assert runtimes.misfits(PADDLE) == {}, "the note says what it was built for"


@pytest.mark.parametrize(("version", "fits"), [("3.3.0.post1", True), ("3.0.0", False), ("0.0.1", True), ("0.0.0", True)])
def test_a_vendors_wheel_is_judged_by_its_version(root: Path, monkeypatch: pytest.MonkeyPatch, version: str, fits: bool):
    def read_text(name: str) -> str:
        return "paddle_custom_device/libpaddle-mychip.so,sha256=x,9\n" if name == "RECORD" else ""

    wheel: Any = SimpleNamespace(metadata={"Name": "paddle_custom_mychip"}, read_text=read_text, version=version)
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: [wheel])
    assert (runtimes.misfits(PADDLE) == {}) == fits


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("custom-cpu", ("custom_cpu",)),
        ("custom-npu", ("npu", "custom_npu")),
        ("custom-intel-gpu", ("intel_gpu",)),
        ("custom-supa", ("SUPA",)),
        ("mychip", ("mychip",)),
    ],
)
def test_the_name_of_a_runtime_tells_its_kind_of_device(
    root: Path, monkeypatch: pytest.MonkeyPatch, name: str, kinds: tuple[str, ...]
):
    """Paddle's own places are never a runtime's, and the digest that a variant's result rests on is that of the right file."""
    library = (root / "libpaddle-mychip.so").rename(root / f"libpaddle-{name}.so")
    known = ("cpu", "gpu", "xpu", "custom_cpu", "npu", "custom_npu", "intel_gpu", "SUPA", "mychip")
    assert tuple(kind for kind in known if runtimes.serves(library, kind)) == kinds
    assert runs_with(f"{kinds[0]}:0")["driver"].startswith(f"libpaddle-{name}.so ")
    built_for(root, "2.6.0")
    (root / "libpaddle-mychip.paddle-version").rename(library.with_suffix(".paddle-version"))
    monkeypatch.setattr(importlib.metadata, "version", lambda package: PADDLE if package == "paddlepaddle" else _missing(package))
    assert [polydraft_backend_info(spec=f"{kind}:0").available for kind in (*kinds, "cpu")] == [False] * len(kinds) + [True]


def _missing(package: str) -> str:
    raise importlib.metadata.PackageNotFoundError(package)


def test_without_a_folder_there_is_nothing_to_judge(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CUSTOM_DEVICE_ROOT", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert runtimes.misfits(PADDLE) == {}


@needs_paddle
def test_doctor_shows_it_and_that_device_alone_is_not_available(root: Path):
    built_for(root, "2.6.0")
    row = next(one for one in examine()["backends"] if one["name"] == "paddle")
    assert row["available"]
    assert "the runtime of device mychip was built for Paddle 2.6.0" in row["notes"][0]
    assert row["notes"][1] == (
        f"the runtime {root / 'libpaddle-mychip.so'} does not load with the installed Paddle (file too short); build it for this "
        "Paddle, or remove it"
    )
    assert row["devices"] == ["cpu"]
    assert not polydraft_backend_info(spec="mychip:0").available
    assert "built for Paddle 2.6.0" in polydraft_backend_info(spec="mychip:0").reason


def test_what_paddle_says_of_one_that_does_not_load():
    library = "/x/libpaddle-npu.so"
    error = (
        f"(InvalidArgument) Fail to open library: {library} with error: {library}: undefined symbol: _ZN3phi\n  [Hint: not null.]"
    )
    assert runtimes.load_problem(ValueError(error)) == (
        "the runtime /x/libpaddle-npu.so does not load with the installed Paddle (undefined symbol: _ZN3phi); "
        "build it for this Paddle, or remove it"
    )
    assert runtimes.load_problem(ValueError("something else")) == ""


@needs_paddle
def test_one_that_breaks_the_import_is_one_sentence(root: Path):
    """Every place is lost with it, the CPU included: Paddle refuses to be imported."""
    run: subprocess.CompletedProcess[str] = polydraft("generate", "x", "--backend", "paddle", "--json")
    assert run.returncode == 1
    library = root / "libpaddle-mychip.so"
    message = json.loads(run.stdout)["error"]["message"]
    assert message == (
        f"the runtime {library} does not load with the installed Paddle (file too short); build it for this Paddle, or remove it"
    )


@pytest.mark.parametrize(
    ("versions", "sentence"),
    [
        ({"paddlepaddle-gpu": "2.6.2"}, "paddlepaddle-gpu 2.6.2 has no machine code for GPUs of compute capability 9.0 or newer"),
        ({"paddlepaddle": "3.3.1", "paddlepaddle-xpu": "3.3.0"}, "paddlepaddle and paddlepaddle-xpu own the same import package"),
        ({"paddlepaddle": "3.1.1"}, "paddlepaddle 3.1.1 is older than 3.2"),
        ({"paddlepaddle": "3.9.0"}, "paddlepaddle 3.9.0 is newer than 3.3"),
    ],
)
@pytest.mark.parametrize("backend", ["paddle", "xpu"])
def test_doctor_shows_what_cannot_be_used(monkeypatch: pytest.MonkeyPatch, backend: str, versions: dict[str, str], sentence: str):
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name.startswith("paddlepaddle"):
            if name not in versions:
                raise importlib.metadata.PackageNotFoundError(name)
            return versions[name]
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    loaded = Loaded.from_entry(BACKEND, backend)
    shown = doctor._backend(Found(backend, loaded.origin, identify(loaded), digest=loaded.digest), ())
    assert not shown["available"]
    assert sentence in shown["reason"]
