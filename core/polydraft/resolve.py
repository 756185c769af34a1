"""Negotiation: turns a configuration, a backend's capabilities and a model into one frozen plan of values with reasons.

The engine calls `resolve` before any weight is loaded; `--explain` and `--json` show its decisions. It is a pure function,
downgrades nothing that was requested by name, and when it refuses it gives every reason at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

from polydraft.backend import BackendInfo
from polydraft.config import AUTO, EngineConfig
from polydraft.contracts import REGISTRY
from polydraft.contracts.base import Limits
from polydraft.contracts.kv_quant import Kv
from polydraft.contracts.packing import MADE, Packing
from polydraft.errors import CapabilityError
from polydraft.models.block import PACKED_ROLES, Block, Role
from polydraft.models.description import ModelDescription
from polydraft.models.ranks import LEAVES, has_experts, in_leaves, of_ranks, without_leaves, without_share
from polydraft.models.weights import packed_at_load
from polydraft.program.caches import block_bytes, never_hit, slot_bytes
from polydraft.program.host_inputs import BLOCKING, MIDDLE, Needs
from polydraft.sampling.grammars import lacking
from polydraft.sampling_params import MAX_STOP_TOKENS
from polydraft.step.graphs import Mode, default_buckets

CACHE_BUDGET = 1 << 30
"""Bytes that "auto" spends on KV blocks at most, unless one request at full length needs more, or the device tells how much is
free (`host/device_memory.py`)."""
EVERY_SLOT = "every slot at full length"
MOST_DRAFTS, FIXED_DRAFTS = 5, 3
"""Drafts of a step where no number was asked for: at most, and where it has to be the same in every step."""
WITH_HEAD = ("mtp", "hybrid")
"""Proposers that draft with the MTP head of the checkpoint, where no draft model is named."""
MIN_BATCHED_TOKENS = 512
MOST_LENGTH = 2**31 - 1
"""Tokens of a text at most: places have 32 bits."""
MAX_DRAFTS = 255
"""Most drafts of a round that core can count: rounds are kept as bytes."""
DEFAULTS: Mapping[str, Any] = {f.name: f.default for f in dataclasses.fields(EngineConfig)}


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
    graph: Mode
    graph_sizes: tuple[int, ...]
    """Buckets to capture, ascending; () with `graph` "off"."""
    invariant: bool
    limits: Limits
    decisions: tuple[Decision, ...]
    accept_schedule: tuple[float, ...] = ()
    """Synthetic acceptance: K chances, or () where drafts are verified."""
    kv: Kv = ""
    """How KV rows are kept: `CacheSpec.kv`."""
    prefix_cache: bool = True
    """Whether requests share the blocks of a common beginning."""
    proposer_options: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Every option that the proposer declares."""
    packing: Packing | None = None
    """What matrices are packed in when they are loaded."""
    packed_as: tuple[str, ...] = ()
    """Names of the packings in which the checkpoint stores matrices."""
    ranks: int = 1
    """Ranks that the model is split over."""
    whole_experts: bool = False
    """Whether ranks keep experts whole."""
    leaves: bool = False
    """Whether sums are taken by leaf, so that texts are those of every other number of ranks."""
    adaptive: bool = False
    """Whether each step makes as many drafts as pay, `limits.num_drafts` at most."""

    def describe(self) -> dict[str, Any]:
        """Name to chosen value, for the `config` of JSON answers."""
        return {d.name: d.chosen for d in self.decisions}

    def with_decision(self, name: str, chosen: str, reason: str) -> Resolved:
        """The same plan with one more thing that was decided, which is no option."""
        return dataclasses.replace(self, decisions=(*self.decisions, Decision(name, AUTO, chosen, reason)))

    def with_blocks(self, num_blocks: int, reason: str) -> Resolved:
        """The same plan with a pool of so many KV blocks."""
        size = int(self.describe()["kv_cache_bytes"]) // self.limits.num_blocks
        chosen = {"num_blocks": (num_blocks, reason), "kv_cache_bytes": (num_blocks * size, _pool_bytes(num_blocks, size))}
        decisions = tuple(
            dataclasses.replace(one, chosen=chosen[one.name][0], reason=chosen[one.name][1]) if one.name in chosen else one
            for one in self.decisions
        )
        return dataclasses.replace(self, limits=dataclasses.replace(self.limits, num_blocks=num_blocks), decisions=decisions)


class _Negotiation:
    """Collects decisions and refusals, so that a refusal can give every reason."""

    def __init__(self, config: EngineConfig, info: BackendInfo, model: ModelDescription) -> None:
        self.config, self.info, self.model, self.caps = config, info, model, info.capabilities
        self.decisions: list[Decision] = []
        self.refusals: list[str] = []

    def choose(self, name: str, chosen: Any, reason: str) -> Any:
        """File a decision about the option `name` (or about something that is no option)."""
        asked = getattr(self.config, name, AUTO)
        own = asked == DEFAULTS.get(name, AUTO)
        self.decisions.append(Decision(name, asked, chosen, reason if own else f"asked for; {reason}"))
        return chosen

    def refuse(self, reason: str) -> None:
        """Add one reason why the configuration cannot be served."""
        self.refusals.append(reason)


