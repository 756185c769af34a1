"""A soak: random arrivals, lengths, ways of sampling and aborts for as long as is asked for, watching everything that may leak.

Every step the block ledger is audited. Every second the memory of process and device is noted; it has to be flat: in the last
quarter not more than in the first one behind the warm-up, but for a hundredth. A prompt that comes again, with the same way of
sampling and `--invariant`, has to begin with the text it had before, whatever runs beside it. No request may end with an error.
Prints one line of figures, adds a row to `--out`, and ends with status 1 where anything did not hold.

    python bench/soak.py --backend cpu --seconds 480 --invariant --out bench/results/soak.json
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from polydraft import LLM, Engine, SamplingParams
from polydraft.bench import report
from polydraft.output.request_output import RequestOutput

SLOTS, MODEL_LEN, BLOCKS, PROMPTS = 12, 384, 64, 64
"""A quarter of the blocks that all slots at full length would take: requests share beginnings, wait, and are preempted."""
WAYS: tuple[dict[str, Any], ...] = (
    {}, {}, {"temperature": 0.8, "top_p": 0.95}, {"temperature": 1.1, "top_k": 40, "repetition_penalty": 1.2},
    {"logprobs": 3}, {"temperature": 0.7, "logprobs": 0, "bad_words": ((11,),)}, {"stop": ("\n\n",)},
)  # fmt: skip
TOLERANCE = 0.01


@dataclass
class Watch:
    """What a soak has seen."""

    problems: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    memory: list[dict[str, int]] = field(default_factory=list)
    texts: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)

    def wrong(self, what: str) -> None:
        """File a problem; the first few are enough."""
        if len(self.problems) < 10:
            self.problems.append(what)

    def judge_memory(self) -> None:
        """Flat means that nothing held at the end is more than what was held behind the warm-up."""
        quarter = len(self.memory) // 4
        if not quarter:
            self.wrong("the run was too short to judge memory")
            return
        for kind in self.memory[0]:
            begin = max(m[kind] for m in self.memory[quarter : 2 * quarter])
            end = max(m[kind] for m in self.memory[-quarter:])
            if end > begin * (1 + TOLERANCE):
                self.wrong(f"{kind} memory grew from {begin:,} to {end:,} bytes")


def resident() -> int:
    """Bytes of this process in memory, where the system says so; 0 elsewhere."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return 0
    return pages * 4096


def memory(engine: Engine, *, alone: bool = True) -> dict[str, int]:
    """Bytes of host and device; the latter by the engine's own count and, where nobody else is on it, by what the device says is
    taken."""
    taken = getattr(engine.device, "memory_taken", None) if alone else None
    return {"host": resident(), "device": engine.device.memory(), **({"device in use": taken()} if taken else {})}


def prompts(engine: Engine) -> list[list[int]]:
    """Random ones of all lengths, of which every other begins like the one before."""
    rng, found = np.random.default_rng(0), list[list[int]]()
    for i in range(PROMPTS):
        own = rng.integers(1, engine.model.vocab_size, int(rng.choice([1, 5, 20, 80, 160]))).tolist()
        found.append([*found[-1][:48], *own[:40]] if i % 2 else own)
    return found


def soak(
    engine: Engine, seconds: float, *, exact: bool, alone: bool = True, clock: Callable[[], float] = time.monotonic
) -> Watch:
    """Serve for so long, then let everything end; `alone`: no other process uses the device."""
    watch, rng, all_ = Watch(), np.random.default_rng(1), prompts(engine)
    alive: dict[str, tuple[int, int]] = {}
    begin = noted = clock()
    while (now := clock()) < begin + seconds or alive:
        if now < begin + seconds:
            for _ in range(int(rng.poisson(0.15 if len(alive) < 3 * SLOTS else 0.0))):
                which, way = int(rng.integers(PROMPTS)), int(rng.integers(len(WAYS)))
                length = int(rng.choice([1, 8, 40, 200], p=[0.1, 0.3, 0.4, 0.2]))
                params = SamplingParams(max_new_tokens=length, ignore_eos=True, seed=which, **WAYS[way])
                alive[engine.add(all_[which], params)] = which, way
            if alive and rng.random() < 0.01:
                engine.abort(str(rng.choice(list(alive))))
        engine.step()
        engine.ledger.audit()
        watch.counts["steps"] += 1
        for output in ended(engine):
            _judge(watch, output, alive.pop(output.id), exact=exact)
        if now >= noted + 1:
            watch.memory.append(memory(engine, alone=alone))
            noted = now
    while engine.has_work:
        engine.step()
    engine.ledger.audit()
    if engine.ledger.num_free != engine.ledger.num_blocks:
        watch.wrong(f"{engine.ledger.num_blocks - engine.ledger.num_free} blocks were not given back")
    watch.judge_memory()
    return watch


