"""Every CUDA kernel compiles for every architecture that is named, without a GPU; those that never ran are compiled only."""

import ctypes
import itertools
import os
import struct
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from polydraft import environment
from polydraft.contracts import COLLECTIVES, COMPOSITES, REGISTRY
from polydraft.contracts.inputs import default_cases
from polydraft.errors import DeviceError
from polydraft_cuda import CAPABILITIES, compiler
from polydraft_cuda.kernels import experts, kernels
from polydraft_cuda.kernels.routing import FREE_SHARED
from tests.device.paper import SHAPES, bind_collectives, bind_of_ranks, bind_on_paper, bind_packed, bind_shape
from tests.support.depth import among, deep

try:
    compiler.nvrtc_version()
    REASON = ""
except DeviceError as error:
    REASON = str(error)

bindings = pytest.importorskip("cuda.bindings", reason="the extra cuda brings the compiler")
needs_compiler = pytest.mark.skipif(bool(REASON), reason=REASON)
Variant = tuple[Path, tuple[tuple[str, str | float], ...]]


SHAPED = ("fp8-channel", "fp8-channel-a8", "fp8-block128-a8", "int8-channel-a8", "int4-channel-zeros", "int4-group32-zeros")
"""Packings whose kernels are compiled in all sizes: each number, and each way in which scales meet sums."""


ACTS = ("bf16", "f32")
"""Dtypes with which every source is bound."""


@cache
def variants(arch: str, acts: tuple[str, ...] = ("f32", "bf16", "f16")) -> tuple[Variant, ...]:
    """Every source with every set of defines that some kernel is bound with for this architecture."""
    found: set[Variant] = set()
    for name in kernels():
        for act in acts:
            cases = default_cases(COMPOSITES.get(name) or REGISTRY[name], seeds=1)
            for case, invariant in itertools.product(cases, (False, True)):
                for one in bind_on_paper(name, case, act, arch=arch, row_invariant=invariant):
                    found.add((one.source, tuple(sorted(one.defines.items()))))
    for act, ranks in itertools.product(acts, (2, 4)):
        bound = [one for name in COLLECTIVES.names() for one in bind_collectives(name, act, ranks, arch=arch)]
        bound += [one for shape in SHAPES for one in bind_of_ranks(shape, act, ranks, arch=arch)]
        found |= {(one.source, tuple(sorted(one.defines.items()))) for one in bound}
    for packing, act, invariant in itertools.product(CAPABILITIES.weight_packings, acts, (False, True)):
        bound = [
            one
            for contract in (REGISTRY[name] for name in REGISTRY.names())
            if contract.packed_cases and packing in getattr(CAPABILITIES, contract.packings)
            for case in contract.packed_cases(packing)
            for one in bind_on_paper(contract.name, case, act, arch=arch, row_invariant=invariant)
        ]
        if packing in SHAPED and arch == "sm_90" and act != "f32":
            bound += bind_packed(SHAPES[0], act, packing, arch=arch, row_invariant=invariant)
        found |= {(one.source, tuple(sorted(one.defines.items()))) for one in bound}
    for shape in SHAPES:
        for act in acts:
            for invariant in (False, True):
                for one in bind_shape(shape, act, arch=arch, row_invariant=invariant):
                    found.add((one.source, tuple(sorted(one.defines.items()))))
    return tuple(sorted(found, key=str))


def sample(found: tuple[Variant, ...]) -> tuple[Variant, ...]:
    """Every source, with every define at every value that it takes anywhere, in few variants."""
    every = {one: {(one[0], define) for define in (*one[1], ("", ""))} for one in found}
    left, taken = set().union(*every.values()), []
    while left:
        taken.append(max(found, key=lambda one: len(every[one] & left)))
        left -= every[taken[-1]]
    return tuple(taken)


def compile_all(arch: str, found: tuple[Variant, ...]) -> None:
    """Compile each variant."""
    for source, defines in found:
        options = dict(defines)
        features = str(options.pop("arch_features", ""))
        assert compiler.compile_source(source, defines=options, arch=arch + features).startswith(b"\x7fELF")


ELSEWHERE = {"attention_prefill.cu"}
"""What sm_90 has for heads of sizes that no case has."""


OLDEST = compiler.ARCHITECTURES[0]
"""Which has the fewest instructions."""


