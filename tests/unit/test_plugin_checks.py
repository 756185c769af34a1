"""Everything wrong with a plugin is said while the engine is built, naming plugin, hook and fix."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pluggy
import pytest

from polydraft import hookimpl
from polydraft.backend import DeviceOptions, PackNotes, PassBuffers
from polydraft.contracts import COMPOSITES, REGISTRY
from polydraft.contracts.base import Limits
from polydraft.device import Device
from polydraft.errors import DeviceError, PluginError
from polydraft.plugins.checks import BACKEND, EXTENSION, PACK, check_hooks, check_table, check_version, lacks
from polydraft.plugins.plugins import Plugins
from polydraft.reference.device import ReferenceDevice
from polydraft.reference.table import NumpyTable
from tests.support.plugin_doubles import backend, pack_kernels, pack_source, plugin

LIMITS = Limits(
    max_seqs=2, num_drafts=1, max_rows=8, max_logit_rows=4, max_len=16, block_size=4, num_blocks=8, max_blocks=4,
    max_stop_tokens=2, vocab_size=10,
)  # fmt: skip


def nothing() -> None:
    """Does nothing."""


def kernels_of(plugin: Any) -> Any:
    plugins = Plugins.load(plugin)
    return plugins.kernels(plugins.open_device("", DeviceOptions()))


# -- hooks -----------------------------------------------------------------------------------------
def unmarked(device: Any) -> Any: ...
def renamed(gadget: Any) -> Any: ...
def with_default(device: Any = None) -> Any: ...
def variadic(*args: Any) -> Any: ...
def keywords(**arguments: Any) -> Any: ...
def keyword_only(*, device: Any) -> Any: ...
def positional_only(device: Any, /) -> Any: ...


WRONG_HOOKS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown hook": (
        {"polydraft_kernel": nothing},
        r"unknown hook 'polydraft_kernel'; did you mean polydraft_kernels\? known hooks: polydraft_backend_info, .*rename",
    ),
    "marked under another name": ({"fast_kernels": nothing}, r"unknown hook 'fast_kernels'"),
    "unmarked": (
        {"polydraft_kernels": SimpleNamespace(__call__=unmarked)},
        r"polydraft_kernels is a SimpleNamespace, wanted a function",
    ),
    "another project's marker": (
        {"polydraft_kernels": staticmethod(pluggy.HookimplMarker("pytest")(unmarked)).__func__},
        r"defines polydraft_kernels without @hookimpl; decorate it with polydraft.hookimpl",
    ),
    "unknown argument": ({"polydraft_kernels": renamed}, r"takes \(device\): unknown argument 'gadget'; rename or remove it"),
    "argument with a default": ({"polydraft_kernels": with_default}, r"'device' has a default and would never be passed"),
    "variadic": ({"polydraft_kernels": variadic}, r"\*args: .*would never be passed; name the arguments"),
    "variadic keywords": ({"polydraft_kernels": keywords}, r"\*\*arguments: .*would never be passed"),
    "keyword only": ({"polydraft_kernels": keyword_only}, r"would never be passed"),
    "positional only": ({"polydraft_kernels": positional_only}, r"would never be passed"),
    "wrapper of the old style": (
        {"polydraft_kernels": hookimpl(hookwrapper=True)(lambda device: (yield))},
        r"polydraft_kernels is a wrapper of pluggy's old style.*use @hookimpl\(wrapper=True\)",
    ),
    "wrapper that does not yield": (
        {"polydraft_kernels": hookimpl(wrapper=True)(lambda device: None)},
        r"polydraft_kernels has wrapper=True and is no generator function; yield once",
    ),
    "unknown name of a hook": ({"mine": hookimpl(specname="polydraft_model")(lambda: ())}, r"unknown hook 'polydraft_model'"),
    "argument of another hook": (
        {"mine": hookimpl(specname="polydraft_models")(lambda device: ())},
        r"polydraft_models\(device\) does not fit the hook, which takes \(\): unknown argument 'device'",
    ),
}


@pytest.mark.parametrize(("hooks", "message"), WRONG_HOOKS.values(), ids=list(WRONG_HOOKS))
def test_wrong_hook_names_plugin_hook_and_fix(hooks: dict[str, Any], message: str):
    wrong = backend()
    for name, value in hooks.items():
        marked = isinstance(value, type(nothing)) and not any(hasattr(value, f"{p}_impl") for p in ("polydraft", "pytest"))
        setattr(wrong, name, hookimpl(value) if marked else value)
    with pytest.raises(PluginError, match=r"plugin 'double'.*" + message):
        Plugins.load(wrong)


@pytest.mark.parametrize("hook", BACKEND.required)
def test_backend_lacks_a_required_hook(hook: str):
    with pytest.raises(PluginError, match=rf"backend plugin 'double' lacks the hook {hook}; implement it"):
        Plugins.load(backend(**{hook: None}))


def test_several_missing_hooks_are_named_at_once():
    with pytest.raises(PluginError, match="lacks the hook polydraft_open_device and the hook polydraft_kernels"):
        Plugins.load(backend(polydraft_kernels=None, polydraft_open_device=None))


@pytest.mark.parametrize("role", [PACK, EXTENSION])
def test_hook_that_another_kind_of_plugin_answers_is_an_error(role: Any):
    hooks = {"polydraft_kernels": pack_kernels("x", "embed"), "polydraft_open_device": lambda spec: None}
    hook = "polydraft_open_device" if role is PACK else "polydraft_kernels"
    message = rf"'x' implements {hook}, which only a .* answers, and this is an? .*; wrap the hook .* in polydraft\.\w+"
    with pytest.raises(PluginError, match=message):
        check_hooks("x", plugin("x", **{hook: hooks[hook], "polydraft_kernels": hooks["polydraft_kernels"]}), role)


def test_file_without_hooks_does_nothing_and_says_so(tmp_path: Path):
    (tmp_path / "idle.py").write_text("x = 1\n")
    with pytest.raises(PluginError, match=r"plugin 'idle' implements no hook; decorate its functions with @hookimpl"):
        Plugins.load("reference", files=(str(tmp_path / "idle.py"),))


def test_pack_may_leave_arguments_out_and_add_extensions(tmp_path: Path):
    proposers = "@hookimpl\ndef polydraft_proposers():\n    return [('guess', object)]\n"
    (tmp_path / "rich.py").write_text(pack_source("rich", "embed") + proposers)
    plugins = Plugins.load("reference", files=(str(tmp_path / "rich.py"),))
    assert plugins.gather("polydraft_proposers") == [("rich", ("guess", object))]
    check_hooks("short", plugin("short", polydraft_kernels=lambda: None), PACK)


def test_properties_and_helpers_of_a_plugin_object_are_left_alone():
    class Plugin:
        polydraft_version = "1.0"

        @property
        def expensive(self) -> None:
            raise AssertionError("looking for hooks must not evaluate properties")

        polydraft_models = hookimpl(lambda self: ())

    check_hooks("x", Plugin(), EXTENSION)


def test_hook_of_another_version_is_left_alone_where_it_is_optional():
    future = hookimpl(optionalhook=True)(lambda anything: None)
    loaded = Plugins.load(backend(polydraft_of_tomorrow=future))
    assert loaded.manager.hook.polydraft_of_tomorrow.get_hookimpls()[0].optionalhook
    with pytest.raises(PluginError, match="implements no hook"):
        check_hooks("x", plugin("x", polydraft_of_tomorrow=future), EXTENSION)


# -- identity --------------------------------------------------------------------------------------
WRONG_CLAIMS: dict[str, tuple[dict[str, Any], str]] = {
    "no dtype": ({"dtypes": ()}, r"dtypes \(\), wanted one or more of f32, bf16, f16"),
    "unknown dtype": ({"dtypes": ("f32", "fp8")}, r"dtypes \('f32', 'fp8'\)"),
    "row order": ({"row_order": "random"}, r"row_order 'random', wanted one of slot, prefill_first, seeded"),
    "window": ({"max_window": 0}, r"max_window 0 and max_seqs 4096, wanted at least 1"),
    "slots": ({"max_seqs": 0}, r"max_window 64 and max_seqs 0"),
    "unavailable without a reason": ({"available": False}, r"available=False without a reason"),
    "graphs without the hook": ({"graph_capture": True}, r"graph_capture without the hook polydraft_graph_capture"),
    "unknown contract": ({"contract_versions": {"rms_nrom": 1}}, r"unknown contract 'rms_nrom'; did you mean 'rms_norm'\?"),
    "version of the future": ({"contract_versions": {"rms_norm": 2}}, r"has version 2 of contract 'rms_norm', core serves 1"),
    "uncapturable": ({"uncapturable": ("magic",)}, r"uncapturable magic, wanted contracts that it implements or forward_meta"),
}


@pytest.mark.parametrize(("changes", "message"), WRONG_CLAIMS.values(), ids=list(WRONG_CLAIMS))
def test_wrong_claim_is_refused_when_the_plugin_is_loaded(changes: dict[str, Any], message: str):
    with pytest.raises(PluginError, match=r"plugin 'double': polydraft_backend_info .*" + message):
        Plugins.load(backend(changes=changes))


def test_smallest_claims_are_fine():
    assert Plugins.load(backend(changes={"max_window": 1, "max_seqs": 1})).info().capabilities.max_window == 1


def test_declared_graphs_with_the_hook_behind_them_are_fine():
    graphs = {"polydraft_graph_capture": lambda device: None}
    assert Plugins.load(backend(changes={"graph_capture": True}, **graphs)).info().capabilities.graph_capture


@pytest.mark.parametrize("answer", [None, {"name": "double"}, object()])
def test_identity_of_another_type(answer: Any):
    with pytest.raises(PluginError, match=r"polydraft_backend_info returned (an? )?\w+, wanted a BackendInfo; return (one|it)"):
        Plugins.load(backend(polydraft_backend_info=lambda: answer))


def test_another_version_is_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    newer = dataclasses.replace(REGISTRY["embed"], version=3)
    monkeypatch.setattr(REGISTRY, "_contracts", {**REGISTRY._contracts, newer.name: newer})
    check_version("x", "polydraft_kernels", "embed", 3)
    for version in (1, 2, 4):
        with pytest.raises(PluginError, match=rf"version {version} of contract 'embed', core serves 3; rebuild it"):
            check_version("x", "polydraft_kernels", "embed", version)


def test_composites_have_version_one():
    name = next(iter(COMPOSITES))
    check_version("x", "polydraft_kernels", name, 1)
    with pytest.raises(PluginError, match="version 2"):
        check_version("x", "polydraft_kernels", name, 2)


# -- what hooks return -----------------------------------------------------------------------------
def three_arguments(role: str, value: Any, dtype: str) -> Any: ...


def table_with(**changes: Any) -> Callable[[Any], Any]:
    """The hook `polydraft_kernels` of a backend whose table has other members."""

    def polydraft_kernels(device: Any) -> Any:
        table = NumpyTable(device)
        for member, change in changes.items():
            setattr(table, member, change(getattr(table, member)))
        return table

    return polydraft_kernels


class Deaf(ReferenceDevice):
    """A device that cannot be downloaded from the way core does it."""

    def download(self, target: Any) -> None:  # type: ignore[override]
        del target


WRONG_ANSWERS: dict[str, tuple[dict[str, Any], str]] = {
    "no device": ({"polydraft_open_device": lambda spec, options: None}, r"polydraft_open_device returned None, wanted a Device"),
    "half a device": (
        {"polydraft_open_device": lambda spec, options: SimpleNamespace(spec="x")},
        r"returned a SimpleNamespace, wanted a Device: it has no counters; add it",
    ),
    "a method with other arguments": (
        {"polydraft_open_device": lambda spec, options: Deaf()},
        r"returned a Deaf, wanted a Device: its download does not take \(stream, target, source, rows\)",
    ),
    "a generator": (
        {"polydraft_kernels": lambda device: (yield)},
        r"polydraft_kernels returned a generator, wanted a KernelTable",
    ),
    "a dict of kernels": (
        {"polydraft_kernels": lambda device: {}},
        r"returned a dict, wanted a KernelTable: it has no providers",
    ),
    "providers in a list": ({"polydraft_kernels": table_with(providers=list)}, r"returned providers as list, wanted a mapping"),
    "no provider": ({"polydraft_kernels": table_with(providers=lambda p: {}, versions=lambda v: {})}, r"offers no kernel"),
    "a provider that is a function": (
        {"polydraft_kernels": table_with(providers=lambda p: {**p, "embed": nothing})},
        r"no usable provider of 'embed': it has no bind; implement it",
    ),
    "a provider without workspace": (
        {"polydraft_kernels": table_with(providers=lambda p: {**p, "embed": SimpleNamespace(bind=lambda a, b, c: None)})},
        r"no usable provider of 'embed': it has no workspace_bytes",
    ),
    "a provider of the old kind": (
        {"polydraft_kernels": table_with(providers=lambda p: {**p, "embed": SimpleNamespace(bind=lambda args: None)})},
        r"no usable provider of 'embed': its bind does not take \(args, limits, workspace\)",
    ),
    "unknown contract": (
        {
            "polydraft_kernels": table_with(
                providers=lambda p: {**p, "attention": p["embed"]}, versions=lambda v: {**v, "attention": 1}
            )
        },
        r"polydraft_kernels names unknown contract 'attention'; did you mean 'paged_attention'",
    ),
    "no version": ({"polydraft_kernels": table_with(versions=lambda v: {})}, r"has version None of contract"),
    "a version without a provider": (
        {"polydraft_kernels": table_with(providers=lambda p: {c: x for c, x in p.items() if c != "embed"})},
        r"versions without providers: embed",
    ),
    "less than declared": (
        {
            "polydraft_kernels": table_with(
                providers=lambda p: {c: x for c, x in p.items() if c != "embed"},
                versions=lambda v: {c: x for c, x in v.items() if c != "embed"},
            )
        },
        r"contract_versions of .* and the table of polydraft_kernels differ in embed \(declared 1, offered not at all",
    ),
    "weights that cannot be refilled": (
        {"polydraft_kernels": table_with(prepare_weight=lambda prepare: three_arguments)},
        r"its prepare_weight does not take \(role, value, dtype, previous\)",
    ),
}


@pytest.mark.parametrize(("hooks", "message"), WRONG_ANSWERS.values(), ids=list(WRONG_ANSWERS))
def test_wrong_answer_names_plugin_hook_and_what_is_missing(hooks: dict[str, Any], message: str):
    with pytest.raises(PluginError, match=r"plugin 'double'.*" + message):
        kernels_of(backend(**hooks))


@pytest.mark.parametrize(
    ("notes", "message"),
    [
        ({"left_out": {}}, r"are dict, wanted polydraft.backend.PackNotes"),
        (PackNotes(computed_by={"swiglu": "an operator"}), r"tell of swiglu, wanted kernels that the table offers"),
        (PackNotes(uncapturable=("rms_norm", "argmax")), r"tell of argmax, wanted kernels that the table offers"),
        (PackNotes(left_out={"embed": "it is here"}), r"leave out embed, wanted contracts that the table does not offer"),
        (PackNotes(left_out={"magic": "it is not there"}), r"leave out magic, wanted contracts"),
    ],
)
def test_notes_of_a_pack_are_about_its_kernels(notes: Any, message: str):
    names = ("embed", "residual_add+rms_norm")
    providers = {
        name: SimpleNamespace(bind=lambda args, limits, workspace: None, workspace_bytes=lambda a, b: 0) for name in names
    }
    table: Any = SimpleNamespace(providers=providers, versions=dict.fromkeys(names, 1), notes=notes)
    with pytest.raises(PluginError, match=r"plugin 'double': notes of what polydraft_kernels returned " + message):
        check_table("double", table, PACK)
    table.notes = PackNotes(computed_by={"embed": "an operator"}, uncapturable=("rms_norm",), left_out={"argmax": "slow"})
    check_table("double", table, PACK)


def test_more_than_declared_is_as_wrong_as_less():
    declared = {c: v for c, v in Plugins.load("reference").info().contract_versions.items() if c != "embed"}
    with pytest.raises(PluginError, match=r"differ in embed \(declared not at all, offered 1\)"):
        kernels_of(backend(changes={"contract_versions": declared}))


def test_pack_needs_providers_only():
    loaded = plugin("small", polydraft_kernels=pack_kernels("small", "embed"))
    assert lacks(loaded.polydraft_kernels(ReferenceDevice()), NumpyTable) == "it is of another kind"
    check_hooks("small", loaded, PACK)


def test_forward_meta_and_graphs_are_checked_too():
    plugins = Plugins.load(
        backend(
            polydraft_init_forward_meta=lambda device: SimpleNamespace(fill=None), polydraft_graph_capture=lambda device: nothing
        )
    )
    device = plugins.open_device("", DeviceOptions())
    buffer = device.empty("x", (1,), "i32")
    with pytest.raises(PluginError, match=r"polydraft_init_forward_meta .*its fill does not take \(stream, step\)"):
        plugins.init_forward_meta(device, PassBuffers("target", buffer, buffer, buffer), LIMITS)
    with pytest.raises(
        PluginError, match=r"polydraft_graph_capture returned a function, wanted a GraphCapture: it has no capture"
    ):
        plugins.graph_capture(device)


def test_graph_capture_without_the_hook():
    plugins = Plugins.load(backend())
    with pytest.raises(PluginError, match=r"plugin 'double' lacks the hook polydraft_graph_capture; implement it"):
        plugins.graph_capture(plugins.open_device("", DeviceOptions()))


@pytest.mark.parametrize(
    ("answer", "message"), [(7, "returned an int, wanted an Iterable"), ([7], "wanted a StepObserver: it has no step")]
)
def test_observers_are_checked(answer: Any, message: str):
    with pytest.raises(PluginError, match=f"plugin 'double': polydraft_step_observers .*{message}"):
        Plugins.load(backend(polydraft_step_observers=lambda: answer)).observers()


def fails() -> Any:
    raise KeyError("driver")


ASKED: dict[str, Callable[[Any], Any]] = {
    "polydraft_backend_info": Plugins.load,
    "polydraft_kernels": kernels_of,
    "polydraft_step_observers": lambda wrong: Plugins.load(wrong).observers(),
    "polydraft_models": lambda wrong: Plugins.load(wrong).gather("polydraft_models"),
}


@pytest.mark.parametrize("hook", list(ASKED))
def test_exception_of_a_hook_is_told_with_its_name(hook: str):
    with pytest.raises(PluginError, match=rf"plugin '\w+': {hook} raised KeyError: 'driver'; repair the plugin") as caught:
        ASKED[hook](backend(**{hook: fails}))
    assert isinstance(caught.value.__cause__, KeyError)


def test_generator_of_observers_may_fail_late():
    def observers() -> Any:
        yield SimpleNamespace(step_finished=lambda plan, outcome: None)
        fails()

    with pytest.raises(PluginError, match="polydraft_step_observers raised KeyError"):
        Plugins.load(backend(polydraft_step_observers=observers)).observers()


def test_error_of_a_hook_that_means_it_passes_through():
    def polydraft_open_device(spec: str) -> Device:
        raise DeviceError(f"device {spec!r} is busy; wait")

    with pytest.raises(DeviceError, match=re.escape("device 'chip:3' is busy; wait")):
        Plugins.load(backend(polydraft_open_device=polydraft_open_device)).open_device("chip:3", DeviceOptions())
