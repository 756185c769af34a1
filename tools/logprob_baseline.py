"""Write tests/parity/logprobs.json: log probabilities of the demo model as Hugging Face transformers computes them.

    python tools/logprob_baseline.py

For each test prompt: the greedy text of Qwen2ForCausalLM over the demo checkpoint in float64, and of every token of prompt and
text its log probability, rank and the five most likely tokens. Every backend is held against it (tests/parity/test_logprobs.py).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "core")]

from polydraft.demo import demo_model_path  # noqa: E402  the checkout's
from polydraft.models import Tokenizer  # noqa: E402
from tests.oracle.prompts import CODE_PROMPTS  # noqa: E402

NEW_TOKENS, TOP, DIGITS = 24, 5, 6
TARGET = ROOT / "tests" / "parity" / "logprobs.json"


def load():
    """The target of the demo model: MiMo's is a Qwen2 whose further weights (the MTP head) are left out."""
    config = json.loads((demo_model_path() / "config.json").read_text())
    for key in ("architectures", "model_type", "num_nextn_predict_layers", "auto_map", "torch_dtype"):
        config.pop(key, None)
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**config)).double().eval()
    from safetensors.torch import load_file

    weights: dict[str, torch.Tensor] = {}
    for file in sorted(demo_model_path().glob("*.safetensors")):
        weights |= load_file(file)
    missing, unexpected = model.load_state_dict({k: v.double() for k, v in weights.items()}, strict=False)
    assert all("mtp" in name for name in unexpected), unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    if missing:
        model.tie_weights()
    return model


def describe(model, prompt_ids):
    ids = list(prompt_ids)
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), dim=-1)
    rows = []
    for place, token in enumerate(ids[1:]):
        values, top = torch.topk(logprobs[place], TOP)
        row = logprobs[place]
        rows.append(
            {
                "token_id": token,
                "logprob": round(float(row[token]), DIGITS),
                "rank": int((row > row[token]).sum()) + 1,
                "top": [[int(t), round(float(v), DIGITS)] for t, v in zip(top, values, strict=True)],
            }
        )
    return {"prompt_ids": list(prompt_ids), "token_ids": ids[len(prompt_ids) :], "rows": rows}


def main():
    model, tokenizer = load(), Tokenizer.from_dir(demo_model_path())
    texts = [describe(model, tokenizer.encode(prompt)) for prompt in CODE_PROMPTS]
    source = f"transformers {transformers.__version__}, torch {torch.__version__}, float64"
    lines = json.dumps({"model": demo_model_path().name, "source": source, "texts": texts}, separators=(",", ":"))
    for start in ('{"token_id"', '{"prompt_ids"'):
        lines = lines.replace(start, f"\n{start}")
    TARGET.write_text(lines + "\n")
    print(f"{TARGET.relative_to(ROOT)}: {len(texts)} texts, {sum(len(t['rows']) for t in texts)} tokens")


if __name__ == "__main__":
    main()
