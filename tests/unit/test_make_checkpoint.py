"""`tools/make_checkpoint.py` writes a checkpoint of every family that is read, and each generates on the CPU backend;
`tools/make_eagle3.py` a target with a draft model."""

import json
from pathlib import Path
from typing import Any

import pytest

from polydraft import LLM, SamplingParams
from polydraft.models import Checkpoint
from polydraft.models.families import BUILT_IN
from tools import make_eagle3
from tools.make_checkpoint import FAMILIES, main

PROMPTS = ["w5 w9 w2", "w17"]


def generated(directory: Path, draft_tokens: int, **options: Any) -> tuple[list[tuple[int, ...]], float]:
    """Greedy texts on the CPU backend, and the tokens of a round."""
    llm = LLM(model=str(directory), backend="cpu", draft_tokens=draft_tokens, max_num_seqs=2, **options)
    outputs = llm.generate(PROMPTS, SamplingParams(max_new_tokens=24, ignore_eos=True))
    llm.close()
    texts = [tuple(output.token_ids) for output in outputs]
    return texts, sum(map(len, texts)) / sum(len(output.rounds) for output in outputs)


def test_every_family_has_a_command():
    assert {config["architectures"][0] for config in FAMILIES.values()} == {family.architecture for family in BUILT_IN}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_made_loads_and_generates(tmp_path: Path, family: str):
    main([family, str(tmp_path)])
    texts, _ = generated(tmp_path, 0)
    assert all(len(text) == 24 and len(set(text)) > 3 for text in texts)
    if FAMILIES[family].get("num_nextn_predict_layers"):
        drafted, per_round = generated(tmp_path, 2)
        assert drafted == texts
        assert 1.1 < per_round < 3, "some drafts are accepted, and some are not"


@pytest.mark.parametrize("family", ["ernie", "ernie-moe"])
def test_paddles_export_is_the_same_model(tmp_path: Path, family: str):
    main([family, str(tmp_path / "pytorch"), "--dtype", "BF16"])
    main([family, str(tmp_path / "paddle"), "--dtype", "U16", "--export", "paddle"])
    with Checkpoint(tmp_path / "paddle") as opened:
        assert all(name.startswith("ernie.") or name == "lm_head.weight" for name in opened.names())
    assert generated(tmp_path / "paddle", 2) == generated(tmp_path / "pytorch", 2)


def test_options_are_the_keys_of_the_configuration(tmp_path: Path):
    main(["glm4-moe", str(tmp_path), "--n-routed-experts", "4", "--n-group", "1", "--use-qk-norm", "false", "--seed", "3"])
    config = json.loads((tmp_path / "config.json").read_text())
    assert config == {**FAMILIES["glm4-moe"], "n_routed_experts": 4, "n_group": 1, "use_qk_norm": False}
    assert generated(tmp_path, 0)[0]


def test_a_head_of_another_kind_than_the_last_layer_stays_random(tmp_path: Path):
    main(["ernie-moe", str(tmp_path), "--moe-layer-end-index", "1"])
    assert generated(tmp_path, 2)[0] == generated(tmp_path, 0)[0]


def test_a_configuration_of_another_family_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    main(["llama", str(tmp_path / "llama")])
    with pytest.raises(SystemExit):
        main(["mimo", str(tmp_path / "mimo"), "--config", str(tmp_path / "llama" / "config.json")])
    assert "is of LlamaForCausalLM, wanted MiMoForCausalLM" in capsys.readouterr().err


@pytest.mark.parametrize("said", [{}, {"head_dim": None, "num_key_value_heads": None, "num_nextn_predict_layers": None}])
def test_a_configuration_that_leaves_the_size_of_heads_to_others(tmp_path: Path, said: dict[str, None]):
    """As those of Llama and Mistral do, with absent keys or null."""
    kept = {key: value for key, value in FAMILIES["llama"].items() if key not in ("head_dim", "num_key_value_heads")}
    (tmp_path / "config.json").write_text(json.dumps({**kept, **said}))
    main(["llama", str(tmp_path / "model"), "--config", str(tmp_path / "config.json")])
    with Checkpoint(tmp_path / "model") as opened:
        assert opened.shape("model.layers.0.self_attn.k_proj.weight") == (48, 48)
    assert generated(tmp_path / "model", 0)[0]


@pytest.mark.parametrize(("noise", "least", "most"), [("0", 3.5, 4.0), ("0.5", 1.0, 2.0)])
def test_drafts_of_a_pair_are_right_as_often_as_is_asked(tmp_path: Path, noise: str, least: float, most: float):
    make_eagle3.main([str(tmp_path), "--layout", "vllm", "--family", "qwen3", "--noise", noise, "--seed", "1"])
    drafting = {"proposer": "eagle3", "draft_model": str(tmp_path / "draft-model")}
    plain, drafted = (generated(tmp_path / "target", k, **more) for k, more in ((0, {}), (3, drafting)))
    assert plain[0] == drafted[0]
    assert least < drafted[1] <= most
