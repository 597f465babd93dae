"""How a Pallas kernel for CUDA is started: inside `shard_map` or not, compiled or interpreted."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array, export
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from gspo_jax import parallel


def launch(
    kernel: Callable[..., None],
    args: tuple[Array, ...],
    out: Sequence[tuple[tuple[int, ...], Any]],
    like: int,
    *,
    warps: int,
    stages: int,
    interpret: bool,
    **specs: Any,
) -> Sequence[Array]:
    """The kernel's results, of shapes and types `out`, which vary over the mesh axes that `args[like]` varies over.

    `specs`: grid, in_specs and out_specs of `pallas_call`. `interpret` runs it as XLA code, anywhere.
    """

    def call(*args: Array) -> Sequence[Array]:
        axes = _axes(args[like])
        return pl.pallas_call(
            kernel,
            out_shape=[jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=axes) for shape, dtype in out],
            compiler_params=triton.CompilerParams(num_warps=warps, num_stages=stages),
            interpret=interpret,
            **specs,
        )(*args)

    if not interpret:
        return call(*args)
    # The interpreter knows nothing of manual axes: what it does is traced where there are none.
    exported = export.export(jax.jit(call))(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args))
    return parallel.varying(exported.call(*args), sorted(_axes(args[like]).varying))


def together(arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """The same arrays, each varying over all mesh axes that one of them varies over."""
    return parallel.varying(arrays, sorted({name for x in arrays for name in _axes(x).varying}))


def _axes(x: Array) -> Any:
    """Over which mesh axes an array varies."""
    kind: Any = jax.typeof(x)
    return kind.manual_axis_type
