"""Arithmetic of a training step, counted from the weight table: multiplications and additions of matrix products."""

import math
from typing import NamedTuple

from gspo_jax.adapters import adapter_sizes, adapter_table
from gspo_jax.objective import build_objective
from gspo_jax.plan.abstract import Work
from gspo_jax.policy import Policy
from gspo_jax.sections import Config
from gspo_jax.start import Start
from serving_bridge.weights import Weight, leaf_shape, stacked


class Forward(NamedTuple):
    """A forward pass over one minibatch."""

    kernels: float
    """Products with the matrices of the layers."""
    adapters: float
    mixing: float
    """Attention, and the recurrence of linear attention: products of tokens with each other."""
    head: float


class StepFlops(NamedTuple):
    """A training step on all devices."""

    model: float
    """Forward 1, backward 2 (1 through what is not trained), the pass for the proximal log-probabilities, that of a
    reference: of real tokens, nothing computed twice."""
    computed: float
    """With what is computed again in the backward pass, and with the padding of rows."""


def forward_flops(start: Start, work: Work) -> Forward:
    """FLOPs of one minibatch forward: 2 per weight and token (of experts those chosen), the head for trained tokens only,
    4 per query head, feature and visible pair of attention, 6 per value head, key feature and value feature of linear
    attention and token. Norms, rotations and softmax are left out."""
    policy, sizes = start.policy, start.policy.config.sizes()
    kernels = sum(_used(row, policy) for row in policy.table if row.path.rsplit("/", 1)[-1] in ("kernel", "conv"))
    added = 0.0
    if start.adapter is not None:
        wide = adapter_sizes(start.adapter, sizes)
        added = sum(_used(row, policy, wide) for row in adapter_table(start.adapter))
    head = 2.0 * sizes["v"] * sizes["d"] * work.trained
    return Forward(2 * kernels * work.tokens, 2 * added * work.tokens, _mixing(policy, work), head)


def _used(row: Weight, policy: Policy, sizes: dict[str, int] | None = None) -> float:
    """Numbers of a leaf that one token meets."""
    count = math.prod(leaf_shape(row, sizes or policy.config.sizes()))
    experts = any("experts" in part for part in row.path.split("/"))
    shared = "e" in stacked(row) or (experts and "e" in row.layout)
    return count * policy.config.num_experts_per_tok / policy.config.num_experts if shared else float(count)


def _mixing(policy: Policy, work: Work) -> float:
    c, sizes = policy.config, policy.config.sizes()
    attention = sum(c.remembers(kind) == "keys" for kind in c.kinds)
    found = 4.0 * sizes["n"] * sizes["h"] * work.pairs * attention
    recurrent = len(c.kinds) - attention
    if recurrent:
        found += 6.0 * sizes["m"] * sizes["j"] * c.linear_key_head_dim * work.tokens * recurrent
    return found


def step_flops(config: Config, start: Start, work: Work) -> StepFlops:
    """FLOPs of one training step. The first minibatch's proximal log-probabilities come for free, unless corrections or a
    reward penalty want those of all."""
    f = forward_flops(start, work)
    whole, trained = sum(f), start.adapter is None
    through = 2.0 if trained else 1.0
    backward = through * (f.kernels + f.head) + 2 * (f.adapters + f.mixing)
    scored = scored_minibatches(config, work) + reference_minibatches(config, work)
    model = work.minibatches * (whole + backward) + scored * whole
    again = f.head + (f.kernels + f.adapters + f.mixing if config.model.remat == "layer" else 0.0)
    padding = work.laid_out / work.tokens
    return StepFlops(model, (model + work.minibatches * again) * padding)


def scored_minibatches(config: Config, work: Work) -> int:
    """Minibatches of a step that are scored under the weights before it."""
    prepared = build_objective(config.algorithm, 1).prepare is not None
    in_reward = config.algorithm.kl_beta > 0 and config.algorithm.kl_in == "reward"
    return (work.minibatches if prepared else work.minibatches - 1) + (work.minibatches if in_reward else 0)


def reference_minibatches(config: Config, work: Work) -> int:
    """Minibatches of a step that the reference of a KL scores."""
    return work.minibatches if config.algorithm.kl_beta > 0 else 0
