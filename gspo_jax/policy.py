"""The policy: a loaded model, and the log-probabilities of tokens under it, without ever building `[b t v]` logits."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int
from pydantic import ValidationError
from qwix import QArray

from gspo_jax import parallel
from gspo_jax.balance import routing_stats
from gspo_jax.models import ARCHITECTURES
from gspo_jax.models.layers import Spots, computed
from gspo_jax.models.tables import table_of
from gspo_jax.pretrained import resolve_model
from gspo_jax.sharding import WHOLE, Layout
from gspo_jax.types import Batch, Params
from serving_bridge import trees
from serving_bridge.convert import StoredLeaf, Weight, WeightError, folder_tensors, open_weights, save_folder

LOGITS_TOKENS = 128, 512
"""Fewest and most tokens whose logits exist at one time (`[512 v]` float32 is 100 MB for a vocabulary of 49152)."""

COMPUTED = ("kernel", "bias", "embedding", "head", "lora_a", "lora_b")
"""Last names of the leaves that are cast to the compute type."""

type LogProbs = Callable[[Params, Batch], tuple[Any, ...]]
"""`(params, micro-batch) -> log-probabilities and entropies` `[r t]`, 0 outside `loss_mask`; then `Stats`, if there are any."""


@dataclass(frozen=True)
class Policy:
    """What stays constant about a model: its configuration, its forward function, its weight table. Parameters are apart."""

    folder: Path
    architecture: str
    config: Any
    model: Any
    table: tuple[Weight, ...]
    dtype: Any

    @property
    def init_cache(self) -> Callable[..., Any]:
        """`(rows, length) -> ` an empty key-value cache."""
        return partial(ARCHITECTURES[self.architecture].init_cache, self.config, dtype=self.dtype)

    @property
    def head_shape(self) -> tuple[int, int]:
        """Of this device's part of the output matrix, once gathered."""
        words, parts = self.config.vocab_size, parallel.size("tensor")
        return words // parts if parallel.divides(words) else words, self.config.hidden_size

    def head(self, params: Params) -> Float[Array, "v d"]:
        """The output matrix: the embedding itself when tied."""
        return params["embedding"] if self.config.tie_word_embeddings else params["head"]


def load_policy(base: str | Path, *, compute_dtype: str = "float32", remat: str = "none") -> tuple[Policy, Params]:
    """A policy and its float32 parameters from a Hugging Face folder, a hub id, or a packaged model (`model.base`).

    Raises `ModelNotFoundError`, or `WeightError` naming every missing, unused or misshapen tensor.
    """
    policy = describe_policy(resolve_model(str(base)), compute_dtype=compute_dtype, remat=remat)
    return policy, load_params(policy, policy.folder)


