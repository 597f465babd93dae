"""The sampler's device programs: pure functions of arrays, each compiled once per shape. Fixed shapes are what makes a
row's bits independent of its companions: a row never sees another row, and the program never changes with the load."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int, UInt32

from gspo_jax.models.decoder import Output
from gspo_jax.models.layers import Spots
from gspo_jax.policy import Policy
from gspo_jax.types import Params

BLOCK = 256
"""Vocabulary entries summed at a time by the inverse CDF."""


class Slots(NamedTuple):
    """What the device holds for every slot: the cache, and the logits of the token to be drawn next."""

    cache: Any
    logits: Float[Array, "b v"]
    experts: Int[Array, "l b t k"] | None = None
    """What the routers chose for the tokens just processed; not kept in the slots."""


class Draws(NamedTuple):
    """How each slot draws its next token."""

    keys: Any
    """`[b]` request keys; folded with `drawn`."""
    drawn: Int[Array, " b"]
    """Tokens this request has drawn so far."""
    temperature: Float[Array, " b"]
    top_p: Float[Array, " b"]
    top_k: Int[Array, " b"]
    banned: Int[Array, "b 8"]
    """Ids that may not be drawn now (stop ids before `min_tokens`); the vocabulary size where unused."""


def request_key(seed: int, path: tuple[int, ...]) -> Array:
    """The key of one request: the run's seed folded with `(branch, step, group, member, turn)`."""
    return _fold(jax.random.key(seed), jnp.asarray(path, jnp.uint32))


@jax.jit
def _fold(key: Array, path: UInt32[Array, " n"]) -> Array:
    return jax.lax.scan(lambda k, i: (jax.random.fold_in(k, i), None), key, path)[0]


def empty_slots(policy: Policy, slots: int, length: int) -> Slots:
    """All slots free."""
    return Slots(policy.init_cache(slots, length), jnp.zeros((slots, policy.config.vocab_size), jnp.float32))


def prefill(policy: Policy, params: Params, tokens: Int[Array, "p t"], lengths: Int[Array, " p"]) -> Slots:
    """Cache and next-token logits of `p` prompts, right-padded to one bucket; padding is never attended to."""
    rows, width = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(width), tokens.shape)
    spots = Spots(positions, (positions < lengths[:, None]).astype(jnp.int32))
    output = policy.model.apply({"params": params}, tokens, spots, policy.init_cache(rows, width))
    last = jnp.take_along_axis(output.hidden, (lengths - 1)[:, None, None], 1)[:, 0]
    return Slots(output.cache, _next_logits(policy, params, last), _chosen(output))


def insert(slots: Slots, prompts: Slots, source: Int[Array, ""], target: Int[Array, ""]) -> Slots:
    """`slots` with row `source` of a prefill copied into slot `target`."""

    def put(into: Array, row: Array, axis: int) -> Array:
        part = jax.lax.dynamic_slice_in_dim(row, source, 1, axis)
        start = [0] * into.ndim
        return jax.lax.dynamic_update_slice(into, part, [target if i == axis else s for i, s in enumerate(start)])

    cache = jax.tree.map(lambda a, b: put(a, b, 1), slots.cache, prompts.cache)
    return Slots(cache, put(slots.logits, prompts.logits, 0))


def decode(policy: Policy, params: Params, slots: Slots, tokens: Int[Array, " b"], positions: Int[Array, " b"]) -> Slots:
    """One token further in every slot. A position beyond the cache marks a free slot: nothing is written for it."""
    spots = Spots(positions[:, None], jnp.ones_like(positions)[:, None])
    output = policy.model.apply({"params": params}, tokens[:, None], spots, slots.cache)
    return Slots(output.cache, _next_logits(policy, params, output.hidden[:, 0]), _chosen(output))


def _chosen(output: Output) -> Int[Array, "l b t k"] | None:
    return None if output.routing is None else output.routing.choices


