"""What the architectures share: the one place that multiplies weights, RMS norm, who sees whom, attention.

Letters: b batch, t query time, s key time, d model, n query heads, k key-value heads, h head, f mlp, v vocabulary, l layers,
e experts, r LoRA rank.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jaxtyping import Bool, Float, Int
from numpy import ndarray

from gspo_jax import parallel
from gspo_jax.models import cuda
from gspo_jax.models.quantize import is_quantized, matrix

Ints = Int[Array, "b t"] | Int[ndarray, "b t"]


class Cache(NamedTuple):
    """What a row remembers, by layer of its kind: keys and values of everything seen, or the state of linear attention."""

    keys: Float[Array, "l b s k h"]
    values: Float[Array, "l b s k h"]
    conv: Float[Array, "m b w c"] | None = None
    """The last inputs of the short convolution, oldest first."""
    state: Float[Array, "m b n i j"] | None = None
    """Recurrent state of each head, float32."""


class Spots(NamedTuple):
    """Where tokens are. Without a cache, what `Batch` calls them; with one, a row is one sequence, keys at their positions."""

    positions: Ints
    segments: Ints
    """0 is padding: nothing sees it and nothing is remembered of it."""
    prefixes: Ints | None = None
    """Segment that is also attended to; 0 or None is none."""


class Context(NamedTuple):
    """What every layer of one forward pass looks at."""

    spots: Spots
    """Of whole rows."""
    here: Spots
    """Of the tokens on this device: a part of each row where the mesh splits rows."""
    mask: Bool[Array, "b t s"]
    window: Bool[Array, "b t s"] | None
    """`mask` cut to the sliding window, where some layers have one."""


class Layer(NamedTuple):
    """What one layer of the stack is told."""

    number: Int[Array, ""]
    slot: Int[Array, ""]
    """Its place in the part of the cache that its kind uses."""
    experts: Int[Array, "b t e"] | None = None
    """Expert choices to replay, -1 where there are none; None: the router decides."""


def context_of(spots: Spots, keys: int | None, window: int | None) -> Context:
    """Masks of a forward pass over rows (`keys` None) or over a cache of `keys` positions."""
    if keys is None:
        mask = row_mask(spots)
        at = spots.positions[:, None, :]
    else:
        at = jnp.arange(keys)[None, None, :]
        mask = at <= spots.positions[:, :, None]
    near = None if window is None else mask & (spots.positions[:, :, None] - at < window)
    here = jax.tree.map(lambda x: parallel.sliced(x, 1), spots)
    return Context(spots, here, mask, near)


def row_mask(spots: Spots) -> Bool[Array, "b t t"]:
    """Who sees whom in packed rows: earlier tokens of the own segment and of its prefix segment."""
    query, key = spots.segments[:, :, None], spots.segments[:, None, :]
    index = jnp.arange(spots.segments.shape[1])
    related = query == key
    if spots.prefixes is not None:
        related |= (spots.prefixes[:, :, None] == key) & (key > 0)
    return (index[:, None] >= index[None, :]) & related & (query > 0)


class Linear(nn.Module):
    """`x @ kernel (+ x @ lora_a @ lora_b)` with tokens flattened: XLA's fast kernels want 2-D operands.

    A kernel may be a quantized array; an adapter is present exactly when its two leaves are among the parameters. On a mesh
    the leaves are gathered where they are used, again in the backward pass.
    """

    shape: tuple[int, ...]
    """Kernel shape: input features first, then output features (which may be several axes)."""
    inputs: int = 1
    """How many leading axes of `shape` are contracted."""
    use_bias: bool = False
    dtype: Any = jnp.float32
    split: str = "none"
    """out | in: the devices of the mesh axis `tensor` divide the first output axis, or the first input axis, among them; in
    the second case their results are summed. Inputs are to be `entering` for the first and split for the second."""

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        shape = self.local()
        into, out_of = math.prod(shape[: self.inputs]), shape[self.inputs :]
        flat = x.reshape(-1, into)
        kernel = parameter(self, "kernel", nn.initializers.lecun_normal(), self.shape)
        flat_shape = (into, math.prod(out_of)) if is_quantized(kernel) else shape
        out = product(flat, kernel, self.dtype, flat_shape)
        if self.has_variable("params", "lora_a"):
            a, b = (self.get_variable("params", name).astype(self.dtype) for name in ("lora_a", "lora_b"))
            a = parallel.whole(a, (*shape[: self.inputs], a.shape[-1]))
            b = parallel.whole(b, (b.shape[0], *out_of))
            out += (flat @ a.reshape(into, -1)) @ b.reshape(b.shape[0], -1)
        out = out.reshape(*x.shape[: x.ndim - self.inputs], *out_of)
        if self.split == "in":
            out = parallel.summed(out, "tensor")
        if self.use_bias:
            out += parameter(self, "bias", nn.initializers.zeros, self.shape[self.inputs :]).astype(self.dtype)
        return out

    def local(self) -> tuple[int, ...]:
        """Shape of this device's part of the kernel."""
        axis = {"none": None, "in": 0, "out": self.inputs}[self.split]
        return tuple(n // parallel.size("tensor") if i == axis else n for i, n in enumerate(self.shape))


@partial(jax.checkpoint, static_argnums=(2, 3), prevent_cse=False)
def product(x: Float[Array, "p d"], kernel: Any, dtype: Any, shape: tuple[int, ...]) -> Float[Array, "p f"]:
    """`x @ kernel`, the kernel being of `shape` once gathered. The backward pass gathers, dequantizes and reshapes it again:
    kept, they would cost more than they saved."""
    return x @ computed(kernel, dtype, shape).reshape(x.shape[1], -1)


def computed(kernel: Any, dtype: Any, shape: tuple[int, ...]) -> Array:
    """A kernel at rest as it is computed with: whole, of `shape`, and of `dtype`. What travels is the smaller type."""
    typed = kernel if is_quantized(kernel) else kernel.astype(dtype)
    return matrix(parallel.whole(typed, shape), dtype)


def parameter(module: nn.Module, name: str, initial: Any, shape: tuple[int, ...]) -> Any:
    """A parameter as it was given, quantized arrays included; a float32 one of `shape` when initializing."""
    if module.has_variable("params", name):
        return module.get_variable("params", name)
    return module.param(name, initial, shape, jnp.float32)


class RMSNorm(nn.Module):
    """`x / rms(x) * (scale + offset)`, the mean square taken in float32."""

    eps: float
    dtype: Any = jnp.float32
    offset: float = 0.0

    @nn.compact
    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        scale = self.param("scale", nn.initializers.constant(1 - self.offset), (x.shape[-1],), jnp.float32)
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + self.eps)
        return (normed * (scale + self.offset if self.offset else scale)).astype(self.dtype)


