"""Whether anything here can be compiled for NVIDIA GPUs."""

from functools import cache
from importlib.util import find_spec

PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
"""What JAX needs for that, with a GPU or without."""


@cache
def installed() -> bool:
    """Whether JAX can compile for CUDA: one of its plugins is installed."""
    return any(find_spec(name) for name in PLUGINS)
