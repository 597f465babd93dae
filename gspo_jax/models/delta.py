"""The gated delta rule (arXiv 2412.06464): linear attention whose memory is one matrix per head, and its short convolution.

Rows are packed: a token of position 0 starts afresh, padding leaves no trace. Letters beyond the usual: n key heads, m value
heads (a multiple: value head `m` uses key head `m // (m / n)`), g value heads of a key head, i features of a key, j features
of a value, c channels of the convolution, w its remembered inputs, z chunks, x and y tokens of a chunk.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import linen as nn
from jax import Array
from jaxtyping import Bool, Float

from gspo_jax import parallel
from gspo_jax.models.layers import Cache, Context, Ints, Layer, Linear, RMSNorm, Spots

CHUNK = 64
"""Tokens whose updates are solved for together; the cost of a row is linear in its length beyond."""
FORGET = 1e30
"""Log-decay of a token that starts afresh: exp(-FORGET) is 0, and 64 of them do not overflow."""

# Sampler and trainer compute one function in two orders; reduced-precision products would tell them apart.
einsum = partial(jnp.einsum, precision="highest")


class Gates(NamedTuple):
    """What each token does to the memory: scale it by `exp(log_decay)`, empty it first if `starts`, write with rate `beta`."""

    log_decay: Float[Array, "b t m"]
    """At most 0; 0 on padding."""
    beta: Float[Array, "b t m"]
    """0 to 1; 0 on padding."""
    starts: Bool[Array, "b t"]


def gated_delta_step(
    q: Float[Array, "b n i"],
    k: Float[Array, "b n i"],
    v: Float[Array, "b m j"],
    gates: Gates,
    state: Float[Array, "b m i j"],
) -> tuple[Float[Array, "b m j"], Float[Array, "b m i j"]]:
    """One token (`gates` has t = 1): `S' = e^a S + beta k (v - (e^a S)^T k)^T`, and what the query reads, `S'^T q`."""
    log_decay = gates.log_decay[:, 0] - FORGET * gates.starts.astype(q.dtype)
    repeat = v.shape[1] // k.shape[1]
    q, k = jnp.repeat(q, repeat, 1), jnp.repeat(k, repeat, 1)
    state = state * jnp.exp(log_decay)[..., None, None]
    change = gates.beta[:, 0, :, None] * (v - jnp.sum(state * k[..., None], -2))
    state = state + k[..., None] * change[..., None, :]
    return jnp.sum(state * q[..., None], -2), state


def gated_delta_rule(
    q: Float[Array, "b t n i"],
    k: Float[Array, "b t n i"],
    v: Float[Array, "b t m j"],
    gates: Gates,
    state: Float[Array, "b m i j"],
    chunk: int = CHUNK,
) -> tuple[Float[Array, "b t m j"], Float[Array, "b m i j"]]:
    """What `gated_delta_step` gives token by token from `state` on, and the state after the last, `chunk` tokens at a time.

    The updates of a chunk are `u = beta (v - S^T k)`, each with the state left by those before it: a unit triangular system,
    solved for all chunks at once (WY form, arXiv 2406.06484); only the states between chunks are sequential.
    """
    length, heads = q.shape[1], k.shape[2]
    size = min(chunk, length)

    def chunked(x: Array, pattern: str, **sizes: int) -> Array:
        padded = jnp.pad(x, [(0, 0), (0, -length % size)] + [(0, 0)] * (x.ndim - 2))
        return rearrange(padded, pattern, x=size, **sizes)

    q, k = (chunked(each, "b (z x) n i -> z b n x i") for each in (q, k))
    v = chunked(v, "b (z x) (n g) j -> z b n g x j", n=heads)
    log_decay, beta = (chunked(each, "b (z x) (n g) -> z b n g x", n=heads) for each in (gates.log_decay, gates.beta))
    cuts = jnp.cumsum(chunked(gates.starts.astype(q.dtype), "b (z x) -> z b 1 1 x"), -1)
    total = jnp.cumsum(log_decay, -1)
    carried, decay = jnp.exp(total - FORGET * cuts), _decays(total, cuts)
    mixing = beta[..., None] * einsum("zbnxi,zbnyi->zbnxy", k, k)[:, :, :, None] * decay
    inverse = unit_lower_inverse(jnp.tril(mixing, -1))
    writes = einsum("zbngxy,zbngyj->zbngxj", inverse, beta[..., None] * v)
    reads = einsum("zbngxy,zbngyi->zbngxi", inverse, (beta * carried)[..., None] * k[:, :, :, None])
    scores = einsum("zbnxi,zbnyi->zbnxy", q, k)[:, :, :, None] * decay
    chunks = Chunk(q, k, writes, reads, scores, carried, decay[..., -1, :])
    state, out = jax.lax.scan(_advance, rearrange(state, "b (n g) i j -> b n g i j", n=heads), chunks)
    out = rearrange(out, "z b n g x j -> b (z x) (n g) j")[:, :length]
    return out, rearrange(state, "b n g i j -> b (n g) i j")


class Chunk(NamedTuple):
    """What a chunk does to the state, and its tokens to each other."""

    q: Float[Array, "*z b n x i"]
    k: Float[Array, "*z b n x i"]
    writes: Float[Array, "*z b n g x j"]
    """What tokens would add if the chunk started from nothing."""
    reads: Float[Array, "*z b n g x i"]
    """What they take back of the state it starts from."""
    scores: Float[Array, "*z b n g x x"]
    """How much each query reads of what was added."""
    carried: Float[Array, "*z b n g x"]
    """What is left of the first state at each token."""
    left: Float[Array, "*z b n g x"]
    """What is left of each token's addition at the end."""


