"""Qwen2 and Qwen2.5: Llama with biases on query, key and value, and a sliding window on the upper layers if asked for."""

from typing import ClassVar

from gspo_jax.models import decoder
from gspo_jax.models.decoder import init_cache
from gspo_jax.models.settings import Settings
from gspo_jax.models.tables import Rows, attention_rows, decoder_table, mlp_rows, norm_rows
from serving_bridge.convert import Weight

__all__ = ["Config", "Model", "init_cache", "weights"]


class Config(Settings):
    """Qwen2's config.json."""

    layer_names: ClassVar[tuple[str, ...]] = ("full_attention", "sliding_attention")

    max_window_layers: int = 28

    @property
    def biases(self) -> tuple[bool, bool]:
        return True, False

    @property
    def sliding(self) -> tuple[bool, ...]:
        if not self.use_sliding_window or self.sliding_window is None:
            return (False,) * self.num_hidden_layers
        if self.layer_types is not None:
            return tuple(kind == "sliding_attention" for kind in self.layer_types)
        return tuple(i >= self.max_window_layers for i in range(self.num_hidden_layers))


Model = decoder.Decoder


def weights(config: Config) -> tuple[Weight, ...]:
    """Every tensor of the checkpoint, under both names."""

    def rows(_: Settings, kind: str) -> Rows:
        return norm_rows() + attention_rows(config) + mlp_rows()

    return decoder_table(config, rows)
