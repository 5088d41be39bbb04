"""Rotary frequencies of a decoder: every scaling in one place, those that depend on a document's length per document.

RoPE is Su et al. 2021 (arXiv:2104.09864), section 3.2.2. ``linear`` is position interpolation, Chen et al. 2023
(arXiv:2306.15595); ``llama3`` is the wavelength-dependent scaling published with Llama 3.1; ``yarn`` is Peng et al.
2023 (arXiv:2309.00071), section 3; ``longrope`` is Ding et al. 2024 (arXiv:2402.13753); ``dynamic`` is the NTK-aware
base that grows with the length of a sequence (Peng et al., appendix). The last two take their frequencies from the
length of each document, as if it stood alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_backend.model.config_fields import Fields
from packing_core.errors import UnsupportedModelError

_PARTIAL = ("phi3", "qwen3_next", "qwen3_5_text")  # families that read partial_rotary_factor
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope", "dynamic")


@dataclass(frozen=True)
class RopeParameters:
    """Rotary parameters of a kind of layer.

    Attributes:
        channels: of each head that turn, the first ones.
        options: the entries of ``rope_parameters`` in ``config.json``, sorted.
        longest: ``max_position_embeddings``.
    """

    channels: int
    options: tuple[tuple[str, Any], ...]
    longest: int

    def frequencies(self, lengths: jax.Array) -> jax.Array:
        """Radians per position, float32: [R/2], or [B, S, R/2] if they depend on the documents' lengths.

        Args:
            lengths: int32 [B, S], the length of each token's document, anything at padding.
        """
        rope: dict[str, Any] = dict(self.options)
        exponent = np.arange(0, self.channels, 2, dtype=np.float32) / np.float32(self.channels)
        base, kind = np.float32(rope["rope_theta"]), rope["rope_type"]
        if kind == "longrope":
            short, long = (
                (1 / (np.asarray(rope[f"{name}_factor"], np.float32) * base**exponent)) for name in ("short", "long")
            )
            return jnp.where(
                (lengths > rope["original_max_position_embeddings"])[..., None], long[None, None], short[None, None]
            )
        if kind == "dynamic":
            return self._dynamic(base, exponent, lengths)
        plain = (1 / base**exponent).astype(np.float32)
        if kind == "linear":
            plain = plain / np.float32(rope["factor"])
        elif kind == "llama3":
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            turns = rope["original_max_position_embeddings"] * plain / (2 * np.pi)
            kept = np.clip((turns - low) / (high - low), 0.0, 1.0)  # 0: long wavelengths, fully scaled; 1: short ones
            plain = plain * (kept + (1 - kept) / rope["factor"])
        elif kind == "yarn":
            kept = self._yarn_kept(rope)
            plain = plain * kept + plain / np.float32(self._factor(rope)) * (1 - kept)
        return jnp.asarray(plain, jnp.float32)

    @property
    def scale(self) -> float:
        """Factor on the turned channels of queries and of keys, which YaRN and LongRoPE calibrate."""
        rope: dict[str, Any] = dict(self.options)
        if rope["rope_type"] not in ("yarn", "longrope"):
            return 1.0
        if rope.get("attention_factor") is not None:
            return float(rope["attention_factor"])
        factor = self._factor(rope)
        if factor <= 1:
            return 1.0
        if rope["rope_type"] == "longrope":
            return math.sqrt(1 + math.log(factor) / math.log(rope["original_max_position_embeddings"]))
        above, below = rope.get("mscale"), rope.get("mscale_all_dim")
        if above and below:
            return (0.1 * above * math.log(factor) + 1) / (0.1 * below * math.log(factor) + 1)
        return 0.1 * math.log(factor) + 1

    def _factor(self, rope: Mapping[str, Any]) -> float:
        return float(rope.get("factor") or self.longest / rope["original_max_position_embeddings"])

    def _yarn_kept(self, rope: Mapping[str, Any]) -> np.ndarray:
        """Returns the share of each frequency that YaRN leaves unscaled, [R/2]: a ramp between two numbers of turns."""
        trained, base, size = rope["original_max_position_embeddings"], rope["rope_theta"], self.channels

        def channel(turns: float) -> float:
            return size * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base))

        first, last = channel(rope.get("beta_fast") or 32), channel(rope.get("beta_slow") or 1)
        if rope.get("truncate", True):
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, size - 1)
        ramp = (np.arange(size // 2, dtype=np.float32) - first) / ((last - first) or 1e-3)
        return 1 - np.clip(ramp, 0, 1).astype(np.float32)

    def _dynamic(self, base: np.float32, exponent: np.ndarray, lengths: jax.Array) -> jax.Array:
        factor = dict(self.options)["factor"]
        length = jnp.maximum(lengths, self.longest).astype(jnp.float32)
        stretch = (factor * length / self.longest) - (factor - 1)
        grown = base * stretch ** (self.channels / (self.channels - 2))
        return 1 / grown[..., None] ** exponent[None, None]


def read_rope(config: Fields, head_dim: int) -> tuple[RopeParameters, RopeParameters | None]:
    """The rotary parameters of a ``config.json``, and those of layers with a window where they have their own.

    transformers 5 keeps ``rope_parameters``, by kind of layer or for all; 4.x kept ``rope_theta`` beside
    ``rope_scaling``, and Gemma 3 a ``rope_local_base_freq``.

    Raises:
        UnsupportedModelError: a scaling that is none of `ROPE_TYPES`.
    """
    given = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if not given and (usual := config.default("rope_parameters")):
        given = config["rope_parameters"] = dict(usual)
    family = config["model_type"]
    if "full_attention" in given or "sliding_attention" in given:
        whole, local = (given.get(f"{kind}_attention") or {} for kind in ("full", "sliding"))
    elif family in ("gemma3_text", "olmo3"):  # scaled in layers without a window alone
        whole, local = given, {}
    else:
        return _rope(config, given, head_dim), None
    if "rope_theta" not in local:
        base = config["rope_local_base_freq"] if family == "gemma3_text" else config.default("rope_theta")
        local = local | {"rope_theta": base}
    return _rope(config, whole, head_dim), _rope(config, local, head_dim)


def _rope(config: Fields, given: Mapping[str, Any], head_dim: int) -> RopeParameters:
    options = dict(given)
    options.setdefault("rope_type", options.pop("type", "default"))
    if "rope_theta" not in options:
        options["rope_theta"] = config["rope_theta"]
    share = options.pop("partial_rotary_factor", None)
    if config["model_type"] in _PARTIAL:
        share = options["partial_rotary_factor"] = config["partial_rotary_factor"] if share is None else share
    else:
        share = 1.0
    longest = config["max_position_embeddings"]
    kind = options["rope_type"]
    if kind not in ROPE_TYPES:
        raise UnsupportedModelError(f"rope_type is {kind!r} and the flax decoder computes {', '.join(ROPE_TYPES)}")
    if kind in ("llama3", "yarn", "longrope"):  # what stands beside them comes first, as in transformers
        trained = config["original_max_position_embeddings"] or options.get("original_max_position_embeddings")
        options["original_max_position_embeddings"] = trained or longest
    frozen = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    return RopeParameters(int(head_dim * share), tuple(sorted(frozen.items())), longest)