def _next_logits(policy: Policy, params: Params, hidden: Float[Array, "b d"]) -> Float[Array, "b v"]:
    head = policy.head(params).astype(hidden.dtype)
    return jax.lax.dot_general(hidden, head, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def draw(logits: Float[Array, "b v"], draws: Draws) -> tuple[Int[Array, " b"], Float[Array, " b"]]:
    """A token per row from softmax(logits / temperature), and its log-probability there.

    One uniform per row and an inverse CDF in two levels. Temperature 0 takes the largest logit and reports its
    log-probability at temperature 1.
    """
    scaled = _scaled(logits, draws)
    logz = jax.nn.logsumexp(scaled, -1, keepdims=True)
    sampled = _inverse_cdf(jnp.exp(scaled - logz), _uniform(draws))
    tokens = jnp.where(draws.temperature > 0, sampled, jnp.argmax(scaled, -1))
    return tokens, (jnp.take_along_axis(scaled, tokens[:, None], 1) - logz)[:, 0]


def draw_filtered(logits: Float[Array, "b v"], draws: Draws) -> tuple[Int[Array, " b"], Float[Array, " b"]]:
    """`draw` from the top-k, then top-p, part of the distribution, renormalised; the log-probability is of that part."""
    scaled = _scaled(logits, draws)
    order = jnp.argsort(scaled, -1, descending=True)
    ranked = jnp.take_along_axis(scaled, order, 1)
    p = jax.nn.softmax(ranked, -1)
    rank = jnp.arange(ranked.shape[1])
    top_k = jnp.where(draws.top_k > 0, draws.top_k, ranked.shape[1])
    p = jnp.where(rank < top_k[:, None], p, 0)
    p = p / jnp.sum(p, -1, keepdims=True)
    before = jnp.cumsum(p, -1) - p
    keep = (rank < top_k[:, None]) & ((before < draws.top_p[:, None]) | (rank == 0))
    kept = jnp.where(keep, ranked, -jnp.inf)
    logz = jax.nn.logsumexp(kept, -1, keepdims=True)
    place = _inverse_cdf(jnp.exp(kept - logz), _uniform(draws))
    place = jnp.where(draws.temperature > 0, place, 0)
    tokens = jnp.take_along_axis(order, place[:, None], 1)[:, 0]
    return tokens, (jnp.take_along_axis(kept, place[:, None], 1) - logz)[:, 0]


def _scaled(logits: Float[Array, "b v"], draws: Draws) -> Float[Array, "b v"]:
    temperature = jnp.where(draws.temperature > 0, draws.temperature, 1.0)[:, None]
    scaled = jnp.where(temperature == 1.0, logits, logits / temperature)
    return scaled.at[jnp.arange(scaled.shape[0])[:, None], draws.banned].set(-jnp.inf, mode="drop")


def _uniform(draws: Draws) -> Float[Array, " b"]:
    return jax.vmap(lambda key, i: jax.random.uniform(jax.random.fold_in(key, i)))(draws.keys, draws.drawn)


def _inverse_cdf(p: Float[Array, "b v"], u: Float[Array, " b"]) -> Int[Array, " b"]:
    """The first index whose cumulative probability exceeds `u`: first the block, then the place in it."""
    rows, size = p.shape
    blocks = jnp.pad(p, ((0, 0), (0, -size % BLOCK))).reshape(rows, -1, BLOCK)
    sums = jnp.sum(blocks, -1)
    target = u * jnp.sum(sums, -1)
    block, rest = _first_above(sums, target)
    place, _ = _first_above(jnp.take_along_axis(blocks, block[:, None, None], 1)[:, 0], rest)
    return block * BLOCK + place


def _first_above(p: Float[Array, "b n"], target: Float[Array, " b"]) -> tuple[Int[Array, " b"], Float[Array, " b"]]:
    cumulative = jnp.cumsum(p, -1)
    above: Bool[Array, "b n"] = (cumulative > target[:, None]) & (p > 0)
    index = jnp.where(jnp.any(above, -1), jnp.argmax(above, -1), jnp.argmax(p, -1))
    before = jnp.take_along_axis(cumulative - p, index[:, None], 1)[:, 0]
    return index, jnp.maximum(target - before, 0)
