"""The architectures. Adding one is a file with `Config, Model, weights, init_cache` and a line here."""

from types import ModuleType

from gspo_jax.models import llama, qwen2, qwen3

ARCHITECTURES: dict[str, ModuleType] = {
    "llama": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
}
"""By `model_type` of the checkpoint's config.json."""
