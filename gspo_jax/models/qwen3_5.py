"""Qwen3.5, text path: linear attention (gated delta rule) and, by default every fourth layer, gated full attention."""

from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from gspo_jax.models import decoder
from gspo_jax.models.decoder import Attention
from gspo_jax.models.delta import GatedDelta, Sizes
from gspo_jax.models.layers import Cache, Context, Layer
from gspo_jax.models.settings import Settings
from gspo_jax.models.tables import Rows, attention_rows, decoder_table, mlp_rows, norm_rows
from serving_bridge.convert import Weight

__all__ = ["Config", "Model", "init_cache", "weights"]

KINDS = {"linear_attention": "linear", "full_attention": "full"}


class Config(Settings):
    """Qwen3.5's config.json; defaults as in transformers."""

    ignored: ClassVar[tuple[str, ...]] = ("mtp_*", "mamba_ssm_dtype")
    untrained: ClassVar[tuple[str, ...]] = ("model.visual.*", "visual.*", "mtp.*", "model.mtp.*")
    qk_norm: ClassVar[bool] = True
    norm_offset: ClassVar[float] = 1.0
    recurrent: ClassVar[bool] = True
    partial_rotary: ClassVar[bool] = True

    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    attn_output_gate: bool = True

    @classmethod
    def spell(cls, raw: dict[str, Any]) -> dict[str, Any]:
        raw.setdefault("head_dim", 256)
        interval, partial = raw.pop("full_attention_interval", 4), raw.pop("partial_rotary_factor", 0.25)
        if not isinstance(interval, int) or interval < 1:
            raise ValueError(f"full_attention_interval={interval!r} must be a positive integer")
        if "layer_types" not in raw:
            numbers = range(1, raw["num_hidden_layers"] + 1)
            raw["layer_types"] = tuple("linear_attention" if n % interval else "full_attention" for n in numbers)
        raw = super().spell(raw)
        raw["rope_parameters"] = {"partial_rotary_factor": partial} | raw["rope_parameters"]
        return raw

    def check(self) -> None:
        super().check()
        if not self.attn_output_gate:
            raise ValueError("attn_output_gate=False is not supported by this architecture")
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise ValueError(
                f"linear_num_value_heads={self.linear_num_value_heads} must be a multiple of "
                f"linear_num_key_heads={self.linear_num_key_heads}"
            )

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(KINDS[kind] for kind in self.layer_types or ())

    def remembers(self, kind: str) -> str:
        return "state" if kind == "linear" else "keys"

    @property
    def linear(self) -> Sizes:
        """The heads of linear attention."""
        keys = (self.linear_num_key_heads, self.linear_key_head_dim)
        return Sizes(*keys, self.linear_num_value_heads, self.linear_value_head_dim)

    def sizes(self) -> dict[str, int]:
        linear = {"m": self.linear_num_value_heads, "j": self.linear_value_head_dim, "u": self.linear.channels}
        return super().sizes() | linear | {"w": self.linear_conv_kernel_dim, "c": 2}


class Block(decoder.Block):
    """A layer."""

    config: Config  # pyright: ignore[reportIncompatibleVariableOverride]

    def mix(self, x: Array, context: Context, layer: Layer, cache: Cache | None) -> tuple[Array, Cache | None]:
        c = self.config
        if self.kind == "full":
            return Attention(c, self.dtype, gated=True, name="attention")(x, context, layer, cache)
        delta = GatedDelta(c.hidden_size, c.linear, c.linear_conv_kernel_dim, c.rms_norm_eps, self.dtype, name="delta")
        return delta(x, context, layer, cache)


class Model(decoder.Decoder):
    """The decoder."""

    block = Block


def init_cache(config: Config, rows: int, length: int, dtype: Any) -> Cache:
    """An empty cache: keys and values of full attention, convolution inputs and states of linear attention."""
    c, layers = config, sum(config.remembers(kind) == "state" for kind in config.kinds)
    state = (layers, rows, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim)
    return decoder.init_cache(config, rows, length, dtype)._replace(
        conv=jnp.zeros((layers, rows, c.linear_conv_kernel_dim - 1, c.linear.channels), dtype),
        state=jnp.zeros(state, jnp.float32),
    )


def linear_rows() -> Rows:
    """Weights of `GatedDelta`."""
    return [
        ("delta/in_proj_qkv/kernel", "linear_attn.in_proj_qkv.weight", "u d -> d u"),
        ("delta/in_proj_z/kernel", "linear_attn.in_proj_z.weight", "(m j) d -> d m j"),
        ("delta/in_proj_b/kernel", "linear_attn.in_proj_b.weight", "m d -> d m"),
        ("delta/in_proj_a/kernel", "linear_attn.in_proj_a.weight", "m d -> d m"),
        ("delta/conv", "linear_attn.conv1d.weight", "u 1 w -> u w"),
        ("delta/A_log", "linear_attn.A_log", "m -> m"),
        ("delta/dt_bias", "linear_attn.dt_bias", "m -> m"),
        ("delta/norm/scale", "linear_attn.norm.weight", "j -> j"),
        ("delta/out_proj/kernel", "linear_attn.out_proj.weight", "d (m j) -> m j d"),
    ]


def mixer_rows(config: Settings, kind: str) -> Rows:
    """Weights of a layer of this kind but for its feed-forward half."""
    return norm_rows() + (linear_rows() if kind == "linear" else attention_rows(config, gated=True))


def weights(config: Config) -> tuple[Weight, ...]:
    """Every tensor of the checkpoint, under both names."""

    def rows(_: Settings, kind: str) -> Rows:
        return mixer_rows(config, kind) + mlp_rows()

    return decoder_table(config, rows)
