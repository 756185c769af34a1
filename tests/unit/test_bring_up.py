"""Bring-up: a device of four functions that no kernel of NumPy could reach into, and the rules that keep delegation open."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import weakref
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from polydraft import Capabilities, Engine, EngineConfig, SamplingParams, hookimpl
from polydraft.backend import CacheSpec
from polydraft.conformance import conform, harness
from polydraft.conformance.kernel_checks import named_cases
from polydraft.conformance.needs import device_functions
from polydraft.conformance.report import Selection
from polydraft.contracts import REGISTRY
from polydraft.demo import demo_model_path
from polydraft.device import Device
from polydraft.errors import CapabilityError, ContractError, DeviceError, PluginError
from polydraft.plugins.bring_up import (
    CACHE_KERNELS,
    DEVICE_FUNCTIONS,
    BringUpDevice,
    BringUpTable,
    Delegated,
    OwnKernel,
    contract_versions,
)
from polydraft.plugins.checks import lacks
from polydraft.plugins.plugins import Plugins
from tests.support import bytes_backend as backend
from tests.support.bytes_backend import BytesDevice, info


def table(device: BringUpDevice | None = None, **own: Any) -> BringUpTable:
    return BringUpTable(device or BytesDevice("bytes"), own=own)


def changed(**capabilities: Any) -> Any:
    """The backend with other capabilities."""
    from polydraft.conformance.target import wrap

    wanted = dataclasses.replace(info().capabilities, **capabilities)
    return wrap(backend, polydraft_backend_info=lambda answer: dataclasses.replace(answer, capabilities=wanted))


# -- the size of a first backend ---------------------------------------------------------------------
def test_a_device_is_four_functions_and_basic_asks_for_few_kernels():
    from polydraft.conformance.catalogue import must_own

    own = {name for name, value in vars(BytesDevice).items() if inspect.isfunction(value) and not name.startswith("_")}
    assert own == set(DEVICE_FUNCTIONS)
    assert len(DEVICE_FUNCTIONS) <= 12
    assert len(must_own("basic", ("dense",))) <= 12, "kernels that count as own in the profile basic"
    assert lacks(BytesDevice("bytes"), Device) == ""
    whole = [function for function in device_functions("graph") if not function.startswith("GraphCapture.")]
    assert len(whole) <= 12, "a device that leaves bring-up"


@pytest.mark.deep
def test_four_functions_and_one_kernel_conform():
    """The device's memory is opaque bytes: whatever passed went through `write` and `read`."""
    report = conform(backend)
    assert report.status == 0, report.content["verdict"]
    owners = list(report.content["owners"].values())
    assert (owners.count("own"), set(owners)) == (1, {"own", "delegated"})
    sentence = report.content["verdict"]["sentence"]
    assert "basic for dense (1 own, " in sentence, sentence
    assert "wholly delegated: sampling, " in sentence, sentence
    assert "bring_up" not in report.content["not_claimed"]


@pytest.mark.deep
def test_the_zoo_dies_around_it_too():
    from polydraft.conformance.proof import matrix, prove

    proof = prove(backend)
    assert proof.status == 0, matrix(proof)


def test_an_engine_generates_what_the_reference_does():
    def run(plugin: Any) -> Any:
        config = EngineConfig(model=str(demo_model_path()), backend="reference", draft_tokens=2, max_num_seqs=2, max_model_len=64)
        engine = Engine(config, backend=plugin)
        for prompt in ([5, 6, 7], [9, 8]):
            engine.add(prompt, SamplingParams(max_new_tokens=10, ignore_eos=True))
        done: list[Any] = []
        while len(done) < 2:
            engine.step()
            done += [output for output in engine.poll() if output.finished]
        engine.close()
        return sorted((output.token_ids, output.rounds) for output in done)

    assert run(backend) == run("reference")


def test_handles_and_records_live_as_the_page_says():
    """Those that an engine uses live with it, then all are let go: nobody has to be told to free them."""
    handles: list[weakref.ref[Any]] = []
    seen: dict[int, set[Any]] = defaultdict(set)
    kept: list[Any] = []

    class Watched(BytesDevice):
        def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
            handles.append(weakref.ref(memory := super().allocate(shape, dtype)))
            return memory

    def swiglu(a: Any, n: int) -> None:
        seen[id(a)].add((id(a.gate_up), id(a.out)))
        kept.append(a)
        backend.swiglu(a, n)

    plugin = SimpleNamespace(**{name: getattr(backend, name) for name in dir(backend) if name.startswith("polydraft_")})
    plugin.polydraft_open_device = hookimpl(specname="polydraft_open_device")(lambda: Watched("bytes"))
    plugin.polydraft_kernels = hookimpl(specname="polydraft_kernels")(lambda device: BringUpTable(device, own={"swiglu": swiglu}))
    engine = Engine(EngineConfig(model=str(demo_model_path()), draft_tokens=2, max_num_seqs=2, max_model_len=64), backend=plugin)
    engine.add([1, 2, 3], SamplingParams(max_new_tokens=8, ignore_eos=True))
    while engine.has_work:
        engine.step()
    assert len(handles) > 10
    assert all(handle() is not None for handle in handles), "in use, or ready to be"
    assert len(seen) < len(kept), "one `a` a binding, at every launch"
    assert all(len(fields) == 1 for fields in seen.values()), "and what it names stays"
    kept.clear()
    engine.close()
    del engine
    gc.collect()
    assert not [handle() for handle in handles if handle() is not None]


# -- what is refused ---------------------------------------------------------------------------------
@pytest.mark.parametrize("claim", [{"asynchronous": True}, {"graph_capture": True}, {"dtypes": ("bf16",)}])
def test_bring_up_excludes(claim: dict[str, Any]):
    with pytest.raises(
        PluginError, match=r"bring_up beside asynchronous, graph_capture or a dtype other than f32|graph_capture with"
    ):
        Plugins.load(changed(**claim))


