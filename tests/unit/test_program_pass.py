"""A backend's own pass over a program: what it may do, what is refused, where its kernels run, and what is reported of it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from polydraft.backend import Collectives
from polydraft.contracts.composite import CompositeArgs
from polydraft.errors import ContractError, PluginError
from polydraft.plugins.checks import check_table
from polydraft.plugins.kernel_table import PackTable, TablePass, lay_over
from polydraft.plugins.program_pass import Entry, Node, OwnKernel, Rewritten, UnboundProgram
from polydraft.program.program import Program, build, joined_launches
from polydraft.reference.device import ReferenceDevice
from polydraft.reference.table import NumpyTable
from tests.unit.test_program import LIMITS, Provider, Table, buffers, contracts, node, run_of_three  # noqa: F401  # fixtures

OWNED = ("add", "scale", "read", "count")
Rewrite = Callable[[UnboundProgram], Sequence[Entry]]


class Pass:
    """A pass that does what a test says, with kernels of two runs and one for scaling alone."""

    def __init__(self, rewrite: Rewrite, log: list[Any]) -> None:
        self._rewrite, self.seen = rewrite, list[UnboundProgram]()
        parts = {"both": ("add", "scale"), "scaled": ("scale", "read"), "fast": ("scale",)}
        self.kernels = {name: OwnKernel(each, Provider(name, log)) for name, each in parts.items()}

    def rewrite(self, program: UnboundProgram) -> Sequence[Entry]:
        self.seen.append(program)
        return self._rewrite(program)


class Passing(Table):
    """A table with a pass over what it serves."""

    def __init__(self, rewrite: Rewrite, *names: str, served: Sequence[str] = OWNED) -> None:
        super().__init__(*names)
        self.own = Pass(rewrite, self.log)
        self.bound = replace(self.bound, passes=(TablePass("chip", frozenset(served), self.own),))

    def program(self, entries: Sequence[Entry]) -> Program:
        builder = self.builder("greedy.target")
        builder.nodes += entries
        return builder.build()


def merge(kernel: str, start: int, end: int, *dead: str) -> Rewrite:
    """Give entries `start` to `end` to a kernel, which does not write those arguments."""

    def rewrite(program: UnboundProgram) -> list[Entry]:
        nodes: Any = program.entries[start:end]
        lost = tuple(next(getattr(n.args, name) for n in nodes if hasattr(n.args, name)) for name in dead)
        return [*program.entries[:start], Rewritten(nodes, kernel, "it is faster", lost), *program.entries[end:]]

    return rewrite


def test_launches_become_one_where_they_are_captured_and_stay_apart_elsewhere(buffers: Any):  # noqa: F811
    table = Passing(merge("scaled", 1, 3, "out"), *OWNED)
    entries = run_of_three(buffers)
    program = table.program(entries)
    assert program.describe() == ["add", "scale", "read"]
    assert [entry.contract for entry in program.captured] == ["add", "scale+read"]
    assert program.captured[0] is program.entries[0], "what is the same is bound once"
    assert [entry.spans for entry in program.captured] == [1, 2]
    for launches in ([launch for launch, _ in program.calls], [launch for _, launch, _ in program.recorded()]):
        for launch in launches:
            launch(None, 4)  # type: ignore[arg-type]
    assert table.log == [("add", 4), ("scale", 4), ("read", 4), ("add", 4), ("scaled", 4)]
    ((args, _),) = table.own.kernels["scaled"].provider.bound  # type: ignore[attr-defined]
    assert isinstance(args, CompositeArgs)
    assert all(part is one.args for part, one in zip(args.parts, entries[1:], strict=True) if isinstance(one, Node))


def test_another_kernel_for_one_launch_serves_it_everywhere(buffers: Any):  # noqa: F811
    table = Passing(merge("fast", 1, 2), *OWNED)
    entries = run_of_three(buffers)
    program = table.program(entries)
    assert program.captured == ()
    assert program.describe() == ["add", "scale", "read"]
    assert [name for name, provider in table.own.kernels.items() if provider.provider.bound] == ["fast"]  # type: ignore[attr-defined]
    assert table.own.kernels["fast"].provider.bound[0][0] is entries[1].args  # type: ignore[attr-defined, union-attr]
    assert not table.providers["scale"].bound


def test_a_pass_sees_composites_and_what_it_leaves_is_bound_as_ever(buffers: Any):  # noqa: F811
    table = Passing(lambda program: program.entries, *OWNED, "add+scale", served=(*OWNED, "add+scale"))
    program = table.program(run_of_three(buffers))
    (seen,) = table.own.seen
    assert [entry.contract for entry in seen.entries if isinstance(entry, Node)] == ["add+scale", "read"]
    assert (seen.name, seen.limits) == ("greedy.target", LIMITS)
    assert program.describe() == ["add+scale", "read"]
    (one,) = joined_launches([program])
    assert (one.joined.contracts, one.joined.captured, one.launches) == ("add+scale", False, {"greedy.target": 1})


def test_it_can_ask_who_reads_what(buffers: Any):  # noqa: F811
    b = buffers
    answers: dict[str, list[bool]] = {}

    def ask(program: UnboundProgram) -> Sequence[Entry]:
        answers[program.name] = [program.is_read(buffer, 2) for buffer in (b.out, b.x, b.z)]
        return program.entries

    table = Passing(ask, *OWNED)
    target, draft = table.builder("target"), table.builder("draft")
    target.nodes += run_of_three(b)
    draft.nodes.append(node("scale", x=b.z, out=b.y))
    build((target, draft))
    assert answers == {"target": [True, True, True], "draft": [False, True, True]}


def dropped(program: UnboundProgram) -> Sequence[Entry]:
    return program.entries[:-1]


def swapped(program: UnboundProgram) -> Sequence[Entry]:
    first, second, *rest = program.entries
    return [second, first, *rest]


def doubled(program: UnboundProgram) -> Sequence[Entry]:
    return [*program.entries, program.entries[-1]]


def invented(program: UnboundProgram) -> Sequence[Entry]:
    first: Any = program.entries[0]
    return [replace(first), *program.entries[1:]]


def broken(program: UnboundProgram) -> Sequence[Entry]:
    raise KeyError(program.name)


def nothing(program: UnboundProgram) -> Sequence[Entry]:
    result: Any = None
    return result  # type: ignore[no-any-return]


def nodeless(program: UnboundProgram) -> Sequence[Entry]:
    nodes: Any = None
    return [Rewritten(nodes, "fast", "none"), *program.entries[1:]]


REFUSED: dict[str, tuple[Rewrite, str]] = {
    "raises": (broken, r"raised KeyError: 'greedy\.target', or returned no list of entries; correct it"),
    "returns nothing": (nothing, r"raised TypeError: 'NoneType' object is not iterable, or returned no list"),
    "rewrites no nodes": (nodeless, r"raised TypeError: .*, or returned no list"),
    "loses an entry": (dropped, r"returned 2 entries, wanted 3"),
    "moves entries": (swapped, r"returned scale as entry 0, wanted all entries in their order"),
    "returns one twice": (doubled, r"returned read as entry 3, wanted all entries"),
    "returns a copy": (invented, r"returned add as entry 0, wanted all entries"),
    "names no kernel of its own": (merge("other", 0, 2), r"gives add\+scale to kernel 'other', which it does not have"),
    "takes a kernel for others": (merge("scaled", 0, 2), r"kernel 'scaled', which is for scale\+read; leave that run"),
    "does not write what it reads again": (merge("both", 0, 2, "x"), r"does not write x, which is read elsewhere"),
    "does not write what none of it reads": (merge("both", 0, 2, "out"), r"does not write a buffer, but that is not what one of"),
    "does not write all of one launch": (merge("fast", 1, 2, "out"), r"does not write everything that this one launch"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_the_same_program_is_refused(what: str, buffers: Any):  # noqa: F811
    rewrite, said = REFUSED[what]
    buffers.x.name = "x"
    with pytest.raises(PluginError, match=rf"plugin 'chip': its pass over greedy\.target .*{said}"):
        Passing(rewrite, *OWNED).program(run_of_three(buffers))


@pytest.mark.parametrize("place", ["behind", "in front, in the next step", "in the other program"])
def test_so_is_a_kernel_that_does_not_write_what_somebody_reads(place: str, buffers: Any):  # noqa: F811
    b, start = buffers, int(place.startswith("in front"))
    b.out.name = "out"
    run, reader = run_of_three(b)[1:], node("read", out=b.out, y=b.z)
    table = Passing(lambda p: merge("scaled", start, start + 2, "out")(p) if p.name == "target" else p.entries, *OWNED)
    target, draft = table.builder("target"), table.builder("draft")
    target.nodes += [reader, *run] if start else [*run, reader] if place == "behind" else run
    draft.nodes += [reader] if "other" in place else []
    with pytest.raises(PluginError, match="does not write out, which is read elsewhere; leave that run as it is"):
        build((target, draft))


def test_what_no_launch_reads_the_host_may_read(buffers: Any):  # noqa: F811
    with pytest.raises(
        PluginError, match="does not write a buffer, but that is not what one of these launches writes for another"
    ):
        Passing(merge("both", 0, 2, "out"), *OWNED).program(run_of_three(buffers)[:2])


def test_what_a_run_adds_to_and_reads_may_die_where_it_is_written_anew_in_front(buffers: Any):  # noqa: F811
    b = buffers
    entries = [node("scale", x=b.z, out=b.x), node("add", x=b.x, y=b.y), node("scale", x=b.x, out=b.out)]
    program = Passing(merge("both", 1, 3, "x"), *OWNED).program(entries)
    assert [entry.contract for entry in program.captured] == ["scale", "add+scale"]
    with pytest.raises(PluginError, match="does not write a buffer, which is read elsewhere; leave that run as it is"):
        Passing(merge("both", 1, 3, "x"), *OWNED).program([*entries, node("scale", x=b.x, out=b.y)])


def test_collectives_bring_the_pass_that_sees_them_and_what_the_backend_serves():
    def nothing(program: UnboundProgram) -> Sequence[Entry]:
        return program.entries

    brought: Any = Pass(nothing, [])
    pack = PackTable("fast", "", table_of("sample", rewrite=nothing), ordered=True)
    for own, given, chosen in ((nothing, brought, True), (nothing, None, False), (None, brought, True)):
        alone = lay_over("chip", table_of("sample", "argmax", rewrite=own), ReferenceDevice(), [pack])
        table = alone.with_collectives(Collectives({"broadcast": Provider("", [])}, {"broadcast": 1}, given), "chip")
        assert [(one.source, *sorted(one.served)) for one in table.passes] == [
            ("fast", "sample"),
            ("chip", "argmax", "broadcast"),
        ]
        assert (table.passes[1].program_pass is brought) == chosen
        assert alone.passes[-1].source == ("fast" if own is None else "chip")


def test_a_pass_keeps_to_what_its_own_table_serves(buffers: Any):  # noqa: F811
    table = Passing(merge("both", 0, 2), *OWNED, served=("scale",))
    with pytest.raises(PluginError, match=r"kernel 'both', but add is served by another plugin"):
        table.program(run_of_three(buffers))


def test_launch_lengths_have_to_count_the_same(buffers: Any):  # noqa: F811
    b = buffers
    entries = [node("add", x=b.x, y=b.y), node("scale", "seqs", x=b.x, out=b.out)]
    with pytest.raises(PluginError, match="their launch lengths count different things"):
        Passing(merge("both", 0, 2), *OWNED).program(entries)


def test_records_are_checked_before_a_kernel_of_a_pass_sees_them(buffers: Any):  # noqa: F811
    table = Passing(merge("both", 0, 2), *OWNED)
    buffers.y.dtype = "i32"
    with pytest.raises(ContractError, match="argument y is of dtype i32"):
        table.program(run_of_three(buffers))
    assert not table.own.kernels["both"].provider.bound  # type: ignore[attr-defined]


# -- tables ----------------------------------------------------------------------------------------
def table_of(*names: str, rewrite: Rewrite | None = None) -> Any:
    brought = {} if rewrite is None else {"program_pass": Pass(rewrite, [])}
    return SimpleNamespace(providers=dict.fromkeys(names), versions=dict.fromkeys(names, 1), **brought)


def test_a_pack_and_the_backend_rewrite_what_each_serves():
    def nothing(program: UnboundProgram) -> Sequence[Entry]:
        return program.entries

    pack = PackTable("fast", "", table_of("sample", rewrite=nothing), ordered=True)
    table = lay_over("chip", table_of("sample", "argmax", rewrite=nothing), ReferenceDevice(), [pack])
    assert [(one.source, *one.served) for one in table.passes] == [("fast", "sample"), ("chip", "argmax")]
    assert table.owners == {"sample": "fast", "argmax": "chip"}
    assert lay_over("chip", table_of("argmax"), ReferenceDevice(), []).passes == ()


def test_a_table_whose_pass_cannot_be_run_is_refused():
    table = NumpyTable(ReferenceDevice())
    for brought, said in ((SimpleNamespace(kernels={}), "it has no rewrite"), (object(), "it has no kernels")):
        table.program_pass = brought  # type: ignore[attr-defined]
        with pytest.raises(PluginError, match=rf"plugin 'chip': polydraft_kernels has no usable program_pass: {said}"):
            check_table("chip", table)
