"""Llama: RMS norm, rotary grouped-query attention, gated SiLU. SmolLM2 and Llama 2/3.x checkpoints."""

from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jaxtyping import Bool, Float, Int
from pydantic import BaseModel, ConfigDict, model_validator

from gspo_jax.models.layers import Cache, Linear, RMSNorm, attend, rope_frequencies, rotate
from serving_bridge.convert import Weight


class Config(BaseModel):
    """The fields of a Hugging Face `config.json` that change what is computed. A setting we do not compute is refused."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"

    @model_validator(mode="before")
    @classmethod
    def _older_spellings(cls, raw: dict[str, Any]) -> dict[str, Any]:
        raw = dict(raw)
        raw["head_dim"] = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
        raw["num_key_value_heads"] = raw.get("num_key_value_heads") or raw["num_attention_heads"]
        if not raw.get("rope_parameters"):
            raw["rope_parameters"] = {"rope_theta": raw.get("rope_theta", 1e4), **(raw.get("rope_scaling") or {})}
        return raw

    @model_validator(mode="after")
    def _supported(self) -> "Config":
        if self.hidden_act != "silu":
            raise ValueError(f"hidden_act={self.hidden_act!r} is not supported; supported: silu")
        rope_frequencies(self.head_dim, self.rope_parameters)
        return self

    def sizes(self) -> dict[str, int]:
        """Length of every axis letter of the weight table."""
        return {
            "v": self.vocab_size, "d": self.hidden_size, "f": self.intermediate_size, "l": self.num_hidden_layers,
            "n": self.num_attention_heads, "k": self.num_key_value_heads, "h": self.head_dim,
        }  # fmt: skip


class Attention(nn.Module):
    """Attention over the row itself, or over a cache that the row's keys and values are first written to."""

    config: Config
    dtype: Any

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "b t d"],
        positions: Int[Array, "b t"],
        mask: Bool[Array, "b t s"],
        cache: Cache | None,
        layer: Int[Array, ""],
    ) -> tuple[Float[Array, "b t d"], Cache | None]:
        c, frequencies = self.config, rope_frequencies(self.config.head_dim, self.config.rope_parameters)

        def project(name: str, heads: int) -> Float[Array, "b t n h"]:
            return Linear((c.hidden_size, heads, c.head_dim), 1, c.attention_bias, self.dtype, name=name)(x)

        q = rotate(project("query", c.num_attention_heads), positions, frequencies)
        k = rotate(project("key", c.num_key_value_heads), positions, frequencies)
        v = project("value", c.num_key_value_heads)
        if cache is not None:
            rows = jnp.arange(x.shape[0])[:, None]
            cache = Cache(
                cache.keys.at[layer, rows, positions].set(k, mode="drop"),
                cache.values.at[layer, rows, positions].set(v, mode="drop"),
            )
            k, v = cache.keys[layer], cache.values[layer]
        out = attend(q, k, v, mask)
        shape = (c.num_attention_heads, c.head_dim, c.hidden_size)
        return Linear(shape, 2, c.attention_bias, self.dtype, name="out")(out), cache


class MLP(nn.Module):
    config: Config
    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        c = self.config
        wide, bias = (c.hidden_size, c.intermediate_size), c.mlp_bias
        gate = Linear(wide, 1, bias, self.dtype, name="gate")(x)
        up = Linear(wide, 1, bias, self.dtype, name="up")(x)
        return Linear(wide[::-1], 1, bias, self.dtype, name="down")(nn.silu(gate) * up)


class Block(nn.Module):
    """One layer in the form `scan` wants: carry in, carry out."""

    config: Config
    dtype: Any

    @nn.compact
    def __call__(self, carry, layer, positions, mask):
        x, cache = carry
        eps = self.config.rms_norm_eps
        y = RMSNorm(eps, self.dtype, name="attention_norm")(x)
        y, cache = Attention(self.config, self.dtype, name="attention")(y, positions, mask, cache, layer)
        x = x + y
        y = RMSNorm(eps, self.dtype, name="mlp_norm")(x)
        return (x + MLP(self.config, self.dtype, name="mlp")(y), cache), None


class Model(nn.Module):
    """Hidden states after the final norm. The head is applied by `policy`, which never builds `[b t v]`."""

    config: Config
    dtype: Any = jnp.float32
    remat: str = "none"

    @nn.compact
    def __call__(
        self,
        tokens: Int[Array, "b t"],
        positions: Int[Array, "b t"],
        mask: Bool[Array, "b t s"],
        cache: Cache | None = None,
    ) -> tuple[Float[Array, "b t d"], Cache | None]:
        c = self.config
        table = self.param("embedding", nn.initializers.normal(0.02), (c.vocab_size, c.hidden_size), jnp.float32)
        if not c.tie_word_embeddings:
            self.param("head", nn.initializers.normal(0.02), (c.vocab_size, c.hidden_size), jnp.float32)
        x = jnp.take(table, tokens, axis=0).astype(self.dtype)
        block = nn.remat(Block, prevent_cse=False) if self.remat == "layer" else Block
        layers = nn.scan(
            block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(0, nn.broadcast, nn.broadcast),  # pyright: ignore[reportArgumentType]
            length=c.num_hidden_layers,
        )(c, self.dtype, name="layers")
        (x, cache), _ = layers((x, cache), jnp.arange(c.num_hidden_layers), positions, mask)
        return RMSNorm(c.rms_norm_eps, self.dtype, name="norm")(x), cache


def weights(config: Config) -> tuple[Weight, ...]:
    """Every tensor of the checkpoint, under both names."""
    rows = [Weight("embedding", "model.embed_tokens.weight", "v d -> v d")]
    if not config.tie_word_embeddings:
        rows.append(Weight("head", "lm_head.weight", "v d -> v d"))
    rows.append(Weight("norm/scale", "model.norm.weight", "d -> d"))

    def layer(path: str, name: str, layout: str) -> None:
        rows.append(Weight(f"layers/{path}", f"model.layers.{{l}}.{name}", layout))

    layer("attention_norm/scale", "input_layernorm.weight", "d -> d")
    layer("mlp_norm/scale", "post_attention_layernorm.weight", "d -> d")
    heads = {"query": ("q", "n"), "key": ("k", "k"), "value": ("v", "k")}
    for path, (short, axis) in heads.items():
        layer(f"attention/{path}/kernel", f"self_attn.{short}_proj.weight", f"({axis} h) d -> d {axis} h")
        if config.attention_bias:
            layer(f"attention/{path}/bias", f"self_attn.{short}_proj.bias", f"({axis} h) -> {axis} h")
    layer("attention/out/kernel", "self_attn.o_proj.weight", "d (n h) -> n h d")
    if config.attention_bias:
        layer("attention/out/bias", "self_attn.o_proj.bias", "d -> d")
    for path, layout, bias in (("gate", "f d -> d f", "f"), ("up", "f d -> d f", "f"), ("down", "d f -> f d", "d")):
        layer(f"mlp/{path}/kernel", f"mlp.{path}_proj.weight", layout)
        if config.mlp_bias:
            layer(f"mlp/{path}/bias", f"mlp.{path}_proj.bias", f"{bias} -> {bias}")
    return tuple(rows)


def init_cache(config: Config, rows: int, length: int, dtype: Any) -> Cache:
    """An empty cache for `rows` sequences of up to `length` tokens."""
    shape = (config.num_hidden_layers, rows, length, config.num_key_value_heads, config.head_dim)
    return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