def describe_policy(folder: Path, *, compute_dtype: str, remat: str) -> Policy:
    """The policy of a Hugging Face folder without its parameters. `WeightError` for a config.json we cannot compute."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise WeightError(
            f"{path}: not a readable model configuration ({error}); model.base must be a Hugging Face folder"
        ) from None
    kind = raw.get("model_type")
    if kind not in ARCHITECTURES:
        raise WeightError(f"{path}: model_type={kind!r} is not supported; supported: {', '.join(sorted(ARCHITECTURES))}")
    module = ARCHITECTURES[kind]
    try:
        config = module.Config.model_validate(raw)
    except (ValidationError, KeyError, ValueError, TypeError) as error:
        raise WeightError(f"{path}: {error!r}" if isinstance(error, KeyError) else f"{path}: {error}") from None
    dtype = jnp.dtype(compute_dtype)
    table = table_of(module, config, folder_tensors(folder))
    return Policy(folder, kind, config, module.Model(config, dtype, remat), table, dtype)


def load_params(
    policy: Policy, folder: Path, keep: Callable[[str, StoredLeaf], Any] = lambda _, leaf: jax.device_put(leaf.read())
) -> Params:
    """Parameters of `policy` from a folder of safetensors. `keep(path, leaf)` makes of each leaf, not read yet, what is kept
    of it: float32 on the default device, unless given."""
    config, embedding = policy.config, next(row.name for row in policy.table if row.path == "embedding")
    heads = ("lm_head.weight", "language_model.lm_head.weight") if config.tie_word_embeddings else ()
    ignore, twins = ["*rotary_emb.inv_freq", *heads, *config.untrained], [(head, embedding) for head in heads]
    found: dict[str, Any] = {}
    for path, leaf in open_weights(folder, policy.table, config.sizes(), ignore, twins).items():
        trees.put(found, path, keep(path, leaf))
    return found


def compute_leaf(path: str, leaf: Any, dtype: Any) -> Any:
    """A leaf in the type the model computes with it: `dtype` for weight matrices, biases and embeddings.

    Norm scales, decays and routers stay float32, as the model reads them; quantized kernels stay as they are.
    """
    *parents, last = path.split("/")
    return leaf.astype(dtype) if last in COMPUTED and "router" not in parents and not isinstance(leaf, QArray) else leaf


def serving_params(params: Params, dtype: Any) -> Params:
    """All parameters as `compute_leaf` makes them: what a sampler holds."""
    found: dict[str, Any] = {}
    for path, leaf in trees.leaves(params):
        trees.put(found, path, compute_leaf(path, leaf, dtype))
    return found


def save_policy(policy: Policy, params: Params, out: Path, *, dtype: Literal["bfloat16", "float32"] = "bfloat16") -> None:
    """A Hugging Face folder at `out` that transformers and vLLM load; appears whole or not at all."""
    save_folder(
        out,
        params,
        policy.table,
        policy.config.sizes(),
        source_folder=policy.folder,
        dtype=dtype,
        keep=policy.config.untrained,
        overwrite=True,
    )


def logprobs_of(policy: Policy, *, temperature: float = 1.0, layout: Layout = WHOLE) -> LogProbs:
    """The function that scores a packed micro-batch under softmax(logits / temperature), in float32 from the logits on.

    All NaN for a recurrent model and a micro-batch with shared prompts: a state runs along the row and cannot go back to where
    a second completion branched off. With experts, also sums of what the routers did (`balance.routing_stats`). With a
    `layout`, parameters and rows are split as it says, and each device computes its rows.
    """

    def logprobs(params: Params, batch: Batch) -> tuple[Any, ...]:
        spots = Spots(batch.positions, batch.segment_ids, batch.prefix_ids)
        experts = None if batch.experts is None else jnp.moveaxis(jnp.asarray(batch.experts), 2, 0)
        output = policy.model.apply({"params": params}, batch.tokens, spots, None, experts)
        hidden = parallel.gathered(output.hidden, 1, ("sequence",))
        logprobs, entropy = score(hidden, policy.head(params), batch, temperature, policy.head_shape)
        if policy.config.recurrent:
            branched = jnp.any(jnp.asarray(batch.prefix_ids) > 0)
            logprobs, entropy = (jnp.where(branched, jnp.nan, x) for x in (logprobs, entropy))
        if output.routing is None:
            return logprobs, entropy
        return logprobs, entropy, parallel.summed(routing_stats(output.routing), *parallel.ROWS, "sequence")

    routed = any(map(policy.config.routes, policy.config.kinds))
    return layout.by_rows(logprobs, stats=routed, cast=partial(compute_leaf, dtype=policy.dtype))


def score(
    hidden: Float[Array, "r t d"],
    head: Float[Array, "v_here d_here"],
    batch: Batch,
    temperature: float,
    shape: tuple[int, int] | None = None,
) -> tuple[Float[Array, "r t"], Float[Array, "r t"]]:
    """Log-probability and entropy at every token of `loss_mask`, 0 elsewhere. Cost grows with the trained tokens only.

    `shape`: of this device's part of the head once gathered, on a mesh; a smaller one is split at rest.
    """
    rows, length = batch.tokens.shape
    least, most = LOGITS_TOKENS
    width = max(1, min(length, min(most, max(least, rows * length // 8)) // rows))
    parts = parallel.size("sequence")
    padded = -(-length // (width * parts)) * width * parts
    where = jax.vmap(lambda m: jnp.nonzero(m, size=padded, fill_value=length)[0])(jnp.asarray(batch.loss_mask))
    if parts > 1:  # every chunk is divided, so that all devices have as many
        where = where.reshape(rows, -1, parts, width)[:, :, parallel.rank("sequence")].reshape(rows, -1)
    inside = jnp.minimum(where, length - 1)
    parents = jnp.take_along_axis(jnp.asarray(batch.parents), inside, 1)
    picked = jnp.take_along_axis(hidden, parents[..., None], 1)
    targets = jnp.take_along_axis(jnp.asarray(batch.tokens), inside, 1)
    chunks = -(-jnp.max(jnp.sum(batch.loss_mask, 1)) // (width * parts))
    found = gather_logprobs(picked, head, targets, chunks, width, temperature, shape or head.shape)
    row = jnp.arange(rows)[:, None]
    blank = parallel.varying(jnp.zeros((rows, length), jnp.float32))
    logprobs, entropy = (parallel.summed(blank.at[row, where].set(x, mode="drop"), "sequence") for x in found)
    return logprobs, entropy


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def gather_logprobs(
    hidden: Float[Array, "r k d"],
    head: Float[Array, "v_here d_here"],
    targets: Int[Array, "r k"],
    chunks: Int[Array, ""],
    width: int,
    temperature: float,
    shape: tuple[int, int] | None = None,
) -> tuple[Float[Array, "r k"], Float[Array, "r k"]]:
    """Log-softmax of `hidden @ head / temperature` at `targets`, and its entropy, `width` columns at a time.

    Only the first `chunks` chunks are computed (a traced number: no work for padding); the logits are computed again in
    the backward pass instead of being kept. The head travels in the type of `hidden`, its gradient in its own.
    """
    return _gather(hidden, head, targets, chunks, width, temperature, shape)


def _logits(hidden: Float[Array, "r w d"], head: Float[Array, "v d"], temperature: float) -> Float[Array, "q v"]:
    flat = hidden.reshape(-1, hidden.shape[-1])
    logits = jax.lax.dot_general(flat, head, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return logits if temperature == 1.0 else logits / temperature


def _chunk(x: Array, i: Array, width: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, i * width, width, 1)


def _logz(logits: Float[Array, "q v"], split: bool) -> Float[Array, " q"]:
    """log Σ exp over the vocabulary, of which each device of `tensor` has a part if `split`."""
    if not split:
        return jax.nn.logsumexp(logits, -1)
    most = jax.lax.pmax(jnp.max(logits, -1), "tensor")
    return most + jnp.log(parallel.summed(jnp.sum(jnp.exp(logits - most[:, None]), -1), "tensor"))


def _place(target: Int[Array, "r w"], words: int, split: bool) -> tuple[Int[Array, " q"], Bool[Array, " q"]]:
    """Columns of the targets among this device's words, and which of them are its own."""
    at = target.reshape(-1) - (parallel.rank("tensor") * words if split else 0)
    return jnp.clip(at, 0, words - 1), (at >= 0) & (at < words)


