"""The model side of core: descriptions, families, checkpoints and tokenizers.

The engine goes checkpoint -> `FamilyRegistry.describe` -> `load_weights`, and `Tokenizer.from_dir` beside it.
Nothing here computes with weights or knows a backend; tokenizer libraries are imported only when a tokenizer is used.
"""

from polydraft.models.attention import Attention
from polydraft.models.block import (
    At,
    Block,
    FeedForward,
    Mixer,
    Norm,
    Stretch,
    Tensor,
    Work,
    emit_block,
    emit_block_rows,
    narrowed,
)
from polydraft.models.checkpoint import Checkpoint, Weights, load_weights
from polydraft.models.config_file import ConfigFile
from polydraft.models.decoder import emit_linear
from polydraft.models.description import ModelDescription, Mtp
from polydraft.models.families import FamilyRegistry
from polydraft.models.family import Family, MtpLayout
from polydraft.models.feed_forward import GatedMlp, Routing, SparseMoe
from polydraft.models.rotary import Rope
from polydraft.models.tensor_table import BLOCK_NAMES, Part, TensorTable
from polydraft.models.tokenizer import IncrementalDecoder, Tokenizer

__all__ = [
    "BLOCK_NAMES",
    "At",
    "Attention",
    "Block",
    "Checkpoint",
    "ConfigFile",
    "Family",
    "FamilyRegistry",
    "FeedForward",
    "GatedMlp",
    "IncrementalDecoder",
    "Mixer",
    "ModelDescription",
    "Mtp",
    "MtpLayout",
    "Norm",
    "Part",
    "Rope",
    "Routing",
    "SparseMoe",
    "Stretch",
    "Tensor",
    "TensorTable",
    "Tokenizer",
    "Weights",
    "Work",
    "emit_block",
    "emit_block_rows",
    "emit_linear",
    "load_weights",
    "narrowed",
]
