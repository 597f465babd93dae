"""Mixtures of experts: a router sends each token to a few of many MLPs; every choice is computed, none is dropped."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jaxtyping import Bool, Float, Int

from gspo_jax import parallel
from gspo_jax.models import cuda
from gspo_jax.models.layers import computed, parameter
from gspo_jax.models.tables import Rows


class Routing(NamedTuple):
    """What a router did, and sums over its tokens (padding apart) from which its balance follows."""

    choices: Int[Array, "*l b t k"]
    """The experts of every token, the likeliest first."""
    load: Float[Array, "*l e"]
    """Times each expert was chosen."""
    probability: Float[Array, "*l e"]
    """Sum of each expert's probability."""
    entropy: Float[Array, "*l"]
    """Sum of the entropies of the tokens' distributions, in nats."""
    tokens: Float[Array, "*l"]
    """How many tokens the sums are of."""


class Experts(nn.Module):
    """The sum of a token's `chosen` likeliest experts, each times its probability (of all experts, or of the chosen ones
    if `normalized`).

    Router in float32, its matrix never quantized. Pairs of token and choice are sorted by expert for three grouped products
    and put back in their order: no sum runs over tokens, so a token's result does not depend on its companions. The sort is
    over the tokens of one device. On a mesh each device of the axis `tensor` computes some features of every expert.
    """

    experts: int
    chosen: int
    model: int
    width: int
    normalized: bool = True
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self, x: Float[Array, "b t d"], valid: Bool[Array, "b t"], replay: Int[Array, "b t k"] | None = None
    ) -> tuple[Float[Array, "b t d"], Routing]:
        """The sum and the routing. Tokens whose row of `replay` has no -1 keep those experts, weighted by today's router."""
        return self.mixed(x, valid, replay)

    def mixed(self, x: Float[Array, "b t d"], valid: Bool[Array, "b t"], replay: Int[Array, "b t k"] | None) -> Any:
        """What `__call__` returns, for subclasses that add to it."""
        kernel = Router(self.experts, name="router")(self.model)
        exact = jax.lax.Precision.HIGHEST
        logp = jax.nn.log_softmax(jnp.matmul(x.astype(jnp.float32), kernel, precision=exact))
        p = jnp.exp(logp)
        choices = jax.lax.top_k(jax.lax.stop_gradient(logp), self.chosen)[1]
        if replay is not None:
            choices = jnp.where(jnp.all(replay >= 0, -1, keepdims=True), replay, choices)
        weights = jnp.take_along_axis(p, choices, -1)
        if self.normalized:
            weights /= jnp.sum(weights, -1, keepdims=True)
        entered = parallel.entering(x, parallel.divides(self.width))
        out = self.grouped(entered.reshape(-1, self.model), choices.reshape(-1, self.chosen))
        out = jnp.einsum("pkd,pk->pd", out, weights.reshape(-1, self.chosen).astype(self.dtype))
        return parallel.summed(out, "tensor").reshape(x.shape), _routing(choices, p, logp, valid)

    def grouped(self, x: Float[Array, "p d"], choices: Int[Array, "p k"]) -> Float[Array, "p k d"]:
        """Every chosen expert's result for every token."""
        flat = choices.reshape(-1)
        order = jnp.argsort(flat, stable=True)
        inverse = jnp.argsort(order)
        sizes = jnp.sum(flat[:, None] == jnp.arange(self.experts), 0, dtype=jnp.int32)
        wide = (self.experts, self.model, self.width)
        pairs = _permute(jnp.repeat(x, self.chosen, 0), order, inverse)
        pairs = ExpertMLPs(wide, self.dtype, name="experts")(pairs, sizes)
        return _permute(pairs, inverse, order).reshape(*choices.shape, -1)


class Router(nn.Module):
    """The float32 matrix of a router."""

    experts: int

    @nn.compact
    def __call__(self, features: int) -> Float[Array, "d e"]:
        shape = (features, self.experts)
        return parallel.whole(parameter(self, "kernel", nn.initializers.normal(0.02), shape), shape)


class ExpertMLPs(nn.Module):
    """`MLP` of every expert on its own tokens."""

    shape: tuple[int, int, int]
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "p d"], sizes: Int[Array, " e"]) -> Float[Array, "p d"]:
        e, d, f = self.shape
        gate, up = (GroupedLinear(self.shape, 2, self.dtype, name=name)(x, sizes) for name in ("gate", "up"))
        return GroupedLinear((e, f, d), 1, self.dtype, name="down")(nn.silu(gate) * up, sizes)


