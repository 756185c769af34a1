"""Pages for authors of backends against the code: every hook, contract, option, capability and error has its place."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pytest

from polydraft import Capabilities, errors, hooks
from polydraft import device as protocols
from polydraft.cli import COMMANDS
from polydraft.conformance import KernelMismatch, check_kernel, conform
from polydraft.conformance.kernel_checks import named_cases
from polydraft.conformance.report import Selection
from polydraft.contracts import COMPOSITES, REGISTRY
from polydraft.contracts.features import FEATURES
from polydraft.contracts.inputs import optional_cases
from polydraft.plugins.checks import ROLES
from tests.docs.pages import code_spans, fences, read, rows, section
from tests.support import tutorial
from tests.support.project import ROOT
from tools import contract_pages, make_commands

BACKENDS = ROOT / "docs" / "backends"
GROUPS = {role.group for role in ROLES}
INTERFACE = json.loads((Path(__file__).parent / "interface.json").read_text(encoding="utf-8"))
"""What scripts and CI systems rely on: commands, their options and arguments. An option may join it, none leaves it."""


# -- made pages --------------------------------------------------------------------------------------
def test_the_page_of_commands_is_up_to_date():
    assert not make_commands.stale(), "run `make pages`"


@pytest.mark.parametrize("name", REGISTRY.names())
def test_a_contracts_page_has_everything(name: str):
    contract = REGISTRY[name]
    text = contract_pages.contract_page(contract, contract_pages.upstream())
    for heading in ("Arguments", "Shapes", "Launch", "Definition", "Source", "Cases", "In a backend"):
        assert section(text, heading).strip(), heading
    described = {
        row[0].strip("`")
        for part in ("Arguments", "Static parameters")
        if f"## {part}" in text
        for row in rows(section(text, part))
    }
    assert described == set(contract.args.specs())
    listed = re.findall(r"^- `([\w.]+)` \(launch", section(text, "Cases"), re.MULTILINE)
    assert listed == [case.name for case in (*named_cases(contract), *optional_cases(contract))]
    assert "def golden(" in text


def test_names_of_fastdeploy_are_found():
    found = contract_pages.upstream()
    assert "eagle_get_self_hidden_states" in "".join(found["select_last_rows"])
    assert set(found) <= {*REGISTRY.names(), "adjust_batch"} | set(COMPOSITES) | set(found) - set(REGISTRY.names())
    assert len(set(found) & set(REGISTRY.names())) >= 20


def test_the_reference_has_a_row_for_every_contract_and_composite():
    text = contract_pages.with_tables(read(BACKENDS / "reference.md"))
    assert [row[0] for row in rows(text)] == [f"[`{REGISTRY[name].key}`](contracts/{name}.md)" for name in REGISTRY.names()]
    assert [row[0] for row in rows(section(text, "Composites"))] == [f"`{name}`" for name in COMPOSITES]
    with pytest.raises(ValueError, match="wants <!-- table of contracts --> once"):
        contract_pages.with_tables("# A page without a place")


# -- commands ------------------------------------------------------------------------------------------
def parameters(name: str) -> list[click.Parameter]:
    command: click.Command = import_module(f"polydraft.cli.{name.replace('-', '_')}").command
    return list(command.params)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_on_the_page_of_commands(name: str):
    text = section(read(ROOT / "docs" / "commands.md"), f"polydraft {name}")
    shown = {option for row in rows(text) for option in re.findall(r"--[a-z-]+", row[0])}
    declared = {
        option for parameter in parameters(name) for option in [*parameter.opts, *parameter.secondary_opts] if option[:2] == "--"
    }
    assert shown == declared


@pytest.mark.parametrize("name", INTERFACE)
def test_help_agrees_with_the_interface(name: str, capsys: pytest.CaptureFixture[str]):
    from polydraft.cli import main

    with pytest.raises(SystemExit) as exit_:
        main.main([name, "--help"])
    text = capsys.readouterr().out
    assert not exit_.value.code
    wanted = [*INTERFACE[name]["options"], "--json", "--help"]
    assert [option for option in wanted if not re.search(rf"(?<![\w-]){option}(?![\w-])", text)] == []
    arguments = [p.human_readable_name for p in parameters(name) if isinstance(p, click.Argument)]
    assert [a for a in INTERFACE[name]["arguments"] if a not in arguments] == []
    for option, values in INTERFACE[name].get("values", {}).items():
        described = next(p for p in parameters(name) if option in p.opts)
        assert all(re.search(rf"\b{value}\b", described.make_metavar(click.Context(click.Command(name)))) for value in values), (
            option
        )


# -- capabilities, protocols, hooks, errors --------------------------------------------------------------
def table(page: str, heading: str = "") -> dict[str, list[str]]:
    text = read(BACKENDS / page)
    return {row[0].strip("`"): row for row in rows(section(text, heading) if heading else text)}


def test_every_capability_has_a_row():
    text = read(BACKENDS / "capabilities.md").partition("\n## ")[0]
    found = {row[0].strip("`"): row for row in rows(text)}
    assert set(found) == {field.name for field in dataclasses.fields(Capabilities)}
    for field in dataclasses.fields(Capabilities):
        words = {True: "yes", False: "no", (): "none"}
        said = found[field.name][1]
        assert said == (
            words[field.default]
            if isinstance(field.default, bool | tuple) and field.default in words
            else f"`{_literal(field.default)}`"
            if not isinstance(field.default, int)
            else str(field.default)
        )


def _literal(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else str(value).replace("'", '"')


def test_every_protocol_of_a_device_has_a_row():
    text = section(read(BACKENDS / "capabilities.md"), "What is asked of a device")
    found = {row[0].strip("`"): row for row in rows(text.partition("| counter |")[0])}
    for name, row in found.items():
        protocol = getattr(protocols, name)
        members = {member for member in vars(protocol) if not member.startswith("_")} | set(
            getattr(protocol, "__annotations__", {})
        )
        assert set(re.findall(r"`(\w+)`", row[1])) == members, name
    declared = {
        n for n, v in vars(protocols).items() if inspect.isclass(v) and getattr(v, "_is_protocol", False) and n != "Protocol"
    }
    assert declared == set(found)


def test_every_counter_has_a_row():
    """Behind the protocols, in a table of its own."""
    text = section(read(BACKENDS / "capabilities.md"), "What is asked of a device")
    found = [name for row in rows(text[text.index("| counter |") :]) for name in re.findall(r"`(\w+)`", row[0])]
    assert found == [field.name for field in dataclasses.fields(protocols.DeviceCounters) if field.name in found]
    assert len(found) == len(dataclasses.fields(protocols.DeviceCounters))


def test_what_a_kernel_table_is_made_of_is_told_member_by_member():
    from typing import get_args

    from polydraft import backend
    from polydraft.contracts import base
    from polydraft.models.block import Role

    text = section(read(BACKENDS / "capabilities.md"), "What is asked of a kernel table")
    types, roles = text.index("| type |"), text.index("| role |")
    for name, members, _ in rows(text[types:roles]):
        kind = getattr(backend, name.strip("`"), None) or getattr(base, name.strip("`"))
        declared = {member for member in vars(kind) if not member.startswith("_")} | set(kind.__annotations__)
        assert {re.sub(r"\(.*", "", one) for one in re.findall(r"`([^`]+)`", members)} == declared, name
        for method, given in re.findall(r"`(\w+)\(([^)]*)\)`", members):
            assert list(inspect.signature(getattr(kind, method)).parameters)[1:] == re.findall(r"\w+", given), (name, method)
    assert tuple(row[0].strip("`") for row in rows(text[roles:])) == get_args(Role)


def test_every_error_has_a_row_with_its_status():
    from polydraft.cli import status_of

    found = table("failures.md", "Errors")
    assert set(found) == {*errors.__all__, KernelMismatch.__name__}
    for name in errors.__all__:
        assert found[name][1] == str(status_of(getattr(errors, name)("words"))), name


def test_every_hook_is_named_for_authors():
    """Their sections are in docs/plugins.md, which a test of its own compares."""
    assert all(f"### `{hook}(" in read(ROOT / "docs" / "plugins.md") for hook in hooks.HOOKS)


def test_what_pages_name_exists():
    """Names of polydraft.* that a page of this folder mentions can be imported."""
    for page in BACKENDS.glob("*.md"):
        for span in code_spans(read(page)):
            if re.fullmatch(r"polydraft(\.\w+)+(\(\))?", span) and span not in GROUPS:
                module, _, name = span.rstrip("()").rpartition(".")
                if not hasattr(import_module(module), name):
                    import_module(f"{module}.{name}")


# -- the tutorial, and the failure that is explained -------------------------------------------------------
@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What new-backend writes, importable; its modules are forgotten afterwards."""
    from polydraft.cli.new_backend import write

    write("mychip", tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.startswith("polydraft_mychip")]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def fresh(name: str = "polydraft_mychip") -> Any:
    for loaded in [loaded for loaded in sys.modules if loaded.startswith("polydraft_mychip")]:
        del sys.modules[loaded]
    return import_module(name)


