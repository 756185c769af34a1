"""Renews what docs/performance.md shows of results measured on an NVIDIA GPU, and draws the pictures beside it.

Every result that is there and that the page has a line for is shown: rounds, prompts, graphs and overlap, heads, log
probabilities, quantised rows, draft vocabularies. Sentences with figures are made of the result as tables are.

    python bench/gpu_page.py
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from polydraft.bench import report

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))
from bench import gpu_heads, gpu_launches, gpu_prompts, gpu_rounds  # noqa: E402  as for bench/draft_vocab.py

PAGE, RESULTS = ROOT / "docs" / "performance.md", ROOT / "bench" / "results"
Result = dict[str, Any]
Row = Mapping[str, Any]
MOST = 0.80
"""Of the other engine's time, that every cell may take."""


def measured(result: Result) -> str:
    """When and on what."""
    cuda = f"CUDA {int(result['driver']) // 1000}"
    return f"Measured on {result['date']} on one {result['device']} ({cuda}, commit {result['commit'][:7]})"


def where(result: Result) -> str:
    """The same, and how often."""
    repeats = sorted({row["repeats"] for row in result["rows"]})
    some = f"{repeats[0]}" if len(repeats) == 1 else f"{repeats[0]} to {repeats[-1]}"
    return f"{measured(result)}, {some} repeats a cell"


# -- rounds --------------------------------------------------------------------------------------------
def rounds(result: Result) -> tuple[str, ...]:
    """Method, table, and what it comes to beside the other engine."""
    first, beside = result["rows"][0], ratios(result)
    said = (
        f"{where(result)}, {first['dtype']}, prompts of {first['prompt_tokens']} tokens, {first['new_tokens']} new tokens, "
        f"whole-step graphs, overlap {first['overlap']}, wall clock of full steps; copies at "
        f"{1e-12 * first['copy_bytes_per_s']:.2f} TB/s. A round's time is the {result['estimator']}{warmth(result)}."
    )
    fit = sum(ratio <= MOST for ratio in beside.values())
    worst = max(beside, key=lambda cell: beside[cell])
    summary = (
        f"{fit} of {len(beside)} cells take at most {MOST:.2f} of vLLM's time; the largest share is {beside[worst]:.2f}, of "
        f"`{worst[0]}` with {worst[1]} drafts at batch {worst[2]}."
    )
    return said, table_of_rounds(result), summary


def warmth(result: Result) -> str:
    """How warm the device was when cells of the large shape began, where the result tells."""
    found = [row["temperature_c"] for row in result["rows"] if row.get("temperature_c") and row["shape"] == "mimo-7b"]
    return (
        f"; the device had {min(found):.0f} to {max(found):.0f} degrees Celsius when cells of the 7B shape began" if found else ""
    )


def table_of_rounds(result: Result) -> str:
    """One line a cell."""
    head = "shape", "drafts", "batch", "ms a round", "of the repeats", "share of the copy rate", "vLLM, ms", "ratio"
    more = "end to end", "device idle", "host, us", "memory, GiB", "tokens a round", "tokens/s"
    lines = ["| " + " | ".join((*head, *more)) + " |", "|" + "---|" * len((*head, *more))]
    beside, whole = ratios(result), end_to_end()
    for row in result["rows"]:
        cell, (low, high) = (row["shape"], row["draft_tokens"], row["batch"]), row["spread"]["ms_per_round"]
        other = f"{row['ms_per_round'] / beside[cell]:.2f} | {beside[cell]:.2f}" if cell in beside else "- | -"
        lines.append(
            f"| {cell[0]} | {cell[1]} | {cell[2]} | {row['ms_per_round']:.3f} | {low:.3f}-{high:.3f} | "
            f"{row['copy_rate_share']:.0%} | {other} | {f'{whole[cell]:.2f}' if cell in whole else '-'} | "
            f"{idle_of(row)} | {row['host_us_per_step']:.0f} | {row['memory_bytes'] / 2**30:.1f} | "
            f"{row['tokens_per_round']:.2f} | {row['tokens_per_s']:,.0f} |"
        )
    return "\n".join(lines)


def ratios(result: Result) -> dict[tuple[str, int, int], float]:
    """Shape, drafts and batch of the cells that the other engine was measured in, to the share of its time."""
    found, peers = {}, gpu_rounds.peer_ms()
    for row in result["rows"]:
        others = peers.get((row["shape"], row["draft_tokens"]))
        if others and row["batch"] in gpu_rounds.BATCHES:
            other = others[gpu_rounds.BATCHES.index(row["batch"])]
            found[row["shape"], row["draft_tokens"], row["batch"]] = row["ms_per_round"] / other
    return found


