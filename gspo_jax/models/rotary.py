"""Rotary position embedding and the published ways to stretch it."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int


class Rope(NamedTuple):
    """Inverse wavelengths of the rotated pairs, and the factor on cosine and sine."""

    frequencies: np.ndarray | Array
    scale: float | Array = 1.0


NEEDED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}

OPTIONAL = (
    "type", "rope_type", "rope_theta", "partial_rotary_factor", "attention_factor", "beta_fast", "beta_slow", "mscale",
    "mscale_all_dim", "truncate",
    # Positions of text are the same in all three sections; the last only tells how the type came about.
    "mrope_section", "mrope_interleaved", "finetuned",
)  # fmt: skip


def rope(head_dim: int, parameters: Mapping[str, Any]) -> Rope:
    """The rotary embedding that `rope_parameters` of a config.json describe.

    Raises ValueError for a type we do not compute, and for one that lacks a number it needs.

    Types: default; linear (all positions divided); llama3 (long wavelengths divided, blended by their number of turns);
    yarn (arXiv 2309.00071: the same with a ramp over dimensions, and a temperature on the logits).
    """
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in NEEDED:
        raise ValueError(f"rope_type={kind!r} is not supported; supported: {', '.join(NEEDED)}")
    for name, value in parameters.items():
        if name not in OPTIONAL and not any(name in needed for needed in NEEDED.values()):
            raise ValueError(f"{name}={value!r} in rope_parameters is not supported")
    missing = [name for name in ("rope_theta", *NEEDED[kind]) if parameters.get(name) is None]
    if missing:
        raise ValueError(f"rope_type={kind!r} needs {', '.join(missing)} in rope_parameters")
    size = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    if size < 2 or size % 2:
        raise ValueError(f"head_dim={head_dim}: {size} of it are rotated, which must be an even number")
    base = float(parameters["rope_theta"])
    inverse = (1.0 / np.float32(base) ** (np.arange(0, size, 2, dtype=np.float32) / np.float32(size))).astype(np.float32)
    if kind == "default":
        return Rope(inverse)
    factor = float(parameters["factor"])
    if kind == "linear":
        return Rope((inverse / factor).astype(np.float32))
    if kind == "llama3":
        low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
        turns = parameters["original_max_position_embeddings"] * inverse / (2 * math.pi)
        keep = np.clip((turns - low) / (high - low), 0, 1)
        return Rope((keep * inverse + (1 - keep) * inverse / factor).astype(np.float32))
    return _yarn(parameters, inverse, base, size, factor)


def _yarn(parameters: Mapping[str, Any], inverse: np.ndarray, base: float, size: int, factor: float) -> Rope:
    def dimension(turns: float) -> float:
        """The (fractional) pair that makes so many turns over the original context."""
        return size * math.log(parameters["original_max_position_embeddings"] / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(float(parameters.get("beta_fast") or 32)), dimension(float(parameters.get("beta_slow") or 1))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = np.clip((np.arange(size // 2, dtype=np.float32) - low) / max(high - low, 0.001), 0, 1)
    scale = parameters.get("attention_factor")
    if scale is None:
        m, all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
        scale = _temperature(factor, m) / _temperature(factor, all_dim) if m and all_dim else _temperature(factor, 1.0)
    return Rope((inverse / factor * ramp + inverse * (1 - ramp)).astype(np.float32), float(scale))


def _temperature(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def rotate(
    x: Float[Array, "b t n h"], positions: Int[Array, "b t"] | Int[np.ndarray, "b t"], rope: Rope
) -> Float[Array, "b t n h"]:
    """`x` with its first 2·len(frequencies) features rotated, half against half, by position times frequency (float32)."""
    angles = positions[..., None, None].astype(jnp.float32) * rope.frequencies
    cos, sin = jnp.cos(angles) * rope.scale, jnp.sin(angles) * rope.scale
    size = 2 * len(rope.frequencies)
    a, b = jnp.split(x[..., :size].astype(jnp.float32), 2, -1)
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)
    return turned if size == x.shape[-1] else jnp.concatenate([turned, x[..., size:]], -1)