def _advance(state: Float[Array, "b n g i j"], chunk: Chunk) -> tuple[Float[Array, "b n g i j"], Float[Array, "b n g x j"]]:
    """The state after a chunk, and what its tokens read."""
    added = chunk.writes - einsum("bngxi,bngij->bngxj", chunk.reads, state)
    before = chunk.carried[..., None] * einsum("bnxi,bngij->bngxj", chunk.q, state)
    out = before + einsum("bngxy,bngyj->bngxj", chunk.scores, added)
    kept = chunk.carried[..., -1, None, None] * state
    return kept + einsum("bnxi,bngxj->bngij", chunk.k, chunk.left[..., None] * added), out


def _decays(total: Float[Array, "z b n g x"], cuts: Float[Array, "z b 1 1 x"]) -> Float[Array, "z b n g x x"]:
    """What is left at each token of what an earlier one (or itself) wrote; 0 for later ones and across a start."""
    lower = jnp.tril(jnp.ones((total.shape[-1],) * 2, bool))
    since = (total[..., :, None] - total[..., None, :]) - FORGET * (cuts[..., :, None] - cuts[..., None, :])
    return jnp.where(lower, jnp.exp(jnp.where(lower, since, 0)), 0)


@jax.custom_vjp
def unit_lower_inverse(a: Float[Array, "... x x"]) -> Float[Array, "... x x"]:
    """`(I + a)^-1` of a strictly lower triangular `a`, by inverting diagonal blocks of twice the size each time.

    Stable where powers of `a` would overflow the precision (equal keys), and matrix products only.
    """
    size, half = a.shape[-1], 1
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=a.dtype), a.shape)
    index = np.arange(size)
    while half < size:
        block, second = index // (2 * half), index // half % 2 == 1
        corner = jnp.where((block[:, None] == block) & second[:, None] & ~second, a, 0)
        if half == 1:
            inverse = inverse - corner
        else:
            inverse = inverse - einsum("...xy,...yz,...zw->...xw", inverse, corner, inverse)
        half *= 2
    return inverse


def _inverse_forward(a):
    inverse = unit_lower_inverse(a)
    return inverse, inverse


def _inverse_backward(inverse, g):
    return (-einsum("...yx,...yz,...wz->...xw", inverse, g, inverse),)


unit_lower_inverse.defvjp(_inverse_forward, _inverse_backward)


def short_convolution(
    x: Float[Array, "b t c"],
    memory: Float[Array, "b w c"],
    weight: Float[Array, "c k"],
    positions: Ints,
) -> Float[Array, "b t c"]:
    """Per channel, `sum_s weight[-1 - s] x[t - s]` over the last `w + 1` tokens, none before the segment's own start.

    `memory` holds the inputs before the row. Tokens of a segment must be adjacent.
    """
    length, reach = x.shape[1], memory.shape[1]
    extended = jnp.concatenate([memory, x], 1)
    out = weight[:, reach] * x
    for back in range(1, reach + 1):
        before = extended[:, reach - back : reach - back + length]
        out += weight[:, reach - back] * jnp.where(positions[..., None] >= back, before, 0)
    return out


def remembered(x: Float[Array, "b t c"], memory: Float[Array, "b w c"], valid: Bool[Array, "b t"]) -> Float[Array, "b w c"]:
    """The memory of the convolution after a right-padded row: its last valid inputs, older ones before them."""
    extended = jnp.concatenate([memory, x.astype(memory.dtype)], 1)
    last = jnp.sum(valid, 1)[:, None] + jnp.arange(memory.shape[1])
    return jnp.take_along_axis(extended, last[..., None], 1)


def unit(x: Float[Array, "*b i"]) -> Float[Array, "*b i"]:
    """`x` at length 1; zero stays zero."""
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), -1, keepdims=True) + 1e-6)


class Sizes(NamedTuple):
    """Heads of linear attention, and the features of each."""

    key_heads: int
    key_size: int
    value_heads: int
    value_size: int

    @property
    def channels(self) -> int:
        """What the convolution runs over: queries, keys and values of all heads."""
        return 2 * self.key_heads * self.key_size + self.value_heads * self.value_size


