"""The architectures. Adding one is a file with `Config, Model, weights, init_cache` and a line here."""

from types import ModuleType

from gspo_jax.models import llama

ARCHITECTURES: dict[str, ModuleType] = {"llama": llama}
"""By `model_type` of the checkpoint's config.json."""
