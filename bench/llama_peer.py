"""One side of `packed_weights.py`: llama.cpp on the CPU, in an interpreter of its own that has `llama-cpp-python` and `gguf`.

Writes a GGUF file with random weights of a shape of bench/shapes in one of llama.cpp's own quantisations, loads it, and reads one
JSON object a line: {"tokens": N} for so many decode steps behind a prompt, {"prompt": N} for a prompt of so many tokens. Answers
with {"ms": M}, milliseconds of a step (their median) or of the prompt. Logits of the last token are read, as a sampler would.

    PYTHON bench/llama_peer.py SHAPE.json Q8_0|Q4_0 THREADS
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

CONTEXT = 1024
DRAWN = 1024
"""Rows of a matrix that are drawn and quantised; they are repeated below."""


def write(path: Path, shape: dict[str, Any], kind: str) -> None:
    """A Qwen2 model of random weights, head and embedding one matrix where the shape ties them."""
    import gguf

    quantised = gguf.GGMLQuantizationType[kind]
    hidden, wide, heads, kv = (
        shape[k] for k in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    )
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_context_length(shape["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_feed_forward_length(wide)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv)
    writer.add_rope_freq_base(shape["rope_theta"])
    writer.add_layer_norm_rms_eps(shape["rms_norm_eps"])
    writer.add_vocab_size(shape["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])
    writer.add_tokenizer_model("none")

    def matrix(name: str, outputs: int, inputs: int) -> None:
        drawn = rng.standard_normal((min(outputs, DRAWN), inputs), np.float32) * np.float32(inputs**-0.5)
        rows = gguf.quants.quantize(drawn, quantised)
        writer.add_tensor(name, np.resize(rows, (outputs, rows.shape[1])), raw_dtype=quantised)

    def vector(name: str, size: int, value: float) -> None:
        writer.add_tensor(name, np.full(size, value, np.float32))

    size = shape["head_dim"]
    matrix("token_embd.weight", shape["vocab_size"], hidden)
    vector("output_norm.weight", hidden, 1.0)
    for i in range(shape["num_hidden_layers"]):
        block = f"blk.{i}."
        vector(f"{block}attn_norm.weight", hidden, 1.0)
        vector(f"{block}ffn_norm.weight", hidden, 1.0)
        for name, outputs in (("q", heads * size), ("k", kv * size), ("v", kv * size)):
            matrix(f"{block}attn_{name}.weight", outputs, hidden)
            vector(f"{block}attn_{name}.bias", outputs, 0.0)
        matrix(f"{block}attn_output.weight", hidden, heads * size)
        matrix(f"{block}ffn_gate.weight", wide, hidden)
        matrix(f"{block}ffn_up.weight", wide, hidden)
        matrix(f"{block}ffn_down.weight", hidden, wide)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Model:
    """A loaded file, by the library's plain C functions."""

    def __init__(self, path: Path, threads: int) -> None:
        import llama_cpp as library

        self.library = library
        library.llama_backend_init()
        self.model = library.llama_model_load_from_file(str(path).encode(), library.llama_model_default_params())
        if not self.model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        options = library.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_ubatch = CONTEXT
        options.n_threads = options.n_threads_batch = threads
        self.context = library.llama_init_from_model(self.model, options)
        self.vocab = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self.model))

    def feed(self, tokens: list[int]) -> int:
        """The likeliest token behind these, which continue what was fed before."""
        array = (self.library.llama_token * len(tokens))(*tokens)
        if self.library.llama_decode(self.context, self.library.llama_batch_get_one(array, len(tokens))):
            raise SystemExit(f"llama.cpp cannot decode {len(tokens)} tokens")
        logits = self.library.llama_get_logits_ith(self.context, -1)
        return int(np.argmax(np.ctypeslib.as_array(ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), (self.vocab,))))

    def forget(self) -> None:
        """Begin another text."""
        self.library.llama_memory_clear(self.library.llama_get_memory(self.context), True)


def answered(model: Model, ask: dict[str, int]) -> float:
    """Milliseconds of what is asked for."""
    model.forget()
    start = time.perf_counter()
    token = model.feed(list(range(10, 10 + ask.get("prompt", 32))))
    took = [time.perf_counter() - start]
    if "prompt" not in ask:
        took = []
        for _ in range(ask["tokens"]):
            start = time.perf_counter()
            token = model.feed([token])
            took.append(time.perf_counter() - start)
    return statistics.median(took) * 1e3


def main() -> None:
    """Write, load, answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the library prints goes elsewhere
    import gguf
    import llama_cpp

    shape = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "random.gguf"
        write(file, shape, sys.argv[2])
        size = file.stat().st_size
        model = Model(file, int(sys.argv[3]))
    features = llama_cpp.llama_print_system_info().decode()
    told = {"version": llama_cpp.__version__, "gguf": getattr(gguf, "__version__", ""), "bytes": size, "features": features}
    for message in itertools.chain([told], ({"ms": answered(model, json.loads(line))} for line in sys.stdin)):
        answers.write(json.dumps(message) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