def end_to_end() -> dict[tuple[str, int, int], float]:
    """Shape, drafts and batch to the share of the other engine's time with prompts included, both on one machine."""
    rows = [row for row in gpu_rounds.peer()["rows"] if "polydraft_end_to_end_share" in row]
    return {(row["shape"], row["draft_tokens"], row["batch"]): row["polydraft_end_to_end_share"] for row in rows}


def idle_of(row: Row) -> str:
    """The idle share, or the smallest and the largest of the repeats where they differ."""
    low, high = row["spread"]["idle_share"]
    return f"{low:.1%} to {high:.1%}" if high - low >= 0.01 else f"{row['idle_share']:.1%}"


# -- the others ----------------------------------------------------------------------------------------
def prompts(result: Result) -> tuple[str, ...]:
    """Method and table."""
    rate = 1e-12 * result["rows"][0]["matrix_operations_per_s"]
    counted = "operations are those of the target's blocks and of the draft layer over prompts, as far as they lie in the time"
    return f"{where(result)}; {counted}; one large product runs at {rate:.0f} TFLOP/s.", gpu_prompts.markdown(result)


def launches(result: Result) -> tuple[str, ...]:
    """The table of its own script, and how it came about."""
    count = min(row["rounds"] for row in result["rows"])
    return f"{measured(result)}, the mean of {count} rounds a cell.", gpu_launches.markdown(result)


