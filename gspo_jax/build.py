"""From a config to functions: the loss, the optimizer, the learner, the batch. What training and replay share."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from gspo_jax import adapters
from gspo_jax.batch import Packing, pack
from gspo_jax.config import ConfigError, row_length
from gspo_jax.config_report import minibatch_size, minibatches, total_steps
from gspo_jax.digest import batch_digest
from gspo_jax.kl import ESTIMATORS, k3
from gspo_jax.learner import learner, score_batch
from gspo_jax.objective import build_objective
from gspo_jax.policy import Policy, logprobs_of
from gspo_jax.reference import Reference, load_reference
from gspo_jax.sections import Config
from gspo_jax.serving_checks import serving_problems
from gspo_jax.signal import Penalties, Signal, numbered, signal
from gspo_jax.start import Start
from gspo_jax.types import Batch, Metrics, Params, TrainState
from rollout.types import Group


class Prepared(NamedTuple):
    """What a step learns from."""

    batch: Batch
    """In its place on the devices."""
    signal: Signal
    digest: str
    """Of the batch on the host, before anything is computed of it."""
    metrics: dict[str, float | None]
    """What was measured on the way."""


class Trainer(NamedTuple):
    """What turns consumed groups into a step: training and `replay` share it, so they compute the same bits."""

    init: Callable[[Params], TrainState]
    """Parameters in their places to a fresh state in its own."""
    like: Callable[[Params], TrainState]
    """The same without arrays: shapes, types and places, to restore into."""
    compiled: Callable[[TrainState], Callable[..., tuple[TrainState, Metrics]]]
    """`Learner.update` as it is run on states in the places of this one: compiled, donating them, leaving new ones there."""
    batch: Callable[[Sequence[Group], Params], Prepared]
    """Groups and the parameters before the step to the batch of the step."""
    frozen: Params | None
    """Weights that an update computes with and does not train, in their places."""
    score: Callable[[Params, Batch], Array]
    """Whole parameters (`Start.whole`) and a batch in its place to log-probabilities `[m u r t]`, compiled."""


def check_capabilities(config: Config) -> None:
    """ConfigError for what a valid config may ask and this version cannot do."""
    if problems := list(serving_problems(config)):
        raise ConfigError("config", problems)


def build_trainer(config: Config, start: Start, load: Callable[[Config, Start], Reference | None] = load_reference) -> Trainer:
    """The learner and the batches a config describes. `load` makes the reference of a KL.

    Of a start whose arrays are shapes alone, `compiled` and `score` can be lowered; `load` must then return None.
    """
    check_routing(config, start.policy)
    algorithm, layout = config.algorithm, start.layout
    objective = build_objective(algorithm, config.policy.max_tokens * config.rollout.max_turns)
    logprobs = logprobs_of(start.policy, temperature=config.policy.temperature, layout=layout)
    attach = partial(adapters.attach, start.adapter)
    learn = learner(
        logprobs,
        objective.loss,
        build_optimizer(config),
        max_grad_norm=config.optimizer.max_grad_norm,
        prepare=objective.prepare,
        attach=attach,
    )
    score = jax.jit(lambda params, batch: score_batch(logprobs, params, batch))
    reference = load(config, start)
    packing = packing_of(config, start, reference)

    def batch(groups: Sequence[Group], params: Params) -> Prepared:
        penalties, metrics = None, {}
        if reference is not None and algorithm.kl_in == "reward":
            whole, second = attach(params, start.frozen), reference.score
            penalties, mean = _penalties(config, groups, lambda b: (score(whole, layout.batch(b)), second(b)), packing)
            metrics["policy/kl_reference"] = mean
        found = signal(algorithm, groups, config.policy.max_tokens, penalties)
        packed = pack(groups, found.advantages, minibatch_size(config), packing)
        placed = layout.batch(packed)
        if objective.reference and reference is not None:
            placed = placed._replace(reference_logprobs=reference.score(packed))
        return Prepared(placed, found, batch_digest(packed), metrics)

    def init(params: Params) -> TrainState:
        shapes = jax.eval_shape(learn.init, params)
        return jax.jit(learn.init, out_shardings=layout.shardings(shapes))(params)

    def like(params: Params) -> TrainState:
        shapes = jax.eval_shape(learn.init, params)
        places = layout.shardings(shapes)
        if places is None:
            return shapes
        return jax.tree.map(lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to), shapes, places)

    def compiled(state: TrainState) -> Callable[..., tuple[TrainState, Metrics]]:
        places = layout.shardings(state)
        return jax.jit(learn.update, donate_argnums=0, out_shardings=None if places is None else (places, None))

    return Trainer(init, like, compiled, batch, start.frozen, score)


def packing_of(config: Config, start: Start, reference: Reference | None = None) -> Packing:
    """How batches are packed: rows that the mesh divides, those of a reference too, and a length that it divides."""
    shapes = [start.layout.shape, *([] if reference is None else [reference.layout.shape])]
    multiple, parts = math.lcm(*(shape.rows for shape in shapes)), math.lcm(*(shape.sequence for shape in shapes))
    rows, length = config.training.rows_per_microbatch, row_length(config)
    return Packing(_up(length, parts), _up(rows, multiple), packing_mode(config, start.policy), multiple)


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def check_routing(config: Config, policy: Policy) -> None:
    """ConfigError when expert choices are to be replayed and the model has no experts."""
    if config.algorithm.routing_replay != "off" and not any(map(policy.config.routes, policy.config.kinds)):
        raise ConfigError("config", [
            f'algorithm.routing_replay: "{config.algorithm.routing_replay}" needs a mixture of experts, and '
            f'{policy.architecture} in {policy.folder} has no layer with experts; use routing_replay = "off"'
        ])  # fmt: skip


def packing_mode(config: Config, policy: Policy) -> str:
    """How rows are laid out for this model: `auto` is shared_prefix where that can be. ConfigError where it cannot."""
    asked = config.training.packing
    if not policy.config.recurrent:
        return "shared_prefix" if asked == "auto" else asked
    if asked == "shared_prefix":
        raise ConfigError("config", [
            f'training.packing: "shared_prefix" lays a prompt down once for all its completions, which the linear attention of '
            f'{policy.architecture} cannot branch from; use packing = "packed", or "auto"'
        ])  # fmt: skip
    return "packed" if asked == "auto" else asked


def _penalties(
    config: Config, groups: Sequence[Group], score: Callable[[Batch], tuple[Array, Array]], packing: Packing
) -> tuple[Penalties, float | None]:
    """`kl_beta` times the KL estimate at every sampled token, by group and member; and the mean of k3.

    The tokens are found again in the packed arrays by the number each carries in its version's place.
    """
    algorithm, marked = config.algorithm, numbered(groups)
    batch = pack(marked, [[0.0] * len(group.trajectories) for group in groups], minibatch_size(config), packing)
    policy, reference = score(batch)
    difference, trained = jnp.asarray(policy) - jnp.asarray(reference), np.asarray(batch.loss_mask)
    values = algorithm.kl_beta * np.asarray(ESTIMATORS[algorithm.kl_estimator](difference), np.float64)
    flat = np.zeros(
        1 + max((n for group in marked for t in group.trajectories for turn in t.turns for n in turn.versions), default=0)
    )
    flat[batch.versions[trained]] = values[trained]
    penalties = [[[flat[n] for turn in t.turns for n in turn.versions] for t in group.trajectories] for group in marked]
    return penalties, float(np.asarray(k3(difference))[trained].mean()) if trained.any() else None


def build_optimizer(config: Config) -> optax.GradientTransformation:
    """AdamW with the config's learning-rate schedule over optimizer steps."""
    optimizer, peak = config.optimizer, config.training.learning_rate
    steps, warmup = total_steps(config) * minibatches(config), optimizer.warmup_steps
    after = {
        "constant": lambda: optax.constant_schedule(peak),
        "linear": lambda: optax.linear_schedule(peak, 0.0, max(steps - warmup, 1)),
        "cosine": lambda: optax.cosine_decay_schedule(peak, max(steps - warmup, 1)),
    }[optimizer.schedule]()
    schedule = optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup]) if warmup else after
    return optax.adamw(schedule, optimizer.beta1, optimizer.beta2, optimizer.eps, weight_decay=optimizer.weight_decay)
