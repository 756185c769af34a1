"""docs/fastdeploy.md: every key of FastDeploy's that bears on speculative decoding has one row, and what it names here exists."""

from __future__ import annotations

import dataclasses
import re

import pytest

from polydraft import Capabilities, EngineConfig, SamplingParams
from polydraft.cli import bench, generate, serve
from polydraft.contracts import REGISTRY
from polydraft.proposers.base import built_in
from polydraft.step import graphs
from tests.support.project import ROOT

PAGE = (ROOT / "docs" / "fastdeploy.md").read_text(encoding="utf-8")
KEYS = {
    "`speculative_config`": """method num_speculative_tokens num_model_steps mtp_strategy model quantization max_candidate_len
        verify_window max_ngram_size min_ngram_size verify_strategy accept_policy benchmark_mode enf_gen_phase_tag
        enable_draft_logprob suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor
        suffix_decoding_min_token_prob num_gpu_block_expand_ratio model_type sharing_model num_extra_cache_layer""",
    "`graph_optimization_config`": """use_cudagraph graph_opt_level cudagraph_capture_sizes cudagraph_capture_sizes_prefill
        cudagraph_num_of_warmups cudagraph_copy_inputs cudagraph_splitting_ops cudagraph_only_prefill full_cuda_graph
        max_capture_shape_prefill use_unique_memory_pool draft_model_use_cudagraph sot_warmup_sizes""",
    "Scheduler and output": """enable_overlap_schedule splitwise_role max_num_seqs max_num_batched_tokens
        enable_chunked_prefill enable_logprob max_logprobs logprobs_mode pd_disaggregation_mode""",
    "Environment variables": """ENABLE_V1_KVCACHE_SCHEDULER PREFILL_NODE_ONE_STEP_STOP PREFILL_NODE_ONE_STEP_STOP_V1
        INFERENCE_MSG_QUEUE_ID INFERENCE_MSG_ID FD_USE_GET_SAVE_OUTPUT_V1 SPEC_TOKENUM_THRESHOLD FD_DISABLED_RECOVER
        FD_LIMIT_THINKING_CONTENT_TRUNCATE_STR FD_TP_GROUP_GID_OFFSET FD_ATTENTION_BACKEND FD_USE_KVCACHE_LOCK
        FD_DETERMINISTIC_MODE FD_DETERMINISTIC_LOG_MODE FD_DETERMINISTIC_SPLIT_KV_SIZE FD_FILL_BITMASK_BATCH
        FD_ENABLE_MAX_PREFILL MAX_PREFILL_NUM FD_ENABLE_V1_UPDATE_WEIGHTS CUDA_VISIBLE_DEVICES XPU_VISIBLE_DEVICES
        HPU_VISIBLE_DEVICES FLAGS_max_partition_size""",
}
"""Section to the keys of FastDeploy 2.x that belong into it."""


def rows(section: str) -> list[list[str]]:
    text = re.split(rf"^## {re.escape(section)}$", PAGE, flags=re.MULTILINE)[1].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines if not line.startswith("|---")]


def options() -> set[str]:
    commands = (generate.command, serve.command, bench.command)
    return {name for command in commands for parameter in command.params for name in parameter.opts}


@pytest.mark.parametrize("section", KEYS)
def test_every_key_has_one_row_and_no_other_has(section: str):
    named = [key for row in rows(section) for key in re.findall(r"`(\w+)`", row[0])]
    assert sorted(named) == sorted(KEYS[section].split())


@pytest.mark.parametrize("section", KEYS)
def test_what_a_row_names_here_exists_or_it_says_why_nothing_does(section: str):
    known = options()
    for key, _, here, differs in rows(section):
        named = re.findall(r"`(--[\w-]+)`", here)
        assert here == "none" or named, key
        assert set(named) <= known, f"{key}: {set(named) - known}"
        assert differs, key
        assert here != "none" or len(differs) > 5, f"{key} has nothing here, and does not say why"


def test_every_other_name_of_the_page_exists():
    fields = {one.name for record in (EngineConfig, SamplingParams, Capabilities) for one in dataclasses.fields(record)}
    upstream = {key for keys in KEYS.values() for key in keys.split()}
    words = {"coupled", "rejection", "decode", "prefill", "off", "raw", "processed", "generate", "serve", "bench"}
    known = fields | upstream | words | set(built_in().needs()) | set(REGISTRY.names()) | set(options())
    known |= {option for proposer in built_in().names() for option in built_in().options(proposer)}
    known |= {"speculative_config", "graph_optimization_config", "EngineConfig", "SamplingParams", "WARM_UPS", "0,0,0"}
    for name in re.findall(r"`([^`/ ]+)`", PAGE):
        assert name in known, f"docs/fastdeploy.md names {name!r}, which nothing here is called"
    assert graphs.WARM_UPS == 2
    assert "2 (`WARM_UPS`" in PAGE


def test_options_of_the_page_are_fields_of_the_configuration_or_of_one_command():
    fields = {one.name for one in dataclasses.fields(EngineConfig)}
    named = {name.removeprefix("--").replace("-", "_") for name in re.findall(r"`(--[\w-]+)`", PAGE)}
    named = {"proposer_options" if name == "proposer_option" else name for name in named}  # one of a list
    assert named - fields == {"record"}, "the rest are options of commands alone"
