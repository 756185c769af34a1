"""A model whose layers differ, as a plugin would provide it: a mixer, a cache and a contract of its own, and its MTP layer among
the target's layers.

It has the family `TinyMixed`, a checkpoint of it, and a backend that knows its contract, for the tests of layers that differ. The
contract is registered only within `registered`, so that no other test meets it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from polydraft.conformance.oracle.checkpoints import random_tensors, write_checkpoint
from polydraft.conformance.probe import tokenizer_json
from polydraft.contracts.base import REGISTRY, Args, Case, Contract, param, tensor
from polydraft.device import Buffer
from polydraft.models import Block, Family, GatedMlp, MtpLayout, Tensor
from polydraft.models.block import At, Work
from polydraft.models.config_file import ConfigFile
from polydraft.models.families import BUILT_IN
from polydraft.models.tensor_table import BLOCK_NAMES
from polydraft.program.caches import CacheKind, PagedRows, SlotState
from polydraft.reference.provider import plain
from polydraft.reference.table import NumpyTable
from tests.support.plugin_doubles import backend, info

RANK, NARROW = 6, 20
CONFIG: dict[str, Any] = {
    "architectures": ["TinyMixed"], "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 48, "vocab_size": 64, "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-5,
    "rope_theta": 100.0, "tie_word_embeddings": False, "max_position_embeddings": 96, "eos_token_id": 0, "hidden_act": "silu",
}  # fmt: skip


class CausalMeanV1(Args):
    """Arguments of `causal_mean`."""

    x: Buffer = tensor("N C", "act", "Rows.")
    row_slot: Buffer = tensor("N", "i32", "Slot of each row; PAD_SLOT for none.")
    positions: Buffer = tensor("N", "i32", "Position of each row.")
    block_table: Buffer = tensor("B MB", "i32", "Blocks of each slot.")
    rows: Buffer = tensor("P C", "act", "Paged rows.", access="inout")
    out: Buffer = tensor("N C", "act", "Mean of all rows of the slot up to the position.", access="out", pad=0.0)
    block_size: int = param("Tokens of a block.")


def causal_mean(a: Any, n: int) -> None:
    """Store the rows, then average."""

    def places(slot: int, end: int) -> Any:
        p = np.arange(end)
        return a.block_table[slot, p // a.block_size] * a.block_size + p % a.block_size

    real = [r for r in range(n) if a.row_slot[r] >= 0]
    for r in real:
        a.rows[places(a.row_slot[r], a.positions[r] + 1)[-1]] = a.x[r]
    a.out[:n] = 0
    for r in real:
        a.out[r] = a.rows[places(a.row_slot[r], a.positions[r] + 1)].mean(axis=0)


def _no_cases(rng: Any = None) -> Iterator[Case]:
    del rng
    yield from ()


CONTRACT = Contract(
    name="causal_mean", version=1, unit="any", args=CausalMeanV1, golden=causal_mean, cases=_no_cases,
    generate=_no_cases,  # type: ignore[arg-type]
    doc="Average rows.", source=__name__, symbols={"C": "elements of a row", "P": "paged rows"},
)  # fmt: skip


@dataclass(frozen=True)
class RunningMean:
    """A mixer that is no attention: each row sees the mean of all rows up to it."""

    rank: int
    state: SlotState | None = None
    """A state that it claims to keep."""
    contracts: ClassVar[tuple[str, ...]] = ("linear", "causal_mean")
    carried: ClassVar[tuple[str, ...]] = ("mean",)

    @property
    def caches(self) -> tuple[CacheKind, ...]:
        return (PagedRows("rows", self.rank), *((self.state,) if self.state else ()))

    def scratch(self, hidden: int) -> tuple[Work, ...]:
        del hidden
        return Work("value", self.rank), Work("mean", self.rank)

    def weights(self, hidden: int) -> tuple[Tensor, ...]:
        return Tensor("value", ((self.rank, hidden),)), Tensor("back", ((hidden, self.rank),))

    def keep(self, at: At) -> None:
        self.mix(at)  # its one contract writes the row and takes the mean

    def mix(self, at: At) -> None:
        at.linear("value", x="normed", out="value")
        at.add(
            "causal_mean", x=at.scratch["value"], row_slot=at.rows.row_slot, positions=at.rows.positions, rows=at.own("rows"),
            out=at.scratch["mean"], block_size=at.program.limits.block_size,
        )  # fmt: skip

    def finish(self, at: At) -> None:
        at.linear("back", x="mean", out="branch")


@dataclass(frozen=True, kw_only=True)
class MixedFamily(Family):
    """Attention first, then a mean with a narrower feed-forward; the MTP layer mixes by `drafts_by`."""

    state: SlotState | None = None
    drafts_by_mean: bool = False

    def blocks(self, config: ConfigFile) -> tuple[Block, ...]:
        return self.block(config), Block(RunningMean(RANK, self.state), GatedMlp(NARROW))

    def mtp_block(self, config: ConfigFile, blocks: tuple[Block, ...]) -> Block:
        return replace(self.block(config), mixer=RunningMean(RANK)) if self.drafts_by_mean else blocks[0]


def family(**changes: Any) -> MixedFamily:
    """The family, names as GLM has them."""
    layout = MtpLayout(
        prefix="model.layers.{layer}.", emb_norm="enorm.weight", hid_norm="hnorm.weight", proj="eh_proj.weight",
        final_norm_name="shared_head.norm.weight", order="embedding_first", feed="post", final_norm="own", recycle="post",
    )  # fmt: skip
    names = {**BLOCK_NAMES, "value": ("mixer.value.weight",), "back": ("mixer.back.weight",)}
    assert BUILT_IN[0].qkv_bias
    return MixedFamily(architecture="TinyMixed", qkv_bias=True, mtp=layout, block_names=names, **changes)


def write(directory: Path, *, drafts_by_mean: bool = False) -> Path:
    """A random checkpoint of it."""
    dense = {**CONFIG, "architectures": ["MiMoForCausalLM"], "num_hidden_layers": 1}
    renames = {
        "model.mtp_layers.0.": "model.layers.2.", "token_layernorm": "enorm", "hidden_layernorm": "hnorm",
        "input_proj": "eh_proj", "final_layernorm": "shared_head.norm",
    }  # fmt: skip
    tensors = {}
    for name, value in random_tensors(dense).items():
        for old, new in renames.items():
            name = name.replace(old, new)  # noqa: PLW2901
        tensors[name] = value
    rng = np.random.default_rng(3)
    hidden = CONFIG["hidden_size"]
    shapes = {"mlp.gate_proj": (NARROW, hidden), "mlp.up_proj": (NARROW, hidden), "mlp.down_proj": (hidden, NARROW)}
    mean = {"mixer.value": (RANK, hidden), "mixer.back": (hidden, RANK)}
    tensors |= {f"model.layers.1.{n}.weight": rng.normal(0, 0.3, s).astype(np.float32) for n, s in (shapes | mean).items()}
    norms = ("input_layernorm", "post_attention_layernorm")
    tensors |= {f"model.layers.1.{n}.weight": np.ones(hidden, np.float32) for n in norms}
    if drafts_by_mean:
        tensors = {n: v for n, v in tensors.items() if not n.startswith("model.layers.2.self_attn")}
        tensors |= {f"model.layers.2.{n}.weight": rng.normal(0, 0.3, s).astype(np.float32) for n, s in mean.items()}
    write_checkpoint(directory, CONFIG, tensors)
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer_json(CONFIG["vocab_size"])))
    return directory


@contextmanager
def registered() -> Iterator[None]:
    """The contract is known meanwhile."""
    REGISTRY.add(CONTRACT)
    try:
        yield
    finally:
        REGISTRY.remove(CONTRACT.name)


def plugin(*, owns: bool = True, proposers: Any = (), **changes: Any) -> ModuleType:
    """A backend like the reference, with the family, and with the contract where it `owns` it."""

    def polydraft_kernels(device: Any) -> NumpyTable:
        table = NumpyTable(device)
        if owns:
            table.providers = {**table.providers, "causal_mean": device.bind_kernel(plain(causal_mean))}
            table.versions = {**table.versions, "causal_mean": 1}
        return table

    versions = {**info().contract_versions, **({"causal_mean": 1} if owns else {})}
    return backend(
        changes={"contract_versions": versions},
        polydraft_kernels=polydraft_kernels,
        polydraft_models=lambda: (family(**changes),),
        polydraft_proposers=lambda: proposers,
    )
