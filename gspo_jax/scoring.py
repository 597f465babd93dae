"""Log-probabilities of given tokens under a policy: plain sequences, no trajectories."""

import jax
import numpy as np
from jaxtyping import Float, Int

from gspo_jax.policy import Policy, logprobs_of
from gspo_jax.types import Batch, Params

ROWS = 8
"""Sequences scored at a time."""


def score_tokens(
    policy: Policy, params: Params, input_ids: Int[np.ndarray, "b t"], *, temperature: float = 1.0
) -> Float[np.ndarray, "b s"]:
    """`next_logprobs [b t-1]` float32: entry `[i, j]` is log p(token j+1 | tokens 0..j) of row i."""
    logprobs = jax.jit(logprobs_of(policy, temperature=temperature))
    found = []
    for start in range(0, len(input_ids), ROWS):
        part = input_ids[start : start + ROWS]
        padded = np.zeros((ROWS, input_ids.shape[1]), np.int32)
        padded[: len(part)] = part
        found.append(np.asarray(logprobs(params, whole_rows(padded))[0])[: len(part), 1:])
    return np.concatenate(found)


def whole_rows(tokens: Int[np.ndarray, "r t"]) -> Batch:
    """One segment a row, every token but the first scored."""
    rows, length = tokens.shape
    index = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
    ones, zeros = np.ones(tokens.shape, np.int32), np.zeros(tokens.shape, np.float32)
    numbers = np.broadcast_to(np.arange(1, rows + 1, dtype=np.int32)[:, None], tokens.shape)
    return Batch(tokens.astype(np.int32), index, ones, 0 * ones, np.maximum(index - 1, 0), numbers, index > 0, zeros, zeros,
                 0 * ones, np.float32(rows) * np.ones((), np.float32))  # fmt: skip
