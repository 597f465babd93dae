"""A decoder: embedding, a scanned stack of layers, final norm. An architecture says what one of its layers is."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jaxtyping import Float, Int

from gspo_jax import parallel
from gspo_jax.models.embedding import embed
from gspo_jax.models.layers import (
    Cache,
    Context,
    Ints,
    Layer,
    Linear,
    RMSNorm,
    Spots,
    attend,
    attend_rows,
    context_of,
    parameter,
)
from gspo_jax.models.rotary import Rope, rotate
from gspo_jax.models.settings import Settings
from gspo_jax.models.stages import Stage, stage_name, stages

UNLIMITED = 2**30
"""Positions: more than any row has."""

type Carry = tuple[Array, Cache | None]


class Output(NamedTuple):
    """What a forward pass returns."""

    hidden: Float[Array, "b t d"]
    """After the final norm. The head is applied by `policy`, which never builds `[b t v]`."""
    cache: Cache | None
    routing: Any = None
    """What the routers chose, by layer that has experts (`experts.Routing`); None without any."""


class Attention(nn.Module):
    """Rotary grouped-query attention over the row itself, or over a cache that its keys and values are first written to."""

    config: Settings
    dtype: Any
    gated: bool = False
    """Whether each query head comes with a gate on its output."""

    @nn.compact
    def __call__(
        self, x: Float[Array, "b t d"], context: Context, layer: Layer, cache: Cache | None
    ) -> tuple[Float[Array, "b t d"], Cache | None]:
        c, positions = self.config, context.here.positions
        bias, out_bias = c.biases
        rope, mask = self.reach(context, layer)
        heads = parallel.Heads.of(c.num_attention_heads, c.num_key_value_heads)
        x = parallel.entering(x, heads.split)

        def project(name: str, *axes: int, split: bool) -> Array:
            how = "out" if split else "none"
            return Linear((c.hidden_size, *axes, c.head_dim), 1, bias, self.dtype, how, name=name)(x)

        def place(heads: Array, name: str) -> Array:
            if c.qk_norm:
                heads = RMSNorm(c.rms_norm_eps, self.dtype, c.norm_offset, name=name)(heads)
            return rotate(heads, positions, rope)

        q, gate = project("query", c.num_attention_heads, *((2,) if self.gated else ()), split=heads.split), None
        if self.gated:
            q, gate = q[..., 0, :], q[..., 1, :]
        q = place(q, "query_norm")
        k = place(project("key", c.num_key_value_heads, split=heads.split_keys), "key_norm")
        v = project("value", c.num_key_value_heads, split=heads.split_keys)
        if cache is not None:
            rows = jnp.arange(x.shape[0])[:, None]
            cache = cache._replace(
                keys=cache.keys.at[layer.slot, rows, positions].set(k, mode="drop"),
                values=cache.values.at[layer.slot, rows, positions].set(v, mode="drop"),
            )
            k, v = cache.keys[layer.slot], cache.values[layer.slot]
        q, k, v = heads.over_rows(q, k, v)
        if cache is None:
            out = attend_rows(q, k, v, context.spots, mask, c.attention_scale, self.window(context, layer))
        else:
            out = attend(q, k, v, mask, c.attention_scale)
        out = heads.back(out)
        if gate is not None:
            out *= nn.sigmoid(gate)
        shape = (c.num_attention_heads, c.head_dim, c.hidden_size)
        how = "in" if heads.split else "none"
        return Linear(shape, 2, out_bias, self.dtype, how, name="out")(out), cache

    def window(self, context: Context, layer: Layer) -> Array | None:
        """How many positions a query of this layer looks back, where some layers' do not see them all."""
        sliding = self.config.sliding
        if context.window is None or not any(sliding):
            return None
        return jnp.where(jnp.asarray(sliding)[layer.number], self.config.sliding_window or UNLIMITED, UNLIMITED)

    def reach(self, context: Context, layer: Layer) -> tuple[Rope, Array]:
        """The rotary embedding and the mask of this layer."""
        sliding = self.config.sliding
        if context.window is None or not any(sliding):
            return self.config.rope(), context.mask
        if all(sliding):
            return self.config.rope(), context.window
        return self.config.rope(), jnp.where(jnp.asarray(sliding)[layer.number], context.window, context.mask)


