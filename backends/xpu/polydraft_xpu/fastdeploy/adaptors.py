"""All adaptors of the kernel pack `xpu/fastdeploy`, and the operators that have none: facts read from FastDeploy's public source.

Nothing of it has run on a chip: tests call stand-ins with upstream's signatures. Of two adaptors for one contract the first that
is installed and fits is used.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from polydraft_xpu.fastdeploy.adaptor import Adaptor, Fill, Given, HostFlag, Refusal

EVIDENCE: Final = "stand-ins with upstream's signatures"
NEVER: Final = -2
"""A token that no row chooses."""
FAR: Final = 2**62
"""A length that no text reaches."""


def _whole_windows(a: Any) -> bool:
    """Whether hidden rows and positions are those of the target's pass."""
    return bool(a.positions.shape[0] == a.hidden.shape[0])


_PACKING: Final = {
    "cpu_token_num": Given("rows"),
    "input_ids": Given("prompts", "int64"),
    "seq_len": Given("lengths", "int32"),
    "draft_tokens": Given("windows", "int64"),
    "seq_lens_encoder": Given("prefill", "int32"),
    "seq_lens_decoder": Given("kv_len", "int32"),
}
_PACKED: Final = (
    "ids", "sequence", "starts", "starts_k", "output_starts", "output_sequence", "output_rows",
)  # fmt: skip

