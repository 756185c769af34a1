"""Writes checkpoints whose matrices are packed as others publish them, from the formats' descriptions: byte by byte, and without
the code under test.

A form turns a float matrix [outputs, inputs] into tensors by the last part of their names, and into the float32 matrix that these
stand for. `packed` does so with every projection of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Form = Callable[[Floats], tuple[dict[str, NDArray[Any]], Floats]]
GROUP: Final = 32
TOPS: Final = np.array([7, 15], np.float32)


def e4m3_values() -> Floats:
    """The 256 numbers of E4M3, from its definition: sign, four bits of exponent with bias 7, three of mantissa."""
    found = []
    for code in range(256):
        sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
        size = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
        found.append(-size if sign else size)
    return np.asarray(found, np.float32)


def to_e4m3(values: Floats) -> NDArray[np.uint8]:
    """The code of the nearest finite number of each."""
    codes = np.array([code for code in range(256) if code & 127 != 127])
    table = e4m3_values()[codes]
    order = np.argsort(table, kind="stable")
    table, codes = table[order], codes[order]
    place = np.clip(np.searchsorted(table, values), 1, len(table) - 1)
    nearer = np.abs(values - table[place - 1]) < np.abs(table[place] - values)
    return codes[place - nearer].astype(np.uint8)


def rounded_scales(scales: NDArray[Any]) -> Floats:
    """Positive numbers that float16 and bfloat16 have, too."""
    kept = (np.maximum(scales, 2.0**-12).astype("<f4").view("<u4") & 0xFFFF0000).view("<f4")
    return kept.astype(np.float16).astype(np.float32)


def spread(places: NDArray[Any], shape: tuple[int, ...], rows: int, columns: int) -> NDArray[Any]:
    return np.repeat(np.repeat(places, rows, axis=0)[: shape[0]], columns, axis=1)[:, : shape[1]]


def largest(matrix: Floats, rows: int, columns: int) -> Floats:
    """The largest magnitude of each block."""
    high, wide = (range(0, size, step) for size, step in zip(matrix.shape, (rows, columns), strict=True))
    return np.asarray([[np.abs(matrix[i : i + rows, j : j + columns]).max() for j in wide] for i in high], np.float32)


def fp8(scale: str, rows: int = 1, columns: int = 0, *, tensor: bool = False) -> Form:
    def make(matrix: Floats) -> tuple[dict[str, NDArray[Any]], Floats]:
        of = (matrix.shape[0] if tensor else rows, columns or matrix.shape[1])
        scales = rounded_scales(largest(matrix, *of) / 448)
        whole = spread(scales, matrix.shape, *of)
        codes = to_e4m3(matrix / whole)
        stored: dict[str, NDArray[Any]] = {"weight": codes, scale: scales.reshape(-1) if tensor else scales}
        return stored | ({"input_scale": np.ones(1, np.float32)} if tensor else {}), e4m3_values()[codes] * whole

    return make


def int8(matrix: Floats) -> tuple[dict[str, NDArray[Any]], Floats]:
    scales = rounded_scales(largest(matrix, 1, matrix.shape[1]) / 127)
    numbers = np.clip(np.rint(matrix / scales), -128, 127).astype(np.int8)
    return {"weight": numbers, "weight_scale": scales}, numbers * scales


def quantised(matrix: Floats, columns: int, *, zeros: bool) -> tuple[NDArray[np.int64], Floats, NDArray[np.int64]]:
    """Numbers from 0 to 15, scales and zero points by group of inputs; a zero point of 8 where there are none."""
    groups = matrix.reshape(len(matrix), -1, columns)
    low, high = np.minimum(groups.min(axis=-1), 0), np.maximum(groups.max(axis=-1), 0)
    scales = rounded_scales((high - low) / 15 if zeros else np.abs(groups).max(axis=-1) / 7)
    points = np.clip(np.rint(-low / scales), 0, 15).astype(np.int64) if zeros else np.full(scales.shape, 8)
    numbers = np.clip(np.rint(groups / scales[..., None]) + points[..., None], 0, 15).astype(np.int64)
    return numbers.reshape(matrix.shape), scales, points


def stands_for(numbers: NDArray[Any], scales: Floats, points: NDArray[Any], group: NDArray[Any]) -> Floats:
    return ((numbers - points[:, group]).astype(np.float32) * scales[:, group]).astype(np.float32)


def words(numbers: NDArray[Any], bits: int = 4, order: tuple[int, ...] = tuple(range(8))) -> NDArray[np.int32]:
    """Along the last axis, 32 / bits numbers a word: the lowest bits hold the number `order[0]` of a word's."""
    count = 32 // bits
    padded = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % count))).reshape(len(numbers), -1, count)
    found = np.zeros(padded.shape[:2], np.uint64)
    for place, number in enumerate(order[:count]):
        found |= padded[..., number].astype(np.uint64) << np.uint64(bits * place)
    return found.astype(np.uint32).view(np.int32)


