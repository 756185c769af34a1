"""Stand-ins with upstream's signatures for FastDeploy's operators: what its public source says that each does.

`tests/paddle/test_xpu_fastdeploy.py` puts the folder above on the path of processes of their own. Where upstream waits for the
device they are NumPy on the host, slot by slot; where it only queues work they are Paddle operations. They know nothing of
contracts. What upstream leaves unwritten holds `STALE`. Environment variables stand for other versions: `STAND_INS_LACK` names
operators that are not there, `STAND_INS_OF` a time whose signatures were older, `STAND_INS_KEEP` which rows are kept.
"""

import os

import paddle

STALE = -77_777
"""What memory holds that an operator allocates and does not write."""
OLD = os.environ.get("STAND_INS_OF") == "autumn 2025"
CALLS: dict[str, int] = {}
"""How often each operator was called."""


def _called(name):
    CALLS[name] = CALLS.get(name, 0) + 1


def _memory(tensor, dtype):
    """Refuse a tensor that is not what an operator reads: raw memory in one piece, of the dtype it was written for."""
    assert str(tensor.dtype) == f"paddle.{dtype}", f"got {tensor.dtype}, wanted {dtype}"
    assert tensor.is_contiguous()


def _host(tensor, dtype):
    """A copy on the host, for which the device is waited for."""
    _memory(tensor, dtype)
    return tensor.numpy().copy()


def _stale(shape, dtype, like):
    return paddle.full([shape], STALE, dtype) if shape else paddle.zeros([0], dtype)


def _like(array, tensor):
    return paddle.to_tensor(array, place=tensor.place)


def _write(tensor, array):
    assert list(tensor.shape) == list(array.shape)
    tensor.copy_(_like(array, tensor), False)


def speculate_pre_process(cpu_token_num, input_ids, seq_len, draft_tokens, seq_lens_encoder, seq_lens_decoder):
    _called("speculate_pre_process")
    for tensor in (seq_len, seq_lens_encoder, seq_lens_decoder):
        _memory(tensor, "int32")
    for tensor in (input_ids, draft_tokens):
        _memory(tensor, "int64")
    slots, width = draft_tokens.shape
    stale = [_stale(shape, dtype, seq_len) for shape, dtype in ((cpu_token_num, "int64"), (cpu_token_num, "int32"))]
    stale += [_stale(slots + 1, "int32", seq_len)] * 3 + [_stale(slots * width, "int32", seq_len), _stale(1, "int32", seq_len)]
    if not cpu_token_num:
        return stale
    prefill = seq_lens_encoder > 0
    starts, (slot, place, valid) = _offsets(seq_len, cpu_token_num)
    from_prompt, from_window = _at(input_ids, slot, place), _at(draft_tokens, slot, place)
    ids = paddle.where(paddle.gather(prefill.astype("int32"), slot) > 0, from_prompt, from_window)
    one = (seq_len > 0) & (seq_lens_encoder != 0)
    output_starts, (output_slot, _, output_valid) = _offsets(paddle.where(one, paddle.ones_like(seq_len), seq_len), slots * width)
    return [
        paddle.where(valid, ids, stale[0]), paddle.where(valid, slot, stale[1]), starts, starts.clone(), output_starts,
        paddle.where(output_valid, output_slot, stale[5]), output_starts[-1:],
    ]  # fmt: skip


def _offsets(lengths, count):
    """Where each slot's rows start, with the end of all; and slot and place of `count` rows, with whether they are any slot's."""
    ends = paddle.cumsum(lengths, dtype="int32")
    rows = paddle.cumsum(paddle.ones([count], "int32"), dtype="int32") - 1
    slot = (rows.unsqueeze(1) >= ends.unsqueeze(0)).astype("int32").sum(axis=1).astype("int32")
    valid, slot = slot < len(lengths), paddle.clip(slot, max=len(lengths) - 1)
    starts = paddle.concat([paddle.zeros_like(ends[:1]), ends])
    return starts, (slot, rows - paddle.gather(starts, slot), valid)


def _at(table, slot, place):
    width = table.shape[1]
    return paddle.gather(table.reshape([-1]), slot * width + paddle.clip(place, 0, width - 1))


