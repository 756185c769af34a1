"""How several launches of a program become one.

There are two ways. *Composites* that the kernel table has are laid over runs of launches by core (`fuse`). What a composite
cannot say (buffers of different names that are one, conditions on shapes, what stands in front) the backend's own *program pass*
says (`polydraft.plugins.program_pass`). Core runs it once for each program, checks that what came back is the same program, and
tells what was joined (`Joined`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from polydraft.contracts import COMPOSITES
from polydraft.contracts.base import Args, Limits, ParamSpec
from polydraft.contracts.composite import Composite, CompositeArgs
from polydraft.errors import PluginError, PolydraftError
from polydraft.plugins.kernel_table import BoundTable, TablePass
from polydraft.plugins.program_pass import Entry, Node, Readers, Rewritten, UnboundProgram, accesses


# -- composites ------------------------------------------------------------------------------------
def fuse(nodes: Sequence[Entry], table: BoundTable, others: Sequence[Sequence[Entry]] = ()) -> list[Entry]:
    """Replace each run of nodes that a registered composite describes by the largest such composite the table owns.

    A run stays as it is if a buffer is read that the composite would not write: a later node, a node of the `others` (the other
    programs of the step), or an earlier node in the next step."""
    owned = sorted((c for c in COMPOSITES.values() if c.name in table.providers), key=lambda c: -len(c.parts))
    begins: dict[str, list[Composite]] = {}
    for composite in owned:
        begins.setdefault(composite.parts[0], []).append(composite)
    readers = Readers(nodes, others)
    result: list[Entry] = []
    index = 0
    while index < len(nodes):
        node = nodes[index]
        for composite in begins.get(node.contract, ()) if isinstance(node, Node) else ():
            end = index + len(composite.parts)
            run = matches(composite, nodes[index:end])
            if run and not any(readers.is_read(buffer, end) for buffer in _dead(composite, run)):
                parts = CompositeArgs(tuple(n.args for n in run if isinstance(n.args, Args)))
                result.append(Node(composite.name, parts, run[0].unit, run[0].stage))
                index = end
                break
        else:
            result.append(node)
            index += 1
    return result


def matches(composite: Composite, nodes: Iterable[Entry]) -> list[Node]:
    """The nodes as a run of the composite's parts, or an empty list: the same contracts in the same order, launch lengths that
    count the same (or, where the parts are defined over different ones, what their contracts say), and fields of one name
    that are the same buffer or the same parameter."""
    run = [n for n in nodes if isinstance(n, Node)]
    if tuple(n.contract for n in run) != composite.parts:
        return []
    declared = [contract.unit for contract in composite.contracts]
    mixed = len(set(declared) - {"any"}) > 1
    if len({n.unit for n in run}) > 1 and not (mixed and declared == [n.unit for n in run]):
        return []
    seen: dict[str, Any] = {}
    for contract, node in zip(composite.contracts, run, strict=True):
        for name, spec in contract.args.specs().items():
            value = getattr(node.args, name)
            first = seen.setdefault(name, value)
            if not (first == value if isinstance(spec, ParamSpec) else first is value):
                return []
    return run


def _dead(composite: Composite, run: Sequence[Node]) -> list[Any]:
    """What the launches of the run would write and the composite does not."""
    return [next(getattr(n.args, name) for n in run if hasattr(n.args, name)) for name in composite.dead]


# -- a backend's pass ------------------------------------------------------------------------------
def rewrite(
    name: str, entries: Sequence[Entry], others: Sequence[Sequence[Entry]], table: BoundTable, limits: Limits
) -> list[Entry]:
    """Run the passes of the table over a program whose composites are chosen, and check what each returns. `others`: the other
    programs of the step. Raises `PluginError` naming the plugin and the program."""
    found = list(entries)
    for one in table.passes:
        program = UnboundProgram(name, tuple(found), one.served, limits, tuple(others))
        try:
            found = list(one.program_pass.rewrite(program))
            _check(one, program, found)
        except PolydraftError:
            raise
        except Exception as error:
            raise PluginError(
                f"plugin {one.source!r}: its pass over {name} raised {type(error).__name__}: {error}, or returned no list of "
                "entries; correct it"
            ) from error
    return found


def pass_of(entry: Rewritten, table: BoundTable) -> TablePass:
    """The pass that has rewritten an entry: a contract is served by one plugin."""
    return next(one for one in table.passes if entry.nodes[0].contract in one.served)


def _check(one: TablePass, program: UnboundProgram, found: Sequence[Entry]) -> None:
    """Every entry of the program is in `found` once and in its place, so that a read after a write stays after it; each
    rewritten run goes to a kernel of the plugin for just these contracts; and nothing reads what is not written any more."""
    where = f"plugin {one.source!r}: its pass over {program.name}"
    place, before = 0, {id(entry) for entry in program.entries}
    for entry in found:
        there = entry.nodes if isinstance(entry, Rewritten) and id(entry) not in before else (entry,)
        end = place + len(there)
        if not there or [*map(id, there)] != [*map(id, program.entries[place:end])]:
            got = getattr(entry, "contract", type(entry).__name__)
            raise PluginError(
                f"{where} returned {got} as entry {place}, wanted all entries in their order; rewrite runs in place"
            )
        if isinstance(entry, Rewritten) and id(entry) not in before:
            problem = _problem(one, program, entry, end)
            if problem:
                raise PluginError(
                    f"{where} gives {entry.contract} to kernel {entry.kernel!r}, {problem}; leave that run as it is"
                )
        place = end
    if place != len(program.entries):
        raise PluginError(f"{where} returned {place} entries, wanted {len(program.entries)}; return every entry once")


def _problem(one: TablePass, program: UnboundProgram, entry: Rewritten, end: int) -> str:
    """What forbids to rewrite the entries that end in front of `end` so; "" where nothing does."""
    if entry.kernel not in one.program_pass.kernels:
        return "which it does not have"
    wanted = one.program_pass.kernels[entry.kernel].parts
    if tuple(entry.contract.split("+")) != wanted:
        return f"which is for {'+'.join(wanted)}"
    strange = [node.contract for node in entry.nodes if node.contract not in one.served]
    if strange:
        return f"but {strange[0]} is served by another plugin"
    if len({node.unit for node in entry.nodes}) > 1:
        return "but their launch lengths count different things"
    if entry.dead and not entry.captured:
        return "which does not write everything that this one launch has to"
    for buffer in entry.dead:
        name = getattr(buffer, "name", "a buffer")
        first, *others = [*filter(None, ({a for v, a in accesses(r) if v is buffer} for r in entry.records)), set[str]()]
        written = first in ({"out"}, {"inout"})
        if not written or not any(touched - {"out"} for touched in others):  # the host may read what no launch does
            return f"which does not write {name}, but that is not what one of these launches writes for another"
        if program.is_read(buffer, end):
            return f"which does not write {name}, which is read elsewhere"
    return ""


# -- reports ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Joined:
    """Launches that became one, or went to another kernel, for `--explain` and reports. `captured`: in captured steps alone."""

    contracts: str
    by: str
    """The plugin whose kernel it is."""
    why: str
    captured: bool = False


def joined(entry: Entry, table: BoundTable) -> Joined | None:
    """What was joined into an entry that is to be bound; None for a launch of one contract by the table's provider."""
    if isinstance(entry, Rewritten):
        return Joined(entry.contract, pass_of(entry, table).source, entry.why, entry.captured)
    if isinstance(entry, Node) and isinstance(entry.args, CompositeArgs):
        return Joined(entry.contract, table.owners.get(entry.contract, ""), COMPOSITES[entry.contract].doc)
    return None
