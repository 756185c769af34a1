"""Each hook: when it is asked, what it is given, and what becomes of its answer. docs/plugins.md says the same in words."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from polydraft import LLM, SamplingParams, reference
from polydraft.backend import Collectives, DeviceOptions, StepMeta
from polydraft.cli import doctor
from polydraft.contracts import COLLECTIVES
from polydraft.errors import CapabilityError, CheckpointError, ConfigError, DeviceError, PluginError
from polydraft.instruments.allocations import Allocations
from polydraft.instruments.sanitize import Sanitizer
from polydraft.models.family import Family
from polydraft.plugins.plugins import Plugins, survey, visible_devices
from polydraft.program.plan import StepOutcome, StepPlan
from polydraft.proposers.none import NoProposer
from polydraft.ranks import Exchange, Group
from tests.support import tiny
from tests.support.plugin_doubles import Packages, backend, pack_kernels

MODEL = str(tiny.checkpoint("narrow"))
PROMPTS = [[3, 5, 7], [11, 2]]
Call = tuple[str, dict[str, Any]]


def watched(calls: list[Call], **hooks: Callable[..., Any]) -> ModuleType:
    """A backend like the reference that notes every call of a hook with its arguments."""

    def watch(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        names = inspect.signature(function).parameters

        @functools.wraps(function)  # pluggy reads the names of the arguments from what is wrapped
        def hook(*values: Any) -> Any:
            calls.append((name, dict(zip(names, values, strict=True))))
            return function(*values)

        vars(hook).pop("polydraft_impl", None)
        return hook

    inherited = {name: value for name, value in vars(backend()).items() if name.startswith("polydraft_")}
    return backend(**{name: watch(name, function) for name, function in {**inherited, **hooks}.items()})


def noting_fills(steps: list[StepMeta]) -> Callable[..., Any]:
    """The reference's hook for forward metadata, which notes the `StepMeta` of every fill."""

    def polydraft_init_forward_meta(device: Any, buffers: Any, limits: Any) -> Any:
        meta: Any = reference.polydraft_init_forward_meta(device, buffers, limits)
        fill = meta.fill

        def noting(stream: Any, step: StepMeta) -> None:
            steps.append(step)
            fill(stream, step)

        meta.fill = noting
        return meta

    return polydraft_init_forward_meta


def engine(calls: list[Call], **options: Any) -> LLM:
    hooks = options.pop("hooks", {})
    return LLM(model=MODEL, backend="reference", plugin=watched(calls, **hooks), **options)


def given(calls: list[Call], hook: str) -> list[dict[str, Any]]:
    return [arguments for name, arguments in calls if name == hook]


def generate(llm: LLM) -> list[tuple[int, ...]]:
    sampled = SamplingParams(max_new_tokens=8, temperature=0.7, seed=1)
    return [out.token_ids for out in llm.generate(PROMPTS, [SamplingParams(max_new_tokens=8), sampled])]


def nobody() -> list[Any]:
    """No instruments, no observers."""
    return []


# -- when ------------------------------------------------------------------------------------------
def test_hooks_are_asked_in_order_while_the_engine_is_built():
    calls: list[Call] = []
    engine(calls, hooks={"polydraft_step_observers": nobody, "polydraft_instruments": nobody})
    meta = ["polydraft_init_forward_meta"] * 3
    assert [name for name, _ in calls] == [
        "polydraft_backend_info", "polydraft_instruments", "polydraft_open_device", "polydraft_kernels", *meta,
        "polydraft_step_observers",
    ]  # fmt: skip


def test_step_makes_no_hook_call(monkeypatch: pytest.MonkeyPatch):
    calls: list[Call] = []
    llm = engine(calls, hooks={"polydraft_step_observers": lambda: [SimpleNamespace(step_finished=lambda plan, outcome: None)]})
    relayed: list[str] = []
    llm.engine.plugins.manager.add_hookcall_monitoring(
        lambda hook, implementations, arguments: relayed.append(hook), lambda outcome, hook, implementations, arguments: None
    )
    built = len(calls)

    def refuse(*arguments: Any, **keywords: Any) -> Any:
        raise AssertionError("a step called pluggy")

    for entry in ("_hookexec", "subset_hook_caller", "register", "get_plugins"):
        monkeypatch.setattr(llm.engine.plugins.manager, entry, refuse)
    generate(llm)
    assert llm.engine.totals.steps > 2
    assert (relayed, len(calls)) == ([], built)


