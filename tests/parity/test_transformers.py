"""Logits equal Hugging Face transformers' on random tiny models: the targets, and the MTP head with every switch.

Each model is built by transformers, all of its parameters are randomised (norm weights and biases too), saved as a
checkpoint, and loaded through our families. Implementations under test are the callables in `IMPLEMENTATIONS`; they take

    logits_fn(model_dir, token_ids, num_drafts, switches) -> (target_logits [n, V], mtp_logits [num_drafts, V])

`token_ids` are n prompt tokens. Row p of `target_logits` scores token p + 1. `mtp_logits` are those of a chain of greedy
drafts behind the prompt and the target's own next token: pass k is fed draft k - 1 and the recycled state. `switches`
replace fields of the model's `Mtp` record.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from polydraft.errors import CheckpointError
from tests.oracle import OracleModel
from tests.support.recording import engine_logits

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

Array = NDArray[Any]
LogitsFn = Callable[[Path, Sequence[int], int, Mapping[str, Any]], tuple[Array, Array]]

TOLERANCE = 1e-4  # of the largest reference logit
PROMPT = [5, 1, 88, 40, 40, 7, 63, 2, 19, 96, 33]
NUM_DRAFTS = 3
MIMO = {"order": "hidden_first", "feed": "pre", "final_norm": "own", "recycle": "pre", "mask_first_position": False}
FLIPPED = {
    "order": "embedding_first",
    "feed": "post",
    "final_norm": "target",
    "recycle": "post",
    "mask_first_position": True,
}


def oracle_logits(model_dir: Path, token_ids: Sequence[int], num_drafts: int, switches: Mapping[str, Any]) -> tuple[Array, Array]:
    model = OracleModel.from_dir(model_dir, **switches)
    states = model.target_states(token_ids)
    logits = model.target_logits(states)
    drafted = np.empty((0, logits.shape[1]))
    if num_drafts:
        drafted = model.draft([*token_ids, int(np.argmax(logits[-1]))], states, num_drafts)[1]
    return logits, drafted


IMPLEMENTATIONS: list[LogitsFn] = [oracle_logits, engine_logits]


# --- models of transformers -------------------------------------------------------------------------------------------


def tiny_config(architecture: str, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 80,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 640000.0},
        "bos_token_id": 1,
        "eos_token_id": 0,
        **changes,
    }
    if architecture == "Qwen2":
        settings["head_dim"] = 12  # Qwen2 has hidden_size / num_attention_heads, and no key for it
    return getattr(transformers, f"{architecture}Config")(**settings)


def randomise(module: Any, seed: int) -> None:
    """Give every parameter values that matter: norms around 1, biases of the size of activations."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(module.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name and parameter.ndim == 1:
                parameter.copy_(1 + 0.4 * noise)
            elif parameter.ndim == 1:
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(noise * (1.0 if "embed" in name else 1.3 / parameter.shape[1] ** 0.5))


def build(architecture: str, seed: int = 0, **changes: Any) -> Any:
    model = getattr(transformers, f"{architecture}ForCausalLM")(tiny_config(architecture, **changes)).eval()
    randomise(model, seed)
    return model


