"""What devices send each other in a compiled step, and the least that a mesh has to send."""

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from gspo_jax.mesh import MeshShape
from gspo_jax.parallel import AXES
from gspo_jax.plan.hlo import Instruction, Module, parts_of, shape_bytes
from gspo_jax.plan.targets import GPUS_PER_NODE, Gpu

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute", "ragged-all-to-all",
         "collective-broadcast")  # fmt: skip


class Collective(NamedTuple):
    """All collectives of one kind along the same mesh axes in one step, as each device sees them."""

    kind: str
    axes: tuple[str, ...]
    """Axes of the mesh with more than one device; empty where the groups are no such axes."""
    devices: int
    """In a group."""
    times: int
    bytes: int
    """Of the whole array: what is gathered, what is reduced, what is exchanged."""

    @property
    def wire(self) -> float:
        """Bytes that a device sends in a ring: the share (n - 1) / n of them, twice that for an all-reduce."""
        share = (self.devices - 1) / max(self.devices, 1)
        return self.bytes * {"all-reduce": 2 * share, "collective-permute": 1.0}.get(self.kind, share)


def collectives(module: Module, mesh: MeshShape, trips: Sequence[int]) -> list[Collective]:
    """The collectives of a program, by kind and axes, most bytes first; `trips` as in `Module.steps`."""
    found: dict[tuple[str, tuple[str, ...], int], list[int]] = defaultdict(lambda: [0, 0])
    for step in module.steps(trips):
        kind = step.instruction.opcode.removesuffix("-start")
        if kind not in KINDS:
            continue
        axes, devices = groups_of(step.instruction, mesh)
        if devices > 1:
            entry = found[kind, axes, devices]
            entry[0] += step.times
            entry[1] += step.times * payload(step.instruction, devices)
    out = [Collective(*key, times, size) for key, (times, size) in found.items()]
    return sorted(out, key=lambda each: -each.bytes)


def payload(instruction: Instruction, devices: int) -> int:
    """Bytes of the whole array of a collective: its result, or for a reduce-scatter all devices' results together."""
    shape, parts = instruction.shape, parts_of(instruction.shape)
    if instruction.opcode.endswith("-start"):
        if shape.startswith("(("):
            shape = parts[-1]  # operands, then results
        elif instruction.opcode in ("all-gather-start", "collective-permute-start") and len(parts) > 1:
            shape = parts[1]
    return shape_bytes(shape) * (devices if instruction.opcode.startswith("reduce-scatter") else 1)


def groups_of(instruction: Instruction, mesh: MeshShape) -> tuple[tuple[str, ...], int]:
    """The mesh axes a collective runs along, and the devices of a group."""
    named = re.search(r"replica_groups=mesh\[(.*?)\]\s*(?:device_ids=\S+\s*)?\{(.*?)\}", instruction.rest)
    if named:
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        axes = tuple(name for name in re.findall(r"'(\w+)'", named[2]) if int(sizes.get(name, 1)) > 1)
        return axes, math.prod(int(sizes[name]) for name in axes)
    if instruction.opcode.startswith("collective-permute"):
        pairs = re.search(r"source_target_pairs=\{\{(.*?)\}\}", instruction.rest)
        return _axes_of([tuple(map(int, pair.split(","))) for pair in pairs[1].split("},{")] if pairs else [], mesh)
    return _axes_of(_groups(instruction.rest, mesh.devices), mesh)


def _groups(text: str, devices: int) -> list[tuple[int, ...]]:
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if iota:
        shape, dims = ([int(n) for n in iota[i].split(",")] for i in (1, 2))
        ids = np.arange(math.prod(dims)).reshape(dims)
        if iota[3]:
            ids = ids.transpose([int(n) for n in iota[3].split(",")])
        return [tuple(row) for row in ids.reshape(shape).tolist()]
    told = re.search(r"replica_groups=\{\{(.*?)\}\}", text)
    if told:
        return [tuple(map(int, group.split(","))) for group in told[1].split("},{")]
    return [tuple(range(devices))]  # {}: all of them


def _axes_of(groups: Sequence[Sequence[int]], mesh: MeshShape) -> tuple[tuple[str, ...], int]:
    """Axes along which the devices of a group differ; none where a group is not all devices along its axes."""
    if not groups:
        return (), 1
    places = np.array([np.unravel_index(device, mesh) for device in groups[0]])
    differ = [bool(np.ptp(places[:, i])) for i in range(len(AXES))]
    axes = tuple(name for name, yes in zip(AXES, differ, strict=True) if yes)
    whole = math.prod(size for size, yes in zip(mesh, differ, strict=True) if yes)
    return (axes if whole == len(groups[0]) else ()), len(groups[0])


def seconds(collective: Collective, mesh: MeshShape, gpu: Gpu) -> float:
    """Time on the wire at full rate: NVLink inside a node; between nodes the network cards of the group's GPUs in one node."""
    return collective.wire / rate(collective.axes, mesh, gpu)


def rate(axes: Sequence[str], mesh: MeshShape, gpu: Gpu) -> float:
    """Bytes per second that a device sends along mesh axes, eight neighboring devices being a node."""
    spans = [range(size) if name in axes or not axes else range(1) for name, size in zip(AXES, mesh, strict=True)]
    nodes = [int(np.ravel_multi_index(place, mesh)) // GPUS_PER_NODE for place in product(*spans)]
    if len(set(nodes)) == 1:
        return gpu.link
    return min(gpu.link, gpu.network * nodes.count(nodes[0]))


class Stored(NamedTuple):
    """Bytes of what is split at rest, whole over `fsdp` and `sequence` and one device's part over `tensor`, as it travels."""

    twice: float
    """Matrices of layers: gathered in the forward pass and again in the backward pass, which recomputed activations share."""
    once: float
    """Embedding, head, and matrices that are split over layers: gathered once for both."""
    trained: float
    """Gradients; those of tables travel in float32."""


def least_bytes(
    stored: Stored, activations: float, mesh: MeshShape, *, micro: int, scored: int, layers: int
) -> dict[str, float]:
    """The least bytes a device sends in a step, by purpose, from the formulas below.

    S = fsdp * sequence, T = tensor, R = replica; `micro` micro-batches are trained on and `scored` ones only scored.
    gather:  (S - 1) / S * (twice * (2 * micro + scored) + once * (micro + scored)).
    scatter: (S - 1) / S * trained * micro: gradients are reduced at the end of every micro-batch, so that none is ever whole.
    tensor:  2 (T - 1) / T * activations * layers * (4 * micro + 2 * scored): all-reduces after attention and MLP, and as many
             in the backward pass. `activations` are bytes of one `[r t d]` on a device.
    replica: 2 (R - 1) / R * trained / S * micro.
    """
    share, copies = (mesh.store - 1) / mesh.store, (mesh.replica - 1) / mesh.replica
    return {
        "gather": share * (stored.twice * (2 * micro + scored) + stored.once * (micro + scored)),
        "scatter": share * stored.trained * micro,
        "tensor": 2 * (mesh.tensor - 1) / mesh.tensor * activations * layers * (4 * micro + 2 * scored),
        "replica": 2 * copies * stored.trained / mesh.store * micro,
    }
