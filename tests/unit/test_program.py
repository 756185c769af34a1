"""The step program: what is fused and what is not, versions, workspaces, missing contracts, and equal texts either way."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from polydraft import LLM, SamplingParams
from polydraft.backend import StepMeta
from polydraft.contracts import COMPOSITES, REGISTRY
from polydraft.contracts.base import UNITS, Args, Limits, Unit, columns, opaque, param, tensor
from polydraft.contracts.composite import Composite, CompositeArgs
from polydraft.contracts.kernels.rms_norm import RmsNormV1
from polydraft.device import Buffer
from polydraft.errors import CapabilityError, ContractError
from polydraft.plugins.kernel_table import BoundTable
from polydraft.plugins.program_pass import Call, Entry, Fill, Node
from polydraft.program.fusion import fuse
from polydraft.program.program import Memory, ProgramBuilder, StepContext, build, lengths
from polydraft.reference.device import ReferenceDevice
from tests.support import tiny
from tests.support.plugin_doubles import backend_without

LIMITS = Limits(
    max_seqs=2, num_drafts=1, max_rows=8, max_logit_rows=4, max_len=16, block_size=4, num_blocks=8, max_blocks=4,
    max_stop_tokens=2, vocab_size=10,
)  # fmt: skip


def buffer(dtype: str = "f32", *shape: int) -> Any:
    """What a record takes for a buffer."""
    return SimpleNamespace(dtype=dtype, shape=shape or (4, 8))


def fitting(spec: Any) -> Any:
    """A buffer of that form, with 2 of everything."""
    return buffer(spec.dtype, *(2 for _ in spec.symbols))


class AddV1(Args):
    """x := x + y."""

    x: Buffer = tensor("N H", "act", "Stream.", access="inout")
    y: Buffer = tensor("N H", "act", "Added.")


class ScaleV1(Args):
    """out := x * factor."""

    x: Buffer = tensor("N H", "act", "Stream.")
    out: Buffer = tensor("N H", "act", "Scaled.", access="out")


class ReadV1(Args):
    """y := out."""

    out: Buffer = tensor("N H", "act", "Read.")
    y: Buffer = tensor("N H", "act", "Written.", access="out")


class CountV1(Args):
    """Counts sequences."""

    x: Buffer = tensor("N H", "act", "Read.")


class Provider:
    """Notes what it was bound to and launched with."""

    def __init__(self, name: str, log: list[Any], nbytes: int = 0) -> None:
        self.name, self.log, self.nbytes = name, log, nbytes
        self.bound: list[tuple[Any, Any]] = []

    def bind(self, args: Any, limits: Limits, workspace: Any) -> Any:
        self.bound.append((args, workspace))
        return lambda stream, n: self.log.append((self.name, n))

    def workspace_bytes(self, args: Any, limits: Limits) -> int:
        return self.nbytes


class Table:
    """A kernel table of `Provider`s, and the launches that they made."""

    def __init__(self, *names: str, **nbytes: int) -> None:
        self.log: list[Any] = []
        self.declared: dict[str, Any] = {}
        """Buffers that launches may name."""
        self.providers: Any = {name: Provider(name, self.log, nbytes.get(name, 0)) for name in names}
        backend: Any = None
        self.bound = BoundTable(backend, ReferenceDevice(), self.providers, dict.fromkeys(names, 1))

    def builder(self, name: str = "step", context: StepContext | None = None) -> ProgramBuilder:
        memory = Memory(ReferenceDevice(), LIMITS, "f32", buffers=dict(self.declared))
        return ProgramBuilder(name, self.bound, memory, context or StepContext())


CONTRACTS: dict[str, tuple[type[Args], Any]] = {
    "add": (AddV1, "any"), "scale": (ScaleV1, "any"), "read": (ReadV1, "any"), "count": (CountV1, "seqs"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def contracts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Toy contracts add, scale, read (any rows) and count (sequences), and composites of them."""
    model = REGISTRY["residual_add"]
    toys = {n: dataclasses.replace(model, name=n, args=a, unit=u) for n, (a, u) in CONTRACTS.items()}
    monkeypatch.setattr(REGISTRY, "_contracts", {**REGISTRY._contracts, **toys})
    for name, dead in {"add+scale": (), "add+scale+read": ("out",), "scale+read": ("out",), "scale+count": ()}.items():
        monkeypatch.setitem(COMPOSITES, name, Composite(name, tuple(name.split("+")), "A toy.", dead))


