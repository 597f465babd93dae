"""Llama: RMS norm, rotary grouped-query attention, gated SiLU. SmolLM2 and Llama 2/3.x checkpoints."""

from typing import Any

from jax import Array

from gspo_jax.models import decoder
from gspo_jax.models.decoder import MLP, init_cache
from gspo_jax.models.layers import Context, Layer
from gspo_jax.models.settings import Settings
from gspo_jax.models.tables import Rows, attention_rows, decoder_table, mlp_rows, norm_rows
from serving_bridge.convert import Weight

__all__ = ["Config", "Model", "init_cache", "weights"]


class Config(Settings):
    """Llama's config.json."""

    mlp_bias: bool = False


class Block(decoder.Block):
    """A layer."""

    config: Config  # pyright: ignore[reportIncompatibleVariableOverride]

    def feed_forward(self, x: Array, context: Context, layer: Layer) -> tuple[Array, Any]:
        c = self.config
        return MLP(c.hidden_size, c.intermediate_size, self.dtype, c.mlp_bias, name="mlp")(x), None


class Model(decoder.Decoder):
    """The decoder."""

    block = Block


def weights(config: Config) -> tuple[Weight, ...]:
    """Every tensor of the checkpoint, under both names."""

    def rows(_: Settings, kind: str) -> Rows:
        return norm_rows() + attention_rows(config) + mlp_rows(bias=config.mlp_bias)

    return decoder_table(config, rows)
