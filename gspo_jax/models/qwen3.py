"""Qwen3: Qwen2 without its biases, and RMS norms on each query and key head."""

from typing import ClassVar

from gspo_jax.models import qwen2
from gspo_jax.models.qwen2 import Model, init_cache, weights

__all__ = ["Config", "Model", "init_cache", "weights"]


class Config(qwen2.Config):
    """Qwen3's config.json."""

    qk_norm: ClassVar[bool] = True

    @property
    def biases(self) -> tuple[bool, bool]:
        return self.attention_bias, self.attention_bias