@pytest.fixture
def buffers() -> Any:
    return SimpleNamespace(**{name: buffer() for name in ("x", "y", "out", "z")})


def node(contract: str, unit: Unit = "rows", **fields: Any) -> Node:
    return Node(contract, CONTRACTS[contract][0](**fields), unit, "stage")


def run_of_three(b: Any) -> list[Entry]:
    return [node("add", x=b.x, y=b.y), node("scale", x=b.x, out=b.out), node("read", out=b.out, y=b.y)]


def names(nodes: list[Entry]) -> list[str]:
    return [n.contract if isinstance(n, Node) else "fill" for n in nodes]


EVERYTHING = ("add", "scale", "read", "count", "add+scale", "add+scale+read", "scale+read", "scale+count")


# -- fusion ----------------------------------------------------------------------------------------
def test_largest_owned_composite_is_taken(buffers: Any):
    nodes = run_of_three(buffers)
    assert names(fuse(nodes, Table(*EVERYTHING).bound)) == ["add+scale+read"]
    assert names(fuse(nodes, Table("add", "scale", "read", "add+scale").bound)) == ["add+scale", "read"]
    assert names(fuse(nodes, Table("add", "scale", "read", "scale+read").bound)) == ["add", "scale+read"]
    assert names(fuse(nodes, Table("add", "scale", "read").bound)) == ["add", "scale", "read"]


def test_composite_keeps_the_records_of_its_parts_and_the_place_of_the_first(buffers: Any):
    nodes = [*run_of_three(buffers), *run_of_three(buffers)]
    fused = fuse(nodes, Table(*EVERYTHING).bound)
    assert names(fused) == ["add+scale+read", "add+scale+read"]
    first = fused[0]
    assert isinstance(first, Node)
    assert isinstance(first.args, CompositeArgs)
    assert all(part is n.args for part, n in zip(first.args.parts, nodes[:3], strict=True) if isinstance(n, Node))
    assert (first.unit, first.stage) == ("rows", "stage")


def test_same_contracts_over_other_buffers_are_no_run(buffers: Any):
    b = buffers
    nodes = [node("add", x=b.x, y=b.y), node("scale", x=b.z, out=b.out)]
    assert names(fuse(nodes, Table(*EVERYTHING).bound)) == ["add", "scale"]


def test_nothing_is_fused_over_what_no_contract_describes(buffers: Any):
    first, *rest = run_of_three(buffers)
    own = Call("custom_block", lambda stream, n: None, "rows", "stage")
    fused = fuse([first, own, *rest], Table(*EVERYTHING).bound)
    assert names(fused) == ["add", "fill", "scale+read"]
    assert fused[1] is own


def test_launch_lengths_must_count_the_same(buffers: Any):
    b = buffers
    nodes = [node("add", x=b.x, y=b.y), node("scale", "seqs", x=b.x, out=b.out)]
    assert names(fuse(nodes, Table(*EVERYTHING).bound)) == ["add", "scale"]


def test_parts_defined_over_different_lengths_fuse_where_each_counts_its_own(buffers: Any):
    rows: Any = {field: fitting(spec) for field, spec in REGISTRY["pack_rows"].args.specs().items()}
    logit_rows: Any = {field: rows.get(field, fitting(spec)) for field, spec in REGISTRY["pack_logit_rows"].args.specs().items()}
    pack = Node("pack_rows", REGISTRY["pack_rows"].args(**rows), "rows", "pack")
    table = Table("pack_rows", "pack_logit_rows", "pack_rows+pack_logit_rows").bound
    for unit, wanted in {"logit_rows": ["pack_rows+pack_logit_rows"], "seqs": ["pack_rows", "pack_logit_rows"]}.items():
        other: Any = Node("pack_logit_rows", REGISTRY["pack_logit_rows"].args(**logit_rows), unit, "later")  # type: ignore[arg-type]
        fused = fuse([pack, other], table)
        assert names(fused) == wanted
        assert (fused[0].unit, fused[0].stage) == ("rows", "pack")