def verify_draft_tokens(
    step_output_ids, step_output_len, step_input_ids, target_tokens, candidate_ids, candidate_scores, candidate_lens, topp,
    stop_flags, seq_lens_encoder, seq_lens_this_time, end_tokens, is_block_step, cu_seqlens_q_output, reasoning_status,
    max_dec_len, step_idx, max_seq_len, verify_window, verify_strategy, reject_all, accept_all,
):  # fmt: skip
    _called("verify_draft_tokens")
    assert verify_strategy in (1, 2), "the lossy rule is not among what stands in here"
    assert candidate_ids is candidate_scores is candidate_lens is None
    assert not any((reject_all, accept_all))
    _host(topp, "float32")
    windows, choices, ends = (_host(one, "int64") for one in (step_input_ids, target_tokens, end_tokens))
    stopped, paused = _host(stop_flags, "bool"), _host(is_block_step, "bool")
    encoder, lengths, first, reasoning = (
        _host(one, "int32") for one in (seq_lens_encoder, seq_lens_this_time, cu_seqlens_q_output, reasoning_status)
    )
    limits, generated = _host(max_dec_len, "int64"), _host(step_idx, "int64")
    out, count = _host(step_output_ids, "int64"), _host(step_output_len, "int32")
    out[:], count[:] = -1, 0
    for slot in range(len(lengths)):
        if stopped[slot] or paused[slot]:
            continue
        ended, place = False, 0

        def emit(token, slot=slot):
            generated[slot] += 1
            known, full = token in ends, generated[slot] >= limits[slot]
            out[slot, count[slot]] = ends[0] if full and not known else token
            count[slot] += 1
            return known or full

        while place < lengths[slot] - 1 and not encoder[slot] and reasoning[slot] != 1:
            draft = windows[slot, place + 1]
            if choices[first[slot] + place] != draft:
                break
            ended = emit(draft)
            if ended:
                break
            place += 1
        if not ended:
            emit(choices[first[slot] + place])
    _write(step_output_ids, out)
    _write(step_output_len, count)


def eagle_get_hidden_states(
    input, seq_lens_this_time, seq_lens_encoder, seq_lens_decoder, stop_flags, accept_nums,  # noqa: A002
    base_model_seq_lens_this_time, base_model_seq_lens_encoder, actual_draft_token_num,
):  # fmt: skip
    _called("eagle_get_hidden_states")
    runs, encoder, accepted, base, base_encoder = (
        _host(one, "int32")
        for one in (seq_lens_this_time, seq_lens_encoder, accept_nums, base_model_seq_lens_this_time, base_model_seq_lens_encoder)
    )
    row, places = 0, list[int]()
    for slot in range(len(runs)):
        if encoder[slot] > 0:
            places += range(row, row + encoder[slot])
            row += encoder[slot]
        elif base_encoder[slot] != 0 or (not base[slot] and not runs[slot]):
            continue
        else:
            if runs[slot]:
                last = row + accepted[slot] - 1
                every = os.environ.get("STAND_INS_KEEP") == "accepted rows"
                places += (
                    range(row, last + 1) if every else [last] if accepted[slot] <= actual_draft_token_num else [last - 1, last]
                )
            row += base[slot]
    rows = input.shape[0]
    assert all(0 <= place < rows for place in places), places
    assert input.is_contiguous()
    return paddle.gather(input, paddle.to_tensor(places, dtype="int32")) if places else input[:0]


def _eagle_get_self_hidden_states(input, last_seq_lens_this_time, seq_lens_this_time, step_idx):  # noqa: A002
    _called("eagle_get_self_hidden_states")
    last, runs = _host(last_seq_lens_this_time, "int32"), _host(seq_lens_this_time, "int32")
    steps = _host(step_idx, "int64")
    row, places = 0, []
    for slot in range(len(runs)):
        just_prefilled = steps[slot] == 1
        if runs[slot] > 0:
            row += 1 if just_prefilled else last[slot]
            places.append(row - 1)
        else:
            row += int(last[slot] > 0) if just_prefilled else last[slot]
    rows = input.shape[0]
    assert len(places) <= rows, "more rows than the map has places"
    assert all(0 <= place < rows for place in places), places
    return [paddle.gather(input, paddle.to_tensor(places, dtype="int32")) if places else input[:0]]


def _eagle_get_self_hidden_states_now(
    input, last_seq_lens_encoder, last_seq_lens_this_time, seq_lens_this_time, step_idx,  # noqa: A002
):  # fmt: skip
    _host(last_seq_lens_encoder, "int32")
    return _eagle_get_self_hidden_states(input, last_seq_lens_this_time, seq_lens_this_time, step_idx)


eagle_get_self_hidden_states = _eagle_get_self_hidden_states if OLD else _eagle_get_self_hidden_states_now


