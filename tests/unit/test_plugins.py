"""Loading: what is named is found, imported and checked; what is not named changes nothing."""

import importlib.metadata
import itertools
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from polydraft import LLM, SamplingParams, reference
from polydraft.backend import DeviceOptions
from polydraft.errors import PluginError, UnknownPluginError
from polydraft.plugins import loading as plugin_loading
from polydraft.plugins.checks import BACKEND, PACK
from polydraft.plugins.plugins import Loaded, Plugins, find, survey
from tests.support import tiny
from tests.support.minimal_backend import __file__ as MINIMAL
from tests.support.plugin_doubles import Packages, Tagged, backend, pack_source, plugin

IMPORTS = "import sys\nsys.modules['imports_seen'].seen.append(__name__)\n"


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Packages:
    return Packages(tmp_path, monkeypatch)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the fake modules that were imported."""
    module: Any = ModuleType("imports_seen")
    module.seen = []
    monkeypatch.setitem(sys.modules, "imports_seen", module)
    return module.seen  # type: ignore[no-any-return]


def backend_source(name: str) -> str:
    return (
        "from tests.support.plugin_doubles import backend as _backend\n"
        f"globals().update({{k: v for k, v in vars(_backend({name!r})).items() if k.startswith('polydraft_')}})\n"
    )


def owners(plugins: Plugins) -> dict[str, str]:
    """Contract to the pack that serves it, of what packs serve."""
    device = plugins.open_device("", DeviceOptions())
    providers = plugins.kernels(device).providers
    return {contract: provider.owner for contract, provider in providers.items() if isinstance(provider, Tagged)}


def generate(**options: Any) -> list[tuple[int, ...]]:
    llm = LLM(**{"model": str(tiny.checkpoint("narrow")), "backend": "reference", **options})
    return [out.token_ids for out in llm.generate([[3, 5, 7], [11]], SamplingParams(max_new_tokens=9))]


# -- selection ---------------------------------------------------------------------------------------
def test_reference_is_an_ordinary_entry_point():
    loaded = Plugins.load("reference")
    assert loaded.backend.plugin is reference
    assert loaded.backend.name == loaded.info().name == "reference"
    assert loaded.report() == [
        {
            "name": "reference",
            "role": "backend",
            "origin": "polydraft (polydraft.reference)",
            "digest": loaded.digests["reference"],
        }
    ]


def test_unknown_name_lists_what_is_installed():
    with pytest.raises(
        PluginError, match=r"no plugin 'referense' in polydraft.backends; installed: .*reference.*polydraft doctor"
    ):
        Plugins.load("referense")


def test_selected_plugin_that_fails_to_import_names_itself(packages: Packages):
    packages.install("sick", "import not_there", backends="sick = sick")
    with pytest.raises(
        PluginError, match=r"plugin 'sick' \(sick \(sick\)\) failed to import: ModuleNotFoundError.*not_there.*repair"
    ):
        Plugins.load("sick")


def test_installed_but_unselected_plugins_change_nothing(packages: Packages, seen: list[str]):
    before, digests = generate(), Plugins.load("reference").digests
    packages.install("broken_backend", IMPORTS + "raise RuntimeError('boom')", backends="broken = broken_backend")
    packages.install("broken_pack", IMPORTS + "raise RuntimeError('boom')", kernels="fast = broken_pack")
    packages.install("broken_extension", IMPORTS + "raise RuntimeError('boom')", extensions="extra = broken_extension")
    packages.install("twin_a", IMPORTS, backends="twin = twin_a")
    packages.install("twin_b", IMPORTS, backends="twin = twin_b")
    assert {"broken", "twin", "reference"} <= set(find(BACKEND.group))
    assert "fast" in find(PACK.group)
    assert generate() == before
    assert Plugins.load("reference").digests == digests
    assert seen == []


def test_name_of_two_packages_is_an_error_for_who_selects_it(packages: Packages):
    packages.install("twin_a", "", backends="twin = twin_a")
    packages.install("twin_b", "", backends="twin = twin_b")
    with pytest.raises(PluginError, match=r"'twin' in polydraft.backends: twin_a \(twin_a\) and twin_b \(twin_b\); uninstall"):
        Plugins.load("twin")


def test_entry_point_must_carry_the_name_of_its_backend(packages: Packages):
    packages.install("mine", backend_source("yours"), backends="mine = mine")
    with pytest.raises(PluginError, match=r"'mine' .*polydraft_backend_info names it 'yours'.*make the two equal"):
        Plugins.load("mine")


def test_packaged_plugins_are_checked_like_any_other(packages: Packages):
    packages.install("half", "from polydraft import hookimpl\n@hookimpl\ndef polydraft_models(): ...\n", backends="half = half")
    with pytest.raises(PluginError, match="backend plugin 'half' lacks the hook polydraft_backend_info and"):
        Plugins.load("half")
    packages.install("later", pack_source("later", "embed").replace("*('embed',)", "'embed', version=2"), kernels="later = later")
    plugins = Plugins.load("reference", packs=("later",))
    with pytest.raises(PluginError, match="plugin 'later': polydraft_kernels has version 2 of contract 'embed', core serves 1"):
        plugins.kernels(plugins.open_device("", DeviceOptions()))


def test_survey_shows_broken_backends_with_their_reason(packages: Packages):
    packages.install("sick", "1 / 0", backends="sick = sick")
    packages.install("twin_a", "", backends="twin = twin_a")
    packages.install("twin_b", "", backends="twin = twin_b")
    packages.install("fine", backend_source("fine"), backends="fine = fine")
    found = {one.name: one for one in survey()}
    assert list(found) == sorted(found)
    assert "ZeroDivisionError" in found["sick"].problem
    assert "twin_a" in found["twin"].origin
    assert "twin_b" in found["twin"].problem
    assert found["sick"].info is found["twin"].info is None
    assert found["fine"].info is not None
    assert found["fine"].info.name == "fine"
    assert len(found["reference"].digest) == 16


def test_order_of_installation_does_not_matter(packages: Packages, monkeypatch: pytest.MonkeyPatch):
    packages.install("a_pack", pack_source("a", "rms_norm", "swiglu"), kernels="a = a_pack")
    packages.install("b_pack", pack_source("b", "swiglu", "embed"), kernels="b = b_pack")
    real = importlib.metadata.entry_points
    seen = set()
    for order in itertools.permutations(range(3)):

        def shuffled(*, group: str, order: tuple[int, ...] = order) -> list[EntryPoint]:
            entries = list(real(group=group))
            return sorted(entries, key=lambda e: order[entries.index(e) % 3])

        monkeypatch.setattr(plugin_loading, "entry_points", shuffled)
        plugins = Plugins.load("reference", packs=("b", "a"))
        assert owners(plugins) == {"rms_norm": "a", "swiglu": "b", "embed": "b"}
        table = plugins.kernels(plugins.open_device("", DeviceOptions()))
        seen.add((tuple(table.providers), str(table.report()), str(plugins.report()), tuple(find(PACK.group))))
    assert len(seen) == 1


# -- --plugin ------------------------------------------------------------------------------------------
def test_backend_file_runs_when_it_is_selected():
    assert generate(plugins=(MINIMAL,), backend="minimal") == generate()


def test_backend_file_that_is_not_selected_is_an_error():
    with pytest.raises(PluginError, match=r"brings the backend 'minimal', but 'reference' is selected; add --backend minimal"):
        Plugins.load("reference", files=(MINIMAL,))


def test_backend_of_a_file_and_of_a_package_may_not_share_a_name(packages: Packages):
    packages.install("packaged", "", backends="minimal = packaged")
    with pytest.raises(
        PluginError, match=r"backend 'minimal' comes from --plugin .*minimal_backend.py and from packaged \(packaged\)"
    ):
        Plugins.load("minimal", files=(MINIMAL,))


def test_file_that_is_not_there():
    with pytest.raises(PluginError, match=r"--plugin nowhere/mine.py: no such Python file; give a path"):
        Plugins.load("reference", files=("nowhere/mine.py",))


@pytest.mark.parametrize(("where", "cause"), [("broken.py", "NameError"), ("not.a.module", "ModuleNotFoundError")])
def test_file_or_module_that_fails_to_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, cause: str):
    (tmp_path / "broken.py").write_text("undefined_name")
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    with pytest.raises(PluginError, match=rf"--plugin {where} failed to import: {cause}.*repair it"):
        Plugins.load("reference", files=(where,))
    assert not any("broken" in name for name in set(sys.modules) - before)


@pytest.mark.parametrize(
    ("where", "said"),
    [("paddle/sdpa", "an installed kernel pack; name it by --kernels"), ("null", "backend; name it by --backend")],
)
def test_an_installed_pack_or_backend_is_no_file(where: str, said: str):
    with pytest.raises(UnknownPluginError, match=f"--plugin {where}: {where} is .*{said}"):
        Plugins.load("reference", files=(where,))


def test_file_called_like_a_module_takes_nothings_place(tmp_path: Path):
    path = tmp_path / "json.py"
    path.write_text(pack_source("mine", "embed"))
    import json

    assert owners(Plugins.load("reference", files=(str(path),))) == {"embed": "mine"}
    assert sys.modules["json"] is json


def test_file_is_read_afresh_by_the_next_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also where Python keeps byte code, which it believes in as long as a file's length and the second of its change are the
    same, as they are here."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = tmp_path / "edited.py"
    path.write_text(pack_source("first", "embed"))
    first = Plugins.load("reference", files=(str(path),))
    path.write_text(pack_source("again", "embed"))
    second = Plugins.load("reference", files=(str(path),))
    assert owners(first) == {"embed": "first"}
    assert owners(second) == {"embed": "again"}
    assert first.digests["edited"] != second.digests["edited"]


def test_module_and_installed_extension_by_name(packages: Packages):
    source = "from polydraft import hookimpl\n@hookimpl\ndef polydraft_proposers():\n    return [('guess', object)]\n"
    packages.install("plain_module", source)
    packages.install("behind", source, extensions="shown = behind")
    by_module, by_entry = (Plugins.load("reference", files=(name,)).extensions[0] for name in ("plain_module", "shown"))
    assert (by_module.name, by_module.role.noun) == ("plain_module", "extension")
    assert (by_entry.name, by_entry.origin) == ("shown", "behind (behind)")
    assert Plugins.load("reference", extensions=("shown",)).extensions[0].name == "shown"


def test_file_pack_needs_no_order_while_nobody_else_claims_its_contracts(tmp_path: Path, packages: Packages):
    packages.install("other_pack", pack_source("other", "swiglu"), kernels="other = other_pack")
    (tmp_path / "mine.py").write_text(pack_source("mine", "rms_norm"))
    plugins = Plugins.load("reference", packs=("other",), files=(str(tmp_path / "mine.py"),))
    assert owners(plugins) == {"rms_norm": "mine", "swiglu": "other"}


@pytest.mark.parametrize("order", [("mine", "other"), ("other", "mine")])
def test_order_of_kernels_decides_between_packs(tmp_path: Path, packages: Packages, order: tuple[str, ...]):
    packages.install("other_pack", pack_source("other", "rms_norm", "swiglu"), kernels="other = other_pack")
    (tmp_path / "mine.py").write_text(pack_source("mine", "rms_norm"))
    plugins = Plugins.load("reference", packs=order, files=(str(tmp_path / "mine.py"),))
    assert owners(plugins) == {"rms_norm": order[0], "swiglu": "other"}


def test_packs_that_clash_without_an_order_are_both_named(tmp_path: Path, packages: Packages):
    packages.install("other_pack", pack_source("other", "rms_norm"), kernels="other = other_pack")
    (tmp_path / "mine.py").write_text(pack_source("mine", "rms_norm"))
    plugins = Plugins.load("reference", packs=("other",), files=(str(tmp_path / "mine.py"),))
    with pytest.raises(PluginError, match=r"packs 'other' and 'mine' both claim rms_norm.*--kernels other,mine"):
        plugins.kernels(plugins.open_device("", DeviceOptions()))


@pytest.mark.parametrize("packs", [("one", "one"), ("one", "same")])
def test_pack_named_twice(packages: Packages, packs: tuple[str, ...]):
    packages.install("one_pack", pack_source("one", "embed"), kernels="one = one_pack\nsame = one_pack")
    with pytest.raises(PluginError, match=r"kernel pack .* is named twice.*name it once"):
        Plugins.load("reference", packs=packs)


# -- plugin objects, digests -----------------------------------------------------------------------------
def test_backend_object_is_called_as_it_calls_itself():
    loaded = Plugins.load(backend("my own"))
    assert (loaded.backend.name, loaded.digests) == ("my own", {"my own": "unknown"})


def test_two_engines_share_no_manager():
    assert Plugins.load("reference").manager is not Plugins.load("reference").manager


def test_digest_covers_the_whole_package(tmp_path: Path, packages: Packages):
    folder = tmp_path / "whole"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "entry.py").write_text(pack_source("whole", "embed"))
    (folder / "kernel.bin").write_bytes(b"\x00\x01")
    (folder / "__pycache__").mkdir()
    packages.install("distribution", "", kernels="whole = whole.entry")

    def digest() -> str:
        return Loaded.from_entry(Plugins.load("reference", packs=("whole",)).packs[0].role, "whole").digest

    first = digest()
    assert len(first) == 16
    (folder / "__pycache__" / "entry.pyc").write_bytes(b"compiled")
    assert digest() == first
    (folder / "kernel.bin").write_bytes(b"\x00\x02")
    assert digest() != first


def test_digest_of_a_single_file_and_of_an_object_in_it(tmp_path: Path):
    path = tmp_path / "single.py"
    path.write_text("class Plugin: pass\n")
    (tmp_path / "neighbour.txt").write_text("not part of it")
    module = plugin_loading.load_file(str(path))
    digest = plugin_loading.digest(module)
    assert plugin_loading.digest(module.Plugin()) == digest
    (tmp_path / "neighbour.txt").unlink()
    assert plugin_loading.digest(module) == digest
    assert plugin_loading.digest(plugin("without a file")) == "unknown"