def test_monitoring_would_have_seen_a_hook_call():
    plugins = Plugins.load("reference")
    relayed: list[str] = []
    plugins.manager.add_hookcall_monitoring(lambda hook, *rest: relayed.append(hook), lambda outcome, hook, *rest: None)
    plugins.open_device("", DeviceOptions())
    assert relayed == ["polydraft_open_device"]


# -- the hooks -------------------------------------------------------------------------------------
def test_polydraft_backend_info():
    calls: list[Call] = []
    llm = engine(calls)
    assert llm.engine.info.name == "double"
    assert llm.engine.resolved.backend == "double"
    assert llm.engine.plugins.info() is llm.engine.info
    assert given(calls, "polydraft_backend_info") == [{}]


def test_unavailable_backend_is_refused_with_its_reason_before_a_device_is_opened():
    calls: list[Call] = []
    info = dataclasses.replace(reference.polydraft_backend_info(""), available=False, reason="no chip; plug one in")
    with pytest.raises(CapabilityError, match="backend reference is not available: no chip; plug one in"):
        engine(calls, hooks={"polydraft_backend_info": lambda: info})
    assert not given(calls, "polydraft_open_device")


def test_polydraft_open_device():
    calls: list[Call] = []
    llm = engine(calls, device="cpu", invariant=True, block_size=8)
    (arguments,) = given(calls, "polydraft_open_device")
    assert arguments == {"spec": "cpu", "options": DeviceOptions(dtype="f32", row_invariant=True)}
    assert llm.engine.device.spec == "cpu"
    assert llm.engine.device.row_invariant  # type: ignore[attr-defined]


def test_polydraft_kernels(tmp_path: Path):
    calls: list[Call] = []
    llm = engine(calls)
    assert given(calls, "polydraft_kernels") == [{"device": llm.engine.device}]
    source = "from tests.unit.test_hooks import PACK\nfrom polydraft import hookimpl\n"
    path = tmp_path / "noting.py"
    path.write_text(source + "\n@hookimpl\ndef polydraft_kernels(device):\n    return PACK(device)\n")
    packed = LLM(model=MODEL, backend="reference", plugins=(str(path),))
    assert packed.engine.table.report()["overrides"] == [
        {"contract": "swiglu", "pack": "noting", "digest": packed.engine.plugins.digests["noting"], "computed_by": ""}
    ]
    assert generate(packed) == generate(llm)
    assert packed.engine.table.providers["swiglu"].owner == "noting"  # type: ignore[attr-defined]


PACK = pack_kernels("noting", "swiglu")


def test_polydraft_graph_capture():
    made = SimpleNamespace(capture=lambda stream, fn: None, memory=lambda: 0)
    plugins = Plugins.load(backend(changes={"graph_capture": True}, polydraft_graph_capture=lambda device: made))
    assert plugins.graph_capture(plugins.open_device("", DeviceOptions())) is made
    with pytest.raises(PluginError, match="graph_capture without the hook polydraft_graph_capture"):
        Plugins.load(backend(changes={"graph_capture": True}))


def test_polydraft_init_forward_meta():
    calls: list[Call] = []
    steps: list[StepMeta] = []
    llm = engine(calls, draft_tokens=3, hooks={"polydraft_init_forward_meta": noting_fills(steps)})
    passes = given(calls, "polydraft_init_forward_meta")
    assert [p["buffers"].role for p in passes] == ["target", "draft", "draft"]
    assert [p["buffers"].row_slot.shape[0] for p in passes] == [512, 512, 8]
    assert all(p["limits"] == llm.engine.resolved.limits and p["device"] is llm.engine.device for p in passes)
    generate(llm)
    first = steps[:4]
    assert [s.pass_index for s in first] == [0, 0, 1, 2]
    assert {s.has_prefill for s in first} == {True}
    assert [s.launch_rows for s in first] == [5, 5, 2, 2]
    assert {s.real_slots for s in steps} <= {1, 2}
    assert not steps[-1].has_prefill


