"""GSPO against GRPO on a tiny mixture of experts, with and without routing replay: `python benchmarks/moe_routing.py`.

The model is trained from random weights, so there is nothing to download. What is printed: how many experts an update changes,
how far sampler and trainer disagree, and what was learned.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from gspo_jax import sampling
from gspo_jax.batch import Packing, pack
from gspo_jax.learner import learner
from gspo_jax.models.layers import Spots
from gspo_jax.objective import build_objective
from gspo_jax.policy import Policy, describe_policy, logprobs_of, score, serving_params
from gspo_jax.sections import Algorithm
from gspo_jax.signal import signal
from gspo_jax.types import Batch, Params, TrainState
from rollout.types import Group, Problem, Trajectory, Turn

CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 16,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
VARIETIES = {"gspo": {"eps_low": 3e-3, "eps_high": 4e-3}, "grpo": {}}
"""Constants: GSPO's band is that of configs/quickstart.toml, since completions are short; GRPO's are the defaults."""
DIGITS, MEMBERS, LENGTH, MINIBATCHES, EQUALS = 4, 16, 24, 4, 10
PROMPT = 2
LAST = 5
"""Steps whose mean reward is called final."""


def tiny_policy(dtype: str) -> Policy:
    """The model's description; its weights are `initial`'s."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        return describe_policy(Path(folder), compute_dtype=dtype, remat="none")