PACK_ROWS: Final = Adaptor(
    contract="pack_rows",
    operator="speculate_pre_process",
    takes=_PACKING,
    returns=_PACKED,
    step="pack_rows",
    read="00aa687910e4",
    differs=(
        "it numbers slots in their own order; it gets everything by sequence, in launch order",
        "it takes a chunk from the first column on; the history is shifted by what the cache holds already",
        "a window is one row of its input; the newest token and the drafts are put side by side",
        "it leaves the tail behind the last row as it was; the tail is written here",
    ),
)
PACK_LOGIT_ROWS: Final = replace(
    PACK_ROWS,
    contract="pack_logit_rows",
    step="pack_logit_rows",
    differs=(
        (
            "its own logit rows hold one for every prefill, also for a chunk that is not the last and for a request that "
            "resumes; it gets the lengths that the contract defines, and packs row numbers in place of tokens"
        ),
        "it leaves the tail behind the last row as it was; the tail is written here",
    ),
)
VERIFY_MATCH: Final = Adaptor(
    contract="verify_match",
    operator="verify_draft_tokens",
    takes={
        "step_output_ids": Fill(-1, "int64", "window"),
        "step_output_len": Fill(0, "int32", "logit_start"),
        "step_input_ids": Given("window", "int64"),
        "target_tokens": Given("choices", "int64"),
        "candidate_ids": None,
        "candidate_scores": None,
        "candidate_lens": None,
        "topp": Fill(1.0, "float32", "logit_start"),
        "stop_flags": Given("idle", "bool"),
        "seq_lens_encoder": Given("prefill", "int32"),
        "seq_lens_this_time": Given("logit_len", "int32"),
        "end_tokens": Fill(NEVER, "int64", "one"),
        "is_block_step": Fill(0, "bool", "logit_start"),
        "cu_seqlens_q_output": Given("logit_start", "int32"),
        "reasoning_status": Fill(0, "int32", "logit_start"),
        "max_dec_len": Fill(FAR, "int64", "logit_start"),
        "step_idx": Fill(0, "int64", "logit_start"),
        "max_seq_len": 1,
        "verify_window": 2,
        "verify_strategy": 1,
        "reject_all": False,
        "accept_all": False,
    },
    writes=("step_output_ids", "step_output_len"),
    returns=(),
    step="verify_match",
    read="59d705974b0b",
    waits="it uploads numbers from the host in every call, also where no number is drawn",
    differs=(
        (
            "it ends a window at an end token and at the length limit, where it also replaces the token; it gets an end "
            "token that no row chooses and a limit that no text reaches, since `commit_window` decides that"
        ),
        "it keeps the newest token in the first column of a window; the drafts are moved by one",
        "it says how many tokens a window has; how many drafts were verified and accepted follows from that",
    ),
)
_FROM_OWN_ROWS: Final = Adaptor(
    contract="select_last_rows",
    operator="eagle_get_self_hidden_states",
    takes={
        "input": Given("hidden"),
        "last_seq_lens_encoder": Fill(0, "int32", "rows"),
        "last_seq_lens_this_time": Given("rows", "int32"),
        "seq_lens_this_time": Given("drafts", "int32"),
        "step_idx": Fill(0, "int64", "rows"),
    },
    returns=("picked",),
    step="select_behind",
    read="39fde6a55b88",
    waits="it reads back from the device how many rows there are",
    differs=(
        "it takes the last row of every sequence; a sequence is cut off behind its newest committed row",
        ("it tells a sequence that was just prefilled by a step counter of 1, and gives it one row; the counter is 0 for all"),
        "its result has as many rows as sequences draft; they are put to their places, between zero rows",
    ),
)
SELECT_LAST_ROWS: Final = (
    Adaptor(
        contract="select_last_rows",
        operator="eagle_get_hidden_states",
        takes={
            "input": Given("hidden"),
            "seq_lens_this_time": Given("drafts", "int32"),
            "seq_lens_encoder": Fill(0, "int32", "rows"),
            "seq_lens_decoder": Fill(1, "int32", "rows"),
            "stop_flags": Fill(0, "bool", "rows"),
            "accept_nums": Fill(1, "int32", "rows"),
            "base_model_seq_lens_this_time": Given("rows", "int32"),
            "base_model_seq_lens_encoder": Fill(0, "int32", "rows"),
            "actual_draft_token_num": Given("num_drafts"),
        },
        returns=("picked",),
        step="select_before",
        read="1c03113cd134",
        waits="it reads back from the device how many rows there are",
        only="rows of the target's pass, each with a position",
        fits=_whole_windows,
        differs=(
            (
                "versions disagree on how many accepted rows of a sequence it keeps, and one puts prefills first; each "
                "sequence becomes two, one whose rows are passed over and one of which a single row is accepted, which all "
                "of them treat alike"
            ),
            "its result has as many rows as sequences draft; they are put to their places, between zero rows",
        ),
    ),
    _FROM_OWN_ROWS,
    replace(
        _FROM_OWN_ROWS,
        takes={name: source for name, source in _FROM_OWN_ROWS.takes.items() if name != "last_seq_lens_encoder"},
        read="8a9fd7bd0e5e",
    ),
)
_FILING: Final = Adaptor(
    contract="advance_draft",
    operator="draft_model_update",
    takes={
        "inter_next_tokens": Given("chosen", "int64"),
        "draft_tokens": Fill(-1, "int64", "window"),
        "pre_ids": Fill(-1, "int64", "history"),
        "seq_lens_this_time": Given("active", "int32"),
        "seq_lens_encoder": Fill(0, "int32", "chosen"),
        "seq_lens_decoder": Given("rows_before", "int32"),
        "step_idx": Given("drafted", "int64"),
        "output_cum_offsets": Fill(0, "int32", "chosen"),
        "stop_flags": Given("done", "bool"),
        "not_need_stop": HostFlag(value=True),
        "max_dec_len": Fill(FAR, "int64", "chosen"),
        "end_ids": Fill(NEVER, "int64", "one"),
        "base_model_draft_tokens": Given("window", "int64"),
        "max_seq_len": 1,
        "substep": Given("pass_index"),
    },
    writes=(
        "draft_tokens", "pre_ids", "seq_lens_this_time", "seq_lens_encoder", "seq_lens_decoder", "step_idx", "stop_flags",
        "base_model_draft_tokens",
    ),
    returns=(),
    step="advance_draft",
    read="8a9fd7bd0e5e",
    waits="it takes a flag in host memory, which it copies to the device",
    differs=(
        (
            "it stops at an end token and at the length limit, where it also replaces the draft; it gets neither, and the "
            "budget is held to here"
        ),
        (
            "it writes -1 into the window of every sequence that does not draft; windows are copies, and only drafts that "
            "were chosen go back"
        ),
        "it counts rows of the cache from 1 on; positions are moved by one",
    ),
)  # fmt: skip


def _with_batch_drop() -> Adaptor:
    """The newer signature, which has two parameters more and does the same."""
    takes = {}
    for name, source in _FILING.takes.items():
        takes[name] = source
        if name == "stop_flags":
            takes["batch_drop"] = Fill(0, "bool", "chosen")
        if name == "base_model_draft_tokens":
            takes["prompt_lens"] = Fill(0, "int64", "chosen")
    return replace(_FILING, takes=takes, writes=(*_FILING.writes, "batch_drop"), read="19d68b52f2ee")