def test_the_tutorial_leads_to_basic(package: Path):
    """Everything but its commands, which `tests/mission.sh` runs and `test_readme_commands.py` parses."""
    kinds = []
    for step in tutorial.steps(read(tutorial.PAGE)):
        kinds.append(step.kind)
        if step.kind == "write":
            assert (package / step.path).exists(), "the page changes files that are there"
            (package / step.path).write_text(step.text, encoding="utf-8")
            fresh()
        elif step.kind == "try":
            exec(compile(step.text, "tutorial", "exec"), {"__name__": "tutorial"})
    assert (kinds.count("write"), kinds.count("try")) == (3, 1)
    plugin = fresh()
    own = set(plugin.KERNELS)
    assert f"`basic for dense ({len(own)} own, ... delegated), wholly delegated: sampling, ... holds`" in read(tutorial.PAGE)
    for name in own:
        assert conform(plugin, selection=Selection(contract=name)).status == 0, name
    assert conform(plugin, selection=Selection(level="L1")).status == 0


def test_the_failure_that_is_explained_is_a_real_one(package: Path):
    wrong = next(step for step in tutorial.steps(read(tutorial.PAGE)) if step.kind == "write").text.replace("* up\n", "+ up\n")
    (package / "polydraft_mychip" / "kernels.py").write_text(wrong, encoding="utf-8")
    report = conform(fresh(), selection=Selection(contract="swiglu", case="gate_comes_before_up"))
    (problem,) = report.content["verdict"]["problems"]
    (example,) = fences(read(BACKENDS / "failures.md"), "text")
    assert problem == example.text.strip(), "which is wrong in a way of its own: nothing is said to be like it"
    with pytest.raises(KernelMismatch, match="gate_comes_before_up"):
        check_kernel("swiglu", fresh("polydraft_mychip.kernels").swiglu)


def test_the_page_of_conformance_lists_every_feature():
    text = section(read(ROOT / "docs" / "conformance.md"), "Levels and profiles")
    found = {row[0].strip("`"): row[1] for row in rows(text[text.index("| feature |") :])}
    assert list(found) == list(FEATURES)
    for name, feature in FEATURES.items():
        rests = feature.rests_on[-1] if feature.rests_on else "dense"
        assert found[name].startswith(feature.doc), name
        assert (f"; rests on `{rests}`" in found[name]) == (rests != "dense"), name


def test_poison_reads_as_the_page_says():
    from polydraft.contracts.inputs import POISON

    text = read(BACKENDS / "failures.md")
    assert f"`is {POISON.real:.0f}` or `is {POISON.integer}`" in text