@pytest.mark.parametrize("row_order", ["slot", "prefill_first", "seeded"])
def test_text_does_not_depend_on_the_row_order_that_the_backend_declared(row_order: str):
    double = backend(changes={"row_order": row_order})
    assert generate(LLM(model=MODEL, backend="reference", plugin=double)) == generate(LLM(model=MODEL, backend="reference"))


def test_polydraft_off_device():
    asked: list[str] = []

    def polydraft_off_device(spec: str) -> dict[str, tuple[str, ...]]:
        asked.append(spec)
        if spec == "cpu:1":
            raise DeviceError("cpu:1 is not there; name another")
        return {"sample": ("argsort", "cumsum")}

    loaded = Plugins.load(backend(polydraft_off_device=polydraft_off_device))
    assert loaded.off_device("cpu:0") == {"asked": True, "operations": {"sample": ["argsort", "cumsum"]}, "problem": ""}
    assert loaded.off_device("cpu:1") == {"asked": True, "operations": {}, "problem": "cpu:1 is not there; name another"}
    assert asked == ["cpu:0", "cpu:1"]
    assert Plugins.load(backend()).off_device("cpu:0")["asked"] is False
    away = Plugins.load(backend(polydraft_off_device=polydraft_off_device, changes={"available": False, "reason": "gone"}))
    assert away.off_device("cpu:0")["asked"] is False
    with pytest.raises(PluginError, match="polydraft_off_device returned a list, wanted a Mapping"):
        Plugins.load(backend(polydraft_off_device=lambda spec: ["argsort"])).off_device("")


def test_polydraft_visible_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    source = (
        "from polydraft import hookimpl\nfrom polydraft.errors import DeviceError\nfrom polydraft.reference import *\n"
        "import dataclasses\nfrom polydraft import reference\n"
        "@hookimpl\ndef polydraft_backend_info():\n"
        "    return dataclasses.replace(reference.polydraft_backend_info(''), name='seer', devices=('cpu',))\n"
        "@hookimpl\ndef polydraft_visible_devices():\n    {answer}\n"
    )
    found = []
    for answer in ("return ('chip:0', 'cpu')", "raise DeviceError('the driver is gone; load it')", "return {'chip:0'}"):
        with monkeypatch.context() as patch:
            (tmp_path / answer[7:11]).mkdir()
            packages = Packages(tmp_path / answer[7:11], patch)
            packages.install("seer", source.format(answer=answer), backends="seer = seer")
            row = doctor._backend(next(one for one in survey() if one.name == "seer"), ())
            found.append((row["devices"], [note.partition(",")[0] for note in row["notes"]]))
    assert found == [
        (["cpu", "chip:0"], []),
        (["cpu"], ["the driver is gone; load it"]),
        (["cpu"], ["plugin 'seer': polydraft_visible_devices returned a set"]),
    ]
    assert visible_devices("reference") == (), "a backend that looks for none"


def without_graphs(withdrawn: dict[str, str]) -> tuple[ModuleType, list[Any]]:
    """A backend that declares graphs, on devices that take capabilities back, and the devices that it opened."""
    opened: list[Any] = []

    def polydraft_open_device(spec: str, options: DeviceOptions) -> Any:
        device: Any = reference.polydraft_open_device(spec, options)
        device.withdrawn = withdrawn
        opened.append(device)
        return device

    def polydraft_graph_capture(device: Any) -> Any:
        raise AssertionError("nobody may ask for graphs here")

    hooks = {"polydraft_open_device": polydraft_open_device, "polydraft_graph_capture": polydraft_graph_capture}
    return backend(changes={"graph_capture": True}, **hooks), opened


