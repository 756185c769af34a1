"""Rotary position embeddings as data: how fast each pair of a head turns, worked out once in float64 from config.json.

Every kind of scaling that the built-in families are published with ends up as a table of frequencies and a factor, so kernels
know of none. `docs/checkpoints.md` lists the kinds, and how long the texts are that a model then takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

import numpy as np

from polydraft.contracts.kernels.rope_kv_write import plain_frequencies
from polydraft.device import Array
from polydraft.errors import CapabilityError, CheckpointError
from polydraft.models.config_file import ConfigFile

__all__ = ["Rope", "Rotation"]

Result = TypeVar("Result")

MOST_DIMS: Final = 1 << 14
"""Elements of a head at most, many times those of any model: each pair that turns is gone through by itself."""


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: pair i of a head turns by the angle position * frequencies[i]."""

    frequencies: tuple[float, ...]
    """Radians from one position to the next, one for each pair. Elements of a head behind these pairs pass unchanged."""
    style: Literal["half", "interleaved"] = "half"
    """Which elements form pair i of n: "half" (i, i + n), "interleaved" (2i, 2i + 1)."""
    attention_factor: float = 1.0
    """Factor of cosines and sines, so of every element that turns."""

    @property
    def dims(self) -> int:
        """Leading elements of each head that turn."""
        return 2 * len(self.frequencies)


@dataclass(frozen=True)
class Rotation:
    """What a configuration says of the rotation, in either spelling: `rope_scaling` beside `rope_theta`, or `rope_parameters`,
    which is how transformers 5 spells both."""

    keys: ConfigFile
    """The section, empty where there is none."""
    section: str
    kind: str
    theta: float
    dims: int
    """Elements of a head that turn."""
    config: ConfigFile
    """The whole configuration."""

    @classmethod
    def read(cls, config: ConfigFile, head_dim: int, *, theta: float, share: float | None) -> Rotation:
        """Read the section. `theta` and `share` (of a head that turns) are those of a configuration that does not say; where
        `share` is None, heads turn whole, whatever it says.

        Errors: `CheckpointError` for a malformed or missing key, `CapabilityError` for a kind or key that is not known.
        """
        if head_dim > MOST_DIMS:
            raise CheckpointError(
                f"{config.path}: heads have {head_dim} elements, wanted at most {MOST_DIMS}; use the config.json of these weights"
            )
        section = _section(config)
        keys = config.section(section)
        kind = keys.text("rope_type", keys.text("type", "default"))
        known = {*KNOWN, *KINDS[kind].keys} if kind in KINDS else {*KNOWN}
        if kind not in KINDS or not known.issuperset(keys.values):
            wrong = f"unknown keys {sorted({*keys.values} - known)}" if kind in KINDS else "a type that is not built"
            raise CapabilityError(
                f"{config.path}: {section} is {dict(keys.values)}, got {wrong}, wanted one rotation for all layers, of a type "
                f"among {', '.join(KINDS)}; use a model with one of those"
            )
        stated = keys.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0 if share is None else share))
        if share is None and kind != "default" and stated != 1:
            raise CheckpointError(
                f"{config.path}: partial_rotary_factor is {stated} beside a rotation of type {kind}, wanted 1, since heads of "
                "these models turn whole; use the config.json of these weights"
            )
        share = 1.0 if share is None else stated
        dims = int(head_dim * min(share, 2.0))
        if not 0 < dims <= head_dim or dims % 2:
            raise CheckpointError(
                f"{config.path}: partial_rotary_factor is {share} of head_dim {head_dim}, wanted an even number of elements "
                "that rotate, at most all; use the config.json of these weights"
            )
        theta = keys.number("rope_theta", config.number("rope_theta", theta))
        outside = config.values.get("original_max_position_embeddings")
        if outside is not None:  # in front of the section's own, as transformers has it
            keys = ConfigFile(keys.path, {**keys.values, "original_max_position_embeddings": outside})
        return cls(keys, section, kind, theta, dims, config)

    def rope(self, style: Literal["half", "interleaved"]) -> Rope:
        """The table of frequencies, and the factor of the angles' cosines and sines."""
        frequencies, factor = self._worked_out(KINDS[self.kind].turn)
        return Rope(tuple(frequencies.tolist()), style, factor)

    @property
    def max_len(self) -> int:
        """Tokens of the longest text that the scaling is meant for."""
        return self._worked_out(KINDS[self.kind].max_len)

    def _worked_out(self, rule: Callable[[Rotation], Result]) -> Result:
        """What a rule makes of it. Raises `CheckpointError` where numbers lead nowhere: a logarithm of 0, sizes without end."""
        try:
            return rule(self)
        except ArithmeticError as error:
            raise CheckpointError(
                f"{self.config.path}: {self.section} is {dict(self.keys.values)} with a rope_theta of {self.theta}, got {error}, "
                "wanted numbers that make frequencies; use the config.json of these weights"
            ) from error

    @property
    def trained(self) -> int:
        """Tokens of the texts that the weights are for; one without scaling need not say, as draft models do."""
        return self.config.integer("max_position_embeddings")

    @property
    def original(self) -> int:
        """Tokens of the texts that the model saw before it was extended."""
        return self.keys.integer("original_max_position_embeddings", self.trained)

    @property
    def factor(self) -> float:
        """By how much texts become longer."""
        return self.keys.number("factor")

    @property
    def plain(self) -> Array:
        """Frequencies without scaling."""
        return np.array(plain_frequencies(self.dims, self.theta))


