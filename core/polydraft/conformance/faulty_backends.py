"""Faulty backends that the kit must kill, each with the check that kills it, and legal ones that it must not.

`polydraft conform BACKEND --prove` runs it around any backend; the tests run it around the reference and the emulator. A mutant
never knows which backend it breaks. Faults that only core can make (planning, the ledger, buckets) are in `core_faults.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from polydraft.conformance import core_faults, kv_faults, leaf_faults, mode_faults, packing_faults, rank_faults, size_faults
from polydraft.conformance import fault_injection as by
from polydraft.conformance import hidden_faults as hidden
from polydraft.conformance import lifetime_faults as lifetime
from polydraft.conformance.core_faults import Fault
from polydraft.conformance.target import Proxy, TableProxy, wrap
from polydraft.contracts.inputs import kernel_of
from polydraft.contracts.packing import unpacked
from polydraft.sentinels import NO_TOKEN, Phase


@dataclass(frozen=True)
class Mutant:
    """One broken backend. `killer` is the check that must fail; `needs` the capability without which the fault cannot show.

    `core`: a fault of core that is in place while the killer runs. `judged`: the killer need not fail, but the verdict
    over it has to be that nothing was proved."""

    id: str
    title: str
    source: str
    """The kind of bug that it stands for, and where that was met."""
    killer: str
    broken: by.Break
    needs: str = ""
    core: Fault | None = None
    judged: bool = False
    moot: str = ""
    """Why it may make no difference around some backends, where it then lives by right."""

    @property
    def level(self) -> str:
        return self.killer.partition("/")[0]


# -- faults of kernels, as changes of a golden ---------------------------------------------------------
def _after(change: Callable[[Any, int], None]) -> by.Corrupt:
    """Run the golden, then spoil what it left."""

    def corrupt(golden: by.Golden, a: Any, n: int) -> None:
        golden(a, n)
        change(a, n)

    return corrupt


def _other_sign(a: Any, n: int) -> None:
    """Of what `swiglu` left."""
    a.out[:n] *= -1


def _seeing(**changes: Callable[[Any], Any]) -> by.Corrupt:
    """Let the golden see other inputs; each function gets the namespace."""

    def corrupt(golden: by.Golden, a: Any, n: int) -> None:
        golden(type(a)(**{**vars(a), **{name: change(a) for name, change in changes.items()}}), n)

    return corrupt


def _keeping(*names: str) -> by.Corrupt:
    """The golden, save for arrays that stay as they were."""

    def corrupt(golden: by.Golden, a: Any, n: int) -> None:
        before = {name: by.keep(a, name) for name in names}
        golden(a, n)
        for name, array in before.items():
            getattr(a, name)[...] = array

    return corrupt


def _without_the_last_column(golden: by.Golden, a: Any, n: int) -> None:
    """Runs of the last column are dropped."""
    before = a.columns[-1].copy()
    golden(a, n)
    a.columns[-1][...] = before


def _by_step_counter(golden: by.Golden, a: Any, n: int) -> None:
    """Whether a slot was just prefilled is guessed from a counter: a sequence that does not begin at 0 is taken for a window."""
    golden(a, n)
    for i in range(n):
        start = a.seq_start[i]
        if a.draft_slot[i] >= 0 and a.positions[start] > 0:
            a.out[i] = a.hidden[start + min(a.draft_position[i] - a.positions[start], 3)]


def _choice_before_the_window(a: Any, n: int) -> None:
    for i in range(n):
        if a.window_len[i] and a.accepted[i] == 0:
            a.window[i, 0] = a.choices[a.logit_start[i] - 1]


def _choice_of_the_last_row(a: Any, n: int) -> None:
    for i in range(n):
        if a.window_len[i]:
            a.window[i, a.accepted[i]] = a.choices[a.logit_start[i] + a.logit_len[i] - 1]


def _mismatch_counts(a: Any, n: int) -> None:
    for i in range(n):
        if 0 <= a.accepted[i] < a.drafted[i]:
            a.accepted[i] += 1


def _not_at_all(launch: Any, device: Any) -> Any:
    del launch, device
    return lambda stream, n: None


def _without_drafts(a: Any) -> Any:
    known = a.prompt_len + a.num_generated
    return np.where(a.row_slot < 0, a.positions, known[np.maximum(a.row_slot, 0)] - a.ahead).astype(np.int32)


def _nothing_is_raised(a: Any, n: int) -> None:
    alone = np.isfinite(a.logits[:n]).sum(axis=1) == 1
    a.logits[:n][alone & (a.logits[:n].max(axis=1) == 0)] = -np.inf


def _padding_moves(a: Any, n: int) -> None:
    idle = a.draft_slot[:n] < 0
    a.draft_position[:n][idle] += 1


def _highest_of_equals(a: Any, n: int) -> None:
    for i in range(n):
        if a.row_slot[i] >= 0 and a.tokens[i] >= 0:
            a.tokens[i] = np.flatnonzero(a.logits[i] == a.logits[i].max())[-1]


def _first_of_nearly_equals(a: Any, n: int) -> None:
    for i in range(n):
        if a.row_slot[i] >= 0 and a.tokens[i] >= 0:
            a.tokens[i] = np.flatnonzero(a.logits[i] >= a.logits[i].max() - 1e-15)[0]


def _no_drafts(a: Any, n: int) -> None:
    a.draft_budget[:n], a.draft_slot[:n] = 0, -1


def _newest_row_left_out(a: Any, n: int) -> None:
    """The row of the newest committed token, which only a full window has behind drafts, is not written to the draft's cache."""
    for row in range(n):
        slot = a.draft_row_slot[row]
        if slot >= 0 and a.phase[slot] == Phase.DECODE and a.positions[row] + 2 == a.prompt_len[slot] + a.num_generated[slot]:
            a.draft_row_slot[row], a.draft_ids[row] = -1, NO_TOKEN


def _whole_cache_forgotten(golden: by.Golden, a: Any, n: int) -> None:
    golden(a, n)
    for i, slot in enumerate(a.slot_order[:n]):
        if slot >= 0 and a.phase[slot] == Phase.DECODE and a.accepted[i] < a.window.shape[1] - 1:
            a.kv_len[slot] = 0


class _LastStep:
    """Hands out the accepted counts of the launch before."""

    def __init__(self) -> None:
        self.before: Any = 0

    def __call__(self, golden: by.Golden, a: Any, n: int) -> None:
        golden(a, n)
        now = a.out_accepted.copy()
        a.out_accepted[:n] = self.before if np.shape(self.before) in {(), now[:n].shape} else 0
        self.before = now[:n]


def _inputs_zeroed(name: str) -> by.Corrupt:
    def change(a: Any, n: int) -> None:
        getattr(a, name)[:n] = 0

    return _after(change)


def _capacity(name: str) -> by.Corrupt:
    """The launch length is taken for the capacity of a buffer."""
    return lambda golden, a, n: golden(a, len(getattr(a, name)))


def _swapped(one: str, other: str) -> Callable[[Any], Any]:
    return lambda args: dataclasses.replace(args, **{one: getattr(args, other), other: getattr(args, one)})


def _longer_window(args: Any) -> Any:
    return dataclasses.replace(args, sliding_window=args.sliding_window and args.sliding_window + 1)


def _allocating(launch: Any, device: Any) -> Any:
    def run(stream: Any, n: int) -> None:
        device.empty("mutant.clone", (4,), "f32")
        launch(stream, n)

    return run


def _waiting(launch: Any, device: Any) -> Any:
    def run(stream: Any, n: int) -> None:
        launch(stream, n)
        device.synchronize()

    return run


class _Disguised(Proxy):
    """A provider of another class, behind which somebody else's kernel runs."""


def _in_disguise(plugin: Any) -> Any:
    """A backend that calls itself real and hands everything to the reference."""
    from polydraft import reference

    def table(answer: Any, device: Any) -> Any:
        del device
        return TableProxy(answer, {name: _Disguised(provider) for name, provider in answer.providers.items()})

    del plugin
    claim = {"name": "disguised", "evidence": "silicon"}
    module = wrap(reference, polydraft_kernels=table, polydraft_backend_info=lambda info: dataclasses.replace(info, **claim))
    module.conformance_base = None  # type: ignore[attr-defined]
    return module


def _claims_graphs(plugin: Any) -> Any:
    """Declares `graph_capture`; what the hook returns can do nothing."""
    from polydraft.hooks import hookimpl

    def info(answer: Any) -> Any:
        return dataclasses.replace(answer, capabilities=dataclasses.replace(answer.capabilities, graph_capture=True))

    def polydraft_graph_capture(device: Any) -> Any:
        del device
        return object()

    module = wrap(plugin, polydraft_backend_info=info)
    module.polydraft_graph_capture = hookimpl(polydraft_graph_capture)  # type: ignore[attr-defined]
    return module


