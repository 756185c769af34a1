"""Refusals that no whole run comes across: each is one sentence, of the right class, and names what was got and what to do."""

from __future__ import annotations

import dataclasses
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polydraft import demo
from polydraft.backend import CacheSpec
from polydraft.conformance.report import Selection
from polydraft.contracts import REGISTRY
from polydraft.contracts.base import Registry
from polydraft.errors import CapabilityError, CheckpointError, ConfigError, ContractError, DeviceError, PolydraftError
from polydraft.models import Checkpoint, FamilyRegistry
from polydraft.models.config_file import ConfigFile, read_json_object
from polydraft.models.safetensors_file import SafetensorsFile
from polydraft.proposers.base import built_in
from polydraft.proposers.mtp import MtpProposer
from polydraft.reference.device import ReferenceDevice
from polydraft.reference.table import NumpyTable
from tests.support import tiny


def device() -> ReferenceDevice:
    return ReferenceDevice()


def table() -> NumpyTable:
    return NumpyTable(device())


def twice() -> None:
    registry = Registry()
    registry.add(REGISTRY["linear"])
    registry.add(REGISTRY["linear"])


def without_head() -> None:
    """An MTP proposer for a model that has no MTP layer."""
    from types import SimpleNamespace

    with Checkpoint(tiny.checkpoint("narrow")) as opened:
        model, _ = FamilyRegistry().describe(opened)
    headless = dataclasses.replace(model, mtp=None, mtp_note="the checkpoint has none")
    MtpProposer(SimpleNamespace(model=headless, limits=None, device=None))  # type: ignore[arg-type]


def refill(shape: tuple[int, ...]) -> None:
    backend = table()
    weight = backend.prepare_weight("linear", np.zeros((4, 3), np.float32), "f32")
    backend.prepare_weight("linear", np.zeros(shape, np.float32), "f32", weight)


REFUSALS: dict[str, tuple[Callable[[Path], Any], type[PolydraftError], str]] = {
    "a directory as config.json": (read_json_object, CheckpointError, "cannot be read, got Is a directory, wanted a readable"),
    "a number where a text stands": (
        lambda path: ConfigFile(path, {"hidden_act": 3}).text("hidden_act", "silu"), CheckpointError, "hidden_act.* 3.*a string",
    ),
    "a directory as weights": (SafetensorsFile, CheckpointError, "cannot be opened, got Is a directory.*complete the directory"),
    "an unknown profile": (
        lambda path: Selection(profile="most").checks(), ConfigError, "profile is 'most', wanted one of basic, .*choose one",
    ),
    "an unknown level": (lambda path: Selection(level="L9").checks(), ConfigError, "level is 'L9', wanted one of L0, .*"),
    "a contract registered twice": (
        lambda path: twice(), ContractError, "contract linear/1 is registered twice, first as linear/1, wanted one; drop",
    ),
    "a proposer with a typing error": (
        lambda path: built_in().factory("ngrams"), ConfigError, "unknown proposer 'ngrams'; did you mean 'ngram'. known: mtp,",
    ),
    "a proposer of another kind": (lambda path: built_in().factory("medusa"), ConfigError, "proposer 'medusa'; known: mtp,"),
    "drafts without a head": (
        lambda path: without_head(), CapabilityError, "needs an MTP head: the checkpoint has none; use --proposer none",
    ),
    "more memory than there is": (
        lambda path: device().empty("cache", (2**50, 2**10), "f32"), DeviceError,
        r"could not allocate 4,611,686,018,427,387,904 bytes for cache; lower --num-blocks",
    ),
    "a value of another shape": (
        lambda path: (d := device()).load(d.empty("slots", (4,), "i32"), np.zeros(5, np.int32)), DeviceError,
        r"buffer slots has shape \(4,\), got a value of shape \(5,\); pass that shape",
    ),
    "weights in another dtype": (
        lambda path: table().prepare_weight("linear", np.zeros((4, 3), np.float32), "bf16"), ContractError,
        "the reference backend computes in f32, got dtype 'bf16'; leave --dtype on auto",
    ),
    "weights of another shape": (
        lambda path: refill((3, 4)), ContractError, r"weight update: got shape \(3, 4\), wanted \(4, 3\); load the same",
    ),
}  # fmt: skip
"""By what is wrong: the call, given a directory, and the refusal."""


@pytest.mark.parametrize("what", REFUSALS)
def test_refused(what: str, tmp_path: Path) -> None:
    call, error, message = REFUSALS[what]
    with pytest.raises(error, match=message) as refused:
        call(tmp_path)
    assert "\n" not in str(refused.value)


def test_weights_are_refilled_in_place() -> None:
    backend = table()
    weight = backend.prepare_weight("linear", np.zeros((4, 3), np.float32), "f32")
    assert backend.prepare_weight("linear", np.ones((4, 3)), "f32", weight) is weight
    assert (weight.array == 1).all()  # type: ignore[attr-defined]


def test_a_cache_is_what_was_asked_for() -> None:
    spec = CacheSpec(num_blocks=3, block_size=4, num_kv_heads=2, head_dim=5, dtype="f32")
    keys, values = table().allocate_cache(spec).read_logical()
    assert keys.shape == values.shape == (3, 4, 2, 5)


@pytest.mark.parametrize("where", ["an archive", "an incomplete installation"])
def test_a_demo_model_that_is_not_there(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if where == "an archive":
        with zipfile.ZipFile(tmp_path / "wheel.zip", "w") as archive:
            archive.writestr("mimo-tiny-python/config.json", "{}")
        monkeypatch.setattr(demo, "files", lambda name: zipfile.Path(tmp_path / "wheel.zip"))
        message = "must be read from a directory, got .*mimo-tiny-python.* inside an archive"
    else:
        monkeypatch.setattr(demo, "files", lambda name: tmp_path)
        message = "the demo model is not installed, got no config.json in .*wanted the complete wheel"
    with pytest.raises(CheckpointError, match=message):
        demo.demo_model_path()
