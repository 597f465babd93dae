"""What the architectures share: the one place that multiplies weights, RMS norm, rotary embedding, attention.

Letters: b batch, t query time, s key time, d model, n query heads, k key-value heads, h head, f mlp, v vocabulary, l layers.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jaxtyping import Bool, Float, Int


class Cache(NamedTuple):
    """Keys and values of everything a row has seen, by layer."""

    keys: Float[Array, "l b s k h"]
    values: Float[Array, "l b s k h"]


class Linear(nn.Module):
    """`x @ kernel` with tokens flattened: XLA's fast kernels, forward and backward, want 2-D operands."""

    shape: tuple[int, ...]
    """Kernel shape: input features first, then output features (which may be several axes)."""
    inputs: int = 1
    """How many leading axes of `shape` are contracted."""
    use_bias: bool = False
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        kernel = self.param("kernel", nn.initializers.lecun_normal(), self.shape, jnp.float32)
        features = math.prod(self.shape[: self.inputs])
        flat = x.reshape(-1, features) @ kernel.astype(self.dtype).reshape(features, -1)
        out = flat.reshape(*x.shape[: x.ndim - self.inputs], *self.shape[self.inputs :])
        if self.use_bias:
            out += self.param("bias", nn.initializers.zeros, self.shape[self.inputs :], jnp.float32).astype(self.dtype)
        return out


class RMSNorm(nn.Module):
    """`x / rms(x) * scale`, the mean square taken in float32."""

    eps: float
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.float32)
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + self.eps)
        return (normed * scale).astype(self.dtype)


def rope_frequencies(head_dim: int, rope: dict[str, Any]) -> Float[Array, " half"]:
    """Inverse wavelengths of the rotary embedding: `default`, or `llama3`'s blend that stretches the long ones."""
    inverse = 1.0 / float(rope["rope_theta"]) ** (jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return inverse
    if kind != "llama3":
        raise ValueError(f"rope_type={kind!r} is not supported; supported: default, llama3")
    factor, low, high = (float(rope[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = rope["original_max_position_embeddings"] * inverse / (2 * math.pi)
    keep = jnp.clip((turns - low) / (high - low), 0, 1)
    return keep * inverse + (1 - keep) * inverse / factor


def rotate(
    x: Float[Array, "b t n h"], positions: Int[Array, "b t"], frequencies: Float[Array, " half"]
) -> Float[Array, "b t n h"]:
    """`x` with its two halves rotated by position times frequency (float32 angles)."""
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def attend(
    q: Float[Array, "b t n h"], k: Float[Array, "b s k h"], v: Float[Array, "b s k h"], mask: Bool[Array, "b t s"]
) -> Float[Array, "b t n h"]:
    """Grouped-query attention where `mask` allows; softmax in float32. A query that sees nothing returns finite garbage."""
    b, t, n, h = q.shape
    groups = q.reshape(b, t, k.shape[2], -1, h)
    scores = jnp.einsum("btkgh,bskh->bkgts", groups, k, preferred_element_type=jnp.float32) / math.sqrt(h)
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, -1e30), -1).astype(v.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(b, t, n, h)
