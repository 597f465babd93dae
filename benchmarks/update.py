"""Seconds of one update of SmolLM2-135M on a quickstart-like rollout batch, by packing. `python benchmarks/update.py`."""

import argparse

import jax
import numpy as np
import optax
from common import head_flops, layer_flops, load, matmul_peak, report, seconds

from gspo_jax.advantages import group_std
from gspo_jax.batch import Packing, pack
from gspo_jax.learner import learner
from gspo_jax.losses import gspo
from gspo_jax.policy import Policy, logprobs_of
from gspo_jax.types import Batch, Params
from rollout.types import Group, Problem, Trajectory, Turn

GROUPS, MEMBERS, PROMPT, COMPLETION, MINIBATCH, ROW = 8, 8, 29, (10, 12), 16, 128


def rollout_batch(policy: Policy) -> list[Group]:
    """Random ids in the shape of the quickstart's later steps: prompts of 29 tokens, answers of 3 to 5."""
    rng = np.random.default_rng(0)

    def ids(n: int) -> tuple[int, ...]:
        return tuple(rng.integers(0, policy.config.vocab_size, n).tolist())

    groups = []
    for seed in range(GROUPS):
        prompt, members = ids(PROMPT), []
        for member in range(MEMBERS):
            n = int(rng.integers(COMPLETION[0], COMPLETION[1] + 1))
            members.append(Trajectory((Turn(prompt, ids(n), (-10.0,) * n, (0,) * n, "stop"),), float(member % 2), "done"))
        groups.append(Group(Problem(seed), tuple(members)))
    return groups


def update_flops(policy: Policy, batch: Batch) -> tuple[float, float]:
    """Rows' tokens that are computed, and FLOPs: forward and backward of all, forward of minibatches 2..m."""
    filled = np.any(batch.segment_ids > 0, axis=(2, 3))
    tokens = filled.sum(1) * batch.tokens.shape[2] * batch.tokens.shape[3]
    trained = batch.loss_mask.sum((1, 2, 3))
    cost = layer_flops(policy) * tokens + head_flops(policy) * trained
    return float(tokens.sum()), float(3 * cost.sum() + cost[1:].sum() + head_flops(policy) * trained.sum())


def measure(policy: Policy, params: Params, packing: Packing, peak: float, repeats: int) -> None:
    groups = rollout_batch(policy)
    advantages = [group_std([t.reward for t in group.trajectories]) for group in groups]
    batch = pack(groups, advantages, MINIBATCH, packing)
    learn = learner(logprobs_of(policy), gspo, optax.adamw(1e-6))
    update = jax.jit(learn.update, donate_argnums=0)
    state = jax.jit(learn.init)(jax.tree.map(lambda x: x + 0, params))

    def run():
        nonlocal state
        state, metrics = update(state, batch)
        return metrics

    took = seconds(run, repeats)
    real = sum(len(turn.completion_ids) + len(turn.prompt_ids) for g in groups for t in g.trajectories for turn in t.turns)
    computed, flops = update_flops(policy, batch)
    report(f"update, {packing.mode}", real, took, flops, peak)
    print(f"{'':28s} {real} tokens of prompts and completions, {computed:.0f} computed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--mode", nargs="*", default=["shared_prefix", "packed", "padded"])
    args = parser.parse_args()
    policy, params = load(args.dtype)
    peak = matmul_peak(args.dtype)
    print(f"{args.dtype}, matmul peak {peak:.0f} GFLOP/s")
    for mode in args.mode:
        length = PROMPT + COMPLETION[1] if mode == "padded" else ROW
        measure(policy, params, Packing(length, 6 if mode == "padded" else 2, mode), peak, args.repeats)


if __name__ == "__main__":
    main()
