"""Policy objectives: pure functions of (log-probabilities, batch). They know nothing about models, text or devices.

Every function returns the loss of one micro-batch as a sum and its count, and statistics. `x_it = logprobs - proximal` is the
token log-ratio, `n_i` the trained tokens of trajectory i, `log s_i = (1/n_i) sum_t x_it` the sequence log-ratio, `A` the
advantage, `w` the detached factor `batch.weights` (1 when None), `sg` stop_gradient. Inputs are selected by the mask before
any arithmetic; clipping is decided on log-ratios, so neither a tie nor an overflow of `exp` reaches the gradient: beyond
e^10 a ratio keeps its value at e^10 and has no gradient.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from gspo_jax.aggregation import Aggregate, budget_mean, pool_mean, row_mean, row_sum, spread, token_mean
from gspo_jax.ratios import (
    MAX_LOG_RATIO,
    advantages_of,
    clip_objective,
    ratio_of,
    sequence_stats,
    sequences,
    token_log_ratio,
    token_stats,
    weights_of,
)
from gspo_jax.types import Batch, Mean, Stats

type Loss = Callable[[Float[Array, "r t"], Batch], tuple[Mean, Stats]]

# Sequence ratio


def gspo(
    logprobs: Float[Array, "r t"],
    batch: Batch,
    *,
    eps_low: float = 3e-4,
    eps_high: float = 4e-4,
    max_log_ratio: float = MAX_LOG_RATIO,
) -> tuple[Mean, Stats]:
    """GSPO, arXiv 2507.18071 eq. 5 and 7. One advantage per trajectory.

        loss = -(1/N) sum_i A_i (min(s_i, 1 + eps_high) if A_i >= 0 else max(s_i, 1 - eps_low)) (1/n_i) sum_t w_it

    A trajectory without trained tokens counts in N and contributes 0. `max_log_ratio` bounds `log s` where eq. 5 has no bound
    (A_i < 0, s_i above the band); inf is the equation to the letter.
    """
    log_s, advantage, length = sequences(logprobs, batch)
    objective, low, high = clip_objective(log_s, advantage, eps_low, eps_high, max_log_ratio)
    weight = pool_mean(weights_of(batch), batch)
    total = -jnp.sum(jnp.where(length > 0, objective * weight, 0))
    return Mean(total, jnp.asarray(batch.trajectories, total.dtype)), sequence_stats(log_s, length, low, high)


def gspo_token(
    logprobs: Float[Array, "r t"],
    batch: Batch,
    *,
    eps_low: float = 3e-4,
    eps_high: float = 4e-4,
    aggregate: Aggregate = row_mean,
) -> tuple[Mean, Stats]:
    """GSPO-token, arXiv 2507.18071 eq. 13 and 14: the sequence ratio with an advantage per token.

        s_it = sg(s_i) exp(x_it - sg(x_it)),   loss = -(1/N) sum_i (1/n_i) sum_t w_it A_it clip by the sign of A_it

    Equal to `gspo` in value and gradient when the advantages of a trajectory are equal. With `token_mean` or a budget it is
    not GSPO any more: trajectories then weigh as much as they are long.
    """
    trained = jnp.asarray(batch.loss_mask)
    log_s, _, length = sequences(logprobs, batch)
    through = jnp.where(trained, logprobs, 0)
    through = through - jax.lax.stop_gradient(through)
    objective, low, high = clip_objective(
        through + spread(jax.lax.stop_gradient(log_s), batch), advantages_of(batch), eps_low, eps_high
    )
    shares = (pool_mean(clipped.astype(log_s.dtype), batch) for clipped in (low, high))
    return aggregate(-objective * weights_of(batch), batch), sequence_stats(log_s, length, *shares)


def luspo(
    logprobs: Float[Array, "r t"], batch: Batch, *, eps_low: float = 2e-3, eps_high: float = 2.5e-3
) -> tuple[Mean, Stats]:
    """LUSPO, arXiv 2602.05261: GSPO's objective of a trajectory times its length.

    loss = -(1/N) sum_i sum_t w_it A_i (min(s_i, 1 + eps_high) if A_i >= 0 else max(s_i, 1 - eps_low))
    """
    log_s, advantage, length = sequences(logprobs, batch)
    objective, low, high = clip_objective(log_s, advantage, eps_low, eps_high)
    return row_sum(-spread(objective, batch) * weights_of(batch), batch), sequence_stats(log_s, length, low, high)


def gmpo(logprobs: Float[Array, "r t"], batch: Batch, *, eps_low: float = 0.4, eps_high: float = 0.4) -> tuple[Mean, Stats]:
    """GMPO, arXiv 2507.20673: a geometric mean of token ratios, each clipped in log space on its outward side.

        c_it = min(x_it, eps_high) if A_i >= 0 else max(x_it, -eps_low)
        loss = -(1/N) sum_i A_i exp((1/n_i) sum_t c_it) (1/n_i) sum_t w_it

    `eps_low`, `eps_high` are log-ratios.
    """
    x, token_advantage = token_log_ratio(logprobs, batch), advantages_of(batch)
    _, advantage, length = sequences(logprobs, batch)
    low, high = (x < -eps_low) & (token_advantage < 0), (x > eps_high) & (token_advantage > 0)
    clipped = jnp.where(token_advantage >= 0, jnp.where(x > eps_high, eps_high, x), jnp.where(x < -eps_low, -eps_low, x))
    mean = pool_mean(clipped, batch)
    weight = pool_mean(weights_of(batch), batch)
    total = -jnp.sum(jnp.where(length > 0, advantage * ratio_of(mean) * weight, 0))
    return Mean(total, jnp.asarray(batch.trajectories, total.dtype)), token_stats(x, batch, low, high)


# Token ratio


def ppo(
    logprobs: Float[Array, "r t"],
    batch: Batch,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    ratio_max: float | None = None,
    aggregate: Aggregate = token_mean,
) -> tuple[Mean, Stats]:
    """PPO's clipped surrogate, arXiv 1707.06347, on token ratios r_it = exp(x_it).

        loss = -aggregate(w_it min(r_it A_it, clip(r_it, 1 - eps_low, 1 + eps_high) A_it))

    `ratio_max` bounds the ratio of a negative advantage, which nothing else does. It is the dual clip's c (arXiv 1912.09729)
    and the two-sided clip's delta (INTELLECT-2, arXiv 2505.07291): above 1 + eps_high the two are one formula.
    """
    x, advantage = token_log_ratio(logprobs, batch), advantages_of(batch)
    objective, low, high = clip_objective(x, advantage, eps_low, eps_high)
    if ratio_max is not None:
        if ratio_max <= 1 + eps_high:
            raise ValueError(f"ratio_max={ratio_max} must be above 1 + eps_high = {1 + eps_high}: it bounds the unclipped side")
        beyond = (advantage < 0) & (x > jnp.log(ratio_max))
        objective, high = jnp.where(beyond, advantage * ratio_max, objective), high | beyond
    return aggregate(-objective * weights_of(batch), batch), token_stats(x, batch, low, high)


def grpo(
    logprobs: Float[Array, "r t"],
    batch: Batch,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    ratio_max: float | None = None,
) -> tuple[Mean, Stats]:
    """GRPO, arXiv 2402.03300: `ppo` averaged within each trajectory, then over trajectories."""
    return ppo(logprobs, batch, eps_low=eps_low, eps_high=eps_high, ratio_max=ratio_max, aggregate=row_mean)


def dapo(
    logprobs: Float[Array, "r t"],
    batch: Batch,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    ratio_max: float | None = None,
) -> tuple[Mean, Stats]:
    """DAPO, arXiv 2503.14476: `ppo` with a wider upper clip, averaged over all tokens of the minibatch."""
    return ppo(logprobs, batch, eps_low=eps_low, eps_high=eps_high, ratio_max=ratio_max, aggregate=token_mean)


def dr_grpo(
    logprobs: Float[Array, "r t"],
    batch: Batch,
    *,
    budget: float,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    ratio_max: float | None = None,
) -> tuple[Mean, Stats]:
    """Dr. GRPO, arXiv 2503.20783: `ppo` summed over tokens and divided by N times a constant budget of tokens.

    Goes with advantages `r - mean`, without a standard deviation (`advantages.group_mean`).
    """

    def aggregate(values: Float[Array, "r t"], batch: Batch) -> Mean:
        return budget_mean(values, batch, budget=budget)

    return ppo(logprobs, batch, eps_low=eps_low, eps_high=eps_high, ratio_max=ratio_max, aggregate=aggregate)


def cispo(
    logprobs: Float[Array, "r t"],
    batch: Batch,
    *,
    cap: float = 5.0,
    floor: float = 0.0,
    aggregate: Aggregate = token_mean,
) -> tuple[Mean, Stats]:
    """CISPO, arXiv 2506.13585: the ratio is a clipped, detached weight; every token keeps a gradient.

        loss = -aggregate(w_it sg(clip(r_it, floor, cap)) A_it logprobs_it)

    `cap` and `floor` are ratios, not distances from 1. The paper runs without the floor; 5 is the cap of arXiv 2510.13786.
    """
    x = token_log_ratio(logprobs, batch)
    weight = jax.lax.stop_gradient(jnp.clip(ratio_of(x), floor, cap))
    objective = weight * advantages_of(batch) * jnp.where(batch.loss_mask, logprobs, 0)
    low, high = x < jnp.log(floor) if floor > 0 else jnp.zeros_like(x, bool), x > jnp.log(cap)
    return aggregate(-objective * weights_of(batch), batch), token_stats(x, batch, low, high)


def sapo(
    logprobs: Float[Array, "r t"],
    batch: Batch,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
    aggregate: Aggregate = row_mean,
) -> tuple[Mean, Stats]:
    """SAPO, arXiv 2511.20347: a soft gate in place of the clip.

    loss = -aggregate(w_it A_it (4/tau) sigmoid(tau (r_it - 1))),  tau = tau_positive if A_it > 0 else tau_negative
    """
    x, advantage = token_log_ratio(logprobs, batch), advantages_of(batch)
    tau = jnp.where(advantage > 0, tau_positive, tau_negative)
    gate = 4 / tau * jax.nn.sigmoid(tau * (ratio_of(x) - 1))
    never = jnp.zeros_like(x, bool)
    return aggregate(-gate * advantage * weights_of(batch), batch), token_stats(x, batch, never, never)


def minirl(
    logprobs: Float[Array, "r t"],
    batch: Batch,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.27,
    aggregate: Aggregate = row_sum,
) -> tuple[Mean, Stats]:
    """MiniRL, arXiv 2512.01374: the token-level first-order approximation of the sequence objective.

        loss = -(1/N) sum_it w_it M_it sg(r_it) A_it logprobs_it,   M_it = 0 where PPO would clip, else 1

    No length normalisation, advantages `r - mean`; the paper's sampler weight is `corrections.token_truncate` with cap 5.
    """
    x, advantage = token_log_ratio(logprobs, batch), advantages_of(batch)
    _, low, high = clip_objective(x, advantage, eps_low, eps_high)
    weight = jax.lax.stop_gradient(jnp.where(low | high, 0, ratio_of(x)))
    objective = weight * advantage * jnp.where(batch.loss_mask, logprobs, 0)
    return aggregate(-objective * weights_of(batch), batch), token_stats(x, batch, low, high)


def reinforce(logprobs: Float[Array, "r t"], batch: Batch, *, aggregate: Aggregate = row_mean) -> tuple[Mean, Stats]:
    """The policy gradient with unit weight: `loss = -aggregate(w_it A_it logprobs_it)`. No ratio, no clip, on-policy only.

    With `row_mean` its gradient is that of `gspo` at ratio 1.
    """
    x = token_log_ratio(logprobs, batch)
    objective = advantages_of(batch) * jnp.where(batch.loss_mask, logprobs, 0)
    never = jnp.zeros_like(x, bool)
    return aggregate(-objective * weights_of(batch), batch), token_stats(x, batch, never, never)
