"""What a run starts from and learns from, as shapes in their places: no weights, no devices."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gspo_jax import adapters, sampling
from gspo_jax.adapters import adapter_sizes, adapter_table
from gspo_jax.batch import pack
from gspo_jax.build import Trainer, packing_of
from gspo_jax.config import model_id
from gspo_jax.config_report import minibatch_size, minibatches
from gspo_jax.models.quantize import quantize
from gspo_jax.objective import build_objective
from gspo_jax.parallel import ROWS
from gspo_jax.policy import Policy, compute_leaf, describe_policy, serving_params
from gspo_jax.pretrained import resolve_model
from gspo_jax.reference import Reference, reference_weights
from gspo_jax.sections import Config
from gspo_jax.sharding import Layout
from gspo_jax.start import Source, Start, check_sequence, locate, plan_adapter, start_layout
from gspo_jax.types import Batch, Params, TrainState
from rollout.types import Group, Problem, Trajectory, Turn
from serving_bridge.trees import leaves, put
from serving_bridge.weights import Weight, leaf_shape


def shapes_source(config: Config) -> Source:
    """Where the model's config.json is: its folder, or the shipped one where there is none. Errors as `locate`."""
    if config.model.source:
        return locate(config)
    base = model_id(config)
    return Source(resolve_model(base, shapes=True), None, base)


def abstract_start(config: Config, mesh: Mesh, source: Source) -> Start:
    """`load_start` on a mesh (of one device, too) with shapes in place of arrays. Raises ConfigError, WeightError."""
    policy = describe_policy(source.model, compute_dtype=config.model.compute_dtype, remat=config.model.remat)
    adapter, sizes = plan_adapter(config, policy, source), policy.config.sizes()
    check_sequence(config, policy)
    layout = start_layout(mesh if mesh.size > 1 else None, policy, adapter)
    if adapter is None:
        params = _float32(policy.table, sizes)
        return Start(policy, placed(params, layout, mesh), layout=layout)
    qtype = config.training.lora.quantization if config.model.trainer_mode == "qlora" else None
    trained = _float32(adapter_table(adapter), adapter_sizes(adapter, sizes))
    frozen = jax.eval_shape(lambda params: _kept(policy, params, qtype), _float32(policy.table, sizes))
    return Start(policy, placed(trained, layout, mesh), placed(frozen, layout, mesh), adapter, source.name,
                 source.adapter is None, layout)  # fmt: skip


def _float32(table: tuple[Weight, ...], sizes: Mapping[str, int]) -> Params:
    found: dict[str, Any] = {}
    for row in table:
        put(found, row.path, jax.ShapeDtypeStruct(leaf_shape(row, sizes), jnp.float32))
    return found


def _kept(policy: Policy, params: Params, qtype: str | None) -> Params:
    """`start.load_frozen`, of arrays that are being traced."""
    kernels, found = {row.path: row for row in adapters.kernel_rows(policy.table)}, {}
    for path, leaf in leaves(params):
        row = kernels.get(path)
        if qtype and row is not None:
            stack, inputs = adapters.kernel_axes(row)
            put(found, path, quantize(leaf, inputs, stack, qtype, policy.dtype))
        else:
            put(found, path, compute_leaf(path, leaf, policy.dtype))
    return found


def placed(tree: Any, layout: Layout, mesh: Mesh) -> Any:
    """The same shapes, where the layout puts them; whole on a mesh of one device."""
    places = layout.shardings(tree) or jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), tree)
    return jax.tree.map(_at, tree, places)


def _at(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def abstract_state(trainer: Trainer, start: Start, mesh: Mesh) -> TrainState:
    """A fresh state, as shapes in their places."""
    return placed(jax.eval_shape(trainer.init, start.params), start.layout, mesh)


def on_first(tree: Any, mesh: Mesh) -> Any:
    """Shapes whole on the first device."""
    alone = Mesh(mesh.devices.reshape(-1)[:1], "x")
    return jax.tree.map(lambda leaf: _at(leaf, NamedSharding(alone, PartitionSpec())), tree)


def served(start: Start) -> Params:
    """The weights that the embedded sampler holds, as shapes."""
    policy = start.policy
    bare = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (start.params, start.frozen))
    return jax.eval_shape(lambda both: serving_params(start.whole(*both), policy.dtype), bare)


def referenced(start: Start) -> Params:
    """The weights of a KL's reference, as shapes."""

    def weights(params: Params, frozen: Params | None) -> Params:
        return reference_weights(replace(start, params=params, frozen=frozen))

    return jax.eval_shape(weights, start.params, start.frozen)