def test_parameters_of_one_name_must_be_equal(monkeypatch: pytest.MonkeyPatch):
    weight: Any = object()
    x, out = buffer(), buffer()
    monkeypatch.setitem(COMPOSITES, "rms_norm+rms_norm", Composite("rms_norm+rms_norm", ("rms_norm", "rms_norm"), "A toy."))
    table = Table("rms_norm", "rms_norm+rms_norm").bound

    def norm(eps: float) -> Node:
        args: Any = {"x": x, "weight": weight, "eps": eps, "plus_one": False, "out": out}
        return Node("rms_norm", RmsNormV1(**args), "rows", "stage")

    assert names(fuse([norm(1e-5), norm(1e-5)], table)) == ["rms_norm+rms_norm"]
    assert names(fuse([norm(1e-5), norm(1e-6)], table)) == ["rms_norm", "rms_norm"]


def test_metadata_fill_between_two_parts_keeps_them_apart(buffers: Any):
    meta: Any = None
    nodes = run_of_three(buffers)
    nodes.insert(1, Fill(meta, 0, "rows", "stage"))
    assert names(fuse(nodes, Table(*EVERYTHING).bound)) == ["add", "fill", "scale+read"]


@pytest.mark.parametrize("place", ["later", "other program", "earlier, in the next step"])
def test_run_is_not_fused_where_somebody_reads_what_would_not_be_written(buffers: Any, place: str):
    b, table = buffers, Table(*EVERYTHING).bound
    reader, run = node("read", out=b.out, y=b.z), run_of_three(b)
    if place == "later":
        assert names(fuse([*run, reader], table)) == ["add+scale", "read", "read"]
    elif place == "other program":
        assert names(fuse(run, table, [[reader]])) == ["add+scale", "read"]
    else:
        assert names(fuse([reader, *run], table)) == ["read", "add+scale", "read"]


def test_dead_buffer_that_is_written_anew_before_it_is_read_may_die(buffers: Any):
    b, table = buffers, Table(*EVERYTHING).bound
    writer, reader = node("scale", "seqs", x=b.z, out=b.out), node("read", "seqs", out=b.out, y=b.z)
    assert names(fuse([*run_of_three(b), writer, reader], table)) == ["add+scale+read", "scale+read"]
    assert names(fuse(run_of_three(b), table, [[writer, reader]])) == ["add+scale+read"]


def test_programs_of_one_step_see_each_others_readers(buffers: Any):
    def described(reads_out: bool) -> list[list[str]]:
        table = Table(*EVERYTHING)
        target, draft = table.builder("target"), table.builder("draft")
        target.nodes += run_of_three(buffers)
        draft.nodes.append(node("read", out=buffers.out if reads_out else buffers.x, y=buffers.z))
        return [program.describe() for program in build((target, draft))]

    assert described(reads_out=False) == [["add+scale+read"], ["read"]]
    assert described(reads_out=True) == [["add+scale", "read"], ["read"]]


def test_no_composite_lets_what_describes_rows_die():
    for one in COMPOSITES.values():
        assert not {"row_slot", "positions", "block_table"} & set(one.dead), one.name


# -- building --------------------------------------------------------------------------------------
def test_program_is_a_flat_list_of_calls_with_their_lengths(buffers: Any):
    table, context = Table("add", "scale", "read", "count"), StepContext(real_slots=2, has_prefill=True)
    steps: list[Any] = []
    meta: Any = SimpleNamespace(fill=lambda stream, step: steps.append((stream, step)))
    builder = table.builder(context=context)
    builder.fill(meta, 3, "rows", "stage")
    for n in run_of_three(buffers):
        assert isinstance(n, Node)
        builder.add(n.contract, n.unit, n.stage, **vars(n.args))
    builder.add("count", "seqs", "last", x=buffers.x)
    program = builder.build()
    assert program.describe() == ["forward_meta", "add", "scale", "read", "count"]
    assert [call[0] for call in program.calls] == [entry.launch for entry in program.entries]
    assert [entry.stage for entry in program.entries] == ["stage"] * 4 + ["last"]
    stream: Any = "stream"
    program.run(stream, lengths(rows=7, seqs=2))
    assert table.log == [("add", 7), ("scale", 7), ("read", 7), ("count", 2)]
    ((seen, step),) = steps
    assert (seen, step) == ("stream", StepMeta(pass_index=3, launch_rows=7, real_slots=2, has_prefill=True))


