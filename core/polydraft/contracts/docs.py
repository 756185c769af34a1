"""Renders the page of a contract from its record: everything that an implementer has to know.

The command line prints it and the tests of contracts keep it complete. It says nothing that the record does not say.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from polydraft.contracts import kv_quant
from polydraft.contracts.base import UNIT_MEANING, ColumnsSpec, Contract, OpaqueSpec, ParamSpec, TensorSpec
from polydraft.contracts.definition import definition_of, names_in
from polydraft.contracts.features import FEATURES
from polydraft.contracts.inputs import SEEDS
from polydraft.contracts.sizes import named

SYMBOL_MEANING: Final[Mapping[str, str]] = {
    "B": "slots; sequences of a launch",
    "K": "drafts of a round",
    "W": "tokens of a window, K + 1",
    "R": "packed rows of a pass",
    "RP": "packed rows that have a position: the rows of a pass, or one a sequence",
    "NL": "logit rows of a pass",
    "N": "rows of the launch",
    "L": "tokens of a history",
    "MB": "entries of a slot's block table",
    "S": "stop tokens of a slot",
    "A": "logit biases of a slot",
    "X": "places for the bad words of a slot",
    "C": "columns of a snapshot record",
    "E": "columns of log probabilities: an emitted token, then the most likely ones",
    "Z": "words of a packed record",
    "WM": "words of a token mask",
    "V": "tokens of the vocabulary",
    "VD": "tokens of a reduced vocabulary",
    "H": "features of a hidden row",
    "D": "features of a normalised row or head",
    "I": "features that go in",
    "O": "features that come out",
    "G": "gate and up features, 2 * I",
    "Q": "query, key and value features of a row",
    "P": "query features of a row",
}
"""Shape symbols that contracts share; all are capacities, the launch length and the data say how much of them is used. A contract
explains symbols of its own itself (`Contract.symbols`)."""

LONG: Final = 120
"""Characters of what pages that follow each other do not repeat."""
_CODE, _FENCE, _DEFINITIONS = "```python\n", "\n```", "\n\n\n"
"""What code begins and ends with, and what is between definitions."""

_DETERMINISM: Final[Mapping[str, str]] = {
    "bitwise": "Every run of one backend gives the same bits, whatever else is in the launch.",
    "run-to-run": "The same launch gives the same bits in every run of one backend.",
    "none": "Bits may differ from run to run.",
}


def signature(contract: Contract) -> str:
    """Return one line: inputs (`inout` where they are written too, `?` where they may be left out, `<kind>` where the
    backend owns the form), static parameters after the semicolon, outputs after the arrow."""
    inputs, params, outputs = [], [], []
    for name, spec in contract.args.specs().items():
        if isinstance(spec, ParamSpec):
            params.append(f"{name}: {_type(contract, name)}")
        elif isinstance(spec, ColumnsSpec):
            inputs.append(f"inout {name}[B,...] tuple")
        elif spec.access == "out":
            outputs.append(_argument(contract, name, spec))
        else:
            inputs.append(("inout " if spec.access == "inout" else "") + _argument(contract, name, spec))
    given = "; ".join(", ".join(part) for part in (inputs, params) if part)
    return f"{contract.key}({given})" + (f" -> {', '.join(outputs)}" if outputs else "")


def render(contract: Contract) -> str:
    """Return the Markdown page of a contract, ending in a newline. Runs `contract.cases` to list them."""
    return "\n\n".join(part for part in _parts(contract) if part) + "\n"


def render_all(contracts: Iterable[Contract]) -> str:
    """Return the pages of several contracts, one after the other; of what an earlier page says word for word, a later one says
    where it is."""
    said: dict[str, str] = {}
    return "\n".join("\n\n".join(_once(contract, said)) + "\n" for contract in contracts)


def _once(contract: Contract, said: dict[str, str]) -> Iterator[str]:
    """The parts of a page. `said`: paragraphs and definitions of earlier pages, to the contract that has them."""
    for part in filter(None, _parts(contract)):
        if part.startswith(_CODE):
            yield _CODE + _DEFINITIONS.join(
                _referred(one, "# ", contract, said) for one in part[len(_CODE) :].split(_DEFINITIONS)
            )
        else:
            yield part if len(part) < LONG or part.startswith("|") else _referred(part, "", contract, said)


def _referred(text: str, mark: str, contract: Contract, said: dict[str, str]) -> str:
    """The text, or where it is, behind `mark` and its beginning."""
    where = said.setdefault(text.removesuffix(_FENCE), contract.name)
    if where == contract.name or len(text) < LONG:
        return text
    return f"{mark}{textwrap.shorten(text.partition(_FENCE)[0], LONG // 2, placeholder=' ...')}: on the page of `{where}`" + (
        _FENCE if text.endswith(_FENCE) else ""
    )


def _parts(contract: Contract) -> Iterator[str]:
    yield f"# {contract.name}, version {contract.version}"
    yield contract.doc
    if contract.feature:
        yield f"It belongs to the feature `{contract.feature}`: {FEATURES[contract.feature].doc}."
    yield f"```text\n{signature(contract)}\n```"
    yield inspect.cleandoc(contract.args.__doc__ or "")
    yield "## Arguments"
    yield _table(
        ("argument", "access", "shape", "dtype", "carries nothing", "compared", "meaning"),
        (_row(contract, n, s) for n, s in contract.args.specs().items() if not isinstance(s, ParamSpec)),
    )
    params = {name: spec for name, spec in contract.args.specs().items() if isinstance(spec, ParamSpec)}
    if params:
        yield "## Static parameters"
        rows = ((f"`{name}`", _type(contract, name), spec.doc) for name, spec in params.items())
        yield _table(("parameter", "type", "meaning"), rows)
    yield "## Shapes"
    meaning = {**SYMBOL_MEANING, **contract.symbols}
    yield _table(("symbol", "counts"), ((symbol, meaning[symbol]) for symbol in _symbols(contract)))
    yield from _promises(contract)
    yield from _launch(contract)
    yield from _definition(contract)
    yield f"## Source\n\n{contract.source}"
    yield from _proof(contract)


def _promises(contract: Contract) -> Iterator[str]:
    """What a provider may rely on when it is bound."""
    free = " Sizes called N are each buffer's own, and the launch length lies within all of them." * ("N" in _symbols(contract))
    yield (
        "A record that does not fit is refused with a `ContractError` before a provider sees it: another dtype or rank, sizes "
        "that share a symbol and differ, something missing, a buffer in two places of which one is written."
        f"{free}" + (" Nor does a record fit that breaks one of these:" if contract.constraints else "")
    )
    if contract.constraints:
        yield "\n".join(f"- `{constraint}`" for constraint in contract.constraints)


def _launch(contract: Contract) -> Iterator[str]:
    yield "## Launch"
    yield (
        f"The launch length counts {UNIT_MEANING[contract.unit]}. It is an upper bound known to the host; what lies at "
        "or beyond it on that axis is never written. A launch is ordered by its stream, may be captured in a graph, "
        "never allocates, never synchronises with the host and returns nothing."
    )
    pool = " A framework's own pool may give temporaries." if contract.pool_temporaries else ""
    yield _DETERMINISM[contract.deterministic] + pool


def _definition(contract: Contract) -> Iterator[str]:
    yield "## Definition"
    source = textwrap.dedent(inspect.getsource(contract.golden)).rstrip()
    yield (
        "The golden. `a` has a field for each argument and parameter: buffers and weights as NumPy arrays in their shapes above, "
        "floats in float64, None for what is left out; `n` is the launch length." + _CACHE * any(_caches(contract))
    )
    yield f"```python\n{source}\n```"
    rest = definition_of(contract.golden.__module__, [*names_in(source), *_described(contract)])
    if rest.text:
        yield "What it calls, and what this page names:"
        yield f"```python\n{rest.text}\n```"
    if rest.numbers:
        lines = (f"`from {module} import {', '.join(sorted(names))}`" for module, names in sorted(rest.numbers.items()))
        yield "A backend in Python may import the numbers among them: " + ", ".join(lines) + "."
    if contract.tolerance:
        scale = inspect.cleandoc(contract.scale.__doc__ or "") if contract.scale else "the largest magnitude of the row."
        yield "A kernel may differ by c * eps * scale, where eps belongs to the dtype and scale is: " + scale
    else:
        yield "A kernel may not differ at all."
    if contract.products:
        yield (
            "Where a backend declares `f32_matmul` as `tf32`, which rounds the factors of its products, eps of activations in "
            "f32 is that of TF32, 2**-10."
        )
    if contract.tipped:
        yield "And beside that: " + inspect.cleandoc(contract.tipped.__doc__ or "")
    for name, symbol in contract.sums.items():
        off = f"sqrt({symbol}) / 4 * 2**-23 * scale"
        yield f"`{name}` may differ by {off} more: what {symbol} float32 additions in any order are off."
    if any(_caches(contract)):
        yield "## Quantised rows"
        yield inspect.cleandoc(kv_quant.__doc__ or "").partition("\n\n")[2]
        yield f"```python\n{definition_of(kv_quant.__name__, ['quantise']).text}\n```"


_CACHE: Final = " `cache.k` and `cache.v` are [num_blocks, block_size, num_kv_heads, head_dim]."
_WORD: Final = re.compile(r"`([A-Z]\w+)`|\b([A-Z]+_[A-Z]+)\b")
"""A name in a description: marked as one, or a sentinel."""


def _caches(contract: Contract) -> Iterator[bool]:
    return (isinstance(spec, OpaqueSpec) and spec.kind == "cache" for spec in contract.args.specs().values())


def _described(contract: Contract) -> list[str]:
    """Names in the record's descriptions: of enumerations, sentinels and layouts."""
    texts = [contract.args.__doc__ or "", *(spec.doc for spec in contract.args.specs().values())]
    return list(dict.fromkeys(marked or sentinel for text in texts for marked, sentinel in _WORD.findall(text)))


