"""Tokens per second of the embedded sampler on SmolLM2-135M. `python benchmarks/sample.py`."""

import argparse
import asyncio
import time

import jax
import numpy as np
from common import head_flops, layer_flops, load, matmul_peak, report, seconds

from gspo_jax import sampling
from gspo_jax.policy import Policy
from gspo_jax.sampler import PREFILL_ROWS, Sampler
from gspo_jax.types import Params
from rollout.types import SamplingParams

PROMPT = 29


def programs(policy: Policy, params: Params, slots: int, context: int, peak: float, repeats: int) -> None:
    """The compiled pieces alone: one prefill, one decode step, one draw."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, policy.config.vocab_size, (PREFILL_ROWS, 32)).astype(np.int32)
    prefill = jax.jit(lambda p, t, n: sampling.prefill(policy, p, t, n))
    took = seconds(lambda: prefill(params, tokens, np.full(PREFILL_ROWS, PROMPT, np.int32)), repeats)
    flops = layer_flops(policy) * tokens.size + head_flops(policy) * PREFILL_ROWS
    report(f"prefill {PREFILL_ROWS} x 32", tokens.size, took, flops, peak)
    decode = jax.jit(lambda p, s, t, n: sampling.decode(policy, p, s, t, n), donate_argnums=1)
    state = sampling.empty_slots(policy, slots, context)

    def step():
        nonlocal state
        state = decode(params, state, np.zeros(slots, np.int32), np.full(slots, PROMPT, np.int32))
        return state.logits

    took = seconds(step, repeats)
    report(f"decode step, {slots} slots", slots, took, (layer_flops(policy) + head_flops(policy)) * slots, peak)
    zeros, ones = np.zeros(slots, np.int32), np.ones(slots, np.float32)
    banned = np.full((slots, 8), policy.config.vocab_size, np.int32)
    draws = sampling.Draws(jax.random.split(jax.random.key(0), slots), zeros, ones, ones, zeros, banned)
    draw = jax.jit(sampling.draw)
    print(f"{'draw':28s} {seconds(lambda: draw(state.logits, draws), repeats):8.3f} s")


async def engine(policy: Policy, params: Params, slots: int, context: int, new_tokens: int) -> tuple[int, float]:
    """The whole engine on `slots` requests in groups of eight, each of exactly `new_tokens` tokens: tokens and seconds."""
    sampler = Sampler(policy, slots=slots, context_length=context, seed=0)
    await sampler.publish(0, params)
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(0, policy.config.vocab_size, PROMPT).tolist()) for _ in range(slots // 8)]

    async def all_of(n: int, branch: int) -> None:
        await asyncio.gather(*(sampler.sample(prompts[i // 8], SamplingParams(n, key=(branch, i))) for i in range(slots)))

    await all_of(2, 0)
    start = time.perf_counter()
    await all_of(new_tokens, 1)
    took = time.perf_counter() - start
    await sampler.aclose()
    return slots * new_tokens, took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    policy, params = load(args.dtype)
    peak = matmul_peak(args.dtype)
    print(f"{args.dtype}, matmul peak {peak:.0f} GFLOP/s")
    programs(policy, params, args.slots, args.context, peak, args.repeats)
    tokens, took = asyncio.run(engine(policy, params, args.slots, args.context, args.new_tokens))
    prefills = -(-args.slots // 8 // PREFILL_ROWS) * PREFILL_ROWS * 32
    flops = (layer_flops(policy) + head_flops(policy)) * tokens + layer_flops(policy) * prefills
    report(f"engine, {args.slots} requests", tokens, took, flops, peak)


if __name__ == "__main__":
    main()
