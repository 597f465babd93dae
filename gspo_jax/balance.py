"""How evenly routers spread tokens over experts: sums over micro-batches, and what is reported of them."""

import jax.numpy as jnp

from gspo_jax.models.experts import Routing
from gspo_jax.types import Mean, Metrics, Stats

SUMS = LOAD, PROBABILITY, ENTROPY = "moe/load", "moe/probability", "moe/router_entropy"
"""Statistics by layer, from which `balance` makes scalars."""


def routing_stats(routing: Routing) -> Stats:
    """Sums of one forward pass, by layer (and expert), over its tokens."""
    return {
        LOAD: Mean(routing.load, jnp.sum(routing.load, -1)),
        PROBABILITY: Mean(routing.probability, routing.tokens),
        ENTROPY: Mean(routing.entropy, routing.tokens),
    }


def balance(stats: Stats) -> Metrics:
    """`moe/...` from sums stacked over minibatches `[m l (e)]`; nothing of a model without experts.

    load_max, load_min: the largest and smallest share of assignments of any expert in any layer, 1 where all are equal.
    balance: e·Σ f·p over a layer's experts, f the share of assignments and p the mean probability, averaged over layers
    (arXiv 2101.03961, equation 4; 1 is uniform). router_entropy: nats, mean over tokens and layers.
    """
    found = (stats.get(name) for name in SUMS)
    sums = [Mean(jnp.sum(x.total, 0), jnp.sum(x.count, 0)) for x in found if isinstance(x, Mean)]
    if not sums:
        return {}
    load, probability, entropy = sums
    experts = load.total.shape[-1]
    share = load.total / load.count[:, None]
    mean = probability.total / probability.count[:, None]
    return {
        "moe/load_max": experts * jnp.max(share),
        "moe/load_min": experts * jnp.min(share),
        "moe/balance": experts * jnp.mean(jnp.sum(share * mean, -1)),
        ENTROPY: jnp.sum(entropy.total) / jnp.sum(entropy.count),
    }