def _proof(contract: Contract) -> Iterator[str]:
    yield "## Cases"
    yield "\n".join(f"- `{case.name}` (launch length {case.n})" for case in contract.cases())
    yield f"And generated cases, `seed-0` to `seed-{SEEDS - 1}` by default."
    for capability, cases in contract.optional_cases.items():
        yield f"Asked only of backends that declare `{capability}`:"
        yield "\n".join(f"- `{case.name}` (launch length {case.n})" for case in cases())
    if contract.grows:
        steps = (f"`{name}` of {', '.join(f'{size:,}' for size in ladder.steps)}" for name, ladder in contract.grows.items())
        yield f"And cases with one large dimension, called like `{_large(contract)}`: {'; '.join(steps)}."
        if contract.together:
            yield f"And with several at once: {', '.join(f'`{named(sizes)}`' for sizes in contract.together)}."
        yield "And cases on no list, with whatever is large, which the seed of a run draws: `surprise-0` and so on."
    if contract.equivalent_mutants:
        yield "Faults that no case can show:"
        yield "\n".join(f"- `{mutant}`: {proof}" for mutant, proof in contract.equivalent_mutants.items())


def _large(contract: Contract) -> str:
    name, ladder = next(iter(contract.grows.items()))
    return f"{name}-{ladder.steps[-1]}"