def attend(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b s k h"],
    v: Float[Array, "b s k h"],
    mask: Bool[Array, "b t s"],
    scale: float,
) -> Float[Array, "b t n h"]:
    """Grouped-query attention where `mask` allows; softmax in float32. A query that sees nothing returns finite garbage."""
    b, t, n, h = q.shape
    groups = q.reshape(b, t, k.shape[2], -1, h)
    scores = jnp.einsum("btkgh,bskh->bkgts", groups, k, preferred_element_type=jnp.float32) * scale
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, -1e30), -1).astype(v.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(b, t, n, h)


def attend_rows(
    q: Float[Array, "b t n h"],
    k: Float[Array, "b t k h"],
    v: Float[Array, "b t k h"],
    spots: Spots,
    mask: Bool[Array, "b t t"],
    scale: float,
    window: Int[Array, ""] | None,
) -> Float[Array, "b t n h"]:
    """`attend` within packed rows. On CUDA a flash kernel, for which `spots` and `window` are the mask: no `[t t]` exists."""
    if not cuda.installed():
        return attend(q, k, v, mask, scale)
    from gspo_jax.models.flash import flash  # Pallas's part for GPUs, which nothing else needs

    def dense(q: Array, k: Array, v: Array, spots: Spots, mask: Array, window: Array | None) -> Array:
        return attend(q, k, v, mask, scale)

    def sparse(q: Array, k: Array, v: Array, spots: Spots, mask: Array, window: Array | None) -> Array:
        return flash(q, k, v, spots, scale, window)

    return jax.lax.platform_dependent(q, k, v, spots, mask, window, cuda=sparse, default=dense)
