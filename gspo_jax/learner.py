"""The learner: `update(state, batch) -> state, metrics`, in the shape of an optax transform. No I/O, no text."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jaxtyping import Float

from gspo_jax.aggregation import lengths, pool_max, pool_mean, spread
from gspo_jax.balance import SUMS, balance
from gspo_jax.losses import Loss
from gspo_jax.policy import LogProbs
from gspo_jax.ratios import require_float32, trained_difference
from gspo_jax.types import Batch, Mean, Metrics, Params, Peak, Prepare, Stats, TrainState, merge, nothing


class Learner(NamedTuple):
    """Two pure functions."""

    init: Callable[[Params], TrainState]
    """Parameters (float32) to a fresh state."""
    update: Callable[..., tuple[TrainState, Metrics]]
    """`(state, batch, frozen=None)`. One rollout batch `[m u r t]`: m optimizer steps of u micro-batches. `frozen` are weights
    that are computed with and not trained. The caller jits it, donating the state."""


def learner(
    logprobs: LogProbs,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    *,
    max_grad_norm: float = 1.0,
    prepare: Prepare | None = None,
    attach: Callable[[Params, Params | None], Params] = lambda params, _: params,
) -> Learner:
    """A learner for any objective on token log-probabilities.

    The proximal log-probabilities (`old` of the ratio) of minibatches 2..m are computed here, before the first step; the
    first minibatch uses `stop_gradient` of its own, so its ratio is exactly 1. `prepare` needs those of the first as well:
    one more forward pass over it. Sums over micro-batches are divided once, by the count of the whole minibatch, so every
    split gives the same step. A minibatch whose loss or gradient is not finite changes nothing but `skipped`. `attach` makes
    the parameters `logprobs` wants of the trained and the frozen ones (an adapter and the model beneath it).
    """

    def init(params: Params) -> TrainState:
        step, skipped = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)  # two buffers: the state is donated
        return TrainState(step, params, optimizer.init(params), skipped)

    def update(state: TrainState, batch: Batch, frozen: Params | None = None) -> tuple[TrainState, Metrics]:
        def score(params: Params, part: Batch) -> Any:
            return logprobs(attach(params, frozen), part)

        batch = batch._replace(proximal_logprobs=_proximal(score, state.params, batch, whole=prepare is not None))
        sampled, prepared = batch, {}
        if prepare is not None:
            batch, prepared = prepare(batch)
        minibatches = batch.tokens.shape[0]
        step = partial(_minibatch, score, loss, optimizer, max_grad_norm)

        def body(carry, x):
            index, minibatch = x
            state, stats = step(carry, minibatch, index == 0)
            return state, stats

        state, (stats, extra, proximal) = jax.lax.scan(body, state, (jnp.arange(minibatches), batch))
        if prepare is None:  # else those of the first minibatch are known, and of rejected tokens too
            sampled = sampled._replace(proximal_logprobs=proximal)
        metrics = _metrics(stats, extra) | _gap(sampled, state.step) | prepared
        return state._replace(step=state.step + 1), metrics

    return Learner(init, update)


def _used(batch: Batch) -> Array:
    """Micro-batches up to the last that holds a token: the rest is padding of the compiled shape and is not computed."""
    filled = jnp.any(batch.segment_ids > 0, axis=(1, 2)) | (batch.trajectories > 0)
    return jnp.max(jnp.where(filled, jnp.arange(1, filled.size + 1), 0))


def _micro(batch: Batch, i: Array) -> Batch:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, 0, keepdims=False), batch)


def _proximal(logprobs: LogProbs, params: Params, batch: Batch, *, whole: bool) -> Float[Array, "m u r t"]:
    """Log-probabilities of minibatches 2..m under the parameters before the first step; zeros for the first unless `whole`."""
    if whole:
        return score_batch(logprobs, params, batch)
    found = score_batch(logprobs, params, jax.tree.map(lambda x: x[1:], batch))
    return jnp.concatenate([jnp.zeros((1, *found.shape[1:]), jnp.float32), found])


def score_batch(logprobs: LogProbs, params: Params, batch: Batch) -> Float[Array, "m u r t"]:
    """Log-probabilities of a whole batch, minibatch by minibatch, 0 outside `loss_mask`."""

    def minibatch(_, part: Batch):
        def body(i, out):
            found, *_ = logprobs(params, _micro(part, i))
            return jax.lax.dynamic_update_index_in_dim(out, found, i, 0)

        return None, jax.lax.fori_loop(0, _used(part), body, jnp.zeros(part.tokens.shape, jnp.float32))

    return jax.lax.scan(minibatch, None, batch)[1]


def _minibatch(
    logprobs: LogProbs,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    max_grad_norm: float,
    state: TrainState,
    batch: Batch,
    first: Array,
) -> tuple[TrainState, tuple[Stats, Metrics, Array]]:
    def objective(params: Params, micro: Batch):
        found, entropy, *more = logprobs(params, micro)
        require_float32(found)
        old = jnp.where(first, jax.lax.stop_gradient(found), jnp.asarray(micro.proximal_logprobs))
        total, stats = loss(found, micro._replace(proximal_logprobs=old, entropy=entropy))
        stats = {**stats, **(more[0] if more else {}), "policy/loss": total, **_progress(found, old, entropy, micro)}
        return total.total, (stats, old)

    def body(i, carry):
        grads, so_far, proximal = carry
        new, (stats, old) = jax.grad(objective, has_aux=True)(state.params, _micro(batch, i))
        proximal = jax.lax.dynamic_update_index_in_dim(proximal, old, i, 0)
        return jax.tree.map(jnp.add, grads, new), merge(so_far, stats), proximal

    shapes = jax.eval_shape(lambda p, b: objective(p, b)[1][0], state.params, _micro(batch, jnp.zeros((), jnp.int32)))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), state.params)
    start = zeros, nothing(shapes), jnp.zeros(batch.tokens.shape, jnp.float32)
    grads, stats, proximal = jax.lax.fori_loop(0, _used(batch), body, start)
    state, extra = _apply(optimizer, max_grad_norm, state, grads, stats["policy/loss"])
    return state, (stats, extra, proximal)


def _apply(
    optimizer: optax.GradientTransformation, max_grad_norm: float, state: TrainState, grads: Params, loss: Any
) -> tuple[TrainState, Metrics]:
    """One optimizer step on gradients of a sum: divided by its count and clipped.

    Left out, bit for bit, when not finite (counted in `skipped`) or exactly zero (nothing to learn: momentum must not move
    the weights).
    """
    count = jnp.maximum(loss.count, 1)
    norm = optax.tree.norm(grads) / count
    finite = jnp.isfinite(norm) & jnp.isfinite(loss.total)
    scale = jnp.minimum(1.0, max_grad_norm / jnp.maximum(norm, 1e-30)) / count

    def step(args):
        params, opt_state = args
        updates, opt_state = optimizer.update(jax.tree.map(lambda g: g * scale, grads), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params, opt_state = jax.lax.cond(finite & (norm > 0), step, lambda args: args, (state.params, state.opt_state))
    skipped = jnp.where(finite, 0, state.skipped + 1)
    empty = jnp.where(finite & (norm == 0), 1.0, 0.0)
    metrics = {"optimizer/grad_norm": norm, "optimizer/skipped": 1.0 - finite, "optimizer/empty": empty}
    return state._replace(params=params, opt_state=opt_state, skipped=skipped), metrics


def _progress(found: Array, old: Array, entropy: Array, micro: Batch) -> Stats:
    """Entropy, and the update drift: how far the policy has moved since the start of the step, per trained token."""
    trained = jnp.asarray(micro.loss_mask)
    tokens = jnp.sum(trained).astype(jnp.float32)
    moved = trained_difference(found, old, micro)
    parts = {
        "policy/entropy": jnp.where(trained, entropy, 0),
        "drift/logprob_abs": jnp.abs(moved),
        "drift/kl": jnp.expm1(moved) - moved,
    }
    return {name: Mean(jnp.sum(x), tokens) for name, x in parts.items()}


def _metrics(stats: Stats, extra: dict[str, Float[Array, " m"]]) -> Metrics:
    """Scalars of the whole step from statistics stacked over minibatches `[m]`; NaN for a mean of nothing, but for the loss."""
    out = balance(stats)
    for name, x in stats.items():
        if name in SUMS:
            continue
        if not isinstance(x, Mean):
            out[name] = jnp.max(x.value) if isinstance(x, Peak) else jnp.min(x.value)
            continue
        if name.startswith("drift/"):  # 0 in the first minibatch by construction
            x = Mean(x.total[1:], x.count[1:])
        whole = Mean(jnp.sum(x.total), jnp.sum(x.count))
        out[name] = whole.value if name == "policy/loss" else whole.total / whole.count
        if name in ("policy/ratio_mean", "policy/clip_fraction"):
            out |= {f"{name}_{i + 1}": each for i, each in enumerate(x.total / x.count)}
        if name == "policy/entropy":
            out["tokens/trained"] = jnp.sum(x.count)
    out["optimizer/grad_norm"] = jnp.mean(extra["optimizer/grad_norm"])
    return out | {name: jnp.sum(extra[name]) for name in ("optimizer/skipped", "optimizer/empty")}


def _gap(batch: Batch, step: Array) -> Metrics:
    """Trainer against sampler at the weights the step started from: *mismatch* on trajectories of those weights alone (two
    engines), *staleness* on those with a token of older ones, whose later tokens the embedded sampler draws with keys and
    values of older weights in its cache. Sizes of gaps, since a signed mean would cancel; NaN where there are no such tokens.
    """
    trained = jnp.asarray(batch.loss_mask)
    age = jnp.where(trained, step - jnp.asarray(batch.versions), 0)
    rho = trained_difference(jnp.asarray(batch.proximal_logprobs), batch.behavior_logprobs, batch)
    oldest = jax.vmap(jax.vmap(_oldest))(age.astype(rho.dtype), batch)
    fresh, stale = trained & (oldest <= 0), trained & (oldest > 0)
    gap, tokens = jnp.where(fresh, jnp.abs(rho), 0), jnp.sum(fresh)
    ordered = jnp.sort(jnp.where(fresh, gap, jnp.inf), axis=None)
    p99 = ordered[jnp.maximum(jnp.ceil(0.99 * tokens).astype(jnp.int32) - 1, 0)]
    each = jax.vmap(jax.vmap(_sequence_gap))(rho, batch._replace(loss_mask=fresh))
    return {
        "mismatch/mean": jnp.sum(gap) / tokens,
        "mismatch/p99": jnp.where(tokens > 0, p99, jnp.nan),
        "mismatch/max": jnp.where(tokens > 0, jnp.max(gap), jnp.nan),
        "mismatch/kl": jnp.sum(jnp.where(fresh, jnp.expm1(rho) - rho, 0)) / tokens,
        "mismatch/sequence_mean": jnp.sum(each.total) / jnp.sum(each.count),
        "staleness/mean": jnp.sum(age) / jnp.maximum(jnp.sum(trained), 1),
        "staleness/max": jnp.max(age).astype(jnp.float32),
        "staleness/logprob_abs": jnp.sum(jnp.where(stale, jnp.abs(rho), 0)) / jnp.sum(stale),
    }


def _oldest(age: Float[Array, "r t"], batch: Batch) -> Float[Array, "r t"]:
    """The age of each trajectory's oldest trained token, at all of its tokens."""
    return spread(pool_max(age, batch), batch)


def _sequence_gap(rho: Float[Array, "r t"], batch: Batch) -> Mean:
    """|mean over a trajectory's tokens|, summed over trajectories: what would stand in the sequence ratio's place."""
    return Mean(jnp.sum(jnp.abs(pool_mean(rho, batch))), jnp.sum(lengths(batch) > 0).astype(rho.dtype))
