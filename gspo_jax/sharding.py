"""Where arrays live: one mesh axis, `fsdp`, over which batch rows, masters and moments are split."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gspo_jax.types import Batch


class Placement(NamedTuple):
    """Three pure functions from arrays to the same arrays in their places."""

    state: Callable[[Any], Any]
    """Parameters or a whole state: each leaf split over its largest axis that divides, else replicated."""
    batch: Callable[[Batch], Batch]
    """A batch `[m u r t]` with its rows split."""
    gathered: Callable[[Any], Any]
    """Whole again on one device, for the sampler; no copy when there is one device."""


def place(devices: int) -> Placement:
    """The placement on the first `devices` devices; the identity for one."""
    if devices == 1:
        return Placement(lambda x: x, lambda x: x, lambda x: x)
    mesh = Mesh(jax.devices()[:devices], ("fsdp",))

    def split(x: Any) -> NamedSharding:
        axes = [i for i, size in enumerate(x.shape) if size % devices == 0]
        widest = max(axes, key=lambda i: x.shape[i], default=None)
        return NamedSharding(mesh, PartitionSpec(*("fsdp" if i == widest else None for i in range(x.ndim))))

    def rows(x: Any) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*(None, None, "fsdp")[: min(x.ndim, 3)] if x.ndim > 2 else ()))

    return Placement(
        lambda tree: jax.tree.map(lambda x: jax.device_put(x, split(x)), tree),
        lambda batch: jax.tree.map(lambda x: jax.device_put(x, rows(x)), batch),
        lambda tree: jax.device_put(tree, jax.devices()[0]),
    )