def _draft_model_update(
    inter_next_tokens, draft_tokens, pre_ids, seq_lens_this_time, seq_lens_encoder, seq_lens_decoder, step_idx,
    output_cum_offsets, stop_flags, not_need_stop, max_dec_len, end_ids, base_model_draft_tokens, max_seq_len, substep,
):  # fmt: skip
    _called("draft_model_update")
    assert not_need_stop.place.is_cpu_place()
    tokens, ends, limits = (_host(one, "int64") for one in (inter_next_tokens, end_ids, max_dec_len))
    offsets, stopped = _host(output_cum_offsets, "int32"), _host(stop_flags, "bool")
    drafts, history, generated, base = (_host(one, "int64") for one in (draft_tokens, pre_ids, step_idx, base_model_draft_tokens))
    runs, encoder, decoder = (_host(one, "int32") for one in (seq_lens_this_time, seq_lens_encoder, seq_lens_decoder))
    for slot in range(len(runs)):
        if stopped[slot]:
            drafts[slot, 0] = base[slot, substep + 1] = -1
        else:
            first, rows = slot * max_seq_len - offsets[slot], runs[slot]
            if decoder[slot] > 0 and encoder[slot] <= 0:
                mine = tokens[first : first + rows]
                decoder[slot] += rows
                history[slot, generated[slot] + 1 : generated[slot] + 1 + rows] = mine
                generated[slot] += rows
            else:
                mine = tokens[first : first + 1]
                decoder[slot] += encoder[slot]
                encoder[slot] = 0
                history[slot, 1] = mine[0]
                generated[slot] += 1
            drafts[slot, 0] = base[slot, substep + 1] = mine[-1]
            if mine[-1] in ends:
                stopped[slot] = True
            elif generated[slot] >= limits[slot]:
                stopped[slot] = True
                drafts[slot, rows - 1] = base[slot, substep + 1] = ends[0]
        runs[slot] = not stopped[slot]
        encoder[slot] *= not stopped[slot]
    for tensor, array in (
        (draft_tokens, drafts), (pre_ids, history), (seq_lens_this_time, runs), (seq_lens_encoder, encoder),
        (seq_lens_decoder, decoder), (step_idx, generated), (stop_flags, stopped), (base_model_draft_tokens, base),
    ):  # fmt: skip
        _write(tensor, array)


def _draft_model_update_now(
    inter_next_tokens, draft_tokens, pre_ids, seq_lens_this_time, seq_lens_encoder, seq_lens_decoder, step_idx,
    output_cum_offsets, stop_flags, batch_drop, not_need_stop, max_dec_len, end_ids, base_model_draft_tokens, prompt_lens,
    max_seq_len, substep,
):  # fmt: skip
    _host(batch_drop, "bool")
    _host(prompt_lens, "int64")
    _draft_model_update(
        inter_next_tokens, draft_tokens, pre_ids, seq_lens_this_time, seq_lens_encoder, seq_lens_decoder, step_idx,
        output_cum_offsets, stop_flags, not_need_stop, max_dec_len, end_ids, base_model_draft_tokens, max_seq_len, substep,
    )  # fmt: skip


draft_model_update = _draft_model_update if OLD else _draft_model_update_now


class _Compiled:
    """A function as pybind11 makes them: no signature that Python could read, and one in the first line of its docstring."""

    __doc__ = (
        "fused_rms_norm_xpu(x: paddle::Tensor, bias: Optional[paddle::Tensor], residual: Optional[paddle::Tensor], "
        "norm_weight: paddle::Tensor, norm_bias: Optional[paddle::Tensor], epsilon: float, begin_norm_axis: int, "
        "quant_scale: float, quant_round_type: int, quant_max_bound: float, quant_min_bound: float) -> list[paddle::Tensor]\n"
    )

    @property
    def __signature__(self):
        raise ValueError("no signature found for builtin")

    def __call__(
        self, x, bias, residual, norm_weight, norm_bias, epsilon, begin_norm_axis, quant_scale, quant_round_type,
        quant_max_bound, quant_min_bound,
    ):  # fmt: skip
        _called("fused_rms_norm_xpu")
        assert bias is norm_bias is None
        assert quant_scale <= 0
        assert begin_norm_axis == 1
        assert norm_weight.dtype == x.dtype
        assert list(norm_weight.shape) == [x.shape[1]]
        summed = x if residual is None else x + residual
        wide = summed.astype("float32")
        scaled = wide * paddle.rsqrt((wide * wide).mean(axis=1, keepdim=True) + epsilon) * norm_weight.astype("float32")
        return [scaled.astype(x.dtype), paddle.full_like(x, STALE) if residual is None else summed]


fused_rms_norm_xpu = _Compiled()


def fast_swiglu_xpu(x):
    _called("fast_swiglu_xpu")
    half = x.shape[1] // 2
    gate, up = x[:, :half].astype("float32"), x[:, half:].astype("float32")
    return [(paddle.nn.functional.silu(gate) * up).astype(x.dtype)]


for _name in filter(None, os.environ.get("STAND_INS_LACK", "").split(",")):
    del globals()[_name]