def compared(result: Result) -> tuple[str, ...]:
    """One line a cell, a column a way of driving the device."""
    ways = {("off", 0): "eager", ("decode", 0): "graphs", ("off", 1): "overlap", ("decode", 1): "both"}
    cells: dict[tuple[str, int, int], dict[tuple[str, int], Row]] = {}
    for row in result["rows"]:
        cells.setdefault((row["shape"], row["draft_tokens"], row["batch"]), {})[row["graph"], row["overlap"]] = row
    head = ["shape", "drafts", "batch", *(f"{name}, ms" for name in ways.values()), "both against eager"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for cell, found in cells.items():
        ms = [found[way]["ms_per_round"] if way in found else None for way in ways]
        shown = [f"{one:.3f}" if one is not None else "-" for one in ms]
        gain = f"{ms[0] / ms[3]:.2f} x" if ms[0] is not None and ms[3] is not None else "-"
        lines.append(f"| {cell[0]} | {cell[1]} | {cell[2]} | " + " | ".join(shown) + f" | {gain} |")
    return f"{where(result)}, {result['rows'][0]['new_tokens']} new tokens.", "\n".join(lines)


def beside_first(result: Result, name: str, label: Callable[[Row], str], head: str) -> str:
    """A table in which every row is set beside the first one of its shape, drafts, batch and prompts."""
    lines = [
        f"| shape | drafts | batch | prompts | {head} | ms a round | against the first | share of the copy rate |",
        "|" + "---|" * 8,
    ]
    base: dict[tuple[Any, ...], Row] = {}
    for row in result["rows"]:
        cell = row["shape"], row["draft_tokens"], row["batch"], row["prompt_tokens"]
        first = base.setdefault(cell, row)
        against = "" if first is row else f"{row['ms_per_round'] / first['ms_per_round'] - 1:+.1%}"
        figures = f"{row['ms_per_round']:.3f} | {against} | {row['copy_rate_share']:.0%}"
        lines.append(f"| {' | '.join(map(str, cell))} | {label(row)} | {figures} |")
    assert name in result["rows"][0]
    return "\n".join(lines)


def logprobs(result: Result) -> tuple[str, ...]:
    """What requests that ask for log probabilities cost a round."""

    def label(row: Row) -> str:
        return "off" if row["logprobs"] is None else f"{row['logprobs']}"

    return f"{where(result)}.", beside_first(result, "logprobs", label, "log probabilities a token")


def rows_kept(result: Result) -> tuple[str, ...]:
    """What quantised keys and values cost and save."""
    return f"{where(result)}.", beside_first(result, "kv_dtype", lambda row: str(row["kv_dtype"]), "rows in")


def vocabularies(result: Result) -> tuple[str, ...]:
    """What a reduced draft vocabulary saves."""
    table = beside_first(result, "draft_vocab", lambda row: f"{row['draft_vocab']:,}", "tokens that may be drafted")
    real = json.loads((RESULTS / "draft_vocab.json").read_text(encoding="utf-8"))["rows"]
    greedy = [row for row in real if row["temperature"] == 0.0]
    kept = ", ".join(f"{row['tokens_per_round']:.2f} with {row['draft_vocab']:,}" for row in greedy)
    said = f"Measured on the demo checkpoint, whose vocabulary is {greedy[0]['vocab']:,}, a round gives so many tokens: {kept}."
    return f"{where(result)}.", table, said


def heads(result: Result) -> tuple[str, ...]:
    """What a first look at heads by their bytes saves, by what their weights are distributed like."""
    shares = gpu_heads.compared(result)
    batches = sorted({batch for batch, _ in shares})
    lines = [
        "| weights | " + " | ".join(f"batch {batch}: whole, ms | bytes, ms | against it" for batch in batches) + " |",
        "|" + "---|" * (1 + 3 * len(batches)),
    ]
    for name in dict.fromkeys(name for _, name in shares):
        cells = (shares[batch, name] for batch in batches)
        lines.append(f"| {name} | " + " | ".join(f"{a:.3f} | {b:.3f} | {share - 1:+.1%}" for a, b, share in cells) + " |")
    said = f"{where(result)}, K = {result['rows'][0]['draft_tokens']}, prompts of {result['rows'][0]['prompt_tokens']} tokens."
    worst = max(shares, key=lambda cell: shares[cell][2])
    most = f"The worst is {shares[worst][2] - 1:+.1%}, with *{worst[1]}* at batch {worst[0]}."
    return said, "\n".join(lines), most


SHOWN: dict[str, Callable[[Result], tuple[str, ...]]] = {
    "cuda.json": rounds,
    "cuda_launches.json": launches,
    "cuda_prompts.json": prompts,
    "cuda_compare.json": compared,
    "cuda_heads.json": heads,
    "cuda_logprobs.json": logprobs,
    "cuda_kv.json": rows_kept,
    "cuda_draft_vocab.json": vocabularies,
}
"""Results and the paragraphs that the page has of each."""


def read(name: str) -> Result | None:
    """A committed result, if there is one."""
    path = RESULTS / name
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def renewed(page: str) -> str:
    """The page with every result that it has a line for."""
    for name, paragraphs in SHOWN.items():
        result, figures = read(name), f"bench/results/{name}"
        if result is not None and f"<!-- figures: {figures} -->" in page:
            page = report.renewed(page, figures, *paragraphs(result))
    return page


# -- pictures ------------------------------------------------------------------------------------------
def draw_rounds(result: Result, path: Path) -> None:
    """Bars of every cell beside the other engine's and what memory allows."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    cells: dict[tuple[str, int], list[Row]] = {}
    for row in result["rows"]:
        cells.setdefault((row["shape"], row["draft_tokens"]), []).append(row)
    figure, every = plt.subplots(1, len(cells), figsize=(3 * len(cells), 3.2), layout="constrained", squeeze=False)
    for axes, ((shape, drafts), rows) in zip(every[0], cells.items(), strict=True):
        places = range(len(rows))
        others = gpu_rounds.peer_ms().get((shape, drafts))
        if others:
            ms = [others[gpu_rounds.BATCHES.index(row["batch"])] for row in rows]
            axes.bar(places, ms, color="#c9c9c9", label="vLLM 0.26.0")
        axes.bar(places, [row["ms_per_round"] for row in rows], width=0.6, color="#3572a5", label="polydraft")
        floors = [1e3 * row["floor_bytes"] / row["copy_bytes_per_s"] for row in rows]
        axes.bar(places, floors, width=0.3, color="#f2b134", label="its bytes at the copy rate")
        axes.set_xticks(list(places), [str(row["batch"]) for row in rows])
        axes.set_title(f"{shape}, K = {drafts}", fontsize=9)
        axes.set_xlabel("batch")
        axes.spines[["top", "right"]].set_visible(False)
    every[0][0].set_ylabel("milliseconds a round")
    figure.legend(*every[0][0].get_legend_handles_labels(), fontsize=8, frameon=False, loc="outside lower center", ncols=3)
    figure.suptitle(f"Decode rounds, synthetic acceptance, {result['device']}, {result['date']}", fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> int:
    """Renew the page; draw what it shows."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    page = PAGE.read_text(encoding="utf-8")
    for name, picture, draw in (
        ("cuda.json", "cuda_rounds.png", draw_rounds),
        ("cuda_launches.json", "cuda_launches.png", gpu_launches.draw),
        ("cuda_heads.json", "cuda_heads.png", gpu_heads.draw),
    ):
        result = read(name)
        if result is not None and f"images/{picture}" in page:
            draw(result, PAGE.parent / "images" / picture)
    PAGE.write_text(renewed(page), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
