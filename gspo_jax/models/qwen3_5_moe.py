"""Qwen3.5 with mixtures of experts in place of its MLPs, and beside them an expert that every token uses, through a gate."""

from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jaxtyping import Bool, Float, Int

from gspo_jax.models import qwen3_5
from gspo_jax.models.decoder import MLP
from gspo_jax.models.experts import Experts, Routing, check_chosen, expert_rows
from gspo_jax.models.layers import Context, Layer, Linear
from gspo_jax.models.qwen3_5 import init_cache, mixer_rows
from gspo_jax.models.settings import Settings
from gspo_jax.models.tables import Rows, decoder_table, mlp_rows
from serving_bridge.convert import Weight

__all__ = ["Config", "Model", "init_cache", "weights"]


class Config(qwen3_5.Config):
    """Qwen3.5-MoE's config.json; defaults as in transformers."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int

    @classmethod
    def spell(cls, raw: dict[str, Any]) -> dict[str, Any]:
        if "num_local_experts" in raw:
            raw.setdefault("num_experts", raw.pop("num_local_experts"))
        raw.setdefault("intermediate_size", raw.get("moe_intermediate_size"))  # of no layer here
        return super().spell(raw)

    def check(self) -> None:
        super().check()
        check_chosen(self.num_experts_per_tok, self.num_experts)

    def routes(self, kind: str) -> bool:
        return True

    def sizes(self) -> dict[str, int]:
        experts = {"e": self.num_experts, "fe": self.moe_intermediate_size, "fs": self.shared_expert_intermediate_size}
        return super().sizes() | experts


class Mixture(Experts):
    """The experts of a router, and a shared one times its own sigmoid gate."""

    shared: int = 0
    """Width of the shared expert."""

    @nn.compact
    def __call__(
        self, x: Float[Array, "b t d"], valid: Bool[Array, "b t"], replay: Int[Array, "b t k"] | None = None
    ) -> tuple[Float[Array, "b t d"], Routing]:
        """The sum and the routing."""
        y, routing = self.mixed(x, valid, replay)
        gate = Linear((self.model, 1), dtype=self.dtype, name="shared_gate")(x)
        return y + nn.sigmoid(gate) * MLP(self.model, self.shared, self.dtype, name="shared")(x), routing


class Block(qwen3_5.Block):
    """A layer."""

    config: Config  # pyright: ignore[reportIncompatibleVariableOverride]

    def feed_forward(self, x: Array, context: Context, layer: Layer) -> tuple[Array, Any]:
        c = self.config
        sizes = (c.num_experts, c.num_experts_per_tok, c.hidden_size, c.moe_intermediate_size)
        mixture = Mixture(*sizes, True, self.dtype, shared=c.shared_expert_intermediate_size, name="mlp")
        return mixture(x, jnp.greater(context.here.segments, 0), layer.experts)


class Model(qwen3_5.Model):
    """The decoder."""

    block = Block


def weights(config: Config, *, fused: bool = False) -> tuple[Weight, ...]:
    """Every tensor of the checkpoint, under both names; `fused`: one tensor holds all experts of a layer."""

    def rows(_: Settings, kind: str) -> Rows:
        shared = mlp_rows("mlp/shared", "mlp.shared_expert", "fs")
        gate = ("mlp/shared_gate/kernel", "mlp.shared_expert_gate.weight", "1 d -> d 1")
        return mixer_rows(config, kind) + expert_rows(fused=fused) + shared + [gate]

    return decoder_table(config, rows)