def resolve(
    config: EngineConfig,
    info: BackendInfo,
    model: ModelDescription,
    *,
    proposers: Mapping[str, Needs],
    features: Mapping[str, Needs] = MappingProxyType({}),
    default: str = "",
    variants: Sequence[str] = (),
    unused_variants: Mapping[str, str] = MappingProxyType({}),
    draft_vocab: int | None = None,
    draft_models: Collection[str] = (),
    layers: Callable[[str, ModelDescription, str], Mapping[str, Block]] = lambda proposer, model, draft_model: {},
    proposer_options: Callable[[str], Mapping[str, float]] = lambda proposer: {},
    draft_note: Callable[[str, ModelDescription, str], str] = lambda proposer, model, draft_model: "",
    sharing: Collection[str] = (),
) -> Resolved:
    """Decide everything. `proposers` are those registered, `features` those in use, each with what it needs to know of the step
    before; `default` says why this backend was taken where none was named; `variants` of it are in use, `unused_variants` are
    not, for a reason each; `draft_vocab`: tokens that drafts are chosen among, None: all; `draft_models`: the proposers
    that take a draft model; `sharing`: those that draft over a share of a model; `layers` returns the decoder blocks of a
    proposer with its draft model, `draft_note` what is worth saying of that, `proposer_options` what can be adjusted of it.
    Raises `CapabilityError` with every reason why the configuration cannot be served."""
    n = _Negotiation(config, info, model)
    if not info.available:
        n.refuse(f"backend {info.name} is not available: {info.reason}")
    n.choose("backend", info.name, default or info.summary)
    default = info.devices[0] if info.devices else ""
    device = n.choose("device", config.device or default, f"{info.name} opens {info.device_pattern}")
    _devices(n, device)
    dtype = _dtype(n)
    leaves = _leaves(n, dtype)
    share = _share(n, leaves)
    kv = _kv(n, dtype)
    packing = _weights(n, dtype)
    length = _length(n)
    proposer, drafts, adaptive = _drafts(n, length, tuple(proposers))
    options = _proposer_options(n, proposer, proposer_options(proposer))
    _draft_model(n, proposer, draft_models, draft_note)
    _draft_vocab(n, proposer, draft_vocab)
    _mtp_options(n, proposer)
    own_layers = layers(proposer, share, config.draft_model)
    _check_draft_state(n, proposer, bool(own_layers))
    verify = _verify(n)
    again = (
        "of requests: their last tokens are written once more without drafts"
        if config.check_texts
        else "no text is written twice"
    )
    n.choose("check_texts", config.check_texts, again)
    schedule = _schedule(n, drafts)
    blocks = {**share.layers, **own_layers}
    _refuse_of_ranks(n, proposer, verify, dtype, sharing=sharing)
    _refuse_packing_of_ranks(n, share, packing)
    _refuse_blocks(n, blocks)
    limits = _limits(n, length, drafts, lambda block_size: block_bytes(blocks, block_size, dtype, kv))
    _slot_states(n, slot_bytes(blocks, limits, dtype), limits)
    overlap = _overlap(n, {f"proposer {proposer}": proposers.get(proposer, "none"), **features})
    graph, sizes = _graph(n, limits)
    prefix_cache = _prefix_cache(n, blocks)
    _rest(n, leaves)
    why = [f"{name} has passed on this device" for name in variants]
    why += [f"{name}: {reason}" for name, reason in unused_variants.items()]
    n.choose("variants", tuple(variants), "; ".join(why) or "the backend brings none for this device")
    if n.refusals:
        raise CapabilityError(f"this engine cannot be built: {'; '.join(n.refusals)}")
    return Resolved(
        info.name, device, dtype, proposer, verify, overlap, graph, sizes, config.invariant, limits, tuple(n.decisions), schedule,
        kv, prefix_cache, options, packing, model.packed_as, share.ranks, config.expert_parallel, leaves, adaptive,
    )  # fmt: skip


def _dtype(n: _Negotiation) -> str:
    allowed, asked = n.caps.dtypes, n.config.dtype
    if asked == AUTO:
        return str(n.choose("dtype", allowed[0], f"first of {n.info.name}'s dtypes, {', '.join(allowed)}"))
    if asked not in allowed:
        n.refuse(f"--dtype {asked}: backend {n.info.name} computes in {', '.join(allowed)}; choose one of those or auto")
    return str(n.choose("dtype", asked, f"{n.info.name} computes in {', '.join(allowed)}"))