def _stale_input(plugin: Any) -> Any:
    stale = by.Stale("y")
    return by.with_table(
        lambda table, device: {"residual_add": stale.provider(table.providers["residual_add"], device)}, without="residual_add"
    )(plugin)


def _counts_of_the_step_before(plugin: Any) -> Any:
    """A memory of its own for every broken backend."""
    return by.computed("commit_window", _LastStep())(plugin)


def _offsets_of_full_windows(a: Any, n: int) -> None:
    """Where a sequence's logit rows begin is worked out from capacities: as if every window were full."""
    del n
    live = a.logit_start >= 0
    a.logit_start[live] = (np.arange(len(a.logit_start)) * max(int(a.logit_len.max(initial=0)), 1))[live]


def _filled_once(plugin: Any) -> Any:
    """Forward metadata is filled for the first pass and kept."""

    def kept(meta: Any, **_: Any) -> Any:
        fill, done = meta.fill, list[bool]()

        def once(stream: Any, step: Any) -> None:
            if not done:
                done.append(True)
                fill(stream, step)

        object.__setattr__(meta, "fill", once)
        return meta

    return wrap(plugin, polydraft_init_forward_meta=kept)


class _OtherScale(Proxy):
    """Rows go into the cache in a scale that attention does not take back."""

    def __init__(self, inner: Any, device: Any) -> None:
        super().__init__(inner)
        self._device = device

    def bind(self, args: Any, limits: Any, workspace: Any) -> Any:
        launch, device = self._inner.bind(args, limits, workspace), self._device

        def scaled(stream: Any, n: int) -> None:
            launch(stream, n)
            with by.uncounted(device):
                k, v = args.cache.read_logical()
                args.cache.write_logical(np.asarray(k * np.float32(0.5)), v)

        return scaled


def _cache_in_another_scale(table: Any, device: Any) -> dict[str, Any]:
    return {"rope_kv_write": _OtherScale(table.providers["rope_kv_write"], device)}


def _declares_nothing(info: Any) -> Any:
    """Every capability that a claim could rest on is left out."""
    less = dataclasses.replace(info.capabilities, graph_capture=False, asynchronous=False, row_invariant=False)
    return dataclasses.replace(info, capabilities=less)


def _core(id_: str, title: str, source: str, killer: str, fault: Fault, needs: str = "") -> Mutant:
    """A mutant whose fault is core's, around a backend that is as it is."""
    return Mutant(id_, title, source, killer, lambda plugin: plugin, needs, fault)


def _kept(id_: str, title: str, source: str, change: kv_faults.Change, kv: str = "int8") -> Mutant:
    """A mutant that stores quantised rows in a wrong way."""
    return Mutant(id_, title, source, f"L2/rope_kv_write/kv-{kv}", kv_faults.stores(change), "kv_dtypes")


def _packed(id_: str, title: str, source: str, packing: str, change: Callable[[Any], Any]) -> Mutant:
    """A mutant whose `linear` reads packed weights in a wrong way."""
    broken = by.computed("linear", _seeing(weight=packing_faults.reading(change)))
    return Mutant(id_, title, source, f"L2/linear/packed-{packing}", broken, "weight_packings")


def _experts(
    id_: str, title: str, source: str, packing: str, change: Callable[[Any], Any], which: tuple[str, ...] = ("gate_up", "down")
) -> Mutant:
    """A mutant whose `expert_mlp` reads packed stacks in a wrong way."""
    broken = by.computed("expert_mlp", _seeing(**{name: packing_faults.reading(change, name) for name in which}))
    return Mutant(id_, title, source, f"L2/expert_mlp/packed-{packing}", broken, "expert_packings")


def _biased_weights(golden: by.Golden, a: Any, n: int) -> None:
    """Weights are taken from what was sorted."""
    golden(a, n)
    if a.bias is not None:
        for i in range(n):
            chosen = a.expert_ids[i]
            a.expert_weights[i] += a.bias[np.maximum(chosen, 0)] * (chosen >= 0)


