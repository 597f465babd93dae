"""Tiny checkpoints of every architecture with reference logits, and programs that several tests run on them."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from helpers_model import done, group, micro, turn

from gspo_jax.batch import Packing, pack
from gspo_jax.models.layers import Spots
from gspo_jax.policy import Policy, describe_policy, load_policy, logprobs_of
from gspo_jax.sampler import Sampler
from gspo_jax.types import Batch, Params

DATA = Path(__file__).parent / "data" / "models"
NAMES = sorted(path.name for path in DATA.iterdir())
ONE_EACH = sorted(set(NAMES) - {"llama3_rope", "qwen3_untied"})
"""A checkpoint per architecture."""
TOLERANCE = 2e-4
QUICK = {"xla_backend_optimization_level": 0}
"""Compiles in half the time. The score command and the sampler compile as they always do."""
SHARED = 10
"""Tokens of the first sequence that serve as a prompt which two completions share."""


@dataclass(frozen=True)
class Family:
    """A checkpoint with the logits that transformers computed, and programs that are compiled once for all tests."""

    folder: Path
    policy: Policy
    params: Params
    data: dict[str, np.ndarray]

    @property
    def ids(self) -> np.ndarray:
        return self.data["input_ids"]

    @cached_property
    def batch(self) -> Batch:
        """Rows of one shape: all three sequences; two completions after one prompt; then one sequence each."""
        rows = [packed(self.ids, 1), packed(self.ids[:1], 1), *(packed(row[None], 1) for row in self.ids)]
        if not self.policy.config.recurrent:
            rows[1] = self.shared
        fields = zip(*rows, strict=True)
        return Batch(*(np.concatenate([a, *rest]) if np.ndim(a) else a for a, *rest in fields))

    @cached_property
    def shared(self) -> Batch:
        """Two equal completions after one prompt: the first sequence, twice."""
        return packed(np.repeat(self.ids[:1], 2, 0), SHARED, "shared_prefix")

    @cached_property
    def logits(self) -> np.ndarray:
        return np.asarray(jax.jit(self._logits, compiler_options=QUICK)(self.params, jax.tree.map(jnp.asarray, self.batch)))

    def _logits(self, params: Params, batch: Batch) -> jax.Array:
        spots = Spots(batch.positions, batch.segment_ids, None if self.policy.config.recurrent else batch.prefix_ids)
        return self.policy.model.apply({"params": params}, batch.tokens, spots).hidden @ self.policy.head(params).T

    @cached_property
    def logprobs(self) -> Any:
        """`(params, batch) -> log-probabilities`, each layer computed again for the backward pass."""
        layered = describe_policy(self.folder, compute_dtype="float32", remat="layer")
        return jax.jit(logprobs_of(layered), compiler_options=QUICK)

    @cached_property
    def sampler(self) -> Sampler:
        return Sampler(self.policy, slots=4, context_length=40, seed=0)


def packed(ids: np.ndarray, prompt: int, mode: str = "packed") -> Batch:
    """The sequences in one row of 111, their first `prompt` tokens a prompt."""
    together = group(*(done(turn(row[:prompt].tolist(), row[prompt:].tolist()), member=i) for i, row in enumerate(ids)))
    groups = [together] if mode == "shared_prefix" else [group(t) for t in together.trajectories]
    advantages = [[1.0] * len(g.trajectories) for g in groups]
    return micro(pack(groups, advantages, len(ids), Packing(111, 1, mode)))


def load_family(name: str) -> Family:
    """A folder of `DATA`."""
    return Family(DATA / name, *load_policy(DATA / name), dict(np.load(DATA / name / "golden.npz")))