def test_an_open_device_takes_back_what_its_backend_declares():
    double, opened = without_graphs({"graph_capture": "chip:0 captured nothing"})
    llm = LLM(model=MODEL, backend="reference", plugin=double)
    assert (llm.engine.resolved.graph, llm.engine.info.capabilities.graph_capture) == ("off", False)
    assert generate(llm) == generate(LLM(model=MODEL, backend="reference"))
    llm.engine.close()
    with pytest.raises(CapabilityError, match="--graph decode: chip:0 captured nothing; use --graph off"):
        LLM(model=MODEL, backend="reference", plugin=double, graph="decode")
    with pytest.raises(DeviceError, match="closed"):
        opened[-1].empty("buffer", (1,), "f32")


@pytest.mark.parametrize("withdrawn", [{"graphs": "no"}, {"max_seqs": "few"}, {"asynchronous": "no"}, {"graph_capture": ""}])
def test_a_device_takes_back_only_what_is_declared_and_says_why(withdrawn: dict[str, str]):
    name, why = next(iter(withdrawn.items()))
    double, _ = without_graphs(withdrawn)
    with pytest.raises(PluginError, match=f"its device withdraws {name!r} for the reason {why!r}, wanted a capability that it"):
        LLM(model=MODEL, backend="reference", plugin=double)


def test_polydraft_proposers(tmp_path: Path):
    path = tmp_path / "shy.py"
    path.write_text(
        "from polydraft import hookimpl\nfrom polydraft.proposers.none import NoProposer\n"
        "@hookimpl\ndef polydraft_proposers():\n    return [('shy', NoProposer)]\n"
    )
    llm = LLM(model=MODEL, backend="reference", plugins=(str(path),), proposer="shy", draft_tokens=2)
    assert isinstance(llm.engine.runner.proposer, NoProposer)
    assert generate(llm) == generate(LLM(model=MODEL, backend="reference"))
    assert not isinstance(LLM(model=MODEL, backend="reference", plugins=(str(path),)).engine.runner.proposer, NoProposer)


def test_proposer_whose_name_is_taken_names_both_plugins():
    taken = backend("chip", polydraft_proposers=lambda: [("mtp", NoProposer)])
    with pytest.raises(ConfigError, match="proposer 'mtp' is registered by polydraft and by chip; rename one"):
        LLM(model=MODEL, backend="reference", plugin=taken)


def test_polydraft_models():
    path = tiny.checkpoint("shared")
    with pytest.raises(CheckpointError, match="TinyShared"):
        LLM(model=str(path), backend="reference")
    assert LLM(model=str(path), backend="reference", plugins=tiny.PLUGINS).engine.model.architecture == "TinyShared"
    taken = backend("chip", polydraft_models=lambda: [Family(architecture="MiMoForCausalLM")])
    with pytest.raises(PluginError, match="plugin chip registers model family MiMoForCausalLM"):
        LLM(model=MODEL, backend="reference", plugin=taken)


def test_polydraft_parameters():
    double = backend("chip", polydraft_parameters=lambda: ["mine"])
    assert Plugins.load(double).gather("polydraft_parameters") == [("chip", "mine")]


COUNTING = """
from polydraft import hookimpl
from polydraft.instruments.base import Instrument

class Counting(Instrument):
    name = "counting"
    launches = 0

    def bind(self, binding, launch):
        def call(stream, n):
            self.launches += 1
            launch(stream, n)
        return call

@hookimpl
def polydraft_instruments():
    return [Counting()]
"""


def test_polydraft_instruments(tmp_path: Path):
    (path := tmp_path / "counting.py").write_text(COUNTING)
    llm = LLM(model=MODEL, backend="reference", plugins=(str(path),), draft_tokens=2)
    counting: Any = next(one for one in llm.engine.instruments if one.name == "counting")
    assert counting.engine is llm.engine
    before = llm.engine.device.counters.launches
    texts = generate(llm)
    assert counting.launches == llm.engine.device.counters.launches - before > 100, "the device counts them, too"
    assert texts == generate(LLM(model=MODEL, backend="reference", draft_tokens=2))
    with pytest.raises(ConfigError, match="instruments counting and counting: there may be one of each; leave one out"):
        LLM(model=MODEL, backend="reference", plugins=(str(path),), instruments=(type(counting)(),))