def save(model: Any, directory: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own deprecations are not ours to fix
        model.save_pretrained(directory)
    return directory


def build_mtp(target: Any, seed: int = 1) -> Any:
    from transformers.modeling_layers import MtpModel

    target.config.num_mtp_layers = 1
    target.config.mtp_layer_types = ["full_attention"]
    mtp = MtpModel(target, 1).eval()
    randomise(mtp.layers, seed)
    return mtp


def save_mimo(target: Any, mtp: Any, directory: Path) -> Path:
    """Save a Qwen2 model and an MTP layer as a MiMo checkpoint."""
    from safetensors.torch import load_file, save_file

    renames = {
        "enorm": "token_layernorm",
        "hnorm": "hidden_layernorm",
        "eh_proj": "input_proj",
        "post_norm": "final_layernorm",
    }
    tensors = load_file(save(target, directory) / "model.safetensors")
    for name, tensor in mtp.layers[0].state_dict().items():
        stem, _, rest = name.partition(".")
        renamed = rest if stem == "mtp_block" else f"{renames[stem]}.{rest}"
        tensors[f"model.mtp_layers.0.{renamed}"] = tensor.contiguous()
    save_file(tensors, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


# --- what transformers computes ---------------------------------------------------------------------------------------


def captured(module: Any, run: Callable[[], Any]) -> tuple[Any, Any]:
    """Run and return the input that `module` got, and the result: how the state before a norm is reached."""
    seen = []
    hook = module.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    try:
        result = run()
    finally:
        hook.remove()
    return seen[-1], result


@torch.no_grad()
def target_logits(model: Any, token_ids: Sequence[int]) -> tuple[Any, Any]:
    """The states before the final norm [1, n, H] and the logits [n, V]."""
    pre, output = captured(model.model.norm, lambda: model(torch.tensor([list(token_ids)]), use_cache=False))
    return pre, output.logits[0]


@torch.no_grad()
def mtp_logits(target: Any, mtp: Any, token_ids: Sequence[int], num_drafts: int, switches: Mapping[str, Any]) -> Array:
    """Greedy drafts through transformers' MTP layer and its cache; asserts that no choice is close."""
    from transformers.cache_utils import MtpCache

    mtp = copy.deepcopy(mtp)
    mtp.config.mtp_hidden_states_first = mtp.layers[0].config.mtp_hidden_states_first = switches["order"] == "hidden_first"
    if switches["final_norm"] == "target":
        mtp.layers[0].post_norm.weight.copy_(target.model.norm.weight)
    pre, logits = target_logits(target, token_ids)
    fed = pre if switches["feed"] == "pre" else target.model.norm(pre)
    next_ids = [*token_ids[1:], int(logits[-1].argmax())]
    position, cache, rows = 1, MtpCache(config=mtp.config), []
    for k in range(num_drafts):
        embeds = mtp.embed_tokens(torch.tensor([next_ids]))
        if switches["mask_first_position"] and k == 0:
            embeds[:, 0] = 0
        positions = torch.arange(position, position + len(next_ids))[None]
        layer = partial(mtp.forward_layer, 0, fed, positions, cache, inputs_embeds=embeds)
        before, after = captured(mtp.layers[0].post_norm, layer)
        rows.append(mtp.shared_head(after)[0, -1])
        best = torch.topk(rows[-1], 2)
        assert best.values[0] - best.values[1] > 1e-2, "a tie: choose another seed"
        position += len(next_ids)
        next_ids = [int(best.indices[0])]
        fed = (before if switches["recycle"] == "pre" else after)[:, -1:]
    return torch.stack(rows).numpy()


def distance(ours: Array, theirs: Array) -> float:
    """Largest difference as a share of the largest reference logit."""
    assert ours.shape == theirs.shape
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


# --- tests ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("logits_fn", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("Qwen2", {}),
        ("Qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
        ("Qwen3", {}),
        ("Qwen3", {"head_dim": 20, "num_key_value_heads": 1}),
        ("Llama", {}),
        ("Llama", {"tie_word_embeddings": True, "rms_norm_eps": 1e-2}),
    ],
)
def test_target(tmp_path: Path, logits_fn: LogitsFn, architecture: str, changes: dict[str, Any]) -> None:
    model = build(architecture, **changes)
    theirs = target_logits(model, PROMPT)[1].numpy()
    ours, _ = logits_fn(save(model, tmp_path), PROMPT, 0, {})
    assert distance(ours, theirs) < TOLERANCE


@pytest.mark.parametrize("logits_fn", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("architecture", "switch", "name"),
    [
        ("Qwen3", "attention_bias", "self_attn.o_proj.bias"),
        ("Llama", "attention_bias", "self_attn.v_proj.bias"),
        ("Llama", "mlp_bias", "mlp.up_proj.bias"),
        ("Ernie4_5", "use_bias", "mlp.down_proj.bias"),
    ],
)
def test_biases(tmp_path: Path, logits_fn: LogitsFn, architecture: str, switch: str, name: str) -> None:
    """Each matters, and none is dropped where the configuration has not switched it on."""
    from safetensors.torch import load_file, save_file

    model = build(architecture, **{switch: True})
    theirs = target_logits(model, PROMPT)[1].numpy()
    assert distance(logits_fn(save(model, tmp_path), PROMPT, 0, {})[0], theirs) < TOLERANCE
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        {key: value.flip(0) if key.endswith(name) else value for key, value in tensors.items()}, tmp_path / "model.safetensors"
    )
    assert distance(logits_fn(tmp_path, PROMPT, 0, {})[0], theirs) > 10 * TOLERANCE
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, switch: False}))
    with pytest.raises(CheckpointError, match=r"proj\.bias"):
        logits_fn(tmp_path, PROMPT, 0, {})


@pytest.fixture(scope="module")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path]:
    """A Qwen2 target, an MTP layer, and both as a MiMo checkpoint."""
    target = build("Qwen2")
    mtp = build_mtp(target)
    return target, mtp, save_mimo(target, mtp, tmp_path_factory.mktemp("mimo"))


@pytest.mark.parametrize("logits_fn", IMPLEMENTATIONS)
def test_mimo(mimo: tuple[Any, Any, Path], logits_fn: LogitsFn) -> None:
    target, mtp, directory = mimo
    ours = logits_fn(directory, PROMPT, NUM_DRAFTS, {})
    assert distance(ours[0], target_logits(target, PROMPT)[1].numpy()) < TOLERANCE
    assert distance(ours[1], mtp_logits(target, mtp, PROMPT, NUM_DRAFTS, MIMO)) < TOLERANCE


@pytest.mark.parametrize("logits_fn", IMPLEMENTATIONS)
@pytest.mark.parametrize("switch", FLIPPED)
def test_every_mtp_switch_matters(mimo: tuple[Any, Any, Path], logits_fn: LogitsFn, switch: str) -> None:
    """Against transformers with one convention changed, ours agrees if told so, and the comparison fails if not."""
    target, mtp, directory = mimo
    flip = {switch: FLIPPED[switch]}
    theirs = mtp_logits(target, mtp, PROMPT, 2, {**MIMO, **flip})
    assert distance(logits_fn(directory, PROMPT, 2, flip)[1], theirs) < TOLERANCE
    assert distance(logits_fn(directory, PROMPT, 2, {})[1], theirs) > 100 * TOLERANCE


@pytest.mark.parametrize("logits_fn", IMPLEMENTATIONS)
def test_all_mtp_switches_together(mimo: tuple[Any, Any, Path], logits_fn: LogitsFn) -> None:
    target, mtp, directory = mimo
    theirs = mtp_logits(target, mtp, PROMPT, NUM_DRAFTS, FLIPPED)
    assert distance(logits_fn(directory, PROMPT, NUM_DRAFTS, FLIPPED)[1], theirs) < TOLERANCE


def test_recycling_shows_only_from_the_second_draft(mimo: tuple[Any, Any, Path]) -> None:
    """Why the comparisons above draft at least twice."""
    target, mtp, _ = mimo
    pre = mtp_logits(target, mtp, PROMPT, 2, MIMO)
    post = mtp_logits(target, mtp, PROMPT, 2, {**MIMO, "recycle": "post"})
    assert distance(pre[:1], post[:1]) == 0
    assert distance(pre[1:], post[1:]) > 100 * TOLERANCE