class GatedDelta(nn.Module):
    """The linear attention of Qwen3.5: projections, short convolution, gated delta rule, gated norm. Inside, float32."""

    model: int
    sizes: Sizes
    kernel: int
    """Tokens the convolution sees."""
    eps: float
    dtype: Any

    @nn.compact
    def __call__(
        self, x: Float[Array, "b t d"], context: Context, layer: Layer, cache: Cache | None
    ) -> tuple[Float[Array, "b t d"], Cache | None]:
        valid = present(context.spots, cache)
        memory, state = self.memory(x.shape[0], layer, cache)
        mixed = self.over_rows(self.project("in_proj_qkv", self.sizes.channels)(x))
        q, k, v = self.heads(mixed, memory, context.spots)
        gates = self.gates(x, valid, context.spots)
        if cache is not None and x.shape[1] == 1:
            out, state = gated_delta_step(q[:, 0], k[:, 0], v[:, 0], gates, state)
            out = out[:, None]
        else:
            out, state = gated_delta_rule(q, k, v, gates, state)
        if cache is not None and cache.conv is not None and cache.state is not None:
            cache = cache._replace(
                conv=cache.conv.at[layer.slot].set(remembered(mixed, memory, valid)),
                state=cache.state.at[layer.slot].set(state),
            )
        z = self.project("in_proj_z", self.sizes.value_heads, self.sizes.value_size)(x)
        out = parallel.exchanged(out, 1, 2)
        out = RMSNorm(self.eps, jnp.float32, name="norm")(out) * nn.silu(z.astype(jnp.float32))
        shape = (self.sizes.value_heads, self.sizes.value_size, self.model)
        return Linear(shape, 2, False, self.dtype, name="out_proj")(out.astype(self.dtype)), cache

    def project(self, name: str, *axes: int) -> Linear:
        return Linear((self.model, *axes), 1, False, self.dtype, name=name)

    def memory(self, rows: int, layer: Layer, cache: Cache | None) -> tuple[Array, Array]:
        """What was there before the row: the convolution's inputs and the state."""
        if cache is not None and cache.conv is not None and cache.state is not None:
            return cache.conv[layer.slot], cache.state[layer.slot]
        parts, s = parallel.size("sequence"), self.sizes
        state = jnp.zeros((rows, s.value_heads // parts, s.key_size, s.value_size), jnp.float32)
        return parallel.varying((jnp.zeros((rows, self.kernel - 1, s.channels // parts), self.dtype), state))

    def over_rows(self, mixed: Array) -> Array:
        """Queries, keys and values of the tokens here and all heads, to those of whole rows and this device's heads."""
        return jnp.concatenate([parallel.exchanged(each, 2, 1) for each in self.three(mixed)], -1)

    def three(self, channels: Array, axis: int = -1, parts: int = 1) -> list[Array]:
        """The channels of queries, keys and values (of one of so many parts of the heads)."""
        size = self.sizes.key_heads * self.sizes.key_size // parts
        return jnp.split(channels, (size, 2 * size), axis)

    def heads(self, mixed: Array, memory: Array, spots: Spots) -> tuple[Array, Array, Array]:
        """Queries, keys and values after the convolution."""
        weight = self.param("conv", nn.initializers.lecun_normal(), (self.sizes.channels, self.kernel), jnp.float32)
        weight = jnp.concatenate([parallel.sliced(each, 0) for each in self.three(weight, 0)])
        inputs = (each.astype(jnp.float32) for each in (mixed, memory, weight))
        mixed = short_convolution(*inputs, positions=spots.positions)
        q, k, v = self.three(nn.silu(mixed), parts=parallel.size("sequence"))
        q, k = (unit(rearrange(each, "b t (n i) -> b t n i", i=self.sizes.key_size)) for each in (q, k))
        return q * self.sizes.key_size**-0.5, k, rearrange(v, "b t (m j) -> b t m j", j=self.sizes.value_size)

    def gates(self, x: Array, valid: Array, spots: Spots) -> Gates:
        """What the tokens do to the memory; padding does nothing."""
        a, b = (self.project(f"in_proj_{name}", self.sizes.value_heads)(x).astype(jnp.float32) for name in "ab")
        a, b = (parallel.exchanged(each, 2, 1) for each in (a, b))
        shape = (self.sizes.value_heads,)
        log_rate = parallel.sliced(self.param("A_log", nn.initializers.zeros, shape, jnp.float32).astype(jnp.float32), 0)
        bias = parallel.sliced(self.param("dt_bias", nn.initializers.ones, shape, jnp.float32).astype(jnp.float32), 0)
        log_decay = -jnp.exp(log_rate) * nn.softplus(a + bias)
        beta, there = nn.sigmoid(b), valid[..., None]
        return Gates(jnp.where(there, log_decay, 0), jnp.where(there, beta, 0), valid & (spots.positions == 0))


def present(spots: Spots, cache: Cache | None) -> Bool[Array, "b t"]:
    """Which tokens are to be remembered: no padding, and nothing beyond the cache, where free slots are."""
    valid = jnp.asarray(spots.segments) > 0
    return valid if cache is None else valid & (spots.positions < cache.keys.shape[2])