def test_instruments_of_plugins_are_checked_before_a_device_is_opened():
    calls: list[Call] = []
    with pytest.raises(
        PluginError, match=r"^plugin '\w+': polydraft_instruments returned a str, wanted an Instrument; return one"
    ):
        engine(calls, hooks={"polydraft_instruments": lambda: ["watch"]})
    assert not given(calls, "polydraft_open_device")
    taken = Allocations()
    double = backend("chip", polydraft_instruments=lambda: [taken])
    LLM(model=MODEL, backend="reference", plugin=double)
    with pytest.raises(ConfigError, match="allocations looks at an engine already"):
        LLM(model=MODEL, backend="reference", plugin=double)


def test_a_hazard_checker_that_a_plugin_brings_is_the_one_of_the_engine():
    mine = Sanitizer()
    double = backend("chip", polydraft_instruments=lambda: [mine])
    llm = LLM(model=MODEL, backend="reference", plugin=double, sanitize=True)
    assert [one for one in llm.engine.instruments if isinstance(one, Sanitizer)] == [mine]


def test_polydraft_step_observers():
    class Observer:
        def __init__(self) -> None:
            self.seen: list[tuple[StepPlan, StepOutcome]] = []

        def step_finished(self, plan: StepPlan, outcome: StepOutcome) -> None:
            self.seen.append((plan, outcome))

    one, two = Observer(), Observer()

    def polydraft_step_observers() -> Iterator[Observer]:
        yield from (one, two)

    llm = LLM(model=MODEL, backend="reference", plugin=backend(polydraft_step_observers=polydraft_step_observers))
    texts = generate(llm)
    assert one.seen == two.seen
    assert [plan.step_id for plan, _ in one.seen] == [outcome.step_id for _, outcome in one.seen]
    assert len(one.seen) == llm.engine.totals.steps
    assert sum(int(outcome.num_tokens.sum()) for _, outcome in one.seen) == sum(map(len, texts))
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.seen[0][0].step_id = 9  # type: ignore[misc]


def test_observers_stand_in_the_order_of_their_plugins(tmp_path: Path):
    for name in ("beta", "alpha"):
        (tmp_path / f"{name}.py").write_text(
            "from polydraft import hookimpl\nclass Observer:\n    def step_finished(self, plan, outcome): pass\n"
            "@hookimpl\ndef polydraft_step_observers():\n    return [Observer()]\n"
        )
    files = [str(tmp_path / f"{name}.py") for name in ("beta", "alpha")]
    observers: list[Any] = list(Plugins.load("reference", files=files).observers())
    assert [type(observer).__module__.rpartition("_")[2] for observer in observers] == ["beta", "alpha"]


# -- pluggy's own ------------------------------------------------------------------------------------
HEAD = "from polydraft import hookimpl\n"


def with_files(tmp_path: Path, sources: dict[str, str], **hooks: Any) -> Plugins:
    """A double of a backend with plugins from files, by name."""
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(HEAD + source)
    return Plugins.load(backend("chip", **hooks), files=[str(tmp_path / f"{name}.py") for name in sources])


def test_manager_holds_what_was_named_and_nothing_else(tmp_path: Path):
    source = "@hookimpl\ndef polydraft_models():\n    return ()\n"
    manager = with_files(tmp_path, {"one": source, "two": source}).manager
    assert {name for name, _ in manager.list_name_plugin()} == {"extension one", "extension two", "backend chip"}
    assert [one.name for one in manager.answering("polydraft_models")] == ["one", "two"]
    assert [one.name for one in manager.answering("polydraft_open_device")] == ["chip"]


def test_plugin_may_wrap_what_the_backend_answers(tmp_path: Path):
    opening = (
        "@hookimpl(wrapper=True)\ndef polydraft_open_device(spec):\n"
        "    asked.append(spec)\n    device = yield\n    asked.append(device)\n    return device\nasked = []\n"
    )
    who = (
        "import dataclasses\n@hookimpl(wrapper=True, specname='polydraft_backend_info')\ndef told():\n"
        "    info = yield\n    return dataclasses.replace(info, summary='seen by a wrapper')\n"
    )
    plugins = with_files(tmp_path, {"log": opening, "who": who})
    device = plugins.open_device("cpu", DeviceOptions())
    asked: Any = plugins.extensions[0].plugin
    assert asked.asked == ["cpu", device]
    assert plugins.info().summary == plugins.info_on("").summary == "seen by a wrapper"
    assert plugins.info().name == "chip"


