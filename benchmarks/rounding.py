"""How far a server in bfloat16 is from the float32 trainer, by rounding: `python benchmarks/rounding.py`.

Trains the quickstart for --steps steps with the embedded sampler and scores what was sampled at each step with the trainer's
parameters, and with these rounded to bfloat16, to nearest and stochastically. No second engine is in it: only the rounding.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax.config import load_config
from gspo_jax.host import keep_freed_memory
from gspo_jax.outgoing import rounded
from gspo_jax.policy import load_policy
from gspo_jax.scoring import score_tokens
from gspo_jax.train import train
from gspo_jax.types import Params
from gspo_jax.watcher import Watcher

CONFIG = Path("configs/quickstart.toml")


def nearest(params: Params) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(x).astype(jnp.bfloat16).astype(jnp.float32), params)


def stochastic(params: Params, version: int) -> Any:
    keys = iter(jax.random.split(jax.random.key(version, impl="rbg"), len(jax.tree.leaves(params))))
    return jax.tree.map(lambda x: rounded(jnp.asarray(x), next(keys)).astype(jnp.float32), params)


def equal_share(a: Params, b: Params) -> float:
    """Share of equal numbers in two trees."""
    pairs = list(zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
    return float(sum(int((x == y).sum()) for x, y in pairs)) / sum(x.size for x, _ in pairs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    keep_freed_memory()
    config, _ = load_config(CONFIG, [f"training.iterations_per_epoch={args.steps}", "run.checkpoint_every=1",
                                     f"run.keep_last={args.steps + 1}", "evaluation.instances=0"])  # fmt: skip
    policy, before = load_policy(config.model.base or "", compute_dtype="float32")
    first = nearest(before)
    print(
        "step  reward  nats per token from the trainer, mean (99th percentile): nearest, stochastic; words equal to the start's"
    )
    with tempfile.TemporaryDirectory() as folder:
        from gspo_jax import checkpoint

        params = before
        for step in train(config, run_dir=Path(folder) / "run", watcher=Watcher()):
            turns = [t.turns[0] for group in step.groups for t in group.trajectories][:128]
            spans = [(len(t.prompt_ids) - 1, len(t.prompt_ids) - 1 + len(t.completion_ids)) for t in turns]
            rows = np.zeros((len(turns), config.serving.context_length), np.int32)
            for row, turn in zip(rows, turns, strict=True):
                row[: len(turn.prompt_ids) + len(turn.completion_ids)] = [*turn.prompt_ids, *turn.completion_ids]
            exact, near, random = (
                score_tokens(policy, p, rows) for p in (params, nearest(params), stochastic(params, step.step))
            )
            gaps = [
                np.concatenate([np.abs(x - y)[a:b] for x, y, (a, b) in zip(exact, other, spans, strict=True)])
                for other in (near, random)
            ]
            said = ", ".join(f"{gap.mean():.4f} ({np.quantile(gap, 0.99):.3f})" for gap in gaps)
            share = equal_share(nearest(params), first)
            print(f"{step.step:4d}  {step.metrics['reward/mean']:6.3f}  {said}; {100 * share:.1f} %", flush=True)
            params = checkpoint.restore_params(Path(folder) / "run" / "checkpoints", step.step + 1, before)
    return 0


if __name__ == "__main__":
    sys.exit(main())