def test_delegation_has_to_be_declared():
    plugins = Plugins.load(changed(bring_up=False))
    with pytest.raises(PluginError, match=r"delegates \d+ kernels \(.*\) to the reference without declaring bring_up"):
        plugins.kernels(BytesDevice("bytes"))


def test_no_overlap():
    with pytest.raises(CapabilityError, match="bytes is in bring-up, which is synchronous; use --overlap 0"):
        Engine(EngineConfig(model=str(demo_model_path()), overlap=1), backend=backend)


@pytest.mark.parametrize("profile", ["graph", "async", "full"])
def test_no_claim_beyond_basic(profile: str):
    """Also where every kernel is own: what a bring-up device shows about order and graphs is nothing."""
    from polydraft.conformance.report import make
    from polydraft.conformance.target import Target

    report = make(Target(backend), Selection(profile), [])
    assert report.status != 0
    assert f"basic is the most that can be claimed, not {profile}" in report.content["verdict"]["sentence"]


def test_half_of_the_cache_kernels():
    for name in CACHE_KERNELS:
        with pytest.raises(PluginError, match=f"only {name} is an own kernel; they share the cache"):
            BringUpTable(BytesDevice("bytes"), own={name: lambda a, n: None})


def test_own_kernels_are_contracts():
    with pytest.raises(PluginError, match="own kernels swigglu are no contracts"):
        table(swigglu=lambda a, n: None)


def test_own_composites_are_offered():
    fused = BringUpTable(BytesDevice("bytes"), own={"residual_add+rms_norm": lambda a, n: None})
    assert fused.versions["residual_add+rms_norm"] == 1
    assert not isinstance(fused.providers["residual_add+rms_norm"], Delegated)
    assert "residual_add+rms_norm" not in contract_versions()


def test_caches_and_metadata_of_others_do_not_reach_delegated_kernels():
    device = BytesDevice("bytes")
    mixed = table(device)
    mixed.allocate_cache = backend.foreign_cache  # type: ignore[method-assign]
    contract = REGISTRY["paged_attention"]
    with pytest.raises(ContractError, match="cache of a delegated kernel is of type Foreign, wanted NumpyCache"):
        harness.run_kernel(contract, named_cases(contract)[0], device, mixed)


def through_the_golden(name: str) -> OwnKernel:
    """An own kernel of a device whose memory is arrays, computed by the definition in float64."""

    def kernel(a: Any, n: int) -> None:
        wide = {k: v.astype(np.float64) if isinstance(v, np.ndarray) and v.dtype.kind == "f" else v for k, v in vars(a).items()}
        cache = wide["cache"]
        REGISTRY[name].golden(SimpleNamespace(**{**wide, "cache": SimpleNamespace(k=cache[0], v=cache[1])}), n)
        for field, value in wide.items():
            if isinstance(value, np.ndarray):
                getattr(a, field)[...] = value

    return kernel


class ArrayDevice(BringUpDevice):
    """Memory is arrays."""

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        return np.empty(shape, dtype)

    def write(self, memory: Any, value: Any) -> None:
        memory[: len(value)] = value

    def read(self, memory: Any, into: Any) -> None:
        into[...] = memory[: len(into)]

    def wait(self) -> None:
        pass


@pytest.mark.parametrize("name", CACHE_KERNELS)
def test_own_cache_kernels_share_a_cache_on_the_device(name: str):
    device = ArrayDevice("arrays")
    mine = BringUpTable(device, own={kernel: through_the_golden(kernel) for kernel in CACHE_KERNELS})
    fresh = mine.allocate_cache(CacheSpec(3, 2, 1, 4, "f32"))
    assert np.isnan(fresh.read_logical()).all()
    assert fresh.nbytes == 2 * 3 * 2 * 4 * 4
    for case in named_cases(REGISTRY[name]):
        assert harness.check_kernel(REGISTRY[name], case, device, mine).ok, case.name


# -- the device and its weights ----------------------------------------------------------------------
def test_a_closed_device_refuses():
    device = BytesDevice("bytes")
    device.close()
    device.close()
    for allocate in (device.empty, device.staging):
        with pytest.raises(DeviceError, match="device bytes is closed; open a new engine to allocate late"):
            allocate("late", (1,), "i32")


def test_memory_that_is_short_is_a_sentence():
    class Full(BytesDevice):
        def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
            raise MemoryError

    with pytest.raises(DeviceError, match=r"could not allocate 4,000 bytes for x; lower --num-blocks"):
        Full("bytes").empty("x", (10, 100), "f32")


def test_wrong_shapes_are_sentences():
    device = BytesDevice("bytes")
    with pytest.raises(DeviceError, match=r"buffer x has shape \(3,\), got a value of shape \(4,\)"):
        device.load(device.empty("x", (3,), "f32"), np.zeros(4, np.float32))
    weight = table(device).prepare_weight("linear", np.zeros((2, 3)), "f32")
    with pytest.raises(ContractError, match=r"weight update: got shape \(3, 2\), wanted \(2, 3\)"):
        table(device).prepare_weight("linear", np.zeros((3, 2)), "f32", weight)


@pytest.mark.parametrize("name", DEVICE_FUNCTIONS)
def test_the_base_has_none_of_the_four(name: str):
    arguments = {"allocate": ((1,), np.dtype("f4")), "wait": ()}.get(name, (None, np.zeros(1)))
    with pytest.raises(NotImplementedError):
        getattr(BringUpDevice("x"), name)(*arguments)


def test_capabilities_say_so_by_default():
    assert not Capabilities().bring_up