def _devices(n: _Negotiation, device: str) -> None:
    """Refuse devices that are not as many as ranks, where each opens one of its own (`Capabilities.rank_devices`)."""
    num_ranks, there = n.config.tensor_parallel, n.info.devices
    kind, _, listed = device.partition("?")[0].partition(":")
    indices = (listed or "0").split(",")
    if not n.caps.rank_devices or not n.info.available or not all(index.isdecimal() for index in indices):
        return  # there is nothing to count, or the backend says what is wrong with it
    if len(indices) > 1 and len(indices) != num_ranks:
        ranks = "one rank, which opens one" if num_ranks == 1 else f"{num_ranks} ranks, each of which opens one"
        n.refuse(
            f"--device {device} names {len(indices)} devices for {ranks}; name as many as ranks, or use "
            f"--tensor-parallel {len(indices)}"
        )
        return
    if device and kind not in {name.partition(":")[0] for name in there}:
        return  # of a kind that is named and not listed the backend says what there is when it opens one
    begin = int(indices[0])
    names = [f"{kind}:{index}" for index in (indices if len(indices) > 1 else range(begin, begin + num_ranks))]
    if num_ranks > 1 and not set(names) <= set(there):
        n.refuse(
            f"--tensor-parallel {num_ranks}: each rank needs a device of its own, wanted {', '.join(names)}, and this machine "
            f"has {', '.join(there) or 'none'}; use fewer, or name others with --device"
        )


def _leaves(n: _Negotiation, dtype: str) -> bool:
    """Whether sums are taken by leaf: where bits are promised, and ranks could share the model out. Packed matrices have no
    leaves, and in a dtype in which ranks do not add up there is no text over several of them that could be the same."""
    packed = n.config.weights != AUTO or bool(n.model.packed_as)
    return n.config.invariant and n.caps.ordered_sums and dtype in n.caps.rank_dtypes and not packed


def _share(n: _Negotiation, leaves: bool) -> ModelDescription:
    """What one rank keeps of the model, which is all of it where it is not split."""
    num_ranks = n.config.tensor_parallel
    share = in_leaves(n.model, whole_experts=n.config.expert_parallel) if leaves else n.model
    if num_ranks > 1 and not n.caps.ranks:
        n.refuse(f"--tensor-parallel {num_ranks}: {n.info.lacks('ranks')}; leave it out or use another --backend")
    try:
        share = of_ranks(share, num_ranks, whole_experts=n.config.expert_parallel)
    except CapabilityError as error:
        n.refuse(f"--tensor-parallel {num_ranks}: model {n.model.name}: {error}; use another number")
    whole = n.config.expert_parallel
    alone = num_ranks == 1 and not leaves
    if whole and (alone or not has_experts(n.model)):
        lacks = "one rank keeps all experts" if alone else f"model {n.model.name} has no experts"
        n.refuse(f"--expert-parallel: {lacks}; leave it out{', or add --tensor-parallel' if alone else ''}")
    split = "sums over experts are those of ranks with whole experts" if num_ranks == 1 else "each rank has whole experts"
    n.choose("expert_parallel", whole, split if whole else "experts are split like other networks")
    if num_ranks == 1:
        n.choose("tensor_parallel", 1, "the whole model is on one device")
    else:
        where = {"threads": "threads of this process", "processes": "a process each"}.get(n.caps.ranks, "")
        n.choose("tensor_parallel", num_ranks, f"ranks, {where}: each keeps its share of heads, features and tokens")
    return share


def _refuse_of_ranks(n: _Negotiation, proposer: str, verify: str, dtype: str, *, sharing: Collection[str]) -> None:
    """What ranks cannot do yet, by name."""
    config, num_ranks = n.config, n.config.tensor_parallel
    if num_ranks == 1:
        return
    lacking = {
        f"--dtype {dtype}": dtype not in n.caps.rank_dtypes and f"ranks add up in {' or '.join(n.caps.rank_dtypes)} alone",
        f"--proposer {proposer}": proposer not in sharing and "it does not draft over a share of a model",
        f"--verify {verify}": verify == "rejection" and "its noise and its tokens would be each rank's own",
        "--enable-sleep-mode": config.enable_sleep_mode and "ranks cannot sleep",
        "--weights-digest": config.weights_digest and "no rank reads all weights",
        "--invariant": config.invariant and _uneven(n),
    }
    for what, why in lacking.items():
        if why:
            n.refuse(f"{what} with --tensor-parallel {num_ranks}: {why}; leave out one of the two")


def _refuse_packing_of_ranks(n: _Negotiation, share: ModelDescription, packing: Packing | None) -> None:
    """Refuse to pack what is to be shared out in the middle of a group; what a checkpoint stores is known once it is read."""
    if share.ranks == 1 or packing is None:
        return
    packings = dict.fromkeys(packed_at_load(n.model, n.config.weights_ignore), packing)
    if why := without_share(n.model, share, packings, n.caps.packings):
        n.refuse(f"--weights {n.config.weights} with --tensor-parallel {share.ranks}: {why}; leave out one of the two")


def _uneven(n: _Negotiation) -> str:
    """Why a text over so many ranks would not be that of every other number, as a clause; "" where it is."""
    if not n.caps.ordered_sums:
        return n.info.lacks("ordered_sums")
    if LEAVES % n.config.tensor_parallel:
        return f"sums have {LEAVES} leaves, which as many ranks cannot share out"
    if n.config.weights != AUTO or n.model.packed_as:
        return "sums of packed matrices have no leaves"
    return without_leaves(n.model)


