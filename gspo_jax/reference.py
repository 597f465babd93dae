"""The frozen reference policy of a KL: whose weights it has, and the devices it is on."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from gspo_jax.config import ConfigError
from gspo_jax.learner import score_batch
from gspo_jax.mesh import MeshShape, make_mesh
from gspo_jax.policy import logprobs_of, serving_params
from gspo_jax.sections import Config
from gspo_jax.sharding import Layout
from gspo_jax.start import Start, start_layout
from gspo_jax.types import Batch, Params


class Reference(NamedTuple):
    """The policy that a KL refers to."""

    score: Callable[[Batch], Array]
    """A batch on the host to log-probabilities `[m u r t]` on the devices that train: dispatched, not waited for."""
    layout: Layout


def load_reference(config: Config, start: Start) -> Reference | None:
    """The policy of `start`, in the compute type; None where no KL refers to it.

    `compute.topology.reference_placement`: "shared", on the devices that train: with a fresh adapter the weights beneath it,
    at no memory cost. "dedicated", on the `gpus_for_ref` devices after those: a copy of its own, which computes while the
    others do something else. ConfigError for a placement that contradicts the rest.
    """
    if config.algorithm.kl_beta <= 0:
        return None
    weights, layout = reference_weights(start), reference_layout(config, start, jax.devices())
    if layout is not start.layout:
        weights = layout.state(weights)
    elif weights is not start.frozen:
        weights = jax.tree.map(jnp.copy, weights)  # the update donates those it trains
    logprobs = logprobs_of(start.policy, temperature=config.policy.temperature, layout=layout)
    score = jax.jit(partial(score_batch, logprobs))
    return Reference(lambda batch: start.layout.rows(score(weights, layout.batch(batch))), layout)


def reference_weights(start: Start) -> Params:
    """What the reference computes with: with a fresh adapter the weights beneath it, else the start in the compute type."""
    if start.frozen is not None and start.fresh:
        return start.frozen
    return start.whole(serving_params(start.params, start.policy.dtype), start.frozen)


def reference_layout(config: Config, start: Start, devices: Sequence[Any]) -> Layout:
    """Where the reference is: with the policy, or on those of the `devices` that come after the policy's."""
    topology, used = config.compute.topology, start.layout.shape.devices
    wanted = topology.gpus_for_ref
    if topology.reference_placement != "dedicated" and not wanted:
        return start.layout
    others = devices[used : used + wanted]
    if len(others) < wanted:
        raise ConfigError("config", [
            f"compute.topology.gpus_for_ref: {wanted} devices after the {used} that train, but there are {len(others)}; "
            'use fewer, or reference_placement = "shared"'
        ])  # fmt: skip
    return start_layout(make_mesh(MeshShape(fsdp=wanted), others), start.policy, start.adapter)
