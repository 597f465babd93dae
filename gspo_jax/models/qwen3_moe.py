"""Qwen3 with mixtures of experts in place of the MLPs of some or all layers."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from gspo_jax.models import decoder, qwen3
from gspo_jax.models.decoder import init_cache
from gspo_jax.models.experts import Experts, check_chosen, expert_rows
from gspo_jax.models.layers import Context, Layer
from gspo_jax.models.settings import Settings
from gspo_jax.models.tables import Rows, attention_rows, decoder_table, mlp_rows, norm_rows
from serving_bridge.convert import Weight

__all__ = ["Config", "Model", "init_cache", "weights"]


class Config(qwen3.Config):
    """Qwen3-MoE's config.json."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()

    @classmethod
    def spell(cls, raw: dict[str, Any]) -> dict[str, Any]:
        if "num_local_experts" in raw:
            raw.setdefault("num_experts", raw.pop("num_local_experts"))
        return super().spell(raw)

    def check(self) -> None:
        super().check()
        check_chosen(self.num_experts_per_tok, self.num_experts)
        if self.decoder_sparse_step < 1:
            raise ValueError(f"decoder_sparse_step={self.decoder_sparse_step} must be at least 1")

    @property
    def kinds(self) -> tuple[str, ...]:
        def sparse(layer: int) -> bool:
            at_step = self.num_experts > 0 and (layer + 1) % self.decoder_sparse_step == 0
            return at_step and layer not in self.mlp_only_layers

        return tuple("sparse" if sparse(layer) else "dense" for layer in range(self.num_hidden_layers))

    def routes(self, kind: str) -> bool:
        return kind == "sparse"

    @property
    def sliding(self) -> tuple[bool, ...]:
        return (self.use_sliding_window and self.sliding_window is not None,) * self.num_hidden_layers

    def sizes(self) -> dict[str, int]:
        return super().sizes() | {"e": self.num_experts, "fe": self.moe_intermediate_size, "c": 2}


class Block(decoder.Block):
    """A layer."""

    config: Config  # pyright: ignore[reportIncompatibleVariableOverride]

    def feed_forward(self, x: Array, context: Context, layer: Layer) -> tuple[Array, Any]:
        c = self.config
        if not c.routes(self.kind):
            return super().feed_forward(x, context, layer)
        sizes = (c.num_experts, c.num_experts_per_tok, c.hidden_size, c.moe_intermediate_size)
        return Experts(*sizes, c.norm_topk_prob, self.dtype, name="mlp")(
            x, jnp.greater(context.here.segments, 0), layer.experts
        )


class Model(decoder.Decoder):
    """The decoder."""

    block = Block


def weights(config: Config, *, fused: bool = False) -> tuple[Weight, ...]:
    """Every tensor of the checkpoint, under both names; `fused`: one tensor holds all experts of a layer."""

    def rows(_: Settings, kind: str) -> Rows:
        mlp = expert_rows(fused=fused) if config.routes(kind) else mlp_rows()
        return norm_rows() + attention_rows(config) + mlp

    return decoder_table(config, rows)