def test_lengths_stand_in_the_order_of_units():
    assert lengths(seqs=2, rows=5) == tuple({"rows": 5, "seqs": 2}.get(unit, 0) for unit in UNITS)


def test_missing_contracts_of_a_whole_step_are_named_at_once(buffers: Any):
    table = Table("read")
    target, draft = table.builder("target"), table.builder("draft")
    target.add("add", "rows", "stage", x=buffers.x, y=buffers.y)
    target.add("read", "rows", "stage", out=buffers.x, y=buffers.y)
    draft.add("scale", "rows", "stage", x=buffers.x, out=buffers.out)
    with pytest.raises(
        CapabilityError, match=r"does not own: add \(in target\), scale \(in draft\); implement .*polydraft contracts"
    ):
        build((target, draft))
    assert not table.providers["read"].bound


class MixV1(Args):
    """Something of everything."""

    x: Buffer = tensor("N H", "act", "Stream.", access="inout")
    bias: Buffer = tensor("H", "act", "May be left out.", optional=True)
    held: tuple[Buffer, ...] = columns("Slot columns.")
    weight: Any = opaque("weight", "Weight.")
    gain: Any = opaque("weight", "May be left out.", optional=True)
    cache: Any = opaque("cache", "Cache.")
    meta: Any = opaque("meta", "Metadata.")
    style: str = param("How.")


@pytest.fixture
def mix(monkeypatch: pytest.MonkeyPatch) -> ProgramBuilder:
    """A builder with memory for one launch of everything."""
    monkeypatch.setattr(REGISTRY, "_contracts", {**REGISTRY._contracts, "mix": dataclasses.replace(
        REGISTRY["residual_add"], name="mix", args=MixV1, unit="any"
    )})  # fmt: skip
    table = Table("mix")
    table.declared = {name: buffer() for name in ("x", "other", "bias", "a", "b", "style")}
    builder = table.builder()
    builder.memory.weights = {"w": object(), "gain": object()}  # type: ignore[dict-item]
    builder.memory.caches, builder.memory.metas = {"layers.0": object()}, {"target": object()}  # type: ignore[dict-item]
    return builder


WHOLE: dict[str, Any] = {"held": ("a", "b"), "weight": "w", "cache": "layers.0", "meta": "target", "style": "x"}


def bound(builder: ProgramBuilder) -> Any:
    (node,) = builder.nodes
    assert isinstance(node, Node)
    return node.args


def test_a_launch_names_what_it_is_bound_to(mix: ProgramBuilder):
    """A buffer that is not given is the one of the field's own name; what may be left out is left out, even where something bears
    its name; a parameter is a value, even where something bears that."""
    memory = mix.memory
    mix.add("mix", "rows", "stage", **WHOLE)
    args = bound(mix)
    assert args.x is memory.buffers["x"]
    assert [*args.held] == [memory.buffers["a"], memory.buffers["b"]]
    assert (args.weight, args.cache, args.meta) == (memory.weights["w"], memory.caches["layers.0"], memory.metas["target"])
    assert (args.bias, args.gain, args.style) == (None, None, "x")