def slots(config: Config, policy: Policy) -> sampling.Slots:
    """What the embedded sampler holds for its slots, as shapes."""
    return jax.eval_shape(lambda: sampling.empty_slots(policy, config.serving.slots, config.serving.context_length))


@dataclass(frozen=True)
class Work:
    """One optimizer step of a run whose trajectories are as long as the config lets them be."""

    batch: Batch
    """Of the step, on the host: one minibatch `[1 u r t]`."""
    minibatches: int
    """Optimizer steps of a training step."""
    micro: int
    """Micro-batches that are computed; the others of `u` only round it up to a power of two."""
    tokens: int
    """Of all trajectories, a shared prompt once."""
    laid_out: int
    """Places in the rows of the computed micro-batches."""
    trained: int
    pairs: int
    """Of tokens, one of which sees the other."""

    @property
    def longest(self) -> int:
        """Most trained tokens of a row."""
        return int(np.asarray(self.batch.loss_mask).sum(-1).max())


def work_of(config: Config, start: Start, reference: Reference | None = None) -> Work:
    """Packs an optimizer step of trajectories that fill `serving.context_length`, as many of their tokens sampled as
    `policy.max_tokens` and `rollout.max_turns` allow: an upper bound of time and memory. Members share their group's prompt."""
    packing = packing_of(config, start, reference)
    batch = pack(_longest_groups(config), _zeros(config), minibatch_size(config), packing)
    ids, prefixes = np.asarray(batch.segment_ids)[0], np.asarray(batch.prefix_ids)[0]
    used = int((ids > 0).any((1, 2)).sum())
    rows = zip(ids.reshape(-1, packing.length), prefixes.reshape(-1, packing.length), strict=True)
    return Work(batch, minibatches(config), used, int((ids > 0).sum()), used * ids[0].size, int(np.sum(batch.loss_mask)),
                sum(visible_pairs(*row) for row in rows))  # fmt: skip


def visible_pairs(segments: np.ndarray, prefixes: np.ndarray) -> int:
    """Pairs of a query and a key that it sees in a packed row `[t]`; sliding windows are not looked at."""
    sizes, total = np.bincount(segments), 0
    for number in np.flatnonzero(sizes):
        if number:
            prefix = int(prefixes[np.argmax(segments == number)])
            total += int(sizes[number]) * (int(sizes[number]) + 1) // 2
            total += int(sizes[number]) * int(sizes[prefix]) if prefix else 0
    return total


def _longest_groups(config: Config) -> list[Group]:
    context, count = config.serving.context_length, minibatch_size(config)
    sampled = min(config.policy.max_tokens * config.rollout.max_turns, context - 1)
    turn = Turn((0,) * (context - sampled), (0,) * sampled, (0.0,) * sampled, (0,) * sampled, "length")
    size = config.training.group_size
    members = [Trajectory((turn,), 0.0, "done", member=i) for i in range(count)]
    return [Group(Problem(i), tuple(members[i : i + size])) for i in range(0, count, size)]


def _zeros(config: Config) -> list[list[float]]:
    count, size = minibatch_size(config), config.training.group_size
    return [[0.0] * min(size, count - i) for i in range(0, count, size)]


def abstract_batch(config: Config, start: Start, mesh: Mesh, work: Work) -> Batch:
    """The batch of a whole step `[m u r t]`, in its place, as shapes."""
    rows, whole = NamedSharding(mesh, PartitionSpec(None, None, ROWS)), NamedSharding(mesh, PartitionSpec())
    found = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((work.minibatches, *x.shape[1:]), x.dtype, sharding=rows if x.ndim > 2 else whole),
        work.batch,
    )
    if build_objective(config.algorithm, 1).reference:
        found = found._replace(reference_logprobs=found.behavior_logprobs)
    settings = start.policy.config
    if config.algorithm.routing_replay == "sampler":
        choices = (sum(map(settings.routes, settings.kinds)), settings.num_experts_per_tok)
        found = found._replace(experts=jax.ShapeDtypeStruct((*found.tokens.shape, *choices), jnp.int32, sharding=rows))
    return found


def device_bytes(tree: Any) -> int:
    """Bytes of a tree of placed shapes on one device; four-bit numbers are half a byte each."""
    total = 0.0
    for leaf in jax.tree.leaves(tree):
        kind = leaf.dtype
        bits = jnp.iinfo(kind).bits if jnp.issubdtype(kind, jnp.integer) else kind.itemsize * 8
        total += int(np.prod(leaf.sharding.shard_shape(leaf.shape), dtype=np.int64)) * bits / 8
    return int(total)