def _kv(n: _Negotiation, dtype: str) -> Kv:
    """How rows of keys and values are kept, in the target's caches and the draft's."""
    asked = n.config.kv_dtype
    if asked == AUTO:
        n.choose("kv_dtype", dtype, "keys and values are kept in the dtype of activations")
        return ""
    if asked not in n.caps.kv_dtypes:
        undeclared = f"backend {n.info.name} does not declare it (kv_dtypes)"
        n.refuse(f"--kv-dtype {asked}: {undeclared}; leave it out or use another --backend")
    reason = "each row of a KV head has a scale of its own; texts are those of another model, and drafts leave them as they are"
    return cast("Kv", n.choose("kv_dtype", asked, reason))


def _weights(n: _Negotiation, dtype: str) -> Packing | None:
    """How matrices are packed when they are loaded."""
    asked, ignored = n.config.weights, n.config.weights_ignore
    if ignored and asked == AUTO:
        n.refuse(f"--weights-ignore {','.join(ignored)}: nothing is packed without --weights; leave it out, or add that")
    n.choose("weights_ignore", ignored, "of the matrices that --weights packs, which stay as they are")
    if n.model.packed_as:
        _stored(n, dtype)
        return None
    if asked == AUTO:
        n.choose("weights", dtype, "matrices are not packed; the backend keeps them as it computes with them")
        return None
    made = MADE[asked]
    reason = f"{made.why}; drafts leave texts as they are"
    n.choose("weights", made.packing.name, "; ".join([reason, *_dequantised(n, made.packing.name, dtype)]))
    return made.packing


def _stored(n: _Negotiation, dtype: str) -> None:
    """Of a checkpoint that stores matrices in few bits."""
    packings = n.model.packed_as
    if n.config.weights != AUTO:
        n.refuse(f"--weights {n.config.weights}: model {n.model.name} is stored as {', '.join(packings)} already; leave it out")
    lacking = [clause for one in packings for clause in _dequantised(n, one, dtype)]
    n.choose("weights", ", ".join(packings), "; ".join(["as the checkpoint stores them", *lacking]))


def _dequantised(n: _Negotiation, packing: str, dtype: str) -> list[str]:
    """Clauses of what the backend does not declare, of matrices or of experts where the model has some."""
    used = {one.role for one in n.model.weights().values()}
    lacking = [role for role in PACKED_ROLES if role in used and packing not in n.caps.packings(role)]
    return [dequantised(n.info, packing, dtype, role) for role in lacking[:1]]


def dequantised(info: BackendInfo, packing: str, dtype: str, role: Role) -> str:
    """What becomes of weights of a role in a packing that a backend does not declare, as a clause."""
    what = "experts" if role == "experts" else "weights"
    return f"backend {info.name} takes no {what} packed as {packing}, so they are dequantised to {dtype} when they are loaded"


def _length(n: _Negotiation) -> int:
    most, asked = n.model.max_model_len, n.config.max_model_len
    length = most if asked == AUTO else int(asked)
    if length > most:
        n.refuse(f"--max-model-len {length}: model {n.model.name} was trained for {most}; lower it")
    if length > MOST_LENGTH:
        n.refuse(f"model {n.model.name} says that it was trained for {most} tokens, which no text has; give --max-model-len")
    if length < 2:
        n.refuse(f"--max-model-len {length} has no room for a prompt and a token of output; use at least 2")
    n.choose("max_model_len", length, f"tokens of prompt and output together; {n.model.name} was trained for {most}")
    return length


# -- drafting --------------------------------------------------------------------------------------
def _drafts(n: _Negotiation, length: int, proposers: tuple[str, ...]) -> tuple[str, int, bool]:
    """The proposer and K, which go together, and whether steps make fewer where that pays."""
    name, asked = n.config.proposer, n.config.most_drafts
    no_mtp, (most, limit) = _no_mtp(n.model), _most_drafts(n, length)
    _refuse_proposer(n, proposers, no_mtp, most, limit)
    if name == AUTO:
        name = "none" if no_mtp or asked == 0 or (asked is None and most == 0) else "mtp"
    fixed = _fixed_drafts(n)
    usual = FIXED_DRAFTS if fixed else MOST_DRAFTS
    drafts = asked if asked is not None else 0 if name == "none" else min(usual, most)
    if drafts > most:
        n.refuse(f"--draft-tokens {n.config.draft_tokens}: {limit}; use at most {most}")
    if name == "none" and drafts > 0:
        reason = no_mtp if n.config.proposer == AUTO else "--proposer none never drafts"
        n.refuse(f"--draft-tokens {n.config.draft_tokens}: {reason}; use --draft-tokens 0")
    if n.config.proposer not in {AUTO, "none"} and asked == 0:
        n.refuse(f"--proposer {name} with --draft-tokens 0 drafts nothing; use --proposer none")
    idle = no_mtp or ("no drafts were asked for" if asked == 0 or n.config.proposer == "none" else limit)
    why = {"mtp": "the checkpoint has an MTP head", "none": idle}.get(name, "chosen by name")
    n.choose("proposer", name, why)
    few = f", fewer than {usual} because {limit}" if asked is None and 0 < drafts < usual else ""
    adaptive = n.config.adaptive and not fixed and drafts > 0
    timed = ", so that what --verify rejection samples depends on measured times" if n.config.verify == "rejection" else ""
    if adaptive:
        n.choose("draft_tokens", f"{AUTO}:{drafts}", f"drafts a step at most{few}; each makes as many as pay{timed}")
    else:
        same = f"; the number stays, since {fixed}" if fixed else ""
        n.choose("draft_tokens", drafts, f"drafts a round{few}{same}" if drafts else "plain decoding, one token a round")
    return name, drafts, adaptive


