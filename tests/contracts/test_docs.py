"""The pages about contracts: complete, well-formed, and made of nothing but the record."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest

from polydraft.contracts import REGISTRY
from polydraft.contracts.base import UNIT_MEANING, ColumnsSpec, Contract, ParamSpec
from polydraft.contracts.docs import LONG, SYMBOL_MEANING, render, render_all, signature
from polydraft.contracts.inputs import arrays, default_cases, namespace
from polydraft.contracts.kv_quant import KV_DTYPES, quantise
from polydraft.contracts.sizes import ROWS
from tests.contracts import toy

each = pytest.mark.parametrize("contract", list(REGISTRY), ids=lambda contract: contract.name)

PAGE = '''\
# blend, version 1

Scale and shift rows.

```text
blend/1(x[N,H] act, row_slot[N] i32, gain[B] f32, offset[B] f32, inout count[B] i32, inout last[B] i32; times: int, \
mode: Literal['plain', 'negated']) -> out[N,H] act
```

Arguments of `blend`: every row is scaled and shifted by numbers of its slot, and the slot counts its rows.

## Arguments

| argument | access | shape | dtype | carries nothing | compared | meaning |
| --- | --- | --- | --- | --- | --- | --- |
| `x` | in | [N, H] | act |  | unchanged | Rows. |
| `row_slot` | in | [N] | i32 |  | unchanged | Slot of each row; PAD_SLOT: none. |
| `gain` | in | [B] | f32 |  | unchanged | Factor of each slot. |
| `offset` | in | [B] | f32 |  | unchanged | Added for each slot. |
| `count` | inout | [B] | i32 |  | exactly | Rows of each slot so far. |
| `last` | inout | [B] | i32 |  | exactly | Newest row of each slot. |
| `out` | out | [N, H] | act | 0 | within 4 eps | Blended rows. |

## Static parameters

| parameter | type | meaning |
| --- | --- | --- |
| `times` | int | How often the offset is added. |
| `mode` | Literal['plain', 'negated'] | Sign of the result. |

## Shapes

| symbol | counts |
| --- | --- |
| N | rows of the launch |
| H | features of a hidden row |
| B | slots; sequences of a launch |

A record that does not fit is refused with a `ContractError` before a provider sees it: another dtype or rank, sizes that share \
a symbol and differ, something missing, a buffer in two places of which one is written. Sizes called N are each buffer's own, \
and the launch length lies within all of them. Nor does a record fit that breaks one of these:

- `times >= 0`

## Launch

The launch length counts rows, of whatever pass launches it. It is an upper bound known to the host; what lies at or \
beyond it on that axis is never written. A launch is ordered by its stream, may be captured in a graph, never allocates, \
never synchronises with the host and returns nothing.

Every run of one backend gives the same bits, whatever else is in the launch.

## Definition

The golden. `a` has a field for each argument and parameter: buffers and weights as NumPy arrays in their shapes above, floats \
in float64, None for what is left out; `n` is the launch length.

```python
def golden(a: Any, n: int) -> None:
    """Row by row."""
    for r in range(n):
        a.out[r] = 0.0
        if a.row_slot[r] >= 0:
            slot = a.row_slot[r]
            blended = a.x[r] * a.gain[slot] + a.times * a.offset[slot]
            a.out[r] = blended if a.mode == "plain" else -blended
            a.count[slot] += 1
            a.last[slot] = r
```

What it calls, and what this page names:

```python
PAD_SLOT: Final = -1
"""Slot index of a row that carries nothing: every kernel skips rows whose slot is negative."""
```

A backend in Python may import the numbers among them: `from polydraft.sentinels import PAD_SLOT`.

A kernel may differ by c * eps * scale, where eps belongs to the dtype and scale is: Sum of the magnitudes of both terms.

`out` may differ by sqrt(H) / 4 * 2**-23 * scale more: what H float32 additions in any order are off.

## Source

Made up.

## Cases

- `padding_between_rows` (launch length 3)
- `rows_of_one_slot` (launch length 3)
- `negated` (launch length 2)

And generated cases, `seed-0` to `seed-19` by default.

And cases with one large dimension, called like `N-512`: `N` of 33, 65, 129, 257, 512.

And cases on no list, with whatever is large, which the seed of a run draws: `surprise-0` and so on.

Faults that no case can show:

- `zero(nothing)`: there is no such argument
'''


def test_whole_page():
    contract = dataclasses.replace(
        toy.CONTRACT,
        scale=toy.scale,
        sums={"out": "H"},
        grows={"N": ROWS},
        constraints=("times >= 0",),
        equivalent_mutants={"zero(nothing)": "there is no such argument"},
    )
    assert render(contract) == PAGE


def test_what_differs_between_contracts():
    plain = render(dataclasses.replace(toy.CONTRACT, tolerance={}, scale=None, deterministic="none", pool_temporaries=True))
    assert "A kernel may not differ at all." in plain
    assert "Bits may differ from run to run. A framework's own pool may give temporaries." in plain
    assert "Faults that no case can show" not in plain
    assert "declares `f32_matmul` as `tf32`" in render(dataclasses.replace(toy.CONTRACT, products=True))
    assert "tf32" not in plain
    default = render(dataclasses.replace(toy.CONTRACT, scale=None))
    assert "scale is: the largest magnitude of the row." in default
    cache = render(REGISTRY["rope_kv_write"])
    assert re.search(r"\| `cache` \| inout \|  \| cache \|  \| `cache\.k` within \d+ eps, else exactly \|", cache)
    assert "| `meta` | in |  | meta |  |  |" in cache


def test_imports_that_a_page_offers_are_there():
    found: dict[str, object] = {}
    for name in ("commit_window", "scatter", "snapshot_output"):
        offered = next(line for line in render(REGISTRY[name]).splitlines() if "may import" in line)
        for line in re.findall("`(from .*?)`", offered):
            exec(line, found)
    assert {"Phase", "Finish", "Snapshot", "Run", "NO_TOKEN", "PAD_SLOT"} <= set(found)


def test_signatures():
    assert signature(REGISTRY["select_last_rows"]) == (
        "select_last_rows/1(hidden[R,H] act, positions[RP] i32, seq_start[B] i32, draft_slot[B] i32, draft_position[B] i32)"
        " -> out[B,H] act"
    )
    assert signature(REGISTRY["scatter"]) == "scatter/1(runs[U,5] i32, payload[T] i32, inout columns[B,...] tuple)"
    assert signature(REGISTRY["linear"]) == ("linear/1(x[N,I] act, weight[O,I] <weight>, bias?[O] <weight>) -> out[N,O] float")


@each
def test_signature_is_one_line_with_every_field(contract: Contract):
    line = signature(contract)
    assert "\n" not in line
    assert line.startswith(f"{contract.key}(")
    for name, spec in contract.args.specs().items():
        assert re.search(rf"\b{name}(\?|\[|:| )", line), name
        if isinstance(spec, ColumnsSpec):
            assert f"{name}[B,...] tuple" in line
        elif not isinstance(spec, ParamSpec) and spec.shape:
            assert f"[{','.join(spec.shape.split())}]" in line


@each
def test_page_is_complete(contract: Contract):
    page = render(contract)
    assert page.endswith("\n")
    assert not page.endswith("\n\n")
    for text in (contract.doc, contract.source, signature(contract), UNIT_MEANING[contract.unit]):
        assert text in page
    for name, spec in contract.args.specs().items():
        row = next(line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        assert spec.doc.replace("|", "\\|").split()[0] in row
        assert row.rstrip(" |").endswith(re.sub(r"\s*\|\s*", r" \\| ", spec.doc))
    for case in contract.cases():
        assert f"- `{case.name}` (launch length {case.n})" in page
    for mutant, proof in contract.equivalent_mutants.items():
        assert f"- `{mutant}`: {proof}" in page


def code_of(page: str) -> str:
    """The blocks of the definition as one module: what the golden calls, then the golden."""
    golden, *rest = re.findall(
        r"```python\n(.*?)\n```", page.split("## Definition")[1].split("## Quantised rows", maxsplit=1)[0], re.DOTALL
    )
    return "\n".join(("from __future__ import annotations", *rest, golden))


@each
def test_a_page_alone_defines_the_kernel(contract: Contract):
    """Its code, executed by itself, is the golden: nothing of it has to be looked up elsewhere."""
    space: dict[str, Any] = {}
    exec(compile(code_of(render(contract)), contract.name, "exec", dont_inherit=True), space)
    for case in default_cases(contract, 4):
        printed, meant = namespace(contract, case), namespace(contract, case)
        with np.errstate(all="ignore"):
            space["golden"](printed, case.n)
            contract.golden(meant, case.n)
        for name, array in arrays(contract, meant).items():
            np.testing.assert_array_equal(arrays(contract, printed)[name], array, err_msg=f"{case.name} {name}")


@pytest.mark.parametrize("name", ["rope_kv_write", "paged_attention"])
def test_a_page_alone_defines_quantised_rows(name: str):
    section = render(REGISTRY[name]).split("## Quantised rows")[1].split("## Source")[0]
    (code,) = re.findall(r"```python\n(.*?)\n```", section, re.DOTALL)
    space: dict[str, Any] = {}
    exec(compile(f"from __future__ import annotations\n{code}", name, "exec", dont_inherit=True), space)
    rows = np.random.default_rng(1).normal(0, 40, (9, 2, 8))
    for kv in KV_DTYPES:
        np.testing.assert_array_equal(space["quantise"](rows, kv), quantise(rows, kv))
    assert "a power of two 2**e" in section


@pytest.mark.parametrize(
    ("contract", "words"),
    [
        ("commit_window", ("PREFILL = 1", "PAUSED = 3", "LENGTH = 2", "def _commit")),
        ("reserve_blocks", ("DECODE = 2", "NO_BLOCK: Final = -1")),
        ("snapshot_output", ("KV_LEN = 7", "class Finish")),
        ("pack_logprobs", ("NUM_WORDS = 4", "DRAFT_LOGPROB = 2", "def record_words")),
        ("scatter", ("OFFSET = 4",)),
        ("gumbel_noise", ("def threefry2x32", "PARITY = 0x1BD11BDA", "ACCEPT = 2")),
        ("sample", ("def ranked", "def kept")),
        ("combine_draft_inputs", ("def combine", "def normalize")),
        ("rope_kv_write", ("def rotate", "def pair")),
        ("verify_rejection", ("def drawn", "def leftover")),
    ],
)
def test_pages_have_what_was_looked_up_elsewhere(contract: str, words: tuple[str, ...]):
    page = render(REGISTRY[contract])
    assert [word for word in words if word not in page] == []
    assert "class Slot" not in page, "a word of prose is no name"


@each
def test_tables_are_rectangular(contract: Contract):
    """A stray bar in a description would shift every cell after it."""
    tables = re.findall(r"(?:^\|.*\n?)+", render(contract), re.MULTILINE)
    assert len(tables) >= 2
    for table in tables:
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(widths) == 1, table


@each
def test_symbols_on_the_page_are_explained(contract: Contract):
    section = render(contract).split("## Shapes")[1].split("## Launch")[0]
    explained = dict(re.findall(r"^\| (\w+) \| (.+) \|$", section, re.MULTILINE))
    specs = [spec for spec in contract.args.specs().values() if not isinstance(spec, ParamSpec)]
    shapes = [["B"] if isinstance(spec, ColumnsSpec) else spec.shape.split() for spec in specs]
    for symbol in {symbol for shape in shapes for symbol in shape if not symbol.isdigit()}:
        assert explained[symbol] == {**SYMBOL_MEANING, **contract.symbols}[symbol]
    assert not set(contract.symbols) & set(SYMBOL_MEANING), "a shared symbol is explained once"


def test_pages_behind_each_other_say_nothing_twice():
    """Whatever a page alone says is there, or said to be on an earlier page; a single page is as it is."""
    assert render_all([REGISTRY["linear"]]) == render(REGISTRY["linear"])
    contracts = REGISTRY.of(["dense"])
    text = render_all(contracts)
    paragraphs = [part for part in re.split(r"\n\n+", text) if len(part) >= LONG and not part.startswith("| ")]
    code = [part for part in paragraphs if part.startswith(" ")]  # bodies of functions may be alike in part
    assert len(set(paragraphs) - set(code)) == len(paragraphs) - len(code)
    assert len(text) < 0.95 * sum(len(render(contract)) for contract in contracts)
    for contract in contracts:
        for part in re.split(r"\n\n+", render(contract)):
            assert part.removesuffix("\n```").strip() in text, contract.name
