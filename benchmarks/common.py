"""What the benchmarks share: the model, this machine's matmul peak, and the FLOPs of a token."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

from gspo_jax.host import keep_freed_memory
from gspo_jax.policy import Policy, load_policy
from gspo_jax.types import Params

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def load(dtype: str) -> tuple[Policy, Params]:
    """The quickstart's model, as its configuration would load it."""
    keep_freed_memory()
    return load_policy(MODEL, compute_dtype=dtype)


def seconds(run: Callable[[], Any], repeats: int) -> float:
    """Median seconds of `run`, after one call that is not counted."""
    jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return median(times)


def matmul_peak(dtype: str) -> float:
    """GFLOP/s of one 2048^3 matrix product here and now: the best this machine does."""
    a = jnp.ones((2048, 2048), jnp.dtype(dtype))
    product = jax.jit(lambda a: a @ a)
    return 2 * 2048**3 / 1e9 / min(seconds(lambda: product(a), 1) for _ in range(7))


def layer_flops(policy: Policy) -> float:
    """Multiply-adds x 2 of the layers' weights, per token (attention scores left out)."""
    s = policy.config.sizes()
    attention = s["d"] * s["h"] * (2 * s["n"] + 2 * s["k"])
    return 2.0 * s["l"] * (attention + 3 * s["d"] * s["f"])


def head_flops(policy: Policy) -> float:
    """The same for the output matrix, per token whose logits are needed."""
    return 2.0 * policy.config.vocab_size * policy.config.hidden_size


def report(name: str, tokens: float, took: float, flops: float, peak: float) -> None:
    """One line: seconds, tokens/s, GFLOP/s, share of the matmul peak."""
    rate = flops / 1e9 / took
    print(
        f"{name:28s} {took:8.3f} s  {tokens / took:8.0f} tok/s  {rate:6.0f} GFLOP/s  {100 * rate / peak:4.0f} % of matmul peak"
    )
