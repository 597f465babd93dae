"""The architectures. Adding one is a file with `Config, Model, weights, init_cache` and a line here."""

from types import ModuleType

from gspo_jax.models import gemma3, llama, qwen2, qwen3, qwen3_5, qwen3_5_moe, qwen3_moe

ARCHITECTURES: dict[str, ModuleType] = {
    "gemma3": gemma3,
    "gemma3_text": gemma3,
    "llama": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_5": qwen3_5,
    "qwen3_5_text": qwen3_5,
    "qwen3_5_moe": qwen3_5_moe,
    "qwen3_5_moe_text": qwen3_5_moe,
    "qwen3_moe": qwen3_moe,
}
"""By `model_type` of the checkpoint's config.json."""