def test_a_launch_may_be_given_other_names_and_things_themselves(mix: ProgramBuilder):
    mine, memory = buffer(), mix.memory
    mix.add("mix", "rows", "stage", **{**WHOLE, "weight": mine, "held": (mine, "a")}, x="other", bias="bias", gain=None)
    args = bound(mix)
    assert (args.x, args.bias, args.gain) == (memory.buffers["other"], memory.buffers["bias"], None)
    assert args.weight is mine
    assert [*args.held] == [mine, memory.buffers["a"]]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"y": "x", "size": 3},
            r"^step: launch of mix/1, got size, y, wanted fields of it: x, bias, held, weight, gain, cache, meta, style",
        ),
        ({"x": "z"}, r"^launch of mix/1: x is the buffer 'z', which no module declares; declare it, or correct the name$"),
        ({"bias": "z"}, r"^launch of mix/1: bias is the buffer 'z', which no module declares"),
        ({"held": ("a", "z")}, r"^launch of mix/1: held is the buffer 'z', which no module declares"),
        ({"weight": "x"}, r"^launch of mix/1: weight is the weight 'x', which no module declares"),
        ({"cache": "w"}, r"^launch of mix/1: cache is the cache 'w', which no module declares"),
        ({"meta": "w"}, r"^launch of mix/1: meta is the meta 'w', which no module declares"),
        *(({name: ...}, rf"^step: launch of mix/1, {name} is missing, wanted a value; give one$")
          for name in ("held", "weight", "cache", "meta", "style")),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_wrong_launches_are_refused_when_they_are_added(mix: ProgramBuilder, changes: dict[str, Any], sentence: str):
    fields = {name: value for name, value in {**WHOLE, **changes}.items() if value is not ...}
    with pytest.raises(ContractError, match=sentence):
        mix.add("mix", "rows", "stage", **fields)
    assert not mix.nodes


def test_a_buffer_that_nobody_declares_is_named_though_the_launch_does_not():
    with pytest.raises(ContractError, match=r"^launch of add/1: x is the buffer 'x', which no module declares"):
        Table("add").builder().add("add", "rows", "stage")


def test_other_contracts_and_lengths_are_refused_when_they_are_added(buffers: Any):
    builder = Table("add", "count").builder()
    with pytest.raises(
        ContractError, match=r"^step: launch of count/1, got a length in rows, wanted seqs; count what it counts$"
    ):
        builder.add("count", "rows", "stage", x=buffers.x)
    with pytest.raises(ContractError, match="no contract is named 'ad'"):
        builder.add("ad", "rows", "stage", x=buffers.x, y=buffers.y)


def test_workspace_is_given_to_who_declared_it(buffers: Any):
    table = Table("add", "scale", "read", scale=96, read=32)
    builder = table.builder()
    for n in run_of_three(buffers):
        assert isinstance(n, Node)
        builder.add(n.contract, n.unit, n.stage, **vars(n.args))
    builder.build()
    given = {name: provider.bound[0][1] for name, provider in table.providers.items()}
    assert given["add"] is None
    assert given["scale"].nbytes == 96
    assert given["read"] is given["scale"]


# -- the real step ---------------------------------------------------------------------------------
def launches(llm: LLM) -> list[str]:
    programs = llm.engine.runner.programs
    return [contract for kind in programs.values() for program in kind.values() for contract in program.describe()]


def test_texts_and_rounds_are_equal_with_and_without_composites():
    owned = tuple(
        c for c in COMPOSITES if c in LLM(model=str(tiny.checkpoint("narrow")), backend="reference").engine.table.providers
    )
    assert len(owned) >= 3
    params = [SamplingParams(max_new_tokens=5), SamplingParams(max_new_tokens=5, temperature=0.9, top_p=0.9, seed=5)]
    prompts = ["def fibonacci(n):", "class Stack:\n    def push(self, item):"]
    outcomes: list[Any] = []
    for llm in (LLM(backend="reference", draft_tokens=3), LLM(plugin=backend_without(*owned), draft_tokens=3)):
        fused = {contract for contract in launches(llm) if "+" in contract}
        assert fused == (set(owned) if not outcomes else set())
        results = [out for p in params for out in llm.generate(prompts, p)]
        outcomes.append([(out.token_ids, out.rounds, out.drafted, out.finish_reason) for out in results])
    assert outcomes[0] == outcomes[1]


def test_engine_on_a_backend_without_a_contract_names_it():
    model = str(tiny.checkpoint("narrow"))
    with pytest.raises(CapabilityError, match=r"does not own: swiglu \(in mtp.0\)"):
        LLM(model=model, plugin=backend_without("swiglu"))
    assert LLM(model=model, plugin=backend_without("advance_draft"), draft_tokens=0).engine.resolved.proposer == "none"
