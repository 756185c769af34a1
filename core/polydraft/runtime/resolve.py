"""Owns negotiation: a configuration, a backend's capabilities and a model in, one frozen plan of values with reasons out.

The engine calls `resolve` before any weight is loaded; `--explain` and `--json` show its decisions. It is a pure function,
downgrades nothing that was asked for by name, and when it refuses it gives every reason at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from polydraft.backend import BackendInfo
from polydraft.config import AUTO, EngineConfig
from polydraft.contracts.base import Limits
from polydraft.errors import CapabilityError
from polydraft.models.description import ModelDescription
from polydraft.sampling_params import MAX_STOP_TOKENS

CACHE_BUDGET = 1 << 30
"""Bytes that "auto" spends on KV blocks at most."""
DEFAULT_DRAFTS = 3
MIN_BATCHED_TOKENS = 512


@dataclass(frozen=True)
class Decision:
    """One value of the plan: what was asked, what was chosen, and why."""

    name: str
    asked: Any
    chosen: Any
    reason: str


@dataclass(frozen=True)
class Resolved:
    """Every value an engine runs with. `limits` carries the capacities; `decisions` explain them all."""

    backend: str
    device: str
    dtype: str
    proposer: str
    verify: str
    overlap: int
    graph: str
    invariant: bool
    limits: Limits
    decisions: tuple[Decision, ...]

    def describe(self) -> dict[str, Any]:
        """Name to chosen value, for the `config` of JSON answers."""
        return {d.name: d.chosen for d in self.decisions}


class _Negotiation:
    """Collects decisions and refusals, so that a refusal can give every reason."""

    def __init__(self) -> None:
        self.decisions: list[Decision] = []
        self.refusals: list[str] = []

    def choose(self, name: str, asked: Any, chosen: Any, reason: str) -> Any:
        self.decisions.append(Decision(name, asked, chosen, reason if asked in (AUTO, None, "") else f"asked for; {reason}"))
        return chosen

    def refuse(self, reason: str) -> None:
        self.refusals.append(reason)


def resolve(config: EngineConfig, info: BackendInfo, model: ModelDescription, *, proposers: tuple[str, ...]) -> Resolved:
    """Decide everything. Raises `CapabilityError` with every reason why the wishes cannot be met."""
    n, caps = _Negotiation(), info.capabilities
    if not info.available:
        n.refuse(f"backend {info.name} is not available: {info.reason}")
    for reason in model.unsupported():
        n.refuse(f"model {model.name}: {reason}")
    n.choose("backend", config.backend, info.name, "the embedded default" if config.backend == AUTO else info.summary)
    device = n.choose("device", config.device, config.device or (info.devices[0] if info.devices else ""), info.device_pattern)
    dtype = _dtype(n, config, info)
    proposer, drafts = _drafts(n, config, info, model, proposers)
    verify = _verify(n, config)
    limits = _limits(n, config, info, model, drafts, dtype)
    overlap = _overlap(n, config, info)
    graph = _graph(n, config, info)
    if config.invariant and not caps.row_invariant:
        n.refuse(f"--invariant: backend {info.name} does not declare row_invariant; leave it out or use --backend reference")
    why = "a row's bits depend on that row alone" if config.invariant else "faster; texts are equal up to ties of the logits"
    n.choose("invariant", config.invariant, config.invariant, why)
    n.choose("seed", config.seed, config.seed, "requests without a seed use it plus their number")
    n.choose("kernels", list(config.kernels), list(config.kernels), "kernel packs, first wins")
    if config.sanitize:
        n.refuse("--sanitize: the hazard checker is not part of this version; leave it out")
    if n.refusals:
        raise CapabilityError(f"this engine cannot be built: {'; '.join(n.refusals)}")
    return Resolved(info.name, device, dtype, proposer, verify, overlap, graph, config.invariant, limits, tuple(n.decisions))


def _dtype(n: _Negotiation, config: EngineConfig, info: BackendInfo) -> str:
    allowed = info.capabilities.dtypes
    if config.dtype == AUTO:
        return str(n.choose("dtype", AUTO, allowed[0], f"first of {info.name}'s dtypes"))
    if config.dtype not in allowed:
        n.refuse(f"--dtype {config.dtype}: backend {info.name} computes in {', '.join(allowed)}; choose one of those or auto")
    return str(n.choose("dtype", config.dtype, config.dtype, f"{info.name} computes in {', '.join(allowed)}"))


def _drafts(
    n: _Negotiation, config: EngineConfig, info: BackendInfo, model: ModelDescription, proposers: tuple[str, ...]
) -> tuple[str, int]:
    """The proposer and K, which go together."""
    reserved = ("suffix", "hybrid")
    unusable = _no_mtp(model)
    name, asked = config.proposer, config.draft_tokens
    if name in reserved:
        n.refuse(f"--proposer {name} is a reserved name and not built yet; known: {', '.join(proposers)}")
    elif name not in (AUTO, *proposers):
        n.refuse(f"--proposer {name} is unknown; known: {', '.join(proposers)}")
    if name == "mtp" and unusable:
        n.refuse(f"--proposer mtp: {unusable}; use --proposer none")
    if name == AUTO:
        name = "none" if unusable or asked == 0 else "mtp"
    drafts = asked if isinstance(asked, int) else (0 if name == "none" else DEFAULT_DRAFTS)
    if name == "none" and drafts > 0:
        reason = unusable if config.proposer == AUTO else "--proposer none never drafts"
        n.refuse(f"--draft-tokens {drafts}: {reason}; use --draft-tokens 0")
    if config.proposer not in (AUTO, "none") and drafts == 0:
        n.refuse(f"--proposer {config.proposer} with --draft-tokens 0 drafts nothing; use --proposer none")
    if drafts + 1 > info.capabilities.max_window:
        n.refuse(f"--draft-tokens {drafts}: backend {info.name} verifies at most {info.capabilities.max_window - 1}; lower it")
    why = {"mtp": "the checkpoint has an MTP head", "none": unusable or "no drafts were asked for"}.get(
        name, "a plugin's proposer"
    )
    n.choose("proposer", config.proposer, name, why)
    n.choose("draft_tokens", asked, drafts, "drafts per round" if drafts else "plain decoding")
    return name, drafts


def _no_mtp(model: ModelDescription) -> str:
    """Why the model cannot draft with its own head, or ""."""
    if model.mtp is None:
        return model.mtp_note or "the checkpoint has no MTP head"
    return "; ".join(model.mtp.unsupported())


def _verify(n: _Negotiation, config: EngineConfig) -> str:
    if config.verify == "rejection":
        n.refuse("--verify rejection is not part of this version; use coupled, which is lossless too")
    if config.verify == AUTO:
        reason = "greedy requests are matched against the argmax, sampling ones against the target's own draw with shared noise"
        return str(n.choose("verify", AUTO, "coupled", reason))
    reason = "only requests with temperature 0 are accepted" if config.verify == "greedy" else "lossless at any temperature"
    return str(n.choose("verify", config.verify, config.verify, reason))


def _overlap(n: _Negotiation, config: EngineConfig, info: BackendInfo) -> int:
    if config.overlap == AUTO:
        depth = 1 if info.capabilities.asynchronous else 0
        reason = "launches return before they have run" if depth else f"{info.name} is synchronous: nothing to overlap with"
        return int(n.choose("overlap", AUTO, depth, reason))
    return int(n.choose("overlap", config.overlap, config.overlap, "steps launched before the last snapshot is read"))


def _graph(n: _Negotiation, config: EngineConfig, info: BackendInfo) -> str:
    if config.graph in ("decode", "prefill") and not info.capabilities.graph_capture:
        n.refuse(f"--graph {config.graph}: backend {info.name} does not declare graph_capture; use --graph off")
    chosen = "off" if config.graph == AUTO else config.graph
    return str(n.choose("graph", config.graph, chosen, "every launch is enqueued by the host" if chosen == "off" else "captured"))


def _limits(n: _Negotiation, config: EngineConfig, info: BackendInfo, model: ModelDescription, drafts: int, dtype: str) -> Limits:
    """Capacities, with "auto" filled in and contradictions refused."""
    window, seqs = drafts + 1, config.max_num_seqs
    if seqs > info.capabilities.max_seqs:
        n.refuse(f"--max-num-seqs {seqs}: backend {info.name} holds at most {info.capabilities.max_seqs}; lower it")
    n.choose("max_num_seqs", seqs, seqs, "requests decoded together")
    length = model.max_model_len if config.max_model_len == AUTO else int(config.max_model_len)
    if length > model.max_model_len:
        n.refuse(f"--max-model-len {length}: model {model.name} was trained for {model.max_model_len}; lower it")
    n.choose("max_model_len", config.max_model_len, length, "tokens of prompt and output together")
    block = 16 if config.block_size == AUTO else int(config.block_size)
    n.choose("block_size", config.block_size, block, "tokens of a KV block")
    per_slot = -(-length // block)
    num_blocks = _num_blocks(n, config, model, per_slot, block, dtype)
    rows = max(MIN_BATCHED_TOKENS, seqs * window) if config.max_batched_tokens == AUTO else int(config.max_batched_tokens)
    if rows < seqs * window:
        n.refuse(
            f"--max-batched-tokens {rows}: {seqs} windows of {window} need {seqs * window} rows a step; raise it or lower "
            "--max-num-seqs or --draft-tokens"
        )
    n.choose("max_batched_tokens", config.max_batched_tokens, rows, "rows of one step, windows and prefill chunks together")
    return Limits(
        max_seqs=seqs,
        num_drafts=drafts,
        max_rows=rows,
        max_logit_rows=seqs * window,
        max_len=length,
        block_size=block,
        num_blocks=num_blocks,
        max_blocks=per_slot,
        max_stop_tokens=MAX_STOP_TOKENS,
        vocab_size=model.vocab_size,
    )


def _num_blocks(n: _Negotiation, config: EngineConfig, model: ModelDescription, per_slot: int, block: int, dtype: str) -> int:
    wanted = config.max_num_seqs * per_slot
    if config.num_blocks != AUTO:
        return int(n.choose("num_blocks", config.num_blocks, config.num_blocks, f"{wanted} would hold every slot at full length"))
    layers = [*model.blocks, *([model.mtp.block] if model.mtp else [])]
    size = sum(2 * b.attention.kv_size for b in layers) * block * (4 if dtype == "f32" else 2)
    affordable = max(CACHE_BUDGET // size, per_slot)
    reason = "every slot at full length" if wanted <= affordable else f"{CACHE_BUDGET >> 20} MiB of {size:,} bytes each"
    return int(n.choose("num_blocks", AUTO, min(wanted, affordable), reason))