class MLP(nn.Module):
    """`down(act(gate x) * up x)`."""

    model: int
    width: int
    dtype: Any
    use_bias: bool = False
    act: Callable[[Array], Array] = nn.silu

    @nn.compact
    def __call__(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        wide, split = (self.model, self.width), parallel.divides(self.width)
        x, out, into = parallel.entering(x, split), *(("out", "in") if split else ("none", "none"))
        gate = Linear(wide, 1, self.use_bias, self.dtype, out, name="gate")(x)
        up = Linear(wide, 1, self.use_bias, self.dtype, out, name="up")(x)
        return Linear(wide[::-1], 1, self.use_bias, self.dtype, into, name="down")(self.act(gate) * up)


class Block(nn.Module):
    """One pre-norm layer in the form `scan` wants: carry in, carry out. Architectures override its two halves."""

    config: Settings
    dtype: Any
    kind: str

    @nn.compact
    def __call__(self, carry: Carry, layer: Layer, context: Context) -> tuple[Carry, Any]:
        x, cache = carry
        y, cache = self.mix(self.norm("attention_norm", x), context, layer, cache)
        x = x + y
        y, routing = self.feed_forward(self.norm("mlp_norm", x), context, layer)
        return (x + y, cache), routing

    def norm(self, name: str, x: Array) -> Array:
        return RMSNorm(self.config.rms_norm_eps, self.dtype, self.config.norm_offset, name=name)(x)

    def mix(self, x: Array, context: Context, layer: Layer, cache: Cache | None) -> tuple[Array, Cache | None]:
        """What tokens learn of each other."""
        return Attention(self.config, self.dtype, name="attention")(x, context, layer, cache)

    def feed_forward(self, x: Array, context: Context, layer: Layer) -> tuple[Array, Any]:
        """What each token makes of it, and the routing of its experts."""
        c = self.config
        return MLP(c.hidden_size, c.intermediate_size, self.dtype, name="mlp")(x), None


class Unit(nn.Module):
    """Several layers as one step of the scan."""

    block: type[Block]
    config: Settings
    dtype: Any
    kinds: tuple[str, ...]

    @nn.compact
    def __call__(self, carry: Carry, layers: tuple[Layer, ...], context: Context) -> tuple[Carry, Any]:
        found = []
        for i, (kind, layer) in enumerate(zip(self.kinds, layers, strict=True)):
            carry, routing = self.block(self.config, self.dtype, kind, name=f"block{i}")(carry, layer, context)
            found.append(routing)
        return carry, tuple(found)


class Decoder(nn.Module):
    """Hidden states of tokens; `experts` are choices to replay, by layer that has them. A subclass names its `block`."""

    block: ClassVar[type[Block]] = Block

    config: Settings
    dtype: Any = jnp.float32
    remat: str = "none"

    @nn.compact
    def __call__(
        self,
        tokens: Ints,
        spots: Spots,
        cache: Cache | None = None,
        experts: Int[Array, "l b t k"] | None = None,
    ) -> Output:
        c = self.config
        shape = (c.vocab_size, c.hidden_size)
        table = parameter(self, "embedding", nn.initializers.normal(0.02), shape)
        if not c.tie_word_embeddings:
            parameter(self, "head", nn.initializers.normal(0.02), shape)
        x = embed(table, jnp.asarray(parallel.sliced(tokens, 1)), shape, self.dtype)
        if c.embedding_scale != 1:
            x *= jnp.asarray(c.embedding_scale, self.dtype)
        keys = None if cache is None else cache.keys.shape[2]
        if experts is not None:
            experts = parallel.sliced(experts, 2)
        context = context_of(spots, keys, c.sliding_window if any(c.sliding) else None)
        block = nn.remat(self.block, prevent_cse=False) if self.remat == "layer" else self.block
        carry, routing, plan = (x, cache), [], stages(c.kinds)
        for i, stage in enumerate(plan):
            layers = tuple(_told(c, stage.numbers(place), experts) for place in range(len(stage.unit)))
            scanned = _scanned(block, c, self.dtype, stage, stage_name(plan, i))
            carry, found = scanned(carry, layers if len(stage.unit) > 1 else layers[0], context)
            routing.append(_interleaved(found if len(stage.unit) > 1 else (found,)))
        x, cache = carry
        routing = [each for each in routing if each is not None]
        merged = jax.tree.map(lambda *parts: jnp.concatenate(parts), *routing) if routing else None
        return Output(RMSNorm(c.rms_norm_eps, self.dtype, c.norm_offset, name="norm")(x), cache, merged)


def _scanned(block: type[Block], config: Settings, dtype: Any, stage: Stage, name: str) -> Any:
    """A stage's layers as one module, its weights stacked over the repetitions."""
    single = len(stage.unit) == 1
    over = nn.scan(
        block if single else Unit,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=(0, nn.broadcast),  # pyright: ignore[reportArgumentType]
        length=stage.repeats,
    )
    make: Any = over if single else partial(over, block)
    return make(config, dtype, stage.unit[0] if single else stage.unit, name=name)


def _told(config: Settings, numbers: tuple[int, ...], experts: Array | None) -> Layer:
    """What the layers of these numbers are told, stacked."""
    kind, memory = config.kinds[numbers[0]], config.remembers
    slots = [sum(memory(other) == memory(kind) for other in config.kinds[:n]) for n in numbers]
    choices = None
    if experts is not None and config.routes(kind):
        choices = experts[jnp.asarray([sum(map(config.routes, config.kinds[:n])) for n in numbers])]
    return Layer(jnp.asarray(numbers), jnp.asarray(slots), choices)


def _interleaved(found: Sequence[Any]) -> Any:
    """Per-place results `[repeats ...]` of a unit as results by layer `[repeats * places ...]`; places without any left out."""
    found = [each for each in found if each is not None]
    if not found:
        return None
    return jax.tree.map(lambda *parts: jnp.stack(parts, 1).reshape(-1, *parts[0].shape[1:]), *found)


def init_cache(config: Settings, rows: int, length: int, dtype: Any) -> Cache:
    """An empty cache of keys and values for `rows` sequences of up to `length` tokens."""
    layers = sum(config.remembers(kind) == "keys" for kind in config.kinds)
    shape = (layers, rows, length, config.num_key_value_heads, config.head_dim)
    return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
