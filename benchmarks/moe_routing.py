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
from gspo_jax.policy import Policy, describe_policy, logprobs_of, serving_params
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
    """Token ids and log-probabilities `[b n]`, and experts `[b t l k]` of every token but the last, by the sampler's programs."""
    params, (rows, width) = serving_params(params, policy.dtype), prompts.shape
    ones, none = jnp.ones(rows), jnp.zeros(rows, jnp.int32)
    draws = sampling.Draws(jax.random.split(key, rows), none, ones, ones, none, jnp.full((rows, 8), CONFIG["vocab_size"]))
    slots = sampling.prefill(policy, params, jnp.pad(prompts, ((0, 0), (0, LENGTH))), jnp.full(rows, width))
    first = slots.experts[:, :, :width]

    def body(slots: sampling.Slots, i: Array) -> tuple[sampling.Slots, Any]:
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


def choices(policy: Policy, params: Params, batch: Batch) -> Array:
    """What today's routers choose for every token of a batch: `[m u r t l k]`."""

    def micro(_: None, part: Batch) -> tuple[None, Array]:
        output = policy.model.apply({"params": params}, part.tokens, Spots(part.positions, part.segment_ids, part.prefix_ids))
        return None, jnp.moveaxis(output.routing.choices, 0, 2)

    return jax.lax.scan(lambda _, m: jax.lax.scan(micro, None, m), None, batch)[1]


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


def compiled(policy: Policy, variety: str, replay: str, rate: float) -> Trial:
    algorithm = Algorithm(variety=variety, routing_replay=replay, **VARIETIES[variety])
    objective = build_objective(algorithm, LENGTH)
    optimizer = optax.adamw(rate, 0.9, 0.99, weight_decay=0.0)
    learn = learner(logprobs_of(policy), objective.loss, optimizer, prepare=objective.prepare)
    return Trial(algorithm, jax.jit(learn.init), jax.jit(learn.update))


def run(policy: Policy, trial: Trial, draw: Any, route: Any, seed: int, steps: int) -> list[dict[str, float]]:
    """One run: what was measured at every step."""
    state, history = trial.init(initial(policy, seed)), []
    layout = Packing(PROMPT + LENGTH, DIGITS * MEMBERS // MINIBATCHES, "padded")
    for step in range(steps):
        groups = play(draw, state.params, step, seed)
        batch = pack(groups, signal(trial.algorithm, groups, LENGTH).advantages, layout.rows, layout)
        recorded = np.asarray(batch.experts)
        if trial.algorithm.routing_replay == "off":
            batch = batch._replace(experts=None)
        after_one, _ = trial.update(state, alone(batch))
        after, metrics = trial.update(state, batch)
        bare = batch._replace(experts=None)
        old, one, new = (np.where(recorded < 0, -1, route(s.params, bare)) for s in (state, after_one, after))
        found = {
            "reward": np.mean([t.reward for group in groups for t in group.trajectories]),
            "one": changed(old, one),
            "update": changed(old, new),
            "engines": changed(recorded, old),
        }
        history.append(found | {name: float(x) for name, x in metrics.items()})
        state = after
    return history