def test_engine_with_wrappers_writes_the_same(tmp_path: Path):
    path = tmp_path / "log.py"
    path.write_text(
        HEAD + "seen = []\n" + "".join(
            f"@hookimpl(wrapper=True)\ndef {hook}():\n    answer = yield\n    seen.append({hook!r})\n    return answer\n"
            for hook in ("polydraft_open_device", "polydraft_kernels", "polydraft_init_forward_meta", "polydraft_models")
        )
    )  # fmt: skip
    llm = LLM(model=MODEL, backend="reference", plugins=(str(path),))
    assert generate(llm) == generate(LLM(model=MODEL, backend="reference"))
    module: Any = llm.engine.plugins.extensions[0].plugin
    assert module.seen == [
        "polydraft_models", "polydraft_open_device", "polydraft_kernels", *["polydraft_init_forward_meta"] * 3
    ]  # fmt: skip


WRONG_WRAPPERS = {
    "forgets to return": ("yield", "polydraft_open_device returned None, wanted a Device; return it"),
    "returns something else": ("yield\n    return 7", "polydraft_open_device returned an int, wanted a Device"),
    "fails before": ("1 / 0\n    yield", "polydraft_open_device raised ZeroDivisionError"),
    "fails behind": ("yield\n    1 / 0", "polydraft_open_device raised ZeroDivisionError"),
    "does not yield": ("if spec:\n        yield", "polydraft_open_device has wrapper=True and did not yield"),
    "yields twice": ("yield\n    yield", "polydraft_open_device has wrapper=True and yielded twice"),
}


@pytest.mark.parametrize(("body", "message"), WRONG_WRAPPERS.values(), ids=list(WRONG_WRAPPERS))
def test_wrong_wrapper_is_named_and_not_the_backend(tmp_path: Path, body: str, message: str):
    source = f"@hookimpl(wrapper=True)\ndef polydraft_open_device(spec):\n    {body}\n"
    with pytest.raises(PluginError, match=f"plugin 'log': {message}"):
        with_files(tmp_path, {"log": source}).open_device("", DeviceOptions())


def test_error_below_a_wrapper_is_the_backends(tmp_path: Path):
    def polydraft_open_device(spec: str) -> Any:
        raise KeyError("driver")

    source = "@hookimpl(wrapper=True)\ndef polydraft_open_device():\n    return (yield)\n"
    plugins = with_files(tmp_path, {"log": source}, polydraft_open_device=polydraft_open_device)
    with pytest.raises(PluginError, match="plugin 'chip': polydraft_open_device raised KeyError"):
        plugins.open_device("", DeviceOptions())


def test_polydraft_collectives():
    (exchange,), calls = Exchange.of_threads(1, 64), list[Call]()
    plugins = Plugins.load(watched(calls))
    device, group = plugins.open_device("", DeviceOptions()), Group(0, 1, exchange)
    found = plugins.collectives(device, group)
    assert found.versions == {one.name: one.version for one in COLLECTIVES}
    assert given(calls, "polydraft_collectives") == [{"device": device, "group": group}]


