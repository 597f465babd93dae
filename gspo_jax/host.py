"""Settings of the process that make it faster without changing a bit of what it computes. Called by commands, not at import."""

import ctypes
import sys
from contextlib import suppress

import jax

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8


def use_first_gpus(count: int) -> None:
    """JAX in this process sees the first `count` NVIDIA GPUs only; 0: all. Before JAX is first used: it takes what it sees."""
    if count:
        jax.config.update("jax_cuda_visible_devices", ",".join(map(str, range(count))))


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
