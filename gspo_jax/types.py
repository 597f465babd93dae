"""The arrays that cross the learner's border, and sums that are not yet means."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int
from numpy import ndarray

type Params = Mapping[str, Any]
Ints = Int[Array, "*lead r t"] | Int[ndarray, "*lead r t"]
Bools = Bool[Array, "*lead r t"] | Bool[ndarray, "*lead r t"]
Floats = Float[Array, "*lead r t"] | Float[ndarray, "*lead r t"]


class Batch(NamedTuple):
    """Packed trajectories. Every array is `[r t]` (rows, length), or `[m u r t]` with minibatches and micro-batches in front.

    A row holds several segments. A token attends to earlier tokens of its own segment and of the segment `prefix_ids`
    names (a prompt that the members of a group share); a padded batch is one segment a row. `logprobs[t]` belongs to
    `tokens[t]` and is read from the hidden state of the token at `parents[t]`.
    """

    tokens: Ints
    positions: Ints
    """Place in the conversation, from 0: what the rotary embedding sees."""
    segment_ids: Ints
    """From 1 in each row; 0 is padding."""
    prefix_ids: Ints
    """Segment of the same row that is also attended to; 0 is none."""
    parents: Ints
    """Index in the row of the preceding token; 0 where there is none."""
    trajectory_ids: Ints
    """From 1 in each micro-batch: what is pooled into one sequence; 0 for tokens of none."""
    loss_mask: Bools
    """True on sampled tokens that are trained."""
    advantages: Floats
    behavior_logprobs: Floats
    """The sampler's log-probabilities, for the mismatch report and the correction weights; never in the ratio."""
    versions: Ints
    """Version of the policy that sampled each trained token, 0 elsewhere; `TrainState.step` minus it is the staleness."""
    trajectories: Float[Array, "*lead"] | Float[ndarray, "*lead"]
    """Trajectories a micro-batch stands for, those without a single trained token included: the loss's denominator."""
    proximal_logprobs: Floats | None = None
    """The trainer's own log-probabilities at the start of the step: `old` of the ratio. Filled in by the learner."""
    reference_logprobs: Floats | None = None
    """Those of the frozen reference policy; only when a KL penalty is asked for."""
    weights: Floats | None = None
    """Detached factor of each trained token's term (correction of the sampler's mismatch). None is 1."""
    entropy: Floats | None = None
    """Entropy of the current policy at each trained token, differentiable. Filled in by the learner."""
    experts: Int[Array, "*lead r t l k"] | Int[ndarray, "*lead r t l k"] | None = None
    """Expert choices of the sampler, by layer that has experts, for the model to use; -1 leaves a token to its router."""


class TrainState(NamedTuple):
    """All that an update needs and changes. `params` are float32 masters."""

    step: Int[Array, ""]
    """Rollout batches consumed."""
    params: Params
    opt_state: Any
    skipped: Int[Array, ""]
    """Consecutive minibatches whose update was not finite and was left out."""


class Mean(NamedTuple):
    """A mean not taken yet. Averages of averages are wrong; sums of sums are not."""

    total: Float[Array, ""]
    count: Float[Array, ""]  # pyright: ignore[reportIncompatibleMethodOverride]

    @property
    def value(self) -> Float[Array, "..."]:
        """`total / count`, 0 when nothing was counted; elementwise for means stacked over minibatches."""
        return self.total / jnp.maximum(self.count, 1)


class Peak(NamedTuple):
    """A maximum over everything seen so far."""

    value: Float[Array, ""]


class Trough(NamedTuple):
    """A minimum over everything seen so far."""

    value: Float[Array, ""]


type Metrics = dict[str, Float[Array, ""]]
type Prepare = Callable[[Batch], tuple[Batch, Metrics]]
"""What is done to a whole batch `[m u r t]` once its proximal log-probabilities are known (`corrections.prepare`)."""
type Stats = dict[str, Mean | Peak | Trough]


def nothing(stats: Stats) -> Stats:
    """What merges with `stats` (arrays or shapes) without changing it."""
    return {name: _nothing(each) for name, each in stats.items()}


def _nothing(each: Mean | Peak | Trough) -> Mean | Peak | Trough:
    blank = -jnp.inf if isinstance(each, Peak) else jnp.inf if isinstance(each, Trough) else 0.0
    return jax.tree.map(lambda x: jnp.full(x.shape, blank, x.dtype), each)


def merge(a: Stats, b: Stats) -> Stats:
    """The statistics of both parts together: sums add, peaks take the larger, troughs the smaller."""
    return {name: _merge(a[name], b[name]) for name in a}


def _merge(a: Mean | Peak | Trough, b: Mean | Peak | Trough) -> Mean | Peak | Trough:
    if isinstance(a, Mean) and isinstance(b, Mean):
        return Mean(a.total + b.total, a.count + b.count)
    return Peak(jnp.maximum(a.value, b.value)) if isinstance(a, Peak) else Trough(jnp.minimum(a.value, b.value))