def test_collectives_that_are_missing_or_of_another_version_are_refused():
    (exchange,) = Exchange.of_threads(1, 64)
    device, group = Plugins.load("reference").open_device("", DeviceOptions()), Group(0, 1, exchange)
    whole = reference.polydraft_collectives(device, group)  # type: ignore[arg-type]
    others = {name: one for name, one in whole.providers.items() if name != "broadcast"}
    newer = Collectives(whole.providers, {**whole.versions, "all_reduce": 2})

    def returning(answer: Collectives) -> Callable[[], Collectives]:
        return lambda: answer

    for wrong, said in (
        (Collectives(others, whole.versions), "argmax_pair/1, own_experts/1, wanted"),
        (newer, "all_reduce/2, .*, wanted"),
    ):
        plugins = Plugins.load(backend(polydraft_collectives=returning(wrong)))
        with pytest.raises(PluginError, match=f"polydraft_collectives returned .*{said} all_gather/1, all_reduce/1, argmax"):
            plugins.collectives(device, group)
    broken: Any = Collectives(whole.providers, whole.versions, object())  # type: ignore[arg-type]
    with pytest.raises(PluginError, match="polydraft_collectives has no usable program_pass: it has no kernels"):
        Plugins.load(backend(polydraft_collectives=returning(broken))).collectives(device, group)
    with pytest.raises(PluginError, match="declares capability ranks without the hook polydraft_collectives; implement the"):
        Plugins.load(backend(polydraft_collectives=None))
    with pytest.raises(PluginError, match="declares ranks 'gpus', wanted threads or processes, or '' for none; correct it"):
        Plugins.load(backend(changes={"ranks": "gpus"}))


def items(source: str) -> str:
    return f"def polydraft_parameters():\n    return [{source}]\n"


def test_order_of_plugins_and_what_may_change_it(tmp_path: Path):
    def polydraft_parameters() -> list[str]:
        return ["chip"]

    sources = {
        "last": "@hookimpl(trylast=True)\n" + items("'last'"),
        "one": "@hookimpl\n" + items("'one', 1"),
        "two": "@hookimpl\n" + items("'two'"),
        "first": "@hookimpl(tryfirst=True)\n" + items("'first'"),
    }
    gathered = with_files(tmp_path, sources, polydraft_parameters=polydraft_parameters).gather("polydraft_parameters")
    assert gathered == [("first", "first"), ("one", "one"), ("one", 1), ("two", "two"), ("chip", "chip"), ("last", "last")]


def test_wrapper_of_a_hook_that_many_answer(tmp_path: Path):
    replace = (
        "@hookimpl(wrapper=True)\ndef polydraft_parameters():\n"
        "    answers = yield\n    return [[f'my {item}' for item in answer] for answer in answers]\n"
    )
    sources = {"one": "@hookimpl\n" + items("'a'"), "two": "@hookimpl\n" + items("'b'"), "mine": replace}
    assert with_files(tmp_path, sources).gather("polydraft_parameters") == [("one", "my a"), ("two", "my b")]
    more = replace.replace("for answer in answers]", "for answer in (*answers, ())]")
    with pytest.raises(PluginError, match="plugin 'mine': polydraft_parameters made 3 answers of the 2 that it wraps; replace"):
        with_files(tmp_path, {**sources, "mine": more}).gather("polydraft_parameters")


def test_nothing_is_said_with_an_empty_tuple(tmp_path: Path):
    assert with_files(tmp_path, {"mute": "@hookimpl\ndef polydraft_instruments():\n    return ()\n"}).gather(
        "polydraft_instruments"
    ) == []  # fmt: skip
    with pytest.raises(PluginError, match="plugin 'mute': polydraft_instruments returned None, wanted an Iterable; return it"):
        with_files(tmp_path, {"mute": "@hookimpl\ndef polydraft_instruments(): ...\n"}).gather("polydraft_instruments")


def test_kernels_go_by_the_order_of_packs_and_not_of_calls(tmp_path: Path):
    kernels = (
        "from tests.support.plugin_doubles import pack_kernels\npolydraft_kernels = hookimpl{}(pack_kernels({!r}, 'swiglu'))\n"
    )
    for name, options in (("one", "(trylast=True)"), ("two", "(tryfirst=True)")):
        (tmp_path / f"{name}.py").write_text(HEAD + kernels.format(options, name))
    files = [str(tmp_path / f"{name}.py") for name in ("one", "two")]
    plugins = Plugins.load("reference", packs=("one", "two"), files=files)
    assert [one.name for one in plugins.manager.answering("polydraft_kernels")] == ["two", "reference", "one"]
    table = plugins.kernels(plugins.open_device("", DeviceOptions()))
    assert [(one.contract, one.pack) for one in table.overrides] == [("swiglu", "one")]
    assert [(one.contract, one.owner, one.by) for one in table.shadowed if one.owner == "two"] == [("swiglu", "two", "one")]