def turned(array: NDArray[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(array.T)


def pack_quantized(columns: int = GROUP, *, zeros: bool = False) -> Form:
    def make(matrix: Floats) -> tuple[dict[str, NDArray[Any]], Floats]:
        wide = columns or matrix.shape[1]
        numbers, scales, points = quantised(matrix, wide, zeros=zeros)
        stored = {"weight_packed": words(numbers), "weight_scale": scales, "weight_shape": np.asarray(matrix.shape)}
        stored |= {"weight_zero_point": turned(words(points.T))} if zeros else {}
        return stored, stands_for(numbers, scales, points, np.arange(matrix.shape[1]) // wide)

    return make


def pack_quantized_8(matrix: Floats) -> tuple[dict[str, NDArray[Any]], Floats]:
    stored, meant = int8(matrix)
    packed = words(stored["weight"].astype(np.int64) + 128, bits=8)
    return {"weight_packed": packed, "weight_scale": stored["weight_scale"], "weight_shape": np.asarray(matrix.shape)}, meant


def awq(matrix: Floats) -> tuple[dict[str, NDArray[Any]], Floats]:
    numbers, scales, points = quantised(matrix, GROUP, zeros=True)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    stored = {"qweight": words(numbers.T, order=order), "qzeros": words(points.T, order=order), "scales": turned(scales)}
    return stored, stands_for(numbers, scales, points, np.arange(matrix.shape[1]) // GROUP)


def gptq(*, less: int = 1, ordered: bool = True) -> Form:
    def make(matrix: Floats) -> tuple[dict[str, NDArray[Any]], Floats]:
        inputs = matrix.shape[1]
        order = np.arange(inputs) if ordered else np.random.default_rng(inputs).permutation(inputs)
        together, scales, points = quantised(np.ascontiguousarray(matrix[:, order]), GROUP, zeros=True)
        numbers, group = np.empty_like(together), np.empty(inputs, np.int32)
        numbers[:, order], group[order] = together, np.arange(inputs) // GROUP
        stored = {
            "qweight": turned(words(numbers)), "qzeros": words((points.T - less) & 15), "scales": turned(scales), "g_idx": group,
        }  # fmt: skip
        return stored, stands_for(numbers, scales, points, group)

    return make


def compressed(form: str, weights: Mapping[str, Any], activations: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """quantization_config as compressed-tensors writes it."""
    usual = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False, "group_size": None}
    group = {"targets": ["Linear"], "weights": {**usual, **weights}, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed", "ignore": ["lm_head"],
        "kv_cache_scheme": None, "config_groups": {"group_0": group},
    }  # fmt: skip


@dataclass(frozen=True)
class Published:
    """A published layout: how it is called in config.json, what becomes of a matrix, and the packing that it is read as."""

    config: dict[str, Any]
    form: Form
    packing: str
    in_order: bool = True


STATIC: Final = {"num_bits": 8, "strategy": "tensor", "symmetric": True, "dynamic": False}
TOKEN: Final = {"num_bits": 8, "strategy": "token", "symmetric": True, "dynamic": True}
OF_FLOATS: Final = {"num_bits": 8, "type": "float"}
BLOCK: Final = {"strategy": "block", "block_structure": [128, 128]}
_AWQ: Final = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
_GPTQ: Final = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
_FP8: Final = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
_INT4: Final = {"num_bits": 4, "strategy": "group", "group_size": GROUP}
PUBLISHED: Final[Mapping[str, Published]] = {
    "ct-fp8-channel": Published(
        compressed("float-quantized", OF_FLOATS, {**OF_FLOATS, **TOKEN}), fp8("weight_scale"), "fp8-channel-a8"
    ),
    "ct-fp8-static": Published(
        compressed("naive-quantized", {**OF_FLOATS, "strategy": "tensor"}, {**OF_FLOATS, **STATIC}),
        fp8("weight_scale", tensor=True), "fp8-channel",
    ),
    "ct-fp8-block": Published(
        compressed("float-quantized", {**OF_FLOATS, **BLOCK}, {**OF_FLOATS, **TOKEN, "strategy": "group", "group_size": 128}),
        fp8("weight_scale", 128, 128), "fp8-block128-a8",
    ),
    "ct-int8-w8a8": Published(compressed("int-quantized", {}, {"type": "int", **TOKEN}), int8, "int8-channel-a8"),
    "ct-int8-w8a16": Published(compressed("pack-quantized", {}), pack_quantized_8, "int8-channel"),
    "ct-int4": Published(compressed("pack-quantized", _INT4), pack_quantized(), "int4-group32"),
    "ct-int4-channel": Published(compressed("pack-quantized", {"num_bits": 4}), pack_quantized(0), "int4-channel"),
    "ct-int4-zeros": Published(
        compressed("pack-quantized", {**_INT4, "symmetric": False}), pack_quantized(zeros=True), "int4-group32-zeros"
    ),
    "fp8-block": Published({**_FP8, "weight_block_size": [128, 128]}, fp8("weight_scale_inv", 128, 128), "fp8-block128-a8"),
    "fp8-tensor": Published({**_FP8, "activation_scheme": "static"}, fp8("weight_scale", tensor=True), "fp8-channel"),
    "awq": Published(_AWQ, awq, "int4-group32-zeros"),
    "gptq": Published(_GPTQ, gptq(), "int4-group32-zeros"),
    "gptq-v2": Published({**_GPTQ, "checkpoint_format": "gptq_v2"}, gptq(less=0), "int4-group32-zeros"),
    "gptq-desc-act": Published({**_GPTQ, "desc_act": True}, gptq(ordered=False), "int4-group32-zeros", in_order=False),
}  # fmt: skip


def packed(
    tensors: Mapping[str, NDArray[Any]], config: Mapping[str, Any], published: Published
) -> tuple[dict[str, NDArray[Any]], dict[str, Any], dict[str, NDArray[Any]]]:
    """The tensors of a checkpoint with every projection packed, its config.json, and what all tensors stand for."""
    stored: dict[str, NDArray[Any]] = {}
    meant = dict(tensors)
    for name, value in tensors.items():
        if not name.endswith("proj.weight"):
            stored[name] = value
            continue
        found, meant[name] = published.form(np.asarray(value, np.float32))
        stored |= {f"{name.removesuffix('weight')}{last}": tensor for last, tensor in found.items()}
    return stored, {**config, "quantization_config": published.config}, meant