def initial(policy: Policy, seed: int) -> Params:
    """Random float32 weights: kernels such that activations keep their size, so router logits have a spread of about 1."""
    one = jnp.ones((1, 1), jnp.int32)
    shapes = jax.eval_shape(policy.model.init, jax.random.key(0), one, Spots(0 * one, one))["params"]
    rng = np.random.default_rng(seed)

    def leaf(path: Any, x: Any) -> Array:
        name = jax.tree_util.keystr(path)
        if "scale" in name:
            return jnp.ones(x.shape)
        fan_in = CONFIG["moe_intermediate_size"] if "down" in name else CONFIG["hidden_size"]
        spread = 0.1 if "embedding" in name or "head" in name else fan_in**-0.5
        return jnp.asarray(rng.normal(0, spread, x.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(leaf, shapes)


def sample(policy: Policy, params: Params, prompts: Array, key: Array) -> tuple[Array, Array, Array]:
    """Ids and log-probabilities `[b n]`, and experts `[b t l k]` of all tokens but the last (-1), by the sampler's programs."""
    params, (rows, width) = serving_params(params, policy.dtype), prompts.shape
    ones, none = jnp.ones(rows), jnp.zeros(rows, jnp.int32)
    draws = sampling.Draws(jax.random.split(key, rows), none, ones, ones, none, jnp.full((rows, 8), CONFIG["vocab_size"]))
    slots: Any = sampling.prefill(policy, params, jnp.pad(prompts, ((0, 0), (0, LENGTH))), jnp.full(rows, width))
    first = slots.experts[:, :, :width]

    def body(slots: Any, i: Array) -> tuple[Any, Any]:
        token, logprob = sampling.draw(slots.logits, draws._replace(drawn=none + i))
        slots = sampling.decode(policy, params, slots, token, none + width + i)
        return slots._replace(experts=None), (token, logprob, slots.experts[:, :, 0])

    _, (ids, logprobs, chosen) = jax.lax.scan(body, slots._replace(experts=None), jnp.arange(LENGTH))
    experts = jnp.concatenate([jnp.moveaxis(first, 0, 2), jnp.moveaxis(chosen, (0, 1), (1, 2))], 1)
    return ids.T, logprobs.T, experts.at[:, -1].set(-1)


def play(draw: Callable[..., Any], params: Params, step: int, seed: int) -> list[Group]:
    """The game: after `d=` count on, modulo the number of digits. Reward: the fraction of right tokens."""
    digits = np.repeat(np.arange(DIGITS), MEMBERS)
    prompts = np.stack([digits, np.full_like(digits, EQUALS)], 1)
    ids, logprobs, experts = jax.device_get(draw(params, prompts, jax.random.fold_in(jax.random.key(seed), step)))
    right = (ids == (np.concatenate([digits[:, None], ids[:, :-1]], 1) + 1) % DIGITS).mean(1)
    members = []
    for p, i, lp, e, reward in zip(prompts.tolist(), ids.tolist(), logprobs.tolist(), experts.tolist(), right, strict=True):
        chosen = tuple(tuple(map(tuple, token)) for token in e)
        turn = Turn(tuple(p), tuple(i), tuple(lp), (step,) * LENGTH, "length", experts=chosen)
        members.append(Trajectory((turn,), float(reward), "done"))
    return [Group(Problem(d), tuple(members[d * MEMBERS : (d + 1) * MEMBERS])) for d in range(DIGITS)]


def look(policy: Policy, params: Params, batch: Batch) -> tuple[Array, Array]:
    """Experts `[m u r t l k]` of every token of a batch, and log-probabilities `[m u r t]`; `batch.experts` are replayed."""

    def micro(_: Any, part: Batch) -> tuple[None, tuple[Array, Array]]:
        spots = Spots(part.positions, part.segment_ids, part.prefix_ids)
        replay = None if part.experts is None else jnp.moveaxis(jnp.asarray(part.experts), 2, 0)
        output: Any = policy.model.apply({"params": params}, part.tokens, spots, None, replay)
        logprobs, _ = score(output.hidden, policy.head(params), part, 1.0)
        return None, (jnp.moveaxis(output.routing.choices, 0, 2), logprobs)

    return jax.lax.scan(lambda _, minibatch: jax.lax.scan(micro, None, minibatch), None, batch)[1]


class Changed(NamedTuple):
    """Shares of what differs between two choices of experts."""

    sets: float
    """Pairs of token and layer whose set of experts differs."""
    experts: float
    """Experts of the first choice that are not in the second."""


def changed(a: np.ndarray, b: np.ndarray) -> Changed:
    """Of choices `[... k]`, in any order; tokens with a -1 in either are left out."""
    kept = (a >= 0).all(-1) & (b >= 0).all(-1)
    lost = ~(a[..., :, None] == b[..., None, :]).any(-1)[kept]
    return Changed(float(lost.any(-1).mean()), float(lost.mean()))


def alone(batch: Batch) -> Batch:
    """The first minibatch with empty ones after it, which change nothing: one optimizer step by the same compiled update."""
    return jax.tree.map(lambda x: np.where(np.arange(len(x)).reshape(-1, *[1] * (x.ndim - 1)) == 0, x, np.zeros_like(x)), batch)


class Trial(NamedTuple):
    """Compiled functions of one objective with or without replay."""

    algorithm: Algorithm
    init: Callable[..., TrainState]
    update: Callable[..., Any]
    draw: Callable[..., Any]
    look: Callable[..., Any]


def trials(dtype: str, rate: float) -> dict[tuple[str, str, str], tuple[Policy, Trial]]:
    """Every objective, with replay off and on."""
    policy, found = tiny_policy(dtype), {}
    draw, see = jax.jit(partial(sample, policy)), jax.jit(partial(look, policy))
    for variety, bands in VARIETIES.items():
        for replay in ("off", "sampler"):
            algorithm = Algorithm.model_validate({"variety": variety, "routing_replay": replay, **bands})
            loss = build_objective(algorithm, LENGTH).loss
            learn = learner(logprobs_of(policy), loss, optax.adamw(rate, 0.9, 0.99, weight_decay=0.0))
            trial = Trial(algorithm, jax.jit(learn.init), jax.jit(learn.update), draw, see)
            found[dtype, variety, replay] = policy, trial
    return found


def moved(new: Array, old: Array, mask: np.ndarray) -> tuple[float, float]:
    """Mean size of the log-ratio of a token, and of a trajectory (its tokens' mean); every row is one trajectory."""
    ratio = np.where(mask, np.asarray(new) - np.asarray(old), 0)
    return float(np.abs(ratio).sum() / mask.sum()), float(np.abs(ratio.sum(-1) / mask.sum(-1)).mean())


def measure(trial: Trial, states: Sequence[TrainState], batch: Batch) -> dict[str, float]:
    """What an update did. `states`: before it, after its first optimizer step, after it; `batch` has the sampler's experts."""
    recorded, mask = np.asarray(batch.experts), np.asarray(batch.loss_mask)
    bare = [trial.look(state.params, batch._replace(experts=None)) for state in states]
    kept = [trial.look(state.params, batch) for state in (states[0], states[-1])]
    old, one, new = (np.where(recorded < 0, -1, chosen) for chosen, _ in bare)
    free, replayed = moved(bare[-1][1], bare[0][1], mask), moved(kept[-1][1], kept[0][1], mask)
    return {
        "one/experts": changed(old, one).experts,
        "update/experts": changed(old, new).experts,
        "update/sets": changed(old, new).sets,
        "engines/sets": changed(recorded, old).sets,
        "token/free": free[0],
        "token/replayed": replayed[0],
        "trajectory/free": free[1],
        "trajectory/replayed": replayed[1],
    }


def run(policy: Policy, trial: Trial, seed: int, steps: int) -> list[dict[str, float]]:
    """One run: what was measured at every step."""
    state, history = trial.init(initial(policy, seed)), []
    layout = Packing(PROMPT + LENGTH, DIGITS * MEMBERS // MINIBATCHES, "padded")
    for step in range(steps):
        groups = play(trial.draw, state.params, step, seed)
        batch = pack(groups, signal(trial.algorithm, groups, LENGTH).advantages, layout.rows, layout)
        seen = batch if trial.algorithm.routing_replay == "sampler" else batch._replace(experts=None)
        after_one, _ = trial.update(state, alone(seen))
        after, metrics = trial.update(state, seen)
        found = {"reward": float(np.mean([t.reward or 0.0 for group in groups for t in group.trajectories]))}
        found |= measure(trial, (state, after_one, after), batch)
        history.append(found | {name: float(x) for name, x in metrics.items()})
        state = after
    return history


type Histories = list[list[dict[str, float]]]
"""Measurements by seed and step."""
type Runs = dict[tuple[str, str, str], Histories]
"""Those of each `(dtype, objective, replay)`."""


def values(runs: Histories, name: str) -> np.ndarray:
    """`[seeds steps]` of one measurement."""
    return np.array([[step[name] for step in history] for history in runs])


def percent(x: np.ndarray) -> str:
    """Median and range over all steps of all seeds."""
    return f"{100 * np.median(x):.1f} ({100 * x.min():.1f} to {100 * x.max():.1f})"


def routing_table(runs: Runs) -> None:
    heads = ("dtype", "objective", "replay", "experts, one step", "experts, update", "sets, update", "sets, sampler : trainer")
    print("\n".join(("| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads))))
    for key, each in runs.items():
        changes = (percent(values(each, name)) for name in ("one/experts", "update/experts", "update/sets"))
        engines = values(each, "engines/sets")
        print(f"| {' | '.join((*key, *changes))} | {100 * engines.mean():.3f} (at most {100 * engines.max():.3f}) |")


def learning_table(runs: Runs) -> None:
    heads = ("dtype", "objective", "replay", f"reward, last {LAST} steps", "all steps", "clipped tokens, %",
             "mismatch, mean", "mismatch, max")  # fmt: skip
    print("\n".join(("| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads))))
    for key, each in runs.items():
        reward = values(each, "reward")
        final, whole = reward[:, -LAST:].mean(1), reward.mean(1)
        spread = [x.std(ddof=1) if len(x) > 1 else np.nan for x in (final, whole)]
        clipped = 100 * values(each, "policy/clip_fraction_tokens").mean()
        gap, most = values(each, "mismatch/mean").mean(), values(each, "mismatch/max").max()
        print(f"| {' | '.join(key)} | {final.mean():.3f} ± {spread[0]:.3f} | {whole.mean():.3f} ± {spread[1]:.3f} "
              f"| {clipped:.1f} | {gap:.1e} | {most:.1e} |")  # fmt: skip


def ratio_table(runs: Runs) -> None:
    heads = ("dtype", "objective", "replay", "token, free", "token, replayed", "trajectory, free", "trajectory, replayed")
    print("\n".join(("| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads))))
    for key, each in runs.items():
        names = ("token/free", "token/replayed", "trajectory/free", "trajectory/replayed")
        print(f"| {' | '.join((*key, *(f'{values(each, name).mean():.4f}' for name in names)))} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--dtypes", nargs="*", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    args = parser.parse_args()
    begin, runs = time.monotonic(), {}
    for dtype in args.dtypes:
        for key, (policy, trial) in trials(dtype, args.learning_rate).items():
            for seed in args.seeds:
                started = time.monotonic()
                runs.setdefault(key, []).append(history := run(policy, trial, seed, args.steps))
                took, reward = time.monotonic() - started, np.mean([step["reward"] for step in history[-LAST:]])
                print(f"{' '.join(key)} seed {seed}: reward {reward:.2f}, {took:.0f} s", file=sys.stderr, flush=True)
    for table in (routing_table, ratio_table, learning_table):
        table(runs)
        print()
    print(f"{(time.monotonic() - begin) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