def _gather(hidden, head, targets, chunks, width, temperature, shape):
    split, head = parallel.varies(head, "tensor"), computed(head, hidden.dtype, shape or head.shape)

    def body(i, found):
        logits = _logits(_chunk(hidden, i, width), head, temperature)
        target = _chunk(targets, i, width)
        logz, (at, mine) = _logz(logits, split), _place(target, head.shape[0], split)
        picked = jnp.where(mine, jnp.take_along_axis(logits, at[:, None], 1)[:, 0], 0)
        spread = jnp.sum(jnp.exp(logits - logz[:, None]) * logits, -1)
        logprob, entropy = parallel.summed(picked, "tensor") - logz, logz - parallel.summed(spread, "tensor")
        parts = (logprob.reshape(target.shape), entropy.reshape(target.shape))
        return tuple(jax.lax.dynamic_update_slice_in_dim(x, part, i * width, 1) for x, part in zip(found, parts, strict=True))

    zeros = parallel.varying(jnp.zeros(targets.shape, jnp.float32))
    return jax.lax.fori_loop(0, chunks, body, (zeros, zeros))


def _gather_forward(hidden, head, targets, chunks, width, temperature, shape):
    return _gather(hidden, head, targets, chunks, width, temperature, shape), (hidden, head, targets, chunks)


def _gather_backward(width, temperature, shape, residuals, cotangents):
    hidden, at_rest, targets, chunks = residuals
    shape = shape or at_rest.shape
    g_logprob, g_entropy = cotangents
    split, head = parallel.varies(at_rest, "tensor"), computed(at_rest, hidden.dtype, shape)

    def body(i, grads):
        g_hidden, g_head = grads
        part = _chunk(hidden, i, width)
        logits = _logits(part, head, temperature)
        logp = logits - _logz(logits, split)[:, None]
        p = jnp.exp(logp)
        entropy = -parallel.summed(jnp.sum(p * logp, -1, keepdims=True), "tensor")
        g_lp, g_h = (_chunk(g, i, width).reshape(-1, 1) for g in (g_logprob, g_entropy))
        at, mine = _place(_chunk(targets, i, width), head.shape[0], split)
        g = -p * (g_lp + g_h * (logp + entropy))
        g = g.at[jnp.arange(at.size), at].add(jnp.where(mine, g_lp[:, 0], 0)) / temperature
        g = g.astype(hidden.dtype)
        flat = part.reshape(-1, part.shape[-1])
        g_part = parallel.summed(g @ head, "tensor").reshape(part.shape)
        g_head += jax.lax.dot_general(g, flat, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        return jax.lax.dynamic_update_slice_in_dim(g_hidden, g_part, i * width, 1), g_head

    zeros = parallel.varying(jnp.zeros_like(hidden)), parallel.alike(jnp.zeros(shape, jnp.float32), head)
    g_hidden, g_head = jax.lax.fori_loop(0, chunks, body, zeros)
    return (
        g_hidden,
        parallel.scattered(g_head.astype(at_rest.dtype), at_rest),
        np.zeros(targets.shape, jax.dtypes.float0),
        np.zeros((), jax.dtypes.float0),
    )


gather_logprobs.defvjp(_gather_forward, _gather_backward)