def _fixed_drafts(n: _Negotiation) -> str:
    """Why every step makes as many drafts where no number was asked for; "" where it may change."""
    if n.config.draft_tokens != AUTO:
        return ""
    if n.config.verify == "rejection":
        return "what --verify rejection samples depends on it, and it would depend on measured times"
    return "their acceptance is synthetic" if n.config.accept_schedule else ""


def _proposer_options(n: _Negotiation, proposer: str, declared: Mapping[str, float]) -> Mapping[str, float]:
    """Every option of the proposer, as asked for or declared."""
    options = dict(declared)
    for name, _, value in (option.partition("=") for option in n.config.proposer_options):
        wanted = "a whole number" if isinstance(declared.get(name), int) else "a number"
        try:
            number = int(value) if wanted == "a whole number" else float(value)
        except ValueError:
            number = -1
        if name not in declared:
            known = f"knows {', '.join(declared)}" if declared else "has no options"
            n.refuse(f"--proposer-option {name}={value}: proposer {proposer} {known}; correct it or leave it out")
        elif not 0 <= number <= MOST_LENGTH:
            n.refuse(f"--proposer-option {name}={value}: wanted {wanted} from 0 to {MOST_LENGTH}; correct it or leave it out")
        options[name] = number
    told = ",".join(f"{name}={value}" for name, value in options.items())
    n.choose(
        "proposer_options", told, f"what proposer {proposer} can be adjusted by" if declared else "there is nothing to adjust"
    )
    return options


def _draft_model(
    n: _Negotiation, proposer: str, draft_models: Collection[str], note: Callable[[str, ModelDescription, str], str]
) -> None:  # fmt: skip
    """The directory of the proposer's own model."""
    asked, takes = n.config.draft_model, proposer in draft_models
    if asked and not takes:
        others = f", {' or '.join(draft_models)}" if draft_models else ""
        n.refuse(
            f"--draft-model {asked}: proposer {proposer} takes no draft model; leave it out or name another --proposer{others}"
        )
    none = "none was named" if takes else f"proposer {proposer} takes none"
    told = note(proposer, n.model, asked) if asked and takes else ""
    with_it = f"the directory that proposer {proposer} drafts with{'; it ' if told else ''}{told}"
    n.choose("draft_model", asked, with_it if asked else none)


def _with_head(n: _Negotiation, proposer: str) -> bool:
    """Whether it drafts with the MTP head of the checkpoint."""
    return proposer in WITH_HEAD and not n.config.draft_model


def _draft_vocab(n: _Negotiation, proposer: str, few: int | None) -> None:
    """How many tokens drafts are chosen among."""
    vocab = n.model.vocab_size
    if few is not None and not _with_head(n, proposer):
        n.refuse(f"--draft-vocab narrows the head of an MTP model, got proposer {proposer}; leave it out or use --proposer mtp")
    reason = f"drafts are chosen among {few} of {vocab} tokens and verified over all of them: the text is the same"
    n.choose("draft_vocab", vocab if few is None else few, reason if few is not None else "drafts are chosen among all tokens")


def _mtp_options(n: _Negotiation, proposer: str) -> None:
    """The conventions of the MTP head, as texts."""
    if n.config.mtp_options and not _with_head(n, proposer):
        n.refuse(f"--mtp-option is of the model's own MTP head, got proposer {proposer}; leave it out or use --proposer mtp")
    note = n.model.mtp_note if n.model.mtp else ""
    n.choose("mtp_options", ",".join(n.config.mtp_options), note or "the conventions that the model's family is known for")


def _check_draft_state(n: _Negotiation, proposer: str, keeps: bool) -> None:
    """The share of rounds behind which the proposer's rows are computed anew."""
    share = n.config.check_draft_state
    if share and not keeps:
        n.refuse(f"--check-draft-state {share:g}: proposer {proposer} keeps nothing between rounds; leave it out")
    what = (
        "of rounds: a request is prefilled again, and must draft the same"
        if share
        else "no request is prefilled to compare drafts"
    )
    n.choose("check_draft_state", share, what)