def ended(engine: Engine) -> Iterator[RequestOutput]:
    """Requests that have ended since the last call."""
    return (output for output in engine.poll() if output.finished)


def _judge(watch: Watch, output: RequestOutput, key: tuple[int, int], *, exact: bool) -> None:
    watch.counts["requests"] += 1
    watch.counts[str(output.finish_reason)] += 1
    watch.counts["tokens"] += len(output.token_ids)
    watch.counts["accepted"] += output.accepted
    if output.finish_reason == "error":
        watch.wrong(f"{output.id}: {output.error}")
        return
    before = watch.texts.get(key, ())
    common = min(len(before), len(output.token_ids))
    watch.counts["compared"] += common > 0
    if before[:common] != output.token_ids[:common]:
        watch.counts["other texts"] += 1
        if exact:
            watch.wrong(f"{output.id}: prompt {key[0]}, way {key[1]} had another text before")
    if len(output.token_ids) > len(before):
        watch.texts[key] = output.token_ids


def row(engine: Engine, watch: Watch, seconds: float) -> dict[str, Any]:
    """What is committed of it."""
    r, quarter = engine.resolved, max(len(watch.memory) // 4, 1)
    parts = (watch.memory[quarter:-quarter], watch.memory[-quarter:])
    held = {kind: [max(m[kind] for m in part) for part in parts] for kind in watch.memory[0]} if all(parts) else {}
    return {
        "shape": engine.model.name, "backend": r.backend, "device": engine.device.spec,
        "evidence": engine.info.evidence, "evidence_on": engine.info.evidence_on,
        "draft_tokens": r.limits.num_drafts, "batch": SLOTS, "accept_schedule": None, "dtype": r.dtype, "invariant": r.invariant,
        "graph": r.graph, "overlap": r.overlap, "seconds": round(seconds, 1), **watch.counts,
        "preemptions": engine.scheduler.num_preemptions, "shared_blocks": engine.ledger.num_hits,
        "memory_bytes": engine.device.memory(), "memory_held": held, "problems": watch.problems,
    }  # fmt: skip


def save(path: Path, new: dict[str, Any]) -> None:
    """Put the row in the place of an older one of its backend, dtype and arithmetic."""
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    key = ("backend", "dtype", "invariant")
    rows = [old for old in rows if any(old[name] != new[name] for name in key)]
    method = " ".join((__doc__ or "").split("\n\n")[1].split())
    result = report.document(rows, device=f"{platform.machine()}, rows name their own", method=method)
    result["rows"].append({**new, "date": result["date"]})
    report.write(path, result)


def main() -> int:
    """Run one soak."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--invariant", action="store_true")
    parser.add_argument("--overlap", type=int)
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--beside-others", action="store_true", help="leave the memory of other processes on the device out")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    llm = LLM(
        backend=args.backend, model=args.model, dtype=args.dtype, invariant=args.invariant, draft_tokens=3, max_num_seqs=SLOTS,
        max_model_len=MODEL_LEN, num_blocks=BLOCKS, logprobs=3, kv_dtype=args.kv_dtype,
        **({} if args.overlap is None else {"overlap": args.overlap}),
    )  # fmt: skip
    engine, begin = llm.engine, time.monotonic()
    watch = soak(engine, args.seconds, exact=args.invariant, alone=not args.beside_others)
    found = row(engine, watch, time.monotonic() - begin)
    if args.beside_others:
        found["note"] = "beside other processes on the same device, whose memory is left out"
    llm.close()
    print(json.dumps({name: value for name, value in found.items() if not name.startswith("evidence")}))
    if args.out:
        save(args.out, found)
    return 1 if watch.problems else 0


if __name__ == "__main__":
    sys.exit(main())
