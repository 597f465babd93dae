"""From a config to functions: the loss, the optimizer, the learner, the batch. What training and replay share."""

from collections.abc import Sequence

import optax

from gspo_jax import advantages as advantage_functions
from gspo_jax.batch import Packing, pack
from gspo_jax.config import ConfigError, row_length
from gspo_jax.config_report import minibatch_size, minibatches, total_steps
from gspo_jax.learner import Learner, learner
from gspo_jax.losses import gspo
from gspo_jax.policy import Policy, logprobs_of
from gspo_jax.sections import Config
from gspo_jax.types import Batch
from rollout.types import Group


def check_capabilities(config: Config) -> None:
    """ConfigError for what a valid config may ask and this version cannot do."""
    problems = []
    if config.model.trainer_mode != "full":
        problems.append(f'model.trainer_mode: "{config.model.trainer_mode}" is not available yet; set trainer_mode = "full"')
    if config.serving.engine == "vllm":
        problems.append('serving.engine: "vllm" is not available yet; set engine = "jax"')
    if problems:
        raise ConfigError("config", problems)


def build_learner(config: Config, policy: Policy) -> Learner:
    """The learner a config describes."""

    def loss(logprobs, batch):
        return gspo(logprobs, batch, eps_low=config.algorithm.eps_low, eps_high=config.algorithm.eps_high)

    logprobs = logprobs_of(policy, temperature=config.policy.temperature)
    return learner(logprobs, loss, build_optimizer(config), max_grad_norm=config.optimizer.max_grad_norm)


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


def make_batch(config: Config, groups: Sequence[Group]) -> tuple[Batch, list[list[float]]]:
    """The packed batch of a step and the advantages in it: the part of a step that `replay` shares with training."""
    function = getattr(advantage_functions, config.algorithm.advantage)
    advantages = [function([t.reward for t in group.trajectories]) for group in groups]
    packing = Packing(row_length(config), config.training.rows_per_microbatch, config.training.packing)
    return pack(groups, advantages, minibatch_size(config), packing), advantages