def _row(contract: Contract, name: str, spec: TensorSpec | ColumnsSpec | OpaqueSpec) -> tuple[str, ...]:
    if isinstance(spec, ColumnsSpec):
        return f"`{name}`", spec.access, "each [B] or [B, its width]", "each i32 or f32", "", "exactly", spec.doc
    shape = f"[{', '.join(spec.shape.split())}]" if spec.shape else ""
    dtype = spec.dtype if isinstance(spec, TensorSpec) else spec.kind
    return f"`{name}`", spec.access, shape, dtype, _pad(spec), _compared(contract, name, spec), spec.doc


def _pad(spec: TensorSpec | OpaqueSpec) -> str:
    """What rows hold that carry nothing."""
    pad = spec.pad if isinstance(spec, TensorSpec) else None
    if pad == "any":
        return "any finite number"
    return "" if pad is None else f"{float(pad):g}"


def _compared(contract: Contract, name: str, spec: TensorSpec | OpaqueSpec) -> str:
    if spec.access == "in":
        return "unchanged" if isinstance(spec, TensorSpec) or spec.kind == "cache" else ""
    bounds = [f"`{key}` within {c:g} eps" for key, c in contract.tolerance.items() if key.startswith(f"{name}.")]
    if name in contract.tolerance:
        return f"within {contract.tolerance[name]:g} eps"
    return ", ".join([*bounds, "else exactly"] if bounds else ["exactly"])


def _argument(contract: Contract, name: str, spec: TensorSpec | OpaqueSpec) -> str:
    optional = "?" if name in contract.args.__dict__ and contract.args.__dict__[name] is None else ""
    shape = f"[{','.join(spec.shape.split())}]" if spec.shape else ""
    return f"{name}{optional}{shape} {spec.dtype if isinstance(spec, TensorSpec) else f'<{spec.kind}>'}"


def _type(contract: Contract, name: str) -> str:
    """The annotation of a parameter as it is written."""
    hints = (inspect.get_annotations(record) for record in contract.args.__mro__)
    hint = next(annotations[name] for annotations in hints if name in annotations)
    return hint if isinstance(hint, str) else inspect.formatannotation(hint)


def _symbols(contract: Contract) -> list[str]:
    specs = contract.args.specs().values()
    shapes = ["B" if isinstance(spec, ColumnsSpec) else spec.shape for spec in specs if not isinstance(spec, ParamSpec)]
    return list(dict.fromkeys(symbol for shape in shapes for symbol in shape.split() if not symbol.isdigit()))


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(re.sub(r"\s*\|\s*", r" \\| ", str(cell)) for cell in line) + " |" for line in lines)
