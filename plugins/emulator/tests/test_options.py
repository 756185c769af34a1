"""The device string: every option documented, read back as written, and a mistake answered with what there is."""

import dataclasses
from pathlib import Path

import pytest

import polydraft_emulator
from polydraft import LLM, SamplingParams
from polydraft.backend import DeviceOptions
from polydraft.errors import ConfigError
from polydraft.plugins.plugins import Plugins
from polydraft_emulator import Emulator, options
from polydraft_emulator.options import Options, parse

NAMES = [f.name for f in dataclasses.fields(Options)][1:]
FULL = (
    "emulator:3?seed=7&policy=reversed&layout=plain&rows=seeded&uncapturable=linear,forward_meta&latency=kernel:20,linear:80+0.5"
    "&delay=download@3:500&fault=copy@12,op@40:lost&ranks=late,skip@1:9&memory=64"
)


def test_what_is_printed_opens_the_same_device():
    assert str(parse(FULL)) == FULL
    assert [f.name for f in dataclasses.fields(Options) if getattr(parse(FULL), f.name) == f.default] == []
    assert parse(str(parse("emulator:0?policy=lazy"))) == parse("?policy=lazy") == Options(policy="lazy")
    device = Emulator(FULL).polydraft_open_device("", DeviceOptions())
    assert device.spec == FULL


@pytest.mark.parametrize("spec", ["", "emulator", "emulator:0", "?", "emulator:0?", "?seed=0"])
def test_defaults(spec: str):
    assert parse(spec) == Options()
    assert str(parse(spec)) == "emulator:0"


def test_a_device_string_goes_over_the_options_of_the_plugin():
    base = Emulator("?seed=1&policy=lazy&rows=seeded")
    device = base.polydraft_open_device("emulator:1?seed=2", DeviceOptions())
    assert device.options == Options(device="emulator:1", seed=2, policy="lazy", rows="seeded")


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("cuda:0", "device 'cuda:0' is none of this backend, wanted emulator:<index>"),
        ("emulator:x", "is none of this backend"),
        ("?seeds=3", "unknown emulator option 'seeds' in .*did you mean 'seed'. known: seed, policy, layout"),
        ("?speed=3&x", "unknown emulator option"),
        ("?seed=3&seed=4", "'seed' is given twice"),
        ("?seed=-1", "seed is '-1', wanted a whole number"),
        ("?memory=1.5", "memory is '1.5', wanted a whole number"),
        ("?policy=fast", "policy is 'fast', wanted one of random, lazy, fifo, reversed, eager"),
        ("?rows=prefill_first", "rows is 'prefill_first', wanted one of slot, prefill-first, seeded"),
        ("?layout=", "layout is '', wanted one of blocked, plain"),
        ("?uncapturable=linear,attention", "uncapturable names attention, wanted some of .*paged_attention"),
    ],
)
def test_mistakes(spec: str, said: str):
    with pytest.raises(ConfigError, match=said):
        Emulator(spec)


def test_every_option_is_documented():
    text = options.__doc__ or ""
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    for name in NAMES:
        assert f"| `{name}`" in text
        assert f"`{name}`" in readme, name


# -- identity -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "declared"), [("slot", "slot"), ("prefill-first", "prefill_first"), ("seeded", "seeded")])
def test_row_order_is_declared(rows: str, declared: str):
    info = Plugins.load(Emulator(f"?rows={rows}")).info()
    assert info.capabilities.row_order == declared
    assert (info.capabilities.asynchronous, info.capabilities.graph_capture, info.capabilities.row_invariant) == (True,) * 3
    assert (info.name, info.evidence) == ("emulator", "emulator")


def test_the_device_string_decides_what_the_backend_declares():
    info = Plugins.load(polydraft_emulator, device="emulator:0?rows=seeded&uncapturable=linear,argmax").info()
    assert info.capabilities.row_order == "seeded"
    assert info.capabilities.uncapturable == ("linear", "argmax")
    over = Plugins.load(Emulator("?rows=seeded&seed=4"), device="?rows=slot").info()
    assert (over.capabilities.row_order, over.devices) == ("slot", ("emulator:0?seed=4",))
    with pytest.raises(ConfigError, match="unknown emulator option 'row'"):
        Plugins.load(polydraft_emulator, device="?row=slot")


@pytest.mark.parametrize("rows", ["slot", "prefill-first", "seeded"])
def test_the_row_order_of_the_device_string_holds_in_a_run(rows: str):
    llm = LLM(plugin=polydraft_emulator, device=f"emulator:0?rows={rows}", backend="emulator", graph="off", max_num_seqs=2)
    assert llm.engine.scheduler.row_order == rows.replace("-", "_")
    outputs = llm.generate([[5, 6, 7], [8]], SamplingParams(max_new_tokens=3, ignore_eos=True))
    assert [output.error for output in outputs] == ["", ""]
    llm.close()


def test_the_module_is_a_plugin_and_its_entry_point():
    assert Plugins.load(polydraft_emulator).info() == Emulator().polydraft_backend_info("")
    pyproject = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    assert '[project.entry-points."polydraft.backends"]\nemulator = "polydraft_emulator"\n' in pyproject
    assert 'dependencies = ["polydraft"]' in pyproject