@pytest.mark.parametrize("arch", among(("sm_90",), compiler.ARCHITECTURES))
def test_every_source_is_bound(arch: str):
    linear = ("tile", "pair", "parts", "rows", "split", "screen", "prompt")
    experts = ("row", "sum", "tile")
    hopper = {
        "attention_prompt.cu",
        *(f"experts_{name}.cu" for name in experts),
        *(f"linear_{name}.cu" for name in linear),
    }  # instructions of sm_90a alone
    ours = hopper | {"screen.cu"} if arch != "sm_90" else ELSEWHERE  # what stands behind `linear_screen`
    assert {source.name for source, _ in variants(arch, ACTS)} == {source.name for source in compiler.all_sources()} - ours


@pytest.fixture
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the compiler optimise little. It reads the same text, and its assembler judges the same instructions and the same
    shared memory. Not `max`: it keeps branches that are dead for an architecture, with instructions that this one does not
    have."""
    monkeypatch.setattr(compiler, "OPTIONS", (*compiler.OPTIONS, "--Ofast-compile=mid"))


@needs_compiler
@pytest.mark.usefixtures("in_a_hurry")
@pytest.mark.parametrize(
    ("arch", "name"), [("sm_90", "linear_tile.cu"), deep(("sm_90", "attention_decode.cu")), (OLDEST, "attention_decode.cu")]
)
def test_a_source_compiles(arch: str, name: str):
    """One with instructions of sm_90a alone, and one for all architectures; `make deep` compiles all sources, also with the
    options that kernels are run with."""
    compile_all(arch, (next(one for one in variants(arch, ACTS) if one[0].name == name),))


@needs_compiler
@pytest.mark.deep
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("in_a_hurry")
def test_every_kernel_compiles_for_the_device_it_is_tuned_for():
    """Every value of every define."""
    found = sample(variants("sm_90", ("bf16",)))
    assert {source for source, _ in found} == {source for source in compiler.all_sources() if source.name not in ELSEWHERE}
    compile_all("sm_90", found)


@needs_compiler
@pytest.mark.deep
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("in_a_hurry")
@pytest.mark.parametrize("arch", [arch for arch in compiler.ARCHITECTURES if arch != "sm_90"])
def test_every_source_compiles_for_the_others(arch: str):
    first = {source: (source, defines) for source, defines in reversed(variants(arch, ("bf16",)))}
    compile_all(arch, tuple(first.values()))


@needs_compiler
@pytest.mark.deep
@pytest.mark.parametrize("arch", compiler.ARCHITECTURES)
def test_every_kernel_compiles(arch: str):
    """All combinations of defines."""
    compile_all(arch, variants(arch))


LEAST_SHARED = 101376
"""Bytes of shared memory that a block may have where that is least: on compute capability 8.6, 8.9 and 12.0."""
SHARED_BEFORE = {"sm_120": 1024}
"""Bytes in front of a kernel's own arrays that are the driver's: their section counts them, what a block may have does not."""


def own_arrays(cubin: bytes, kernel: str) -> int:
    """Bytes of shared memory of the arrays that a kernel declares itself: the size of a section of an ELF file of 64 bits."""
    (table,), (size, count, names) = struct.unpack_from("<Q", cubin, 40), struct.unpack_from("<3H", cubin, 58)
    headers = [struct.unpack_from("<2I4Q", cubin, table + size * i) for i in range(count)]
    texts = headers[names][4]
    sizes = {cubin[texts + name :].partition(b"\0")[0].decode(): nbytes for name, *_, nbytes in headers}
    return sizes.get(f".nv.shared.{kernel}", 0)


@needs_compiler
@pytest.mark.usefixtures("in_a_hurry")
@pytest.mark.parametrize("arch", among(("sm_86",), ("sm_86", "sm_89", "sm_120")))
def test_a_block_has_the_shared_memory_that_its_kernel_wants_where_that_is_least(arch: str):
    """Those that ask for little have 48 KiB of arrays of their own at most."""
    every = [
        one
        for shape, invariant in itertools.product(SHAPES, (False, True))
        for one in bind_shape(shape, "bf16", arch=arch, row_invariant=invariant, shared_bytes=LEAST_SHARED)
        if one.shared > FREE_SHARED
    ]
    assert {"expert_stream", "attention_decode", "attention_prefill"} <= {one.name for one in every}
    products = [one.defines for one in every if one.name == "expert_stream"]
    sizes = {tuple(told[name.upper()] for name in experts.Size._fields) for told in products}
    assert sizes == {*experts.SIZES, *experts.INVARIANT}
    for one in every:
        own = own_arrays(compiler.compile_source(one.source, defines=one.defines, arch=arch), one.name)
        wanted = one.shared + own - SHARED_BEFORE.get(arch, 0)
        assert 0 < own < wanted <= LEAST_SHARED, (one.name, one.defines, wanted)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("POLYDRAFT_CACHE_DIR", str(tmp_path))
    return tmp_path / "cuda"


TEXT = 'extern "C" __global__ void k(float* x) { x[threadIdx.x] = VALUE; }'


@needs_compiler
def test_compiled_kernels_are_kept_and_found_again(folder: Path, monkeypatch: pytest.MonkeyPatch):
    first = compiler.compile_source(TEXT, defines={"VALUE": 1}, arch="sm_90")
    (file,) = folder.glob("*")
    monkeypatch.setattr(compiler, "_compile", lambda *arguments: pytest.fail("compiled again"))
    assert compiler.compile_source(TEXT, defines={"VALUE": 1}, arch="sm_90") == first
    assert list(folder.glob("*")) == [file]


@needs_compiler
@pytest.mark.parametrize(
    "change", [{"defines": {"VALUE": 2}}, {"arch": "sm_80"}, {"driver_version": 13000}, {"source": TEXT + "\n"}], ids=str
)
def test_whatever_decides_the_code_is_part_of_its_key(folder: Path, change: dict):
    usual = {"source": TEXT, "defines": {"VALUE": 1}, "arch": "sm_90", "driver_version": 13010}
    for arguments in (dict[str, Any](usual), dict[str, Any](usual | change)):
        text: Any = arguments.pop("source")
        compiler.compile_source(text, **arguments)
    assert len(list(folder.glob("*.cubin"))) == 2


@needs_compiler
@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"", lambda data: data[:40] + b"\0" + data[41:]])
def test_a_damaged_file_is_compiled_again(folder: Path, damage):
    wanted = compiler.compile_source(TEXT, defines={"VALUE": 1}, arch="sm_90")
    (file,) = folder.glob("*")
    file.write_bytes(damage(file.read_bytes()))
    assert compiler.compile_source(TEXT, defines={"VALUE": 1}, arch="sm_90") == wanted
    assert file.read_bytes()[32:] == wanted


@needs_compiler
def test_what_a_killed_process_left_is_swept_and_what_one_writes_is_not(folder: Path):
    folder.mkdir(parents=True)
    old, fresh = folder / "old.part", folder / "fresh.part"
    for file in (old, fresh):
        file.write_bytes(b"half a ker")
    os.utime(old, (0, 0))
    compiler.compile_source(TEXT, defines={"VALUE": 1}, arch="sm_90")
    assert sorted(file.suffix for file in folder.glob("*")) == [".cubin", ".part"]
    assert fresh.exists()


@needs_compiler
def test_a_folder_that_cannot_be_written_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "file").write_text("no folder", encoding="utf-8")
    monkeypatch.setenv("POLYDRAFT_CACHE_DIR", str(tmp_path / "file"))
    assert compiler.compile_source(TEXT, defines={"VALUE": 1}, arch="sm_90")


@needs_compiler
def test_a_kernel_that_does_not_compile_is_one_sentence(folder: Path):
    with pytest.raises(DeviceError, match=r"^kernel text\.cu does not compile for sm_90: text\.cu\(1\): error: .*VALUE.*$"):
        compiler.compile_source(TEXT, arch="sm_90")
    assert not list(folder.glob("*"))


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("POLYDRAFT_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert environment.cache_folder() == tmp_path / "polydraft"
    monkeypatch.setenv("POLYDRAFT_CACHE_DIR", str(tmp_path / "mine"))
    assert environment.cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("POLYDRAFT_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert environment.cache_folder() == Path.home() / ".cache" / "polydraft"


def test_arguments_are_packed_by_their_kind():
    assert compiler._value(7).value == 7
    assert isinstance(compiler._value(7), ctypes.c_int32)
    assert isinstance(compiler._value(0.5), ctypes.c_float)
    assert compiler._value(None).value is None
    own = ctypes.c_uint64(1 << 40)
    assert compiler._value(own) is own