def _section(config: ConfigFile) -> str:
    """The section that says how positions rotate."""
    older, newer = "rope_scaling", "rope_parameters"
    both = [config.values.get(key) for key in (older, newer)]
    if all(both) and both[0] != both[1]:
        raise CheckpointError(
            f"{config.path}: {older} is {both[0]}, {newer} is {both[1]}, wanted one of the two; move what you added into "
            f"{newer}, with its rope_theta"
        )
    return newer if both[1] else older


def _default(rotation: Rotation) -> tuple[Array, float]:
    return rotation.plain, 1.0


def _linear(rotation: Rotation) -> tuple[Array, float]:
    """Positions lie closer. Source: Chen et al. 2023, position interpolation."""
    return rotation.plain / rotation.factor, 1.0


def _dynamic(rotation: Rotation) -> tuple[Array, float]:
    """A base that grows with the text ("NTK-aware"), here as it is for the longest text. A base for each length would need keys
    rotated again as a text grows, and its tokens would depend on how many of them were drafted."""
    if rotation.dims < 4:
        raise CheckpointError(
            f"{rotation.keys.path}: {rotation.section} is dynamic and {rotation.dims} elements of a head rotate, wanted at "
            "least 4; use the config.json of these weights"
        )
    longer = rotation.factor * rotation.factor - (rotation.factor - 1.0)  # of factor * trained tokens
    theta = rotation.theta * longer ** (rotation.dims / (rotation.dims - 2))
    return np.array(plain_frequencies(rotation.dims, theta)), 1.0


def _yarn(rotation: Rotation) -> tuple[Array, float]:
    """Slow pairs are interpolated, fast ones stay, those between are mixed. Source: Peng et al. 2023, YaRN."""
    keys, dims, factor = rotation.keys, rotation.dims, _yarn_factor(rotation)

    def pair_of(turns: float) -> float:
        """The pair, as a real number, that turns this often within the original length."""
        return dims * math.log(rotation.original / (turns * 2 * math.pi)) / (2 * math.log(rotation.theta))

    first, last = pair_of(_or(keys, "beta_fast", 32.0)), pair_of(_or(keys, "beta_slow", 1.0))
    if keys.flag("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dims - 1)
    interpolated = np.clip((np.arange(dims // 2) - first) / ((last - first) or 0.001), 0.0, 1.0)
    frequencies = rotation.plain / factor * interpolated + rotation.plain * (1.0 - interpolated)

    def sharper(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    over, under = _or(keys, "mscale", 0.0), _or(keys, "mscale_all_dim", 0.0)
    usual = sharper(over) / sharper(under) if over and under else sharper(1.0)
    return frequencies, keys.number("attention_factor", usual)


def _yarn_factor(rotation: Rotation) -> float:
    return rotation.keys.number("factor", rotation.trained / rotation.original)


def _llama3(rotation: Rotation) -> tuple[Array, float]:
    """Pairs that turn less than `low_freq_factor` times within the original length are interpolated, those that turn more than
    `high_freq_factor` times stay, those between are mixed. Source: the code published with Llama 3.1."""
    low, high = rotation.keys.number("low_freq_factor"), rotation.keys.number("high_freq_factor")
    if high <= low:
        raise CheckpointError(
            f"{rotation.keys.path}: {rotation.section} has low_freq_factor {low} and high_freq_factor {high}, wanted the second "
            "larger; use the config.json of these weights"
        )
    turns = rotation.original * rotation.plain / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return rotation.plain / rotation.factor * (1.0 - kept) + rotation.plain * kept, 1.0


def _or(keys: ConfigFile, key: str, default: float) -> float:
    """The number at `key`; the default where it is absent or 0, which counts as absent."""
    return keys.number(key, default) if keys.values.get(key) else default


def _as_configured(rotation: Rotation) -> int:
    return rotation.trained


def _times_trained(rotation: Rotation) -> int:
    return int(rotation.trained * rotation.factor)


def _times_original(rotation: Rotation) -> int:
    return max(int(rotation.original * _yarn_factor(rotation)), rotation.trained)


@dataclass(frozen=True)
class _Kind:
    """One kind of scaling."""

    turn: Callable[[Rotation], tuple[Array, float]]
    max_len: Callable[[Rotation], int]
    keys: tuple[str, ...] = ()
    """What it reads of its section, besides what all kinds do."""


KINDS: Final[Mapping[str, _Kind]] = {
    "default": _Kind(_default, _as_configured),
    "linear": _Kind(_linear, _times_trained, ("factor",)),
    "dynamic": _Kind(_dynamic, _times_trained, ("factor",)),
    "yarn": _Kind(
        _yarn,
        _times_original,
        ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "llama3": _Kind(_llama3, _as_configured, ("factor", "low_freq_factor", "high_freq_factor")),
}
"""By their names in config.json."""
KNOWN: Final = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings", "finetuned")
"""Keys that any kind may have; "finetuned" says how weights came about, and changes nothing."""
