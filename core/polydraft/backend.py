"""The records by which a backend describes itself: identity, capabilities and the limits within which they hold.

Plugins build these records, negotiation (`resolve.py`) reads them, and `doctor` prints them. Core asks for a property of
`Capabilities`, and does not ask which backend it is talking to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from polydraft.contracts.base import Provider
from polydraft.contracts.compare import Products
from polydraft.device import Array, Buffer, Device, Stream

if TYPE_CHECKING:
    from polydraft.plugins.program_pass import ProgramPass

RowOrder = Literal["slot", "prefill_first", "seeded"]


@dataclass(frozen=True)
class Capabilities:
    """Documented properties; each is checked at start-up and by the conformance kit. Undeclared means refused, never emulated."""

    dtypes: tuple[str, ...] = ("f32",)
    """Activation dtypes, best first."""
    asynchronous: bool = False
    """Launches and copies return before they have run; events are needed to know. Overlap pays only here."""
    graph_capture: bool = False
    """`graph_capture` captures a run of launches and replays it on the same addresses."""
    uncapturable: tuple[str, ...] = ()
    """Contracts (and `forward_meta`) that cannot be captured: a step is then captured in pieces around them."""
    row_invariant: bool = False
    """A row's bits depend on that row alone (not on width, position, padded context, chunk or bucket), when asked for."""
    row_order: RowOrder = "slot"
    """Order in which scheduled slots are packed; core lays the launch order out accordingly and never assumes one."""
    host_inputs: bool = True
    """A step can wait for data uploaded after its target pass was launched (the third meeting point)."""
    max_window: int = 64
    """Largest window (drafts + 1) of one slot."""
    max_seqs: int = 4096
    """Largest number of slots."""
    pool_temporaries: bool = False
    """Kernels may take temporaries from a framework's own pool inside one launch."""
    update_weights: bool = True
    """Prepared weights can be refilled in place at the same addresses."""
    synthetic_acceptance: bool = True
    """Verification can be driven by a schedule instead of the drafts, for benchmarks."""
    bring_up: bool = False
    """Kernels that are not written yet are the reference's, run on host copies (`polydraft.plugins.bring_up`): f32, synchronous,
    no graphs, no overlap, and no claim beyond the profile `basic`."""
    kv_dtypes: tuple[str, ...] = ()
    """Quantised forms of KV rows (`CacheSpec.kv`) that `allocate_cache`, `rope_kv_write` and `paged_attention` take."""
    weight_packings: tuple[str, ...] = ()
    """Packings (names of `contracts/packing.py`) in which `linear` takes a matrix; core dequantises what comes in others."""
    expert_packings: tuple[str, ...] = ()
    """Packings in which `expert_mlp` takes a stack of matrices."""
    f32_matmul: Products = "f32"
    """What matrix products of float32 round their factors to: "tf32" keeps 10 bits of the mantissa. Sums are float32 either
    way."""
    sliding_window: bool = False
    """`paged_attention` takes a window: layers whose rows attend to the last keys alone."""
    ranks: Literal["", "threads", "processes"] = ""
    """A model can be split over several ranks, which are threads of one process, or a process each (`polydraft_collectives`); "":
    it cannot."""
    rank_dtypes: tuple[str, ...] = ("f32",)
    """Dtypes of activations that ranks add up."""
    rank_devices: bool = False
    """Each rank opens a device of its own: of `KIND:INDEX` that one or the one that many behind it, of `KIND:INDEX,INDEX` the one
    at its place. Otherwise all open the same one."""
    single_rank: bool = False
    """A process can be one rank at most, whatever tries several as threads of one."""
    ordered_sums: bool = False
    """`all_reduce` and `sum_leaves` add float32 in one balanced binary tree (`tree_sum`), whoever arrives first. What
    row-invariant kernels compute of an output, a head, an expert or a leaf does not depend on what stands beside it."""

    sleep: bool = False
    """Devices that are opened for it (`DeviceOptions.sleep`) give the memory of weights and caches back while its addresses stay
    (`polydraft.device.Sleeping`)."""

    def packings(self, role: str) -> tuple[str, ...]:
        """The packings in which kernels take weights of a role."""
        return {"linear": self.weight_packings, "experts": self.expert_packings}.get(role, ())

    @property
    def ranks_in_process(self) -> bool:
        """Whether ranks are threads of one process, so that a fault of one of them can be planted there."""
        return self.ranks == "threads"

    @property
    def ranks_as_threads(self) -> bool:
        """Whether several ranks can be threads of one process, whatever they are in an engine: a fault of a collective can be
        planted there."""
        return self.ranks != "" and not self.single_rank

    def describe(self) -> dict[str, Any]:
        """Name to value, for `doctor` and reports."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Variant:
    """A kernel pack that a backend brings along for a place, and that nobody has seen right there: off unless it is named with
    `--kernels`, or `polydraft conform BACKEND --enable-variants` has found it right on this very device, driver and library."""

    name: str
    """Of the pack, in the entry-point group `polydraft.kernels`."""
    contracts: tuple[str, ...]
    """Contracts and composites that it serves."""
    summary: str
    """What it is, in a phrase."""


@dataclass(frozen=True)
class PackNotes:
    """What a kernel pack says of its kernels beside the providers, as `notes` of its table, which may have none: of a pack whose
    kernels are somebody else's operators, a report names these."""

    computed_by: Mapping[str, str] = field(default_factory=dict)
    """Contract or composite to what computes it, in a phrase."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Contract or composite that the pack would serve to the reason why it does not here, as one sentence."""
    uncapturable: tuple[str, ...] = ()
    """Contracts whose kernels of this pack cannot be captured: steps are captured in pieces around them."""
    evidence: str = ""
    """What its authors have seen its kernels on, in a phrase."""
    library: str = ""
    """Package and version of what computes them, where that is not the pack itself."""


