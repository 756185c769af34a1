"""The model side of core: descriptions, families, checkpoints and tokenizers.

The engine goes checkpoint -> `FamilyRegistry.describe` -> `load_weights`, and `Tokenizer.from_dir` beside it.
Nothing here computes with weights or knows a backend; tokenizer libraries are imported only when a tokenizer is used.
"""

from polydraft.models.attention import Attention, Rope
from polydraft.models.block import Block, FeedForward, Mixer, Stretch, Tensor
from polydraft.models.checkpoint import Checkpoint, Weights, load_weights
from polydraft.models.description import ModelDescription, Mtp
from polydraft.models.families import Family, FamilyRegistry, MtpLayout
from polydraft.models.feed_forward import GatedMlp
from polydraft.models.tensor_table import Part, TensorTable
from polydraft.models.tokenizer import IncrementalDecoder, Tokenizer

__all__ = [
    "Attention",
    "Block",
    "Checkpoint",
    "Family",
    "FamilyRegistry",
    "FeedForward",
    "GatedMlp",
    "IncrementalDecoder",
    "Mixer",
    "ModelDescription",
    "Mtp",
    "MtpLayout",
    "Part",
    "Rope",
    "Stretch",
    "Tensor",
    "TensorTable",
    "Tokenizer",
    "Weights",
    "load_weights",
]