class GroupedLinear(nn.Module):
    """`Linear` with a kernel per expert: the first `sizes[0]` tokens meet the first one, the next `sizes[1]` the second, ...

    CUDA computes just that (`grouped.product`). On a CPU XLA has no such product: every token meets every kernel,
    zeros in place of the others' tokens, at e times the arithmetic and a copy of the tokens e times as wide (32 experts, 2048
    pairs, 256 x 128 kernels: 48 ms and 71 MB against 0.9 ms and nothing for one dense product): fine for tests and toys.
    """

    shape: tuple[int, int, int]
    """Experts, input features, output features."""
    split: int
    """The axis of `shape` that the devices of the mesh axis `tensor` divide among them, if it divides."""
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "p d"], sizes: Int[Array, " e"]) -> Float[Array, "p f"]:
        parts = parallel.size("tensor") if parallel.divides(self.shape[self.split]) else 1
        shape = tuple(n // parts if i == self.split else n for i, n in enumerate(self.shape))
        kernel = parameter(self, "kernel", nn.initializers.lecun_normal(batch_axis=0), self.shape)
        out = grouped_product(x, kernel, sizes, self.dtype, shape)
        if self.has_variable("params", "lora_a"):
            a, b = (self.get_variable("params", name).astype(self.dtype) for name in ("lora_a", "lora_b"))
            a, b = parallel.whole(a, (*shape[:2], a.shape[-1])), parallel.whole(b, (shape[0], b.shape[1], shape[2]))
            out += ragged(ragged(x, a, sizes), b, sizes)
        return out


@partial(jax.checkpoint, static_argnums=(3, 4), prevent_cse=False)
def grouped_product(
    x: Float[Array, "p d"], kernel: Any, sizes: Int[Array, " e"], dtype: Any, shape: tuple[int, ...]
) -> Float[Array, "p f"]:
    """`layers.product` in groups."""
    return ragged(x, computed(kernel, dtype, shape), sizes)


def ragged(x: Float[Array, "p d"], kernel: Float[Array, "e d f"], sizes: Int[Array, " e"]) -> Float[Array, "p f"]:
    """`jax.lax.ragged_dot`; on CUDA, where XLA would multiply every token by every kernel, our own products of groups."""
    if not cuda.installed():
        return jax.lax.ragged_dot(x, kernel, sizes)
    from gspo_jax.models.grouped import product  # Pallas's part for GPUs, which nothing else needs

    return product(x, kernel, sizes)


def check_chosen(chosen: int, experts: int) -> None:
    """ValueError unless `chosen` of so many experts can be chosen."""
    if not 1 <= chosen <= max(experts, 1):
        raise ValueError(f"num_experts_per_tok={chosen} must be 1..num_experts={experts}")


def expert_rows(*, fused: bool) -> Rows:
    """Weights of `Experts` in one tensor per expert and matrix, or in two tensors (`fused`) for all experts of a layer."""
    rows: Rows = [("mlp/router/kernel", "mlp.gate.weight", "e d -> d e")]
    if fused:
        return [
            *rows,
            ("mlp/experts/gate/kernel", "mlp.experts.gate_up_proj", "e (c fe) d -> e d fe", ("c", 0)),
            ("mlp/experts/up/kernel", "mlp.experts.gate_up_proj", "e (c fe) d -> e d fe", ("c", 1)),
            ("mlp/experts/down/kernel", "mlp.experts.down_proj", "e d fe -> e fe d"),
        ]
    for part, layout in (("gate", "fe d -> d fe"), ("up", "fe d -> d fe"), ("down", "d fe -> fe d")):
        rows.append((f"mlp/experts/{part}/kernel", f"mlp.experts.{{e}}.{part}_proj.weight", layout))
    return rows


def _routing(choices: Int[Array, "b t k"], p: Float[Array, "b t e"], logp: Float[Array, "b t e"], valid: Array) -> Routing:
    chosen = (choices[..., None] == jnp.arange(p.shape[-1])) & valid[..., None, None]
    counted = jnp.where(valid[..., None], p, 0)
    return jax.lax.stop_gradient(Routing(
        choices, jnp.sum(chosen, (0, 1, 2), dtype=jnp.float32), jnp.sum(counted, (0, 1)),
        -jnp.sum(counted * logp), jnp.sum(valid, dtype=jnp.float32),
    ))  # fmt: skip


@jax.custom_vjp
def _permute(x: Float[Array, "p d"], order: Int[Array, " p"], inverse: Int[Array, " p"]) -> Float[Array, "p d"]:
    """`x[order]`, whose gradient is the inverse permutation: a gather again, not a scatter."""
    return x[order]


_permute.defvjp(lambda x, order, inverse: (x[order], inverse), lambda inverse, g: (g[inverse], None, None))