def _masked_with_zero(golden: by.Golden, a: Any, n: int) -> None:
    """An expert of a group that was left out still beats those with a negative selection score."""
    golden(a, n)
    if a.num_groups > 1 and a.bias is not None:
        size = a.logits.shape[1] // a.num_groups
        for i in range(n):
            kept = set((a.expert_ids[i] // size).tolist())
            outside = next((e for e in range(a.logits.shape[1]) if e // size not in kept), None)
            chosen = a.expert_ids[i, -1]
            if outside is not None and chosen >= 0 and a.bias[chosen] < -1:
                a.expert_ids[i, -1] = outside


def _scale_renormalised(a: Any, n: int) -> None:
    if a.renormalize != "none":
        a.expert_weights[:n] /= a.scale


def _all_experts_computed(golden: by.Golden, a: Any, n: int) -> None:
    """Experts that nobody chose count with weight 0, which does not stop what is not a number."""
    golden(a, n)
    unread = np.setdiff1d(np.arange(len(a.gate_up)), a.expert_ids[:n])
    a.out[:n] += sum(0.0 * (unpacked(a.gate_up[e]).sum() + unpacked(a.down[e]).sum()) for e in unread)


def _within_capacity(a: Any) -> Any:
    """Each expert takes as many rows as on average, and half as many more."""
    ids, counts = a.expert_ids.copy(), dict[int, int]()
    limit = max(1, 3 * ids.size // (2 * len(a.gate_up)))
    for place in np.ndindex(ids.shape):
        counts[ids[place]] = counts.get(ids[place], 0) + 1
        if counts[ids[place]] > limit:
            ids[place] = -1
    return ids


def _by_load(table: Any, device: Any) -> dict[str, Any]:
    """Choices of each row are put into the order of how many rows their experts have before the kernel sees them."""
    return {"expert_mlp": _SortedByLoad(table.providers["expert_mlp"], device)}


class _SortedByLoad(Proxy):
    """A provider whose launches have the choices of rows in another order, worked out from the whole launch."""

    def __init__(self, inner: Any, device: Any) -> None:
        super().__init__(inner)
        self._device = device

    def bind(self, args: Any, limits: Any, workspace: Any) -> Any:
        device, names = self._device, ("expert_ids", "expert_weights")
        before = {name: getattr(args, name) for name in names}
        with by.uncounted(device):
            mine = {name: device.empty(f"mutant.{name}", one.shape, one.dtype) for name, one in before.items()}
            pins = {name: device.staging(f"mutant.{name}", one.shape, one.dtype) for name, one in before.items()}
            event = device.event()
        launch = self._inner.bind(dataclasses.replace(args, **mine), limits, workspace)

        def run(stream: Any, n: int) -> None:
            with by.uncounted(device):
                for name, buffer in before.items():
                    device.download(stream, pins[name], buffer, buffer.shape[0])
                event.record(stream)
                event.synchronize()
                ids = pins["expert_ids"].array
                load = np.bincount(ids[:n][ids[:n] >= 0], minlength=int(ids[:n].max(initial=0)) + 1)
                order = np.argsort(np.where(ids[:n] >= 0, load[np.maximum(ids[:n], 0)], -1), axis=1, kind="stable")
                for name, buffer in mine.items():
                    pins[name].array[:n] = np.take_along_axis(pins[name].array[:n], order, axis=1)
                    device.upload(stream, buffer, pins[name], buffer.shape[0])
                event.record(stream)
                event.synchronize()
            launch(stream, n)

        return run


ATTACKER: Final = "planted by an attacker"


def _sized(id_: str, contract: str, case: str, spoil: Callable[[Any, int], None], source: str) -> Mutant:
    """A mutant that is right at small sizes."""
    fault = (spoil.__doc__ or "").rstrip(".")
    title = f"{contract}: {fault[:1].lower()}{fault[1:]}"
    return Mutant(id_, title, source, f"L2/{contract}/{case}", by.spoiled(contract, spoil))


SIZED: Final[tuple[Mutant, ...]] = (
    _sized("M90", "linear", "I-1025", size_faults.inputs_beyond_256, "a tile of the inner dimension"),
    _sized("M91", "linear", "O-1031", size_faults.outputs_beyond_1024, "one block of threads a row"),
    _sized("M92", "linear", "N-65", size_faults.rows_beyond_64, "a tile of rows"),
    _sized("M93", "linear", "more-surprises", size_faults.inputs_on_no_list, "kernels tuned to a test suite"),
    _sized("M94", "begin_draft", "B-17", size_faults.slots_beyond_8, "a demonstration's batch"),
    _sized("M95", "begin_draft", "B-33", size_faults.slots_beyond_16, "half a warp"),
    _sized("M96", "verify_match", "K-8", size_faults.drafts_beyond_7, "windows of 8 words"),
    _sized("M97", "argmax", "N-65", size_faults.no_slot_beyond_32_rows, "padding tested in the first block alone"),
    _sized("M98", "argmax", "V-152064", size_faults.tokens_beyond_65535, "vocabularies of 32,000"),
    _sized("M99", "embed", "V-152064", size_faults.table_rows_beyond_65535, "the same"),
    _sized("M100", "paged_attention", "MB-129", size_faults.keys_beyond_1024, "a fixed number of blocks in shared memory"),
    _sized("M101", "paged_attention", "head_dim-256", size_faults.head_elements_beyond_128, "one thread an element"),
    _sized("M102", "rope_kv_write", "MB-513", size_faults.positions_beyond_4096, "tables of the length of a first model"),
    _sized("M103", "rms_norm", "D-5120", size_faults.columns_beyond_4096, "a row held in registers"),
    _sized("M104", "swiglu", "I-28672", size_faults.columns_beyond_16384, "offsets in 16 bits"),
    _sized("M105", "pack_rows", "B-65", size_faults.sequences_beyond_a_warp, "prefix sums of one warp"),
    _sized("M106", "reserve_blocks", "MB-129", size_faults.blocks_beyond_64, "a bit mask of 64"),
    _sized("M107", "commit_window", "S-300", size_faults.stop_tokens_beyond_64, "a fixed table"),
    _sized("M108", "commit_window", "L-8192", size_faults.history_beyond_4096, "positions in 12 bits"),
    _sized("M109", "top_logprobs", "E-129", size_faults.columns_beyond_32, "one a lane of a warp"),
    _sized("M110", "route_experts", "EX-512", size_faults.experts_beyond_256, "one thread an expert"),
)
"""Those that no small case can find."""

C = by.computed


def _of_ranks(id_: str, contract: str, check: str, title: str, source: str, corrupt: by.Corrupt) -> Mutant:
    """A collective that computes a change of its golden."""
    needs = "ordered_sums" if check == "ordered-sums" else "ranks_as_threads"
    return Mutant(id_, title, source, f"L2/collectives/{check}", rank_faults.computed(contract, corrupt), needs)


def _by_leaf(id_: str, contract: str, check: str, title: str, source: str, corrupt: by.Corrupt) -> Mutant:
    """A kernel of sums by leaf, or a product beside them, that computes a change of its golden."""
    golden = by.computed(contract, corrupt)

    def broken(plugin: Any) -> Any:  # not recognised by its golden: none is held against it, or a leaf of it is another's size
        return golden(plugin)

    return Mutant(id_, title, source, f"L2/{check}", golden if contract == "linear_leaves" else broken, "ordered_sums")


MUTANTS: Final[tuple[Mutant, ...]] = (
    Mutant(
        "M01",
        "hidden row told from a step counter",
        "FastDeploy XPU, eagle_get_self_hidden_states",
        "L2/select_last_rows/resumed_prefill_is_no_special_case",
        C("select_last_rows", _by_step_counter),
    ),
    Mutant(
        "M02",
        "two int arguments of one shape swapped",
        "positional calls with many tensors",
        "L2/pack_rows/resumed_request_prefills_all_but_its_last_token",
        by.rebound("pack_rows", _swapped("prefill_len", "prompt_len")),
    ),
    Mutant(
        "M03",
        "negative rows not skipped",
        "FastDeploy 7247",
        "L2/gather_rows/no_row_between_rows",
        C("gather_rows", _seeing(index=lambda a: np.maximum(a.index, 0))),
    ),
    Mutant(
        "M04",
        "padding rows advanced",
        "vLLM 43682, 45005",
        "L2/advance_draft/sequence_that_is_done_between_others",
        C("advance_draft", _after(_padding_moves)),
    ),
    Mutant(
        "M05",
        "placeholder tokens reach the embedding",
        "vLLM 40768",
        "L2/pack_rows/fewer_drafts_than_places",
        C("pack_rows", _seeing(draft_len=lambda a: np.full_like(a.draft_len, a.drafts.shape[1]))),
    ),
    Mutant(
        "M06",
        "row before the window where nothing was accepted",
        "FastDeploy 6495",
        "L2/verify_match/no_draft_accepted",
        C("verify_match", _after(_choice_before_the_window)),
    ),
    Mutant(
        "M07",
        "the target's token of the last row instead of the accepted one",
        "off by some",
        "L2/verify_match/no_draft_accepted",
        C("verify_match", _after(_choice_of_the_last_row)),
    ),
    Mutant(
        "M08",
        "first mismatch counted as accepted",
        "off by one",
        "L2/verify_match/agreement_after_a_disagreement_counts_for_nothing",
        C("verify_match", _after(_mismatch_counts)),
    ),
    Mutant(
        "M09",
        "loop over the capacity of the batch",
        "FastDeploy, slices by real_bsz",
        "L2/commit_window/beyond_the_launch_length",
        C("commit_window", _capacity("out_len")),
    ),
    Mutant(
        "M10",
        "padded outputs not cut to the real ones",
        "FastDeploy 8061",
        "L2/snapshot_output/beyond_the_launch_length",
        C("snapshot_output", _capacity("record")),
    ),
    Mutant(
        "M11",
        "hidden rows credited to another request",
        "SGLang 26163",
        "L2/select_last_rows/prefill_chunk_beside_windows",
        C("select_last_rows", _after(lambda a, n: a.out.__setitem__(slice(0, n), a.out[:n][::-1].copy()))),
    ),
    Mutant(
        "M12",
        "arrays of a slot not stretched over its window",
        "FastDeploy 8061, 7864",
        "L2/gumbel_noise/windows_of_several_slots",
        C("gumbel_noise", _seeing(row_slot=lambda a: np.where(a.row_slot >= 0, np.arange(len(a.row_slot)) % len(a.seed), -1))),
    ),
    Mutant(
        "M13",
        "recovered token drawn from p instead of (p - q)+",
        "a classic",
        "L2/verify_rejection/drawn_from_what_the_target_has_more",
        C("verify_rejection", _seeing(draft_probs=lambda a: None if a.draft_probs is None else np.zeros_like(a.draft_probs))),
    ),
    Mutant(
        "M14",
        "reported q is not the q that was drawn from",
        "transformers 47932",
        "L2/draw_draft/each_slot_files_behind_what_it_has",
        C("draw_draft", _after(lambda a, n: a.draft_probs.__imul__(0.5))),
    ),
    Mutant(
        "M15",
        "target probabilities changed in place",
        "vllm-ascend 2881",
        "L2/verify_rejection/equal_distributions_accept_everything",
        C("verify_rejection", _after(lambda a, n: a.probs.fill(0.0))),
    ),
    Mutant(
        "M16",
        "acceptance rule of certain drafts on drawn ones",
        "reuse of an n-gram path",
        "L2/verify_rejection/likelier_than_the_draft_thought",
        C("verify_rejection", _seeing(draft_probs=lambda a: None)),
    ),
    Mutant(
        "M17",
        "another rule for ties",
        "FastDeploy 7883",
        "L2/argmax/lowest_id_of_equals",
        C("argmax", _after(_highest_of_equals)),
    ),
    Mutant(
        "M111",
        "numbers that are close count as equal",
        "Paddle's comparison of float32",
        "L2/argmax/the_last_digit_decides",
        C("argmax", _after(_first_of_nearly_equals)),
    ),
    Mutant(
        "M18",
        "drafting silently off",
        "a parameter that one caller leaves at 0",
        "L5/greedy/K3-B3",
        C("begin_draft", _after(_no_drafts)),
    ),
    _core(
        "M19",
        "capacity counts slots, not slots times window",
        "FastDeploy 7623, 7438",
        "L5/full-batch",
        core_faults.logit_rows_for_one_token_a_slot,
    ),
    Mutant(
        "M20",
        "graphs accepted and ignored",
        "vLLM 32818",
        "L3/engine/is-replayed",
        by.with_capture(lambda facility, device: by.NeverCaptures(facility)),
        "graph_capture",
    ),
    Mutant(
        "M21",
        "graph input assigned anew instead of copied",
        "FastDeploy 7864",
        "L3/replay/new-contents",
        _stale_input,
        "graph_capture",
    ),
    Mutant("M22", "a clone in every launch", "FastDeploy 8061", "L2/swiglu/every_row_used", by.launched("swiglu", _allocating)),
    Mutant(
        "M23",
        "tails of persistent buffers not written",
        "vllm-ascend 15461",
        "L2/pack_rows/order_shorter_than_the_batch",
        C("pack_rows", _keeping("row_slot")),
    ),
    Mutant("M24", "the host waits inside a launch", "review practice", "L2/linear/one_row", by.launched("linear", _waiting)),
    _core(
        "M25",
        "the next smaller bucket",
        "bucket search off by one",
        "L3/engine/bucket-edges",
        core_faults.next_smaller_bucket,
        "graph_capture",
    ),
    Mutant(
        "M26",
        "two graphs share what is one's own",
        "SGLang 22930",
        "L3/replay/two-graphs",
        by.with_capture(lambda facility, device: by.OneGraph(facility)),
        "graph_capture",
    ),
    Mutant(
        "M27",
        "later passes use the first pass's positions",
        "FastDeploy 5624, 8061",
        "L2/advance_draft/first_draft_of_several",
        C("advance_draft", _keeping("draft_position")),
    ),
    Mutant(
        "M28",
        "host copy read before it was finished",
        "vLLM 36013",
        "L1/event-not-early",
        by.with_device(lambda device: by.EventDevice(device, lambda event, _: by.NeverWaits(event))),
        "asynchronous",
    ),
    Mutant(
        "M29",
        "pinned staging rewritten before its upload ran",
        "the same family",
        "L4/overlap-2/arrivals",
        by.with_device(by.SharedStaging),
        "asynchronous",
    ),
    Mutant(
        "M30",
        "event recorded before the copy",
        "overlap code",
        "L1/event-not-early",
        by.with_device(by.LateDownloads),
        "asynchronous",
    ),
    Mutant(
        "M31",
        "query() true while work runs",
        "OpenReg streamQuery",
        "L1/query-is-honest",
        by.with_device(lambda device: by.EventDevice(device, lambda event, _: by.AlwaysReached(event))),
        "asynchronous",
    ),
    _core(
        "M32",
        "planned on optimistic lengths that nobody corrects",
        "vllm-ascend 10032",
        "L4/overlap-1/arrivals",
        core_faults.lengths_stay_optimistic,
        "asynchronous",
    ),
    _core(
        "M33",
        "a request freed twice under overlap",
        "a guard in mini-sglang",
        "L4/overlap-1/stop-in-flight",
        core_faults.freed_when_it_ends_and_again_when_drained,
        "asynchronous",
    ),
    Mutant(
        "M34",
        "blocks reserved for one token, not for a window",
        "ROCm ATOM 250, vLLM 16370",
        "L2/reserve_blocks/one_token_more_than_two_blocks",
        C("reserve_blocks", _seeing(lookahead=lambda a: 0)),
    ),
    _core(
        "M35",
        "the tail of a rejected window never released",
        "the ledger",
        "L5/late-arrivals",
        core_faults.tail_never_released,
    ),
    Mutant(
        "M36",
        "a rejected draft resets the whole cache",
        "aprender 2014",
        "L2/commit_window/no_draft_accepted",
        C("commit_window", _whole_cache_forgotten),
    ),
    Mutant(
        "M37",
        "slots taken for consecutive",
        "TGI 2711",
        "L2/verify_match/all_phases_in_another_order_than_slots",
        C("verify_match", _seeing(slot_order=lambda a: np.where(a.slot_order >= 0, np.arange(len(a.slot_order)), -1))),
    ),
    Mutant(
        "M38",
        "the draft's cache row of the newest token not written",
        "vLLM 9730",
        "L5/greedy/K3-B3",
        C("pack_draft_rows", _after(_newest_row_left_out)),
    ),
    Mutant(
        "M39",
        "the count of columns cut to the bits beside a flag",
        "FastDeploy 7883",
        "L2/pack_logprobs/more_columns_than_a_byte_holds",
        C("pack_logprobs", _after(lambda a, n: a.record[:1].__iand__(0xFFFF))),
    ),
    Mutant(
        "M40",
        "a batch above the record's fixed size silently cut",
        "a record of 512 slots",
        "L2/pack_logprobs/another_order_than_slots",
        C("pack_logprobs", _seeing(slot_order=lambda a: np.where(np.arange(len(a.slot_order)) < 2, a.slot_order, -1))),
    ),
    Mutant(
        "M41",
        "tokens behind a stop token inside the window",
        "commit",
        "L2/commit_window/stop_token_second",
        C("commit_window", _seeing(stop_tokens=lambda a: np.full_like(a.stop_tokens, -1))),
    ),
    Mutant("M42", "kernels quietly handed to the reference", "fallback imports", "L0/ownership", _in_disguise),
    Mutant(
        "M43",
        "the first result is returned for ever",
        "KernelBench, result reuse",
        "L2/swiglu/new-contents",
        by.launched("swiglu", by.once),
    ),
    Mutant(
        "M44",
        "inputs zeroed behind the result",
        "KernelBench, zero-out",
        "L2/swiglu/every_row_used",
        C("swiglu", _inputs_zeroed("gate_up")),
    ),
    Mutant(
        "M45",
        "work on a side stream that nobody waits for",
        "KernelBench, side stream",
        "L2/swiglu/every_row_used",
        by.launched("swiglu", by.late),
    ),
    Mutant("M46", "a capability claimed and not implemented", "our own", "L0/capture-facility", _claims_graphs),
    Mutant(
        "M47",
        "everything under-declared",
        "our own",
        "L3/capture/runs-nothing",
        by.with_info(_declares_nothing),
        "graph_capture",
        judged=True,
    ),
    Mutant(
        "M48",
        "a request is admitted without one of its columns",
        "an incomplete list of fields",
        "L2/scatter/columns_of_every_kind",
        C("scatter", _without_the_last_column),
    ),
    Mutant(
        "M49",
        "counts of the step before",
        "FastDeploy 7788",
        "L2/commit_window/all_drafts_accepted",
        _counts_of_the_step_before,
    ),
    Mutant(
        "M50",
        "a counter off by one in one consumer",
        "FastDeploy 7166, 7349",
        "L2/begin_draft/all_drafts_accepted",
        C("begin_draft", _after(lambda a, n: a.draft_position.__iadd__(1))),
    ),
    Mutant(
        "M51",
        "launch length taken for the valid length",
        "uninitialised tails",
        "L2/pack_draft_rows/beyond_the_launch_length",
        C("pack_draft_rows", _capacity("draft_ids")),
    ),
    _core(
        "M52",
        "target and draft disagree on what is replayed",
        "FastDeploy 4430, 4456",
        "L3/engine/shrinking-batch",
        core_faults.draft_replays_another_bucket,
        "graph_capture",
    ),
    Mutant(
        "M53",
        "capturing also runs",
        "met while building the kit",
        "L3/capture/runs-nothing",
        by.with_capture(lambda facility, device: by.RunsWhileCapturing(facility)),
        "graph_capture",
    ),
    Mutant(
        "M54",
        "forward metadata of an earlier pass",
        "FastDeploy, ForwardMeta rebuilt here and copied there",
        "L5/greedy/K3-B3",
        _filled_once,
        moot="kernels that read rows and block tables themselves need no metadata",
    ),
    Mutant(
        "M55",
        "the cache kept in another scale",
        "FastDeploy, uint8 here and int8 there",
        "L2/rope_kv_write/windows_beside_a_prefill_chunk",
        by.with_table(_cache_in_another_scale, without="rope_kv_write"),
    ),
    Mutant(
        "M56",
        "logit rows found by capacities",
        "FastDeploy XPU, slot times length minus an offset",
        "L2/pack_logit_rows/all_phases_in_another_order_than_slots",
        C("pack_logit_rows", _after(_offsets_of_full_windows)),
    ),
    Mutant(
        "M57",
        "a stream that does not wait for an event",
        "overlap code",
        "L1/two-streams",
        by.with_device(by.HeedlessStreams),
        "asynchronous",
        moot="a device whose streams are one queue keeps their order without waiting",
    ),
    Mutant(
        "M58",
        "a graph that runs on memory that has moved",
        "FastDeploy 7864",
        "L3/replay/rebinding",
        by.with_capture(lambda facility, device: by.NeverCaptures(facility)),
        "graph_capture",
    ),
    Mutant(
        "M59",
        "a later binding takes the place of an earlier one",
        "one static parameter block for all layers",
        "L2/swiglu/bound-again",
        by.with_table(lambda table, device: {"swiglu": by.BoundLast(table.providers["swiglu"])}, without="swiglu"),
    ),
    _core(
        "M60",
        "nobody looks at what a kernel is bound to",
        "FastDeploy, ops that take any tensor",
        "L2/linear/refused-arguments",
        core_faults.arguments_unchecked,
    ),
    _core(
        "M61",
        "data from the host of an earlier step",
        "grammar masks that came too late",
        "L5/host-inputs/eager",
        core_faults.host_inputs_go_up_once,
        "host_inputs",
    ),
    _core(
        "M62",
        "preempted requests go on with weights that they did not begin with",
        "met while building weight updates",
        "L5/weights/begun-requests-keep-the-old-ones",
        core_faults.preempted_go_on_with_new_weights,
        "update_weights",
    ),
    _core(
        "M63",
        "sequences in another order than the declared one",
        "FastDeploy XPU, adjust_batch",
        "L5/chunked-prefill",
        core_faults.another_launch_order,
    ),
    _kept("M64", "exponents of the next head", "strides of two arrays mixed up", kv_faults.of_the_next_head),
    _kept("M65", "exponents of the next row", "off by one", kv_faults.of_the_next_row),
    _kept("M66", "the exponents of keys for values", "one scale for both halves", kv_faults.of_the_keys),
    _kept("M67", "exponents not written", "a cache that was zeroed once", kv_faults.not_written),
    _kept("M68", "exponents one too small", "rounding a logarithm down", kv_faults.too_small),
    _kept("M69", "numbers cut instead of rounded", "a cast to int8", kv_faults.truncated),
    _kept("M70", "numbers below the normal ones of fp8 lost", "conversions that flush", kv_faults.flushed, "fp8"),
    _kept("M71", "exponents of fp8 rows one too small", "448 taken for 512", kv_faults.too_small, "fp8"),
    _core(
        "M72",
        "steps without drafts leave the draft's keys and values unwritten",
        "met while building drafts per step",
        "L5/drafts-per-step",
        core_faults.no_keep_part,
    ),
    _core(
        "M73",
        "a graph of fewer drafts than planned",
        "met while building drafts per step",
        "L3/engine/drafts-per-step",
        core_faults.replays_the_rung_below,
        "graph_capture",
    ),
    Mutant(
        "M74",
        "the selection bias inside the weights",
        "routers that sort biased scores and keep them",
        "L2/route_experts/bias_selects_and_does_not_weigh_sigmoid",
        C("route_experts", _biased_weights),
    ),
    Mutant(
        "M75",
        "experts of groups that were left out have 0 instead of -infinity",
        "masks by multiplication",
        "L2/route_experts/negative_selection_scores_win_over_masked_groups",
        C("route_experts", _masked_with_zero),
    ),
    Mutant(
        "M76",
        "renormalised after scaling",
        "order of two lines",
        "L2/route_experts/sigmoid_renormalised_and_scaled",
        C("route_experts", _after(_scale_renormalised)),
    ),
    Mutant(
        "M77",
        "terms of experts summed in the order of their loads",
        "grouped kernels that add as they finish",
        "L2/expert_mlp/row-alone",
        by.with_table(_by_load, without="expert_mlp"),
        "row_invariant",
        moot="in 16 bits the order of a few terms is mostly lost in the rounding of their sum",
    ),
    Mutant(
        "M78",
        "an expert without rows is read",
        "dense products over all experts, masked afterwards",
        "L2/expert_mlp/an_expert_without_rows_is_not_read",
        C("expert_mlp", _all_experts_computed),
    ),
    Mutant(
        "M79",
        "experts of rows that are not there",
        "padding that is routed as well",
        "L2/route_experts/rows_without_a_slot_have_no_experts",
        C("route_experts", _seeing(row_slot=lambda a: None)),
    ),
    Mutant(
        "M80",
        "a row is dropped where its expert is full",
        "capacity factors",
        "L2/expert_mlp/all_rows_choose_one_expert",
        C("expert_mlp", _seeing(expert_ids=_within_capacity)),
    ),
    Mutant(
        "M81",
        "a sliding window one key too long",
        "masks that keep the key at the distance of the window, too",
        "L2/paged_attention/sliding-window",
        by.rebound("paged_attention", _longer_window),
        "sliding_window",
    ),
    Mutant(
        "M82",
        "the attention factor of a scaled rotation left out",
        "YaRN read for its frequencies alone",
        "L2/rope_kv_write/turned_elements_are_scaled",
        by.rebound("rope_kv_write", lambda args: dataclasses.replace(args, attention_factor=1.0)),
    ),
    *SIZED,
    Mutant(
        "M123",
        "the queue finished inside every launch",
        "planted by a tester",
        "L4/launch-returns/swiglu",
        hidden.every_launch(hidden.finishing),
        "asynchronous",
    ),
    Mutant(
        "M124",
        "the queue finished inside replays",
        "planted by a tester",
        "L4/replays-return",
        by.with_capture(hidden.WaitingReplays),
        "graph_capture",
    ),
    Mutant(
        "M83",
        "every copy blocks",
        "planted by a tester; copies from memory that is not pinned",
        "L4/copies-return",
        by.with_device(hidden.WaitingCopies),
        "asynchronous",
    ),
    Mutant(
        "M84",
        "long copies block",
        "a driver that stages them",
        "L4/copies-return",
        by.with_device(lambda device: hidden.WaitingCopies(device, hidden.LONG)),
        "asynchronous",
    ),
    Mutant(
        "M85",
        "launches and copies block alike",
        "a synchronous device that declares otherwise",
        "L4/work-is-queued",
        hidden.both(hidden.every_launch(hidden.finishing), by.with_device(hidden.WaitingCopies)),
        "asynchronous",
    ),
    Mutant(
        "M86",
        "one launch in flight",
        "parameters of launches in one place",
        "L4/work-is-queued",
        hidden.one_in_flight,
        "asynchronous",
    ),
    Mutant(
        "M87",
        "the queue finished in one launch of some",
        "a ring of parameters that is too short",
        "L4/steps-return",
        hidden.now_and_then,
        "asynchronous",
    ),
    Mutant(
        "M88",
        "metadata worked out behind a wait",
        "FastDeploy, lengths read back for attention",
        "L4/launch-returns/paged_attention",
        hidden.metadata_waits,
        "asynchronous",
    ),
    Mutant(
        "M89",
        "an event that is recorded behind a wait",
        "events made of waits",
        "L4/events-return",
        by.with_device(lambda device: by.EventDevice(device, hidden.WaitingRecords)),
        "asynchronous",
    ),
    Mutant(
        "M112",
        "memory allocated inside launches, and not counted",
        "planted by a tester",
        "L6/memory-of-launches/swiglu",
        by.launched("swiglu", hidden.allocating),
    ),
    Mutant(
        "M113",
        "memory that launches keep",
        "a list that only grows",
        "L6/memory-of-launches/swiglu",
        by.launched("swiglu", hidden.keeping),
    ),
    Mutant(
        "M114",
        "memory that uploads keep",
        "staging of one's own",
        "L6/memory-of-steps",
        by.with_device(hidden.KeepingUploads),
    ),
    Mutant(
        "M115",
        "wrong on the 100th launch of a binding",
        "planted by a tester",
        "L2/linear/new-contents",
        by.launched("linear", hidden.wears_out(hidden.LATE)),
    ),
    Mutant(
        "M116",
        "wrong on the 100th replay of a graph",
        "planted by a tester",
        "L3/kernel/swiglu",
        by.with_capture(lambda facility, device: hidden.GraphsWearOut(facility)),
        "graph_capture",
    ),
    Mutant(
        "M117",
        "a binding that was captured is launched no more",
        "a flag that stays",
        "L3/kernel/swiglu",
        hidden.captured_for_good,
        "graph_capture",
    ),
    Mutant(
        "M118",
        "engines share their caches",
        "a pool by form and not by engine",
        "L5/two-engines",
        hidden.caches_of_all,
    ),
    Mutant(
        "M119",
        "a later engine's bindings take the place of an earlier one's",
        "state of a process",
        "L5/two-engines",
        hidden.bindings_of_all,
    ),
    Mutant(
        "M120",
        "an engine that is closed closes the others",
        "one context for all",
        "L5/two-engines",
        hidden.closed_with_another,
    ),
    Mutant(
        "M121",
        "a stream that waits on the host",
        "events made of waits",
        "L4/events-return",
        by.with_device(hidden.WaitingStreams),
        "asynchronous",
        moot="a device whose streams are one queue has none to wait",
    ),
    Mutant(
        "M122",
        "launches that finish the queue, before events that hesitate",
        "query() is no proof",
        "L4/launch-returns/swiglu",
        hidden.both(
            hidden.every_launch(hidden.finishing),
            by.with_device(lambda device: by.EventDevice(device, lambda event, _: by.HesitatesOnce(event))),
        ),
        "asynchronous",
    ),
    Mutant(
        "M125",
        "uploads that happen when they are called",
        "planted by a tester",
        "L1/copies-behind-work",
        by.with_device(hidden.EarlyUploads),
        "asynchronous",
        moot="a device whose streams are one queue has no way past it",
    ),
    Mutant(
        "M126",
        "downloads that happen when they are called",
        "the same, the other way",
        "L1/copies-behind-work",
        by.with_device(hidden.EarlyDownloads),
        "asynchronous",
        moot="a device whose streams are one queue has no way past it",
    ),
    Mutant(
        "M127",
        "a load that does not wait for the stream",
        "planted by a tester",
        "L1/load-behind-work",
        by.with_device(hidden.EarlyLoads),
        "asynchronous",
        moot="a device whose streams are one queue has no way past it",
    ),
    Mutant(
        "M128",
        "wrong on the 200th launch of a binding",
        "planted by a tester",
        "L2/linear/many-launches",
        by.launched("linear", hidden.wears_out(hidden.LATER)),
    ),
    _packed("M131", "scales of the next block", "off by one", "int4-group32", packing_faults.neighbour),
    _packed("M132", "scales of blocks transposed", "row and column mixed up", "fp8-block128", packing_faults.transposed),
    _packed("M133", "zero points one higher", "files that store 1 less", "int4-group64-zeros", packing_faults.zero_off_by_one),
    _packed("M134", "low and high nibble swapped", "another order of halves", "int4-channel", packing_faults.swapped),
    _packed("M135", "a group that ends a column late", "off by one", "int4-group128", packing_faults.border),
    Mutant(
        "M136",
        "activations of all rows rounded with one scale",
        "a reduction over the whole launch",
        "L2/linear/packed-int8-channel-a8",
        by.computed("linear", _seeing(x=packing_faults.rounded_together)),
        "weight_packings",
    ),
    Mutant(
        "M137",
        "waiting for an event waits for everything",
        "planted by a tester",
        "L4/events-return",
        by.with_device(lambda device: by.EventDevice(device, hidden.WaitingForAll)),
        "asynchronous",
    ),
    Mutant(
        "M138",
        "a load that reads the caller's array later",
        "planted by a tester",
        "L1/load-behind-work",
        by.with_device(hidden.AliasingLoads),
        "asynchronous",
    ),
    Mutant(
        "M139",
        "memory that launches keep, taken by a thread of their own",
        "planted by a tester",
        "L6/memory-of-launches/swiglu",
        by.launched("swiglu", hidden.keeping_elsewhere),
    ),
    _sized("M140", "pack_rows", "L-131101", size_faults.positions_beyond_32767, "planted by a tester"),
    _sized("M141", "rope_kv_write", "MB-8209", size_faults.angles_beyond_32767, "planted by a tester"),
    Mutant(
        "M142",
        "weights that are lost in sleep",
        "a pool of memory that is tagged wrongly",
        "L5/sleep/level-1",
        by.with_device(hidden.Amnesia),
        "sleep",
    ),
    _of_ranks("M150", "all_reduce", "ordered-sums", "sums in the order of arrival", "ring and tree sums", rank_faults.own_first),
    _of_ranks("M151", "all_reduce", "ordered-sums", "sums rank by rank", "a sum in a loop", rank_faults.one_after_the_other),
    _of_ranks("M152", "all_reduce", "all_reduce", "a sum of one row more", "off by one", rank_faults.rows_beyond),
    _of_ranks(
        "M153", "all_gather", "all_gather", "padding in front", "a gather of the padded vocabulary", rank_faults.padding_is_kept
    ),
    _of_ranks("M154", "argmax_pair", "argmax_pair", "the last of equals", "ranks compared with >=", rank_faults.last_of_equals),
    _of_ranks("M155", "argmax_pair", "argmax_pair", "padding wins", "the padded vocabulary", rank_faults.padding_takes_part),
    _of_ranks("M156", "broadcast", "broadcast", "ranks that sample for themselves", "no broadcast", rank_faults.own_choice),
    Mutant(
        "M157",
        "a rank that skips a collective",
        "vLLM, issue 44185: a rank that skips a draft pass",
        "L2/collectives/all_gather",
        rank_faults.skipping("all_gather", 1),
        "ranks_as_threads",
    ),
    _experts("M170", "scales of the next expert", "an offset of one matrix", "int8-channel", packing_faults.next_expert),
    _experts(
        "M171", "zero points of the next expert", "an offset of one matrix", "int4-group32-zeros", packing_faults.next_zeros
    ),
    _experts(
        "M172",
        "experts' scales of the next block",
        "off by one",
        "int4-group32",
        packing_faults.of_each(packing_faults.neighbour),
    ),
    _experts(
        "M173",
        "experts' scales of blocks transposed",
        "row and column mixed up",
        "fp8-block128",
        packing_faults.of_each(packing_faults.transposed),
    ),
    _experts(
        "M174",
        "experts' zero points one higher",
        "files that store 1 less",
        "int4-group64-zeros",
        packing_faults.of_each(packing_faults.zero_off_by_one),
    ),
    _experts(
        "M175",
        "experts' low and high nibble swapped",
        "another order of halves",
        "int4-channel",
        packing_faults.of_each(packing_faults.swapped),
    ),
    _experts(
        "M176",
        "experts' groups end a column late",
        "off by one",
        "int4-group128",
        packing_faults.of_each(packing_faults.border),
        ("gate_up",),
    ),
    Mutant(
        "M177",
        "activations of all rows of experts rounded with one scale",
        "a reduction over the whole launch",
        "L2/expert_mlp/packed-int8-channel-a8",
        by.computed("expert_mlp", _seeing(x=lambda a: packing_faults.rounded_together(a, "gate_up"))),
        "expert_packings",
    ),
    _experts(
        "M178",
        "what lies between an expert's products is not rounded",
        "a fused kernel",
        "fp8-channel-a8",
        packing_faults.unrounded,
        ("down",),
    ),
    Mutant(
        "M200",
        "thinking judged by the committed text alone, without the drafts before a row",
        "speculative decoding around a logits processor of plain decoding",
        "L2/limit_thinking/limit_is_reached_by_the_drafts",
        C("limit_thinking", _seeing(positions=_without_drafts)),
    ),
    Mutant(
        "M201",
        "the end of thinking not looked for behind the last token of a window",
        "off by one",
        "L2/commit_thinking/end_is_the_last_token",
        C(
            "commit_thinking",
            _seeing(out_len=lambda a: np.maximum(a.out_len - 1, 0), num_generated=lambda a: a.num_generated - 1),
        ),
    ),
    Mutant(
        "M202",
        "a forced token stays as forbidden as it was",
        "limits of thinking beside bad words",
        "L2/limit_thinking/forced_tokens_were_forbidden_before",
        C("limit_thinking", _after(_nothing_is_raised)),
    ),
    Mutant(
        "M203",
        "likely tokens of a draft filed in place of those of the draft before it",
        "off by one",
        "L2/draft_top_logprobs/each_slot_files_behind_what_it_has",
        C("draft_top_logprobs", _seeing(draft_len=lambda a: np.maximum(a.draft_len - 1, 0))),
    ),
    Mutant(
        "M204",
        "greedy rows cut by the filters that only rows that sample have",
        "a filter that reads top_k alone",
        "L2/forbid_filtered/greedy_slots_are_not_filtered",
        C("forbid_filtered", _seeing(temperature=lambda a: np.ones_like(a.temperature))),
    ),
    Mutant(
        "M205",
        "where thinking has ended is never noted",
        "a state that only the first window follows",
        "L5/thinking/K3",
        by.launched("commit_thinking", _not_at_all),
    ),
    _of_ranks(
        "M158", "own_experts", "own_experts", "experts counted among all", "off by the rank", rank_faults.counted_among_all
    ),
    _of_ranks("M159", "own_experts", "own_experts", "experts dealt in turn", "another layout", rank_faults.dealt_in_turn),
    _core(
        "M160",
        "a rank that skips a draft pass",
        "vLLM, issues 44185 and 44954, where the others hang",
        "L5/ranks/N2-K3",
        core_faults.skips_a_draft_pass,
        "ranks_in_process",
    ),
    _core(
        "M161",
        "a rank that runs a stale plan",
        "a message that is read twice",
        "L5/ranks/N2-K0",
        core_faults.runs_a_stale_plan,
        "ranks_in_process",
    ),
    _core(
        "M210",
        "a tap of the layer before",
        "SGLang 25454, numbers of layers that mean their inputs or their outputs",
        "L5/taps/eager",
        core_faults.taps_of_the_layer_before,
    ),
    _core(
        "M211",
        "a tap in front of the norm in place of one behind it",
        "SpecForge 879",
        "L5/taps/eager",
        core_faults.taps_in_front_of_the_norm,
    ),
    _core(
        "M212",
        "taps of other rows, padding among them",
        "an index that was not packed anew",
        "L5/taps/eager",
        core_faults.taps_of_other_rows,
    ),
    _core(
        "M213",
        "a tap whose residual stream goes on",
        "a view in place of a copy",
        "L5/taps/replayed",
        core_faults.taps_that_go_on,
        "graph_capture",
    ),
    Mutant(
        "M230",
        "the third cache of a form is the first",
        "planted by a tester; a model has two layers where it was tried",
        "L2/rope_kv_write/many-layers",
        lifetime.third_cache_is_first,
    ),
    Mutant(
        "M231",
        "the third weight of a form is the first",
        "the same, of weights",
        "L2/rms_norm/many-layers",
        lifetime.third_weight_is_first,
    ),
    Mutant(
        "M232",
        "refills of norms, experts and routers do nothing",
        "planted by a tester",
        "L0/weights-refill-in-place",
        lifetime.stale(lifetime.neither_linear_nor_embedding),
        "update_weights",
    ),
    Mutant(
        "M233",
        "refills of packed weights do nothing",
        "planted by a tester",
        "L0/weights-refill-in-place",
        lifetime.stale(lifetime.packed),
        "weight_packings",
    ),
    Mutant(
        "M234",
        "graphs go on with the weights that they were captured with",
        "planted by a tester",
        "L3/replay/refilled-weight",
        lifetime.graphs_keep_weights,
        "graph_capture",
    ),
    Mutant(
        "M235",
        "memory that refills of weights leave taken",
        "planted by a tester",
        "L6/memory-of-refills",
        lifetime.keeping_refills,
        "update_weights",
    ),
    Mutant(
        "M236",
        "memory that each sleep leaves taken",
        "planted by a tester",
        "L6/memory-while-asleep",
        by.with_device(lifetime.KeepsAsleep),
        "sleep",
    ),
    Mutant(
        "M237",
        "memory that each waking leaves taken",
        "planted by a tester",
        "L6/memory-while-asleep",
        by.with_device(lifetime.KeepsAwake),
        "sleep",
    ),
    Mutant(
        "M238",
        "sleep at level 1 gives nothing back",
        "planted by a tester",
        "L6/memory-while-asleep",
        by.with_device(lifetime.SleepsLightly),
        "sleep",
    ),
    Mutant(
        "M239",
        "a closed device keeps its memory",
        "planted by a tester",
        "L6/memory-of-devices",
        lifetime.closed_in_name,
    ),
    Mutant(
        "M240",
        "a kernel that is wrong beside another one",
        "planted by a tester; one table of two features",
        "L2/all-kernels/side-by-side",
        lifetime.wrong_beside("swiglu", "argmax", _other_sign),
    ),
    Mutant(
        "M241",
        "free memory that is not there",
        "planted by a tester",
        "L1/counters",
        by.with_device(lifetime.Rich),
    ),
    _sized("M220", "paged_attention", "num_kv_heads-8", size_faults.kv_heads_beyond_4, ATTACKER),
    _sized("M221", "paged_attention", "block_size-32", size_faults.blocks_over_16, ATTACKER),
    _sized("M222", "paged_attention", "N-257", size_faults.chunks_beyond_128, ATTACKER),
    _sized("M223", "linear", "N-2049", size_faults.rows_beyond_1024, ATTACKER),
    _sized("M224", "paged_attention", "num_blocks-4200", size_faults.block_ids_beyond_4095, ATTACKER),
    _sized("M225", "linear", "N-129+I-4099+O-4099", size_faults.many_rows_of_a_large_matrix, ATTACKER),
    _sized("M226", "argmax", "zeros_of_both_signs_are_equal", size_faults.negative_zeros, ATTACKER),
    _sized("M227", "verify_match", "K-32", size_faults.windows_beyond_17, ATTACKER),
    _sized("M228", "filter_probs", "V-32000", size_faults.short_list_of_64, ATTACKER),
    Mutant(
        "M229",
        "weights end behind 2**24 numbers",
        ATTACKER,
        "L2/linear/N-129+I-4099+O-4099",
        lambda plugin: wrap(plugin, polydraft_kernels=lambda answer, device: size_faults.EndingWeights(answer, {})),
    ),
    _sized("M219", "paged_attention", "B-300", size_faults.slots_beyond_256, ATTACKER),
    _by_leaf("M250", "sum_leaves", "leaves/order", "leaves added one after the other", "a loop", leaf_faults.one_after_the_other),
    _by_leaf("M251", "sum_leaves", "leaves/order", "leaves added by halves", "reductions over threads", leaf_faults.halves),
    _by_leaf(
        "M252",
        "linear_leaves",
        "linear_leaves/a_bias_is_the_first_leafs",
        "a bias in every leaf",
        "a projection a leaf",
        leaf_faults.a_bias_a_leaf,
    ),
    _by_leaf(
        "M253",
        "expert_leaves",
        "expert_leaves/experts_in_2",
        "experts dealt to leaves in turn",
        "another layout of experts",
        leaf_faults.experts_in_turn,
    ),
    _by_leaf(
        "M254",
        "linear",
        "leaves/columns",
        "another order of sums where there are many outputs",
        "OpenBLAS, whose kernels follow the shape of a product",
        leaf_faults.many_outputs,
    ),
    _core(
        "M255",
        "sums of as many leaves as there are ranks",
        "sums over ranks alone",
        "L5/ranks/same-bits",
        core_faults.a_leaf_a_rank,
        "ranks_in_process",
    ),
    _core(
        "M256",
        "a rank that keeps its old weights",
        "an update that reaches rank 0 alone",
        "L5/ranks/new-weights",
        core_faults.keeps_its_old_weights,
        "ranks_in_process",
    ),
    _sized("M270", "linear", "N-1+I-28672", size_faults.few_rows_of_many_inputs, ATTACKER),
    _sized("M271", "argmax", "N-1+V-152064", size_faults.one_row_of_a_large_vocabulary, ATTACKER),
    _sized("M272", "pack_rows", "L-131101", size_faults.positions_beyond_65535, ATTACKER),
    Mutant(
        "M273",
        "products with packed matrices end behind 1024 inputs",
        ATTACKER,
        "L2/linear/large-packed",
        C("linear", size_faults.packed_inputs_beyond_1024),
        "weight_packings",
    ),
    Mutant(
        "M274",
        "experts with packed matrices end behind 1024 features",
        ATTACKER,
        "L2/expert_mlp/large-packed",
        C("expert_mlp", size_faults.packed_widths_beyond_1024),
        "expert_packings",
    ),
    Mutant(
        "M275",
        "windows of more than 512 keys are none",
        ATTACKER,
        "L2/paged_attention/sliding-window",
        by.rebound("paged_attention", size_faults.no_windows_beyond_512),
        "sliding_window",
    ),
    _of_ranks(
        "M276", "all_reduce", "all_reduce", "sums end behind 4096 columns", ATTACKER, size_faults.columns_beyond_4096_of_ranks
    ),
    _of_ranks("M277", "argmax_pair", "argmax_pair", "places in 15 bits", ATTACKER, size_faults.shares_beyond_32767),
    Mutant(
        "M280",
        "weights can be refilled once",
        ATTACKER,
        "L0/weights-refill-in-place",
        lifetime.refilled_once,
        "update_weights",
    ),
    Mutant(
        "M281",
        "a device that wakes with the weights that it was given first",
        ATTACKER + "; weights are replaced between two sleeps in training",
        "L5/sleep/new-weights",
        lifetime.first_weights_come_back,
        "sleep",
    ),
    Mutant(
        "M282",
        "sleep of one engine takes what others have",
        ATTACKER,
        "L5/sleep/beside-another-engine",
        lifetime.asleep_together,
        "sleep",
    ),
    Mutant(
        "M284",
        "graphs beyond the 32nd are the first",
        ATTACKER,
        "L3/replay/many-graphs",
        by.with_capture(lambda facility, device: lifetime.FewGraphs(facility)),
        "graph_capture",
    ),
    Mutant(
        "M285",
        "caches beyond the 32nd of a form are the first",
        ATTACKER + "; models have up to 126 layers",
        "L2/rope_kv_write/many-layers",
        lifetime.layers_beyond_32,
    ),
    Mutant(
        "M286",
        "graphs leave out what is stored in quantised rows",
        ATTACKER,
        "L3/kernel/rope_kv_write",
        mode_faults.left_out_of_graphs(partial(mode_faults.over_quantised_rows, "rope_kv_write")),
        "graph_capture",
        moot="a backend without quantised rows has none to leave out",
    ),
    Mutant(
        "M287",
        "graphs leave out a fused kernel",
        ATTACKER,
        "L3/kernel/gumbel_noise+sample",
        mode_faults.left_out_of_graphs(partial(by.launched, "gumbel_noise+sample")),
        "graph_capture",
    ),
    Mutant(
        "M288",
        "products with packed matrices finish the queue",
        ATTACKER + "; matrices unpacked on the host",
        "L4/launch-returns/linear",
        mode_faults.with_packed_weights("linear", hidden.finishing),
        "asynchronous",
        moot="a backend without packed weights has no such products",
    ),
    Mutant(
        "M289",
        "memory that products with packed matrices keep",
        ATTACKER,
        "L6/memory-of-launches/linear",
        mode_faults.with_packed_weights("linear", hidden.keeping),
        "weight_packings",
    ),
    Mutant(
        "M290",
        "a fused kernel whose first result is returned for ever",
        ATTACKER,
        "L2/gumbel_noise+sample/new-contents",
        by.launched("gumbel_noise+sample", by.once),
    ),
    Mutant(
        "M291",
        "row-invariant kernels whose first result is returned for ever",
        ATTACKER,
        "L2/swiglu/many-launches",
        mode_faults.on_devices(mode_faults.row_invariant, table=mode_faults.first_result("swiglu")),
        "row_invariant",
    ),
    Mutant(
        "M292",
        "in 16 bits the first result is returned for ever",
        ATTACKER,
        "L2/swiglu/many-launches",
        mode_faults.on_devices(mode_faults.in_16_bits, table=mode_faults.first_result("swiglu")),
        moot="a backend of float32 alone computes in no other dtype",
    ),
    Mutant(
        "M293",
        "memory that uploads keep unless kernels are row-invariant",
        ATTACKER + "; whole engines were tried row-invariant where that is declared",
        "L6/memory-of-steps",
        mode_faults.on_devices(mode_faults.plain, device=hidden.KeepingUploads),
    ),
    Mutant(
        "M294",
        "attention whose last bit depends on how many rows are launched",
        ATTACKER + "; keys parted among more threads where rows are few",
        "L2/paged_attention/row-alone",
        by.spoiled("paged_attention", mode_faults.an_ulp_among_many),
        "row_invariant",
    ),
    Mutant(
        "M295",
        "long sums whose last bit depends on how many rows are launched",
        ATTACKER + "; another tile where rows are many",
        "L2/linear/large-row-alone",
        by.spoiled("linear", mode_faults.an_ulp_among_many_of_long_sums),
        "row_invariant",
    ),
    Mutant(
        "M296",
        "long sums whose last bit changes from launch to launch",
        ATTACKER + "; atomic additions",
        "L2/linear/large-repeat",
        by.spoiled("linear", mode_faults.ByTurns()),
    ),
    Mutant(
        "M297",
        "a kernel that keeps something in the workspace",
        ATTACKER + "; counters that have to be 0 when a kernel begins",
        "L2/swiglu/new-contents",
        by.with_table(lambda table, device: {"swiglu": mode_faults.Marking(table.providers["swiglu"], device)}),
    ),
    Mutant(
        "M299",
        "scales of packed weights that are lost in sleep",
        ATTACKER,
        "L5/sleep/packed-weights",
        lifetime.packed_weights_lost_asleep,
        "sleep",
    ),
    Mutant(
        "M300",
        "an epsilon taken from a binding of the same shapes",
        ATTACKER + "; kernels compiled once a shape",
        "L2/combine_draft_inputs/other-parameters",
        mode_faults.by_form("combine_draft_inputs", "eps"),
    ),
    _core(
        "M301",
        "a rank that finds scores of drafted tokens where another one has its own",
        "a table that is made once for all ranks",
        "L5/ranks/draft-vocabulary",
        core_faults.scores_tokens_of_rank_0,
        "ranks_in_process",
    ),
)
"""Every mutant of this version, by the numbers of the design's table; a number that is missing is in `CORES`."""

CORES: Final[dict[str, str]] = {}
"""Numbers of the table that cannot be tried yet."""


@dataclass(frozen=True)
class Variant:
    """A backend that is unusual and legal: every check in `passes` must still pass."""

    id: str
    title: str
    changed: by.Break
    passes: tuple[str, ...]
    core: Fault | None = None
    """What is unusual about core meanwhile."""


def _is_dense(name: str) -> bool:
    return kernel_of(name).features == ("dense",)


def _larger_workspace(table: Any, device: Any) -> dict[str, Any]:
    del device

    class Larger(Proxy):
        def workspace_bytes(self, args: Any, limits: Any) -> int:
            return int(self._inner.workspace_bytes(args, limits)) + 4096

    return {name: Larger(provider) for name, provider in table.providers.items()}


def _twice(launch: Any, device: Any) -> Any:
    del device

    def run(stream: Any, n: int) -> None:
        launch(stream, n)
        launch(stream, n)

    return run


def _few(info: Any) -> Any:
    return dataclasses.replace(info, capabilities=dataclasses.replace(info.capabilities, max_seqs=4, max_window=4))


_ENGINE = ("L5/greedy/K3-B3", "L5/stop-token/place-1", "L5/prefix-hit")
LEGAL_VARIANTS: Final[tuple[Variant, ...]] = (
    Variant("S1", "no composite is fused", by.offering(lambda name: "+" not in name), ("L0/contracts", *_ENGINE)),
    Variant(
        "S2",
        "every kernel wants workspace",
        by.with_table(_larger_workspace),
        ("L2/linear/seeds", "L2/swiglu/new-contents", *_ENGINE),
    ),
    Variant("S3", "a kernel that writes its result twice", by.launched("swiglu", _twice), ("L2/swiglu/seeds", *_ENGINE)),
    Variant(
        "S4",
        "copies to the host are waited for",
        by.with_device(by.SynchronousCopies),
        ("L1/event-not-early", "L1/query-is-honest", "L1/copies-behind-work", "L1/load-behind-work", *_ENGINE),
    ),
    Variant(
        "S5",
        "query() hesitates",
        by.with_device(lambda device: by.EventDevice(device, lambda event, _: by.HesitatesOnce(event))),
        ("L1/query-is-honest", "L1/event-not-early", "L1/copies-behind-work", "L1/load-behind-work", *_ENGINE),
    ),
    Variant("S6", "blocks in another order", lambda plugin: plugin, _ENGINE, core_faults.blocks_in_another_order),
    Variant("S7", "no feature but dense", by.offering(_is_dense), ("L0/contracts", "L0/engine", *_ENGINE)),
    Variant(
        "S8",
        "launches take the host long, and wait for nothing",
        hidden.every_launch(hidden.slow),
        ("L4/launch-returns/swiglu", "L4/copies-return", "L4/replays-return"),
    ),
    Variant(
        "S9",
        "a queue that is full blocks",
        hidden.short_queue,
        ("L4/launch-returns/swiglu", "L4/copies-return", "L4/replays-return", "L4/overlap-2/arrivals"),
    ),
    Variant(
        "S10",
        "what goes up is taken at the call, and copied in its turn",
        by.with_device(hidden.SnapshotUploads),
        ("L1/copies-behind-work", "L1/load-behind-work", "L4/overlap-2/arrivals"),
    ),
    Variant(
        "S11",
        "a load waits for everything",
        by.with_device(hidden.LateLoads),
        ("L1/load-replaces-all", "L1/load-behind-work"),
    ),
    Variant(
        "S12",
        "few slots and short windows",
        by.with_info(_few),
        ("L0/undeclared-is-refused", "L5/greedy/K5-B8", "L5/full-batch", "L5/drafts-per-step", "L3/engine/shrinking-batch"),
    ),
)
"""What the kit must not kill."""

__all__ = ["CORES", "MUTANTS", "LEGAL_VARIANTS", "Mutant", "Variant"]
