"""The mesh a run trains on: which devices, along which axes."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from gspo_jax.config import ConfigError
from gspo_jax.parallel import AXES
from gspo_jax.sections import Config


class MeshShape(NamedTuple):
    """Devices along each axis of the mesh; see `parallel` for what they split."""

    replica: int = 1
    fsdp: int = 1
    tensor: int = 1
    sequence: int = 1

    @property
    def devices(self) -> int:
        """All of them."""
        return math.prod(self)

    @property
    def rows(self) -> int:
        """What the rows of a micro-batch are divided by."""
        return self.replica * self.fsdp

    @property
    def store(self) -> int:
        """What the state is divided by, but for the axis `tensor`."""
        return self.fsdp * self.sequence


def make_mesh(shape: MeshShape, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of the first devices of this run, or of those given."""
    chosen = (jax.devices() if devices is None else devices)[: shape.devices]
    return Mesh(np.asarray(chosen).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def mesh_shape(config: Config, available: int) -> MeshShape:
    """The mesh that trains on this machine: what `[mesh]` says, `fsdp = 0` being what is left of the devices for training.

    Those are the first `compute.topology.gpus_for_training` of the `available` ones; or all, but for those of a reference.
    ConfigError where they are too few, or do not divide.
    """
    mesh, asked = config.mesh, config.compute.topology.gpus_for_training
    others = config.compute.topology.gpus_for_ref if config.algorithm.kl_beta > 0 else 0
    devices = asked if 0 < asked <= available else max(available - others, 1)
    others = mesh.replica * mesh.tensor * mesh.sequence
    told = f"mesh.replica {mesh.replica} * mesh.tensor {mesh.tensor} * mesh.sequence {mesh.sequence}"
    if others * max(mesh.fsdp, 1) > devices:
        raise ConfigError("config", [
            f"mesh.fsdp: {told} * fsdp {mesh.fsdp or 1} = {others * max(mesh.fsdp, 1)} devices, but {devices} found; "
            f"make the product <= {devices}"
        ])  # fmt: skip
    if not mesh.fsdp and devices % others:
        raise ConfigError("config", [f"mesh.fsdp: 0 is what {told} leave of {devices} devices, which they do not divide"])
    return MeshShape(mesh.replica, mesh.fsdp or devices // others, mesh.tensor, mesh.sequence)


def mesh_of(config: Config) -> Mesh | None:
    """The mesh of a run on the devices that are here; None for one device."""
    shape = mesh_shape(config, len(jax.devices()))
    return make_mesh(shape) if shape.devices > 1 else None