_NORM: Final = Adaptor(
    contract="rms_norm",
    operator="fused_rms_norm_xpu",
    takes={
        "x": Given("x"),
        "bias": None,
        "residual": None,
        "norm_weight": Given("gain"),
        "norm_bias": None,
        "epsilon": Given("eps"),
        "begin_norm_axis": 1,
        "quant_scale": -1.0,
        "quant_round_type": 0,
        "quant_max_bound": 0.0,
        "quant_min_bound": 0.0,
    },
    returns=("normalised", "summed"),
    step="rms_norm",
    read="76eb06fe27ef",
    differs=("it multiplies by the weight alone; where the gain is 1 + weight, that sum is made in every launch",),
)

ADAPTORS: Final = (
    PACK_ROWS,
    PACK_LOGIT_ROWS,
    VERIFY_MATCH,
    *SELECT_LAST_ROWS,
    _with_batch_drop(),
    _FILING,
    _NORM,
    replace(
        _NORM,
        contract="residual_add+rms_norm",
        takes={**_NORM.takes, "residual": Given("residual")},
        step="add_and_norm",
        differs=(
            *_NORM.differs,
            "it returns the sum instead of writing it over the residual stream; it is copied there",
        ),
    ),
    Adaptor(
        contract="swiglu",
        operator="fast_swiglu_xpu",
        takes={"x": Given("gate_up")},
        returns=("gated",),
        step="swiglu",
        read="1ecb2dbfbf7f",
        differs=(
            ("which half is gated is decided in a library without source; the contract's case `gate_comes_before_up` tells"),
        ),
    ),
)
"""Of one contract in order of preference, newer signatures first."""

REFUSALS: Final = (
    Refusal(
        "block_attn",
        ("rope_kv_write", "paged_attention"),
        (
            "rotates, stores and attends in one call, in bfloat16 alone (bfloat16 or int8 rows), over a cache of blocks "
            "by head, place and element, where the cache that all kernels share has places before heads: calling it would"
            " copy the whole cache in every layer. (Blocks of a single place would lie alike; upstream calls it with "
            "blocks of 64.) It wants lengths and maps in host memory, which `get_infer_param` waits for in every pass; it"
            " takes all rows behind the prompts for those of sequences that decode; and upstream's own test leaves "
            "decoding with several rows a sequence out, as not adapted. What it makes of a NaN or of a row without a slot"
            " lies in a library without source."
        ),
        "e9a402180e04",
    ),
    Refusal(
        "unified_update_model_status",
        ("commit_window",),
        (
            "has one list of end tokens for all slots, where each request has its own; at the length limit it replaces the "
            "token that was chosen by an end token, writes no history at all close to the end of the table, says nothing of"
            " why a request ended, and knows no row of which nothing could be chosen."
        ),
        "1653886453ae",
    ),
    Refusal(
        "draft_model_preprocess",
        ("begin_draft", "pack_draft_rows"),
        (
            "keeps lengths of its own from round to round and corrects them, tells a request that was just prefilled by a step "
            "counter of 1, and knows no budget that shrinks towards the length limit; the prompt has to be shifted by the host "
            "before."
        ),
        "0f3c7ce81063",
    ),
    Refusal(
        "draft_model_postprocess",
        (),
        ("counts the drafts that are not -1; here `draft_len` says how many drafts wait, so no contract asks for it."),
        "679bbd162a4b",
    ),
    Refusal(
        "speculate_schedule_cache",
        ("reserve_blocks",),
        (
            "looks at one entry of the block table, the last that a slot may need, so that a hole before it is not seen; it"
            " wakes nobody (`recover_decode_task` does), and zeroes the lengths of a slot that it pauses."
        ),
        "14028a958f4e",
    ),
    Refusal(
        "gather_next_token",
        ("gather_rows",),
        (
            "follows lists in host memory that are read back in every pass, in bfloat16 alone; the contract picks any rows,"
            " repeated and in any order, by an index on the device."
        ),
        "d3ce9686fd55",
    ),
    Refusal(
        "adjust_batch, get_infer_param",
        (),
        ("reorder rows by lengths that they read back; here core lays rows out in the order that a backend declares."),
        "0e6ce6fc9021",
    ),
    Refusal(
        "speculate_get_token_penalty_multi_scores",
        ("penalise_logits", "forbid_tokens"),
        (
            "counts one text for all three penalties, without the drafts of the same window, and divides by the temperature and "
            "forbids tokens in the same call."
        ),
        "5096c079240e",
    ),
    Refusal(
        "build_sampling_params",
        ("gumbel_noise",),
        (
            "derives the seed of a row from its place in the step; noise here is keyed by the request's seed and the "
            "position, so that a text does not depend on drafts."
        ),
        "2815a1542a6c",
    ),
)
"""Operators near a contract that cannot meet it, with what was read against them."""