def _refuse_proposer(n: _Negotiation, proposers: tuple[str, ...], no_mtp: str, most: int, limit: str) -> None:
    name, known = n.config.proposer, ", ".join(proposers)
    if name not in {AUTO, *proposers}:
        n.refuse(f"--proposer {name} is unknown; known: {known}")
    elif _with_head(n, name) and no_mtp:
        n.refuse(f"--proposer {name}: {no_mtp}; use --proposer none")
    elif name not in {AUTO, "none"} and most == 0:
        n.refuse(f"--proposer {name}: {limit}; use --proposer none")


def _most_drafts(n: _Negotiation, length: int) -> tuple[int, str]:
    """The largest K that can be of use, and what bounds it; where no number was asked for, the largest that rows suffice for."""
    window, rows, seqs = n.caps.max_window, n.config.max_batched_tokens, n.config.max_num_seqs
    bounds = {
        f"backend {n.info.name} verifies windows of at most {window} tokens": window - 1,
        f"a text of at most {length} tokens has no room for more": max(length - 2, 0),
        "a round of more drafts cannot be counted": MAX_DRAFTS,
    }
    if n.config.draft_tokens == AUTO and rows != AUTO:
        room = int(rows) // seqs
        fitting = max(room // 2, min(room, FIXED_DRAFTS + 1), 1)  # long windows take no more than half of them from prompts
        bounds[f"--max-batched-tokens {rows} leaves windows of {fitting} rows to {seqs} slots"] = fitting - 1
    limit = min(bounds, key=lambda reason: bounds[reason])
    return bounds[limit], limit


def _no_mtp(model: ModelDescription) -> str:
    """Why the model cannot draft with its own head, or ""."""
    if model.mtp is None:
        return model.mtp_note or "the checkpoint has no MTP head"
    return "; ".join(model.mtp.unsupported())


def _verify(n: _Negotiation) -> str:
    asked = n.config.verify
    lacking = [contract.name for contract in REGISTRY.of(["sampling"]) if contract.name not in n.info.contract_versions]
    if asked == AUTO and lacking and not n.config.kernels:  # what packs bring is known once the device is open
        reason = f"backend {n.info.name} does not offer {' and '.join(lacking)}, so only requests with temperature 0 are accepted"
        return str(n.choose("verify", "greedy", reason))
    if asked == AUTO:
        reason = "greedy requests are matched against the argmax, sampling ones against the target's own draw with shared noise"
        return str(n.choose("verify", "coupled", reason))
    reason = {
        "greedy": "only requests with temperature 0 are accepted",
        "coupled": "lossless at any temperature",
        "rejection": "lossless in distribution; a sampled text depends on the number of drafts",
    }[asked]
    return str(n.choose("verify", asked, reason))


def _schedule(n: _Negotiation, drafts: int) -> tuple[float, ...]:
    """The synthetic acceptance schedule, as long as there are drafts."""
    asked = n.config.accept_schedule
    if asked and not n.caps.synthetic_acceptance:
        n.refuse(f"backend {n.info.name} has no synthetic acceptance; leave the schedule out")
    if asked and n.config.verify == "rejection":
        n.refuse("a synthetic acceptance schedule forces choices, which --verify rejection does not make; use --verify coupled")
    if asked and len(asked) < drafts:
        n.refuse(f"--draft-tokens {drafts}: the synthetic acceptance schedule has {len(asked)} chances; give one for each draft")
    reason = "synthetic: drafts are accepted by chance, whatever the model says; the text means nothing, only its timing does"
    return tuple(n.choose("accept_schedule", asked[:drafts], reason if asked else "drafts are verified"))


# -- capacities ------------------------------------------------------------------------------------
def _limits(n: _Negotiation, length: int, drafts: int, bytes_of: Callable[[int], int]) -> Limits:
    """Capacities, with "auto" filled in and contradictions refused."""
    config, window, seqs = n.config, drafts + 1, n.config.max_num_seqs
    if seqs > n.caps.max_seqs:
        n.refuse(f"--max-num-seqs {seqs}: backend {n.info.name} holds at most {n.caps.max_seqs}; lower it")
    n.choose("max_num_seqs", seqs, "requests decoded together")
    block = 16 if config.block_size == AUTO else int(config.block_size)
    n.choose("block_size", block, "tokens of a KV block")
    per_slot = -(-length // block)
    num_blocks = _num_blocks(n, per_slot, bytes_of(block))
    rows = max(MIN_BATCHED_TOKENS, seqs * window) if config.max_batched_tokens == AUTO else int(config.max_batched_tokens)
    if rows < seqs * window:
        n.refuse(
            f"--max-batched-tokens {rows}: {seqs} windows of {window} need {seqs * window} rows a step; raise it or lower "
            "--max-num-seqs or --draft-tokens"
        )
    n.choose("max_batched_tokens", rows, "rows of one step, windows and prefill chunks together")
    return Limits(
        max_seqs=seqs,
        num_drafts=drafts,
        max_rows=rows,
        max_logit_rows=seqs * window,
        max_len=length,
        block_size=block,
        num_blocks=num_blocks,
        max_blocks=per_slot,
        max_stop_tokens=MAX_STOP_TOKENS + len(n.model.eos_token_ids),
        vocab_size=n.model.vocab_size,
        max_logprobs=-1 if config.logprobs is None else config.logprobs,
    )


def _num_blocks(n: _Negotiation, per_slot: int, size: int) -> int:
    """KV blocks of the pool, and what they cost. `size`: bytes of a block."""
    wanted, asked = n.config.max_num_seqs * per_slot, n.config.num_blocks
    if asked == AUTO:
        affordable = max(CACHE_BUDGET // max(size, 1), per_slot)  # layers may keep nothing in blocks
        chosen = min(wanted, affordable)
        reason = EVERY_SLOT if wanted <= affordable else f"what {CACHE_BUDGET >> 20} MiB hold, at least one request"
    else:
        chosen = int(asked)
        reason = f"{wanted} would hold every slot at full length, {per_slot} one request"
    n.choose("num_blocks", chosen, reason)
    n.choose("kv_cache_bytes", chosen * size, _pool_bytes(chosen, size))
    return chosen


def _pool_bytes(num_blocks: int, size: int) -> str:
    return f"{num_blocks} blocks of {size:,} bytes over all layers that draft or verify"


def _slot_states(n: _Negotiation, size: int, limits: Limits) -> None:
    """What layers keep of each slot however long its text is; nothing is said where they keep nothing."""
    if size:
        n.choose(
            "slot_state_bytes", size * limits.max_seqs, f"states of {limits.max_seqs} slots of {size:,} bytes over all layers"
        )


def _prefix_cache(n: _Negotiation, blocks: Mapping[str, Block]) -> bool:
    """Whether blocks are shared, which every layer must be able to go on from."""
    never = never_hit(blocks)
    if not n.config.prefix_cache or not never:
        reason = "requests share the KV blocks of a common beginning" if n.config.prefix_cache else "off"
        return bool(n.choose("prefix_cache", n.config.prefix_cache, reason))
    where = never[0] + (f" and {len(never) - 1} more" if len(never) > 1 else "")
    return bool(n.choose("prefix_cache", False, f"off: {where} cannot go on from the blocks of a common beginning"))


def _refuse_blocks(n: _Negotiation, blocks: Mapping[str, Block]) -> None:
    """Refuse blocks that need a capability which the backend lacks."""
    first = {name: prefix for prefix, block in reversed([*blocks.items()]) for name in block.capabilities}
    for name, prefix in first.items():
        if not getattr(n.caps, name):
            n.refuse(f"{prefix} of model {n.model.name} needs {name}, but {n.info.lacks(name)}; use another --backend")


# -- the step --------------------------------------------------------------------------------------
def _overlap(n: _Negotiation, features: Mapping[str, Needs]) -> int:
    """The depth. What a feature needs to know of the step before may cost some or all of it."""
    blocking = " and ".join(name for name, needs in features.items() if needs == BLOCKING)
    middle = " and ".join(name for name, needs in features.items() if needs == MIDDLE)
    if middle and not n.caps.host_inputs:
        n.refuse(
            f"{middle} needs {MIDDLE}, but backend {n.info.name} takes no data in the middle of a step (capability host_inputs); "
            "leave it out or use another backend"
        )
    half = (
        f"; {middle} needs {MIDDLE}, so steps that it takes part in are launched in two halves and at most one is ahead"
        if middle
        else ""
    )
    if n.config.overlap == AUTO:
        depth = 1 if n.caps.asynchronous and not blocking else 0
        reason = "launches return before they have run" if depth else f"{n.info.name} is synchronous: nothing to overlap with"
        if blocking and n.caps.asynchronous:
            reason = f"none: {blocking} needs {BLOCKING}, so each step waits for the one before"
        return int(n.choose("overlap", depth, reason + half))
    if n.config.overlap and n.caps.bring_up:
        n.refuse(f"--overlap {n.config.overlap}: backend {n.info.name} is in bring-up, which is synchronous; use --overlap 0")
    if blocking and n.config.overlap:
        n.refuse(f"--overlap {n.config.overlap}: {blocking} needs {BLOCKING} of the step before; use --overlap 0 or auto")
    return int(n.choose("overlap", n.config.overlap, f"steps launched before the last snapshot is read{half}"))


def _graph(n: _Negotiation, limits: Limits) -> tuple[Mode, tuple[int, ...]]:
    """What is captured, and the buckets."""
    mode, asked = n.config.graph, n.config.graph_sizes
    strays = n.config.allow_cpu_fallback
    chosen: Mode = cast("Mode", mode)  # one of GRAPH_MODES
    if mode == AUTO:
        chosen = "decode" if n.caps.graph_capture and not strays else "off"
    if chosen != "off" and not n.caps.graph_capture:
        n.refuse(f"--graph {chosen}: {n.info.lacks('graph_capture')}; use --graph off")
    if asked and chosen == "off":
        n.refuse(f"--graph-sizes {','.join(map(str, asked))} without graphs; add --graph decode or prefill")
    largest = {"decode": limits.max_seqs, "prefill": limits.max_rows}.get(chosen, 0)
    wrong = [size for size in asked if chosen != "off" and not 1 <= size <= largest]
    if wrong:
        n.refuse(f"--graph-sizes {','.join(map(str, wrong))}: a {chosen} step has 1 to {largest} of them; correct the sizes")
    sizes = (tuple(sorted(set(asked))) or default_buckets(largest)) if largest else ()
    off = "every launch is enqueued by the host"
    if mode == AUTO and chosen == "off":
        why = "what may run on the CPU is in no graph; --graph decode captures where nothing does" if n.caps.graph_capture else ""
        off += f": {why or n.info.lacks('graph_capture')}"
    what = {"decode": "steps without prefill are replayed", "prefill": "steps without decoding are replayed"}
    n.choose("graph", chosen, what.get(chosen, off))
    n.choose("graph_sizes", sizes, "buckets: running sequences, or rows of a prefill" if sizes else "nothing is captured")
    return chosen, sizes


def _rest(n: _Negotiation, leaves: bool) -> None:
    """Wishes that are met or refused as they are."""
    config = n.config
    if config.invariant and not n.caps.row_invariant:
        n.refuse(f"--invariant: {n.info.lacks('row_invariant')}; leave it out or use another --backend")
    same = "a row's bits depend on that row alone: texts are bit-equal for every number of drafts, batch and chunk"
    same += f", and over 1, 2 or {LEAVES} ranks" if leaves else ""
    n.choose("invariant", config.invariant, same if config.invariant else "faster; texts are equal up to ties of the logits")
    if config.enable_sleep_mode and not n.caps.sleep:
        n.refuse(f"--enable-sleep-mode: {n.info.lacks('sleep')}; leave it out or use another --backend")
    asleep = "memory of weights and caches is given back while the engine sleeps" if config.enable_sleep_mode else "it is kept"
    n.choose("enable_sleep_mode", config.enable_sleep_mode, asleep)
    traced = "SHA-256 of every tensor as it is read" if config.weights_digest else "weights have no digest"
    n.choose("weights_digest", config.weights_digest, traced)
    _logprobs(n)
    thinking = (
        ("think_start_ids", "begin thinking"),
        ("think_end_ids", "end thinking"),
        ("think_forced_ids", "end it at its limit"),
    )
    for name, what in thinking:
        ids = getattr(config, name)
        wrong = [token for token in ids if not 0 <= token < n.model.vocab_size]
        if wrong:
            n.refuse(f"{name} has {wrong[0]}, which is no token of model {n.model.name}; correct it")
        n.choose(name, ids, f"tokens that {what}" if ids else "none")
    end, forced = config.think_end_ids, config.think_forced_ids
    if forced and not (end and any(forced[i : i + len(end)] == end for i in range(len(forced)))):
        n.refuse(f"think_forced_ids {forced} do not end thinking, wanted think_end_ids {end} among them; correct one of them")
    if config.constraints and (lack := lacking()):
        n.refuse(f"--constraints: {lack}, or leave it out")
    bound = "grammars bind output where requests ask for it"
    n.choose("constraints", config.constraints, bound if config.constraints else "no output is bound")
    n.choose("seed", config.seed, "requests without a seed use it plus their number")
    n.choose("kernels", config.kernels, "kernel packs, first wins" if config.kernels else "the backend's own kernels")
    n.choose("plugins", config.plugins, "loaded by name, in order" if config.plugins else "none were named")
    probe = f"polydraft doctor --probe {config.backend}={config.device}".rstrip("=")
    strays = f"slowly, what the device has no kernel for; `{probe}` says what that is"
    n.choose("allow_cpu_fallback", config.allow_cpu_fallback, strays if config.allow_cpu_fallback else "never in secret")
    n.choose("sanitize", config.sanitize, "every access is checked, slowly" if config.sanitize else "no hazard checker watches")


def _logprobs(n: _Negotiation) -> None:
    """How many log probabilities a request may have, and of what."""
    asked, vocab = n.config.logprobs, n.model.vocab_size
    if asked is not None and asked > vocab:
        n.refuse(f"--logprobs {asked}: model {n.model.name} has {vocab} tokens; ask for at most as many")
    some = "buffers for a token and as many beside it; a step reports what its requests ask for, and nothing for others"
    n.choose("logprobs", asked, "none are reported" if asked is None else some)
    what = {"raw_logprobs": "of the model's logits", "processed_logprobs": "after penalties, temperature and filters"}
    drafts = n.config.draft_logprobs
    if drafts and asked is None:
        n.refuse("--draft-logprobs reports beside the log probabilities of a request; give --logprobs, the most that it may have")
    n.choose("draft_logprobs", drafts, "of each draft that is verified" if drafts else "those of drafts are not computed")
    n.choose("logprobs_mode", n.config.logprobs_mode, what[n.config.logprobs_mode])
