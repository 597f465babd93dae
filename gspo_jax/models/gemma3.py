"""Gemma 3: scaled embeddings, four norms a layer, sliding windows with a rotary embedding of their own. Text part only."""

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from gspo_jax.models import decoder
from gspo_jax.models.decoder import MLP, init_cache
from gspo_jax.models.layers import Cache, Context, Layer
from gspo_jax.models.rotary import Rope, rope
from gspo_jax.models.settings import Settings
from gspo_jax.models.tables import Rows, attention_rows, decoder_table, mlp_rows
from serving_bridge.convert import Weight

__all__ = ["Config", "Model", "init_cache", "weights"]

ASSUMED = {
    "vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True, "sliding_window": 4096,
}  # fmt: skip
"""What a key means that a config.json leaves out, as the published multimodal ones do."""

THETAS = {"full_attention": 1e6, "sliding_attention": 1e4}
PATTERN = 6
"""Every so many layers one sees everything."""


class Config(Settings):
    """Gemma 3's config.json, or the `text_config` of a multimodal one."""

    untrained: ClassVar[tuple[str, ...]] = ("*vision_tower.*", "*multi_modal_projector.*")
    activations: ClassVar[tuple[str, ...]] = ("gelu_pytorch_tanh",)
    qk_norm: ClassVar[bool] = True
    norm_offset: ClassVar[float] = 1.0
    layer_names: ClassVar[tuple[str, ...]] = ("full_attention", "sliding_attention")

    query_pre_attn_scalar: float

    @classmethod
    def spell(cls, raw: dict[str, Any]) -> dict[str, Any]:
        raw = ASSUMED | raw
        raw["hidden_act"] = raw.pop("hidden_activation")
        theta = {"full_attention": raw.pop("rope_theta", None), "sliding_attention": raw.pop("rope_local_base_freq", None)}
        scaling, given = raw.pop("rope_scaling", None), raw.pop("rope_parameters", None) or {}
        if given and not set(given) <= set(THETAS):
            raise ValueError(f"rope_parameters={given} must have the keys {', '.join(THETAS)}")
        raw["rope_parameters"] = {
            kind: {"rope_theta": theta[kind] or usual} | dict(given.get(kind) or {}) for kind, usual in THETAS.items()
        }
        raw["rope_parameters"]["full_attention"] |= scaling or {}
        every, hidden = raw.pop("sliding_window_pattern", PATTERN), raw.get("_sliding_window_pattern")
        if "layer_types" not in raw:
            if hidden not in (None, every):
                raise ValueError(
                    f"_sliding_window_pattern={hidden} is not supported without layer_types or sliding_window_pattern"
                )
            layers = range(1, raw["num_hidden_layers"] + 1)
            raw["layer_types"] = tuple("sliding_attention" if i % every else "full_attention" for i in layers)
        return raw

    def check(self) -> None:
        self.rope()
        self.local_rope()

    def rope(self) -> Rope:
        return rope(self.head_dim, self._stretch("full_attention"))

    def local_rope(self) -> Rope:
        """The rotary embedding of layers with a sliding window."""
        return rope(self.head_dim, self._stretch("sliding_attention"))

    def _stretch(self, kind: str) -> Mapping[str, Any]:
        return {"original_max_position_embeddings": self.max_position_embeddings} | self.rope_parameters[kind]

    @property
    def sliding(self) -> tuple[bool, ...]:
        return tuple(kind == "sliding_attention" for kind in self.layer_types or ())

    @property
    def attention_scale(self) -> float:
        return self.query_pre_attn_scalar**-0.5

    @property
    def embedding_scale(self) -> float:
        return self.hidden_size**0.5


class Attention(decoder.Attention):
    """Attention whose layers with a window also rotate by other frequencies."""

    config: Config  # pyright: ignore[reportIncompatibleVariableOverride]

    def reach(self, context: Context, layer: Layer) -> tuple[Rope, Array]:
        _, mask = super().reach(context, layer)
        near, far = self.config.local_rope(), self.config.rope()
        slides = jnp.asarray(self.config.sliding)[layer.number]
        return Rope(*(jnp.where(slides, a, b) for a, b in zip(near, far, strict=True))), mask


class Block(decoder.Block):
    """A layer that norms what its halves put out, too."""

    config: Config  # pyright: ignore[reportIncompatibleVariableOverride]

    def mix(self, x: Array, context: Context, layer: Layer, cache: Cache | None) -> tuple[Array, Cache | None]:
        y, cache = Attention(self.config, self.dtype, name="attention")(x, context, layer, cache)
        return self.norm("attention_out_norm", y), cache

    def feed_forward(self, x: Array, context: Context, layer: Layer) -> tuple[Array, Any]:
        c, gelu = self.config, partial(nn.gelu, approximate=True)
        y = MLP(c.hidden_size, c.intermediate_size, self.dtype, act=gelu, name="mlp")(x)
        return self.norm("mlp_out_norm", y), None


class Model(decoder.Decoder):
    """The decoder."""

    block = Block


def weights(config: Config) -> tuple[Weight, ...]:
    """Every tensor of the text part, under both names."""
    norms = {
        "attention_norm": "input_layernorm", "attention_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm", "mlp_out_norm": "post_feedforward_layernorm",
    }  # fmt: skip

    def rows(_: Settings, kind: str) -> Rows:
        named: Rows = [(f"{path}/scale", f"{name}.weight", "d -> d") for path, name in norms.items()]
        return named + attention_rows(config) + mlp_rows()

    return decoder_table(config, rows)