@dataclass(frozen=True)
class BackendInfo:
    """Identity of a backend: what `polydraft_backend_info` returns without opening a device or importing a heavy library."""

    name: str
    version: str
    package: str
    device_pattern: str
    """What `--device` accepts, e.g. `cpu` or `cuda:<index>`."""
    summary: str
    available: bool = True
    reason: str = ""
    """Why it is not available, as one sentence with the next step."""
    devices: tuple[str, ...] = ()
    capabilities: Capabilities = field(default_factory=Capabilities)
    contract_versions: Mapping[str, int] = field(default_factory=dict)
    """Contract name to the version implemented (composites by their composite name)."""
    evidence: Literal["silicon", "custom device", "emulator", "compiled only", "double only"] = "double only"
    """What its results were seen on; a backend says so itself, and claims nothing by default."""
    evidence_on: str = ""
    """The device and day of the latest run that the class rests on, such as `NVIDIA H200, 2026-11-21`; with "silicon" and "custom
    device" there has to be one."""

    notes: tuple[str, ...] = ()
    """What is wrong on this machine with devices other than the one asked about, a sentence each; `doctor` shows them."""
    variants: tuple[Variant, ...] = ()
    """Kernel packs written for the device that was asked about, in order of precedence; none of them is in use by itself."""
    runs_with: Mapping[str, str] = field(default_factory=dict)
    """What a variant's result holds for: "device", "driver" and "library" as far as they are known without opening the device."""
    withdrawn: Mapping[str, str] = field(default_factory=dict)
    """Capabilities that it declares and an open device was found to lack, each with the reason; filled by `without`."""

    @property
    def claim(self) -> str:
        """The evidence class with what it rests on, for people."""
        return f"{self.evidence} ({self.evidence_on})" if self.evidence_on else self.evidence

    def without(self, withdrawn: Mapping[str, str]) -> BackendInfo:
        """This identity on an open device that lacks the capabilities `withdrawn`, each of which is true or false here."""
        if not withdrawn:
            return self
        changes: dict[str, Any] = dict.fromkeys(withdrawn, False)
        less = dataclasses.replace(self.capabilities, **changes)
        return dataclasses.replace(self, capabilities=less, withdrawn=dict(withdrawn))

    def lacks(self, capability: str) -> str:
        """Why it does not have a capability that it does not have, in a clause."""
        return self.withdrawn.get(capability) or f"backend {self.name} does not declare {capability}"


Backend = BackendInfo
"""The name under which plugin authors import the record from `polydraft`."""


class Weight(Protocol):
    """A weight in the backend's own form; core passes it to `bind` and never looks inside."""

    @property
    def nbytes(self) -> int:
        """Bytes of device memory; 0 where none is its own."""


class Cache(Protocol):
    """One layer's KV cache in the backend's own layout. The logical accessors exist for tests only."""

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""

    def read_logical(self) -> tuple[Array, Array]:
        """(k, v), each [num_blocks, block_size, num_kv_heads, head_dim] float32; synchronises; tests only."""

    def write_logical(self, k: Array, v: Array) -> None:
        """Overwrite the whole cache, with arrays as `read_logical` returns them; synchronises; tests only."""


