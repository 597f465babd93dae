"""Settings of the process that make it faster without changing a bit of what it computes. Called by commands, not at import."""

import ctypes
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import jax
from jax._src import xla_bridge

from gspo_jax.config import ConfigError

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8


def use_first_gpus(count: int) -> None:
    """JAX in this process sees the first `count` NVIDIA GPUs only; 0: all. Before JAX is first used: it takes what it sees.

    ConfigError where it was used already and has more: it holds most of their memory, and servers there could not start.
    """
    if count and xla_bridge.backends_are_initialized():
        refuse_taken(jax.local_devices(), count)
    if count:
        jax.config.update("jax_cuda_visible_devices", ",".join(map(str, range(count))))


def refuse_taken(devices: Sequence[Any], count: int) -> None:
    """ConfigError where `devices` that JAX has taken are more than `count` GPUs."""
    taken = sum(device.platform == "gpu" for device in devices)
    if taken > count:
        raise ConfigError("config", [
            f"compute.topology: {count} GPUs are for training and its reference, but JAX was used before and has "
            f"taken {taken}; start this process with CUDA_VISIBLE_DEVICES={','.join(map(str, range(count)))}, or train first"
        ])  # fmt: skip


def keep_freed_memory() -> None:
    """Make glibc keep freed memory instead of returning it to the kernel.

    XLA's CPU client frees and allocates its temporaries at every call; getting gigabytes of fresh pages each time costs a
    fifth of an update of a small model. Does nothing where the C library is another.
    """
    if not sys.platform.startswith("linux"):
        return
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)
