"""Engines over quantised KV rows: drafts leave the text as it is, planning counts bytes, and what nobody declared is refused."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from polydraft import LLM, SamplingParams, reference
from polydraft.conformance.probe import checkpoint, prompts
from polydraft.conformance.target import wrap
from polydraft.contracts.kv_quant import KV_DTYPES
from polydraft.errors import CapabilityError, ConfigError, PluginError
from tests.conformance.doubles import BACKENDS

PROBE = str(checkpoint())
OPTIONS: dict[str, Any] = {"model": PROBE, "max_num_seqs": 3, "block_size": 4, "kv_dtype": "int8"}


def texts(**options: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    with closing(LLM(**{**OPTIONS, **options})) as llm:
        found = llm.generate([list(prompt) for prompt in prompts(10)[6:]], params)
    return [(one.token_ids, one.rounds) for one in found]


each_kv = pytest.mark.parametrize("kv", KV_DTYPES)


@each_kv
def test_drafts_batches_chunks_and_devices_change_nothing(kv: str):
    """The emulator keeps rows in another order and runs launches late; the reference's other arithmetic is row-invariant, too."""
    plain = [tokens for tokens, _ in texts(backend="reference", draft_tokens=0, invariant=True, kv_dtype=kv)]
    drafted = texts(backend="reference", draft_tokens=3, invariant=True, kv_dtype=kv)
    assert [tokens for tokens, _ in drafted] == plain
    assert any(sum(rounds) for _, rounds in drafted)
    assert texts(backend="reference", draft_tokens=3, invariant=True, max_batched_tokens=13, kv_dtype=kv) == drafted
    assert texts(backend=BACKENDS["emulator"], draft_tokens=3, overlap=1, invariant=True, sanitize=True, kv_dtype=kv) == drafted


@each_kv
def test_a_block_takes_a_byte_a_number_and_one_a_row(kv: str):
    def planned(**options: Any) -> tuple[Any, ...]:
        with closing(LLM(**{**OPTIONS, "backend": "reference", "num_blocks": 32, **options})) as llm:
            chosen = llm.engine.resolved.describe()
            reasons = {one.name: one.reason for one in llm.engine.resolved.decisions}
            return chosen["kv_cache_bytes"], chosen["kv_dtype"], reasons["kv_dtype"], llm.engine.resolved.kv

    rows = 2 * 2 * 32 * 4 * 2  # keys and values, target and MTP, blocks, places, heads
    size, chosen, reason, kept = planned(kv_dtype=kv)
    assert (size, chosen, kept) == (rows * (8 + 1), kv, kv)
    assert "asked for" in reason
    assert "another model" in reason
    size, chosen, reason, kept = planned(kv_dtype="auto")
    assert (size, chosen, kept) == (rows * 8 * 4, "f32", "")
    assert "asked for" not in reason


def test_who_does_not_declare_it_refuses():
    bare = wrap(reference, polydraft_backend_info=lambda info: dataclasses.replace(
        info, name="bare", capabilities=dataclasses.replace(info.capabilities, kv_dtypes=())))  # fmt: skip
    with pytest.raises(CapabilityError) as refused:
        LLM(**OPTIONS, plugin=bare)
    assert str(refused.value) == (
        "this engine cannot be built: --kv-dtype int8: backend bare does not declare it (kv_dtypes); leave it out or use another "
        "--backend"
    )


def test_another_form_is_a_config_error():
    with pytest.raises(ConfigError, match=r"^kv_dtype is 'int4', wanted one of auto, int8, fp8; correct it or leave it out$"):
        LLM(**{**OPTIONS, "kv_dtype": "int4"}, backend="reference")


def test_a_form_that_core_does_not_know_is_no_capability():
    odd = wrap(reference, polydraft_backend_info=lambda info: dataclasses.replace(
        info, capabilities=dataclasses.replace(info.capabilities, kv_dtypes=("int4",))))  # fmt: skip
    with pytest.raises(PluginError, match=r"kv_dtypes \('int4',\), wanted some of int8, fp8 or none"):
        LLM(model=PROBE, plugin=odd)


PACK = """
from types import SimpleNamespace
from polydraft import hookimpl
from polydraft.reference.table import NumpyTable

@hookimpl
def polydraft_kernels(device):
    table = NumpyTable(device)
    return SimpleNamespace(providers={NAME: table.providers[NAME]}, versions={NAME: table.versions[NAME]})
"""


@pytest.mark.parametrize(("contract", "refused"), [("paged_attention", True), ("swiglu", False)])
def test_a_pack_that_serves_such_rows_is_refused(tmp_path: Path, contract: str, refused: bool):
    file = tmp_path / "strange.py"
    file.write_text(PACK.replace("NAME", repr(contract)))
    options = {**OPTIONS, "backend": "reference", "plugins": (str(file),)}
    if not refused:
        LLM(**options).close()
        return
    with pytest.raises(CapabilityError, match=r"--kv-dtype int8: kernel pack '.*' serves paged_attention, and only kernels of"):
        LLM(**options)
    LLM(**{**options, "kv_dtype": "auto"}).close()