@dataclass(frozen=True)
class CacheSpec:
    """What `allocate_cache` is asked for: one layer's paged rows."""

    num_blocks: int
    block_size: int
    """Rows of a block."""
    num_kv_heads: int
    head_dim: int
    """Elements of one head of a row; keys and values alike."""
    dtype: str
    """Of activations, in which rows are kept where `kv` is ""."""
    kv: Literal["", "int8", "fp8"] = ""
    """How rows are kept: "" in `dtype`, "int8" and "fp8" as `contracts/kv_quant.py` defines. Asked only of who declares it in
    `kv_dtypes`."""


class KernelTable(Protocol):
    """What `polydraft_kernels(device)` returns: providers by contract or composite name, and the two opaque factories."""

    @property
    def providers(self) -> Mapping[str, Provider]: ...
    @property
    def versions(self) -> Mapping[str, int]: ...
    def prepare_weight(self, role: str, value: Any, dtype: str, previous: Weight | None = None) -> Weight:
        """Lay a canonical float32 array out once at load, for kernels that compute in `dtype`. `role`: "linear" [out, in],
        "embedding" [tokens, features], "norm" and "bias" [features], "experts" [experts, out, in], "router" [experts, in] or
        [experts], which stays float32 whatever `dtype` is. With `previous`, refill that weight in place at the same address
        (weight update) and return it. A backend that declares `weight_packings` is also given `PackedWeight`s of role "linear"
        in those packings, of role "experts" in its `expert_packings`; a refill comes in the same one."""

    def allocate_cache(self, spec: CacheSpec) -> Cache:
        """Allocate one layer's cache. Raises `DeviceError` when memory is short."""


@dataclass(frozen=True)
class Collectives:
    """What `polydraft_collectives` returns: providers and versions of one rank, by contract of `COLLECTIVES`.

    `program_pass`: over programs with collectives, in the place of the one that the backend's kernel table brings; None: that one
    sees them, too. `nbytes`: of device memory that they take once they are bound, which is then left for them. `meets`: how ranks
    meet and why, for `--explain`, where there is a choice."""

    providers: Mapping[str, Provider]
    versions: Mapping[str, int]
    program_pass: ProgramPass | None = None
    nbytes: int = 0
    meets: tuple[str, str] | None = None


@dataclass(frozen=True)
class StepMeta:
    """What the host knows of one pass when its metadata is filled. Frozen; one per pass kind and step.

    Upstream names in brackets: `pass_index` [substep], `real_slots` [real_bsz], `has_prefill` [exist_prefill_flag].
    """

    pass_index: int
    """Of the draft's passes; 0 for the target."""
    launch_rows: int
    """Rows launched: an upper bound of the valid rows."""
    real_slots: int
    """Scheduled sequences of this step."""
    has_prefill: bool


@dataclass(frozen=True)
class PassBuffers:
    """The device buffers that describe the rows of one kind of pass: what metadata is built from."""

    role: Literal["target", "draft"]
    row_slot: Buffer
    """[N] int32: slot of each row, PAD_SLOT for none."""
    positions: Buffer
    """[N] int32: absolute position of each row. A draft's pass that has the target's is over the target's rows of the same step:
    the slot of each is what it was there, or negative."""
    block_table: Buffer
    """[B, MB] int32."""


class ForwardMeta(Protocol):
    """A backend's own attention and packing metadata for one kind of pass; filled in place, passed to attention as `meta`."""

    def fill(self, stream: Stream, step: StepMeta) -> None:
        """Enqueue whatever prepares the metadata for the rows now described by the pass's buffers. Never allocates or syncs."""


@dataclass(frozen=True)
class DeviceOptions:
    """The options of an engine that its device needs to know; an argument of `polydraft_open_device`."""

    dtype: str = "f32"
    row_invariant: bool = False
    allow_cpu_fallback: bool = False
    """What the device has no kernel for may run on the CPU; otherwise the backend refuses it by name."""
    sleep: bool = False
    """The engine may sleep: what `prepare_weight` and `allocate_cache` allocate has to be able to go."""
    rank: int = 0
    """Which rank of a model that is split over several, for backends whose ranks have a device each."""
    num_ranks: int = 1
    """Over how many."""


__all__: Sequence[str] = [
    "Backend",
    "BackendInfo", "Cache", "CacheSpec", "Capabilities", "Collectives", "Device", "DeviceOptions", "ForwardMeta", "KernelTable",
    "PassBuffers", "RowOrder", "StepMeta", "Variant", "Weight",
]  # fmt: skip
