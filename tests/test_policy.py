"""Token log-probabilities: the chunked head against a plain log-softmax, alignment, temperature, and who sees whom."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers_model import VOCAB, by_completion, done, group, micro, tiny_policy, turn

from gspo_jax import policy as policy_module
from gspo_jax.batch import Packing, pack
from gspo_jax.policy import gather_logprobs, logprobs_of, score
from gspo_jax.types import Batch
from rollout.types import Trajectory

ROWS, LENGTH, WIDTH, SYMBOLS = 2, 50, 8, 13

jit_score = jax.jit(score, static_argnums=3)


def lay(*trajectories: Trajectory, length: int = 64, mode: str = "packed", rows: int = 1) -> Batch:
    """One micro-batch; all trajectories are one group."""
    batch = pack([group(*trajectories)], [[1.0] * len(trajectories)], len(trajectories), Packing(length, rows, mode))
    assert batch.tokens.shape[:2] == (1, 1)
    return micro(batch)


def answer(prompt, completion) -> Trajectory:
    return done(turn(prompt, completion))


@pytest.fixture(scope="module")
def scoring():
    """The tiny model's scoring function, compiled once per shape, and its parameters."""
    policy, params = tiny_policy()
    run = jax.jit(logprobs_of(policy))
    return lambda batch: np.asarray(run(params, batch)[0])


def normal(rng: np.random.Generator, *shape: int):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def random_case(seed: int, share: float):
    """Hidden states, head and a batch with random targets, parents and mask."""
    rng = np.random.default_rng(seed)
    batch = lay(answer([1], [1] * (LENGTH - 1)), answer([1], [1] * (LENGTH - 1)), length=LENGTH, mode="padded", rows=ROWS)
    index = np.arange(LENGTH)
    batch = batch._replace(
        tokens=rng.integers(0, SYMBOLS, (ROWS, LENGTH)).astype(np.int32),
        parents=(rng.random((ROWS, LENGTH)) * index).astype(np.int32),
        loss_mask=(rng.random((ROWS, LENGTH)) < share * np.array([[1.0], [0.3]])) & (index > 0),
    )
    hidden, head = normal(rng, ROWS, LENGTH, WIDTH), normal(rng, SYMBOLS, WIDTH)
    return hidden, head, batch, rng.standard_normal((2, ROWS, LENGTH))


def plain(hidden, head, batch: Batch, temperature: float):
    """The textbook formula, all logits at once."""
    parents = jnp.take_along_axis(hidden, batch.parents[..., None], 1)
    logp = jax.nn.log_softmax(parents @ head.T / temperature, -1)
    picked = jnp.take_along_axis(logp, batch.tokens[..., None], -1)[..., 0]
    entropy = -jnp.sum(jnp.exp(logp) * logp, -1)
    return jnp.where(batch.loss_mask, picked, 0), jnp.where(batch.loss_mask, entropy, 0)


@pytest.mark.parametrize(
    ("logits_tokens", "share", "temperature"), [(1, 0.6, 1.7), (7, 1.0, 1.0), (64, 0.6, 0.6), (64, 0.0, 1.0), (4096, 0.05, 1.0)]
)
def test_score_is_log_softmax_for_any_chunk_width(monkeypatch, logits_tokens: int, share: float, temperature: float):
    """Values, entropies, and the gradients of both with respect to hidden states and head."""
    monkeypatch.setattr(policy_module, "LOGITS_TOKENS", (logits_tokens, logits_tokens))
    hidden, head, batch, weights = random_case(logits_tokens, share)

    def both(f):
        def weighted(hidden, head):
            found = f(hidden, head, batch, temperature)
            return sum(jnp.sum(w * x) for w, x in zip(weights.astype(np.float32), found, strict=True)), found

        return jax.jit(jax.value_and_grad(weighted, (0, 1), has_aux=True))(hidden, head)

    (_, found), grads = both(score)
    (_, expected), expected_grads = both(plain)
    for a, b in zip((*found, *grads), (*expected, *expected_grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
    outside = ~np.asarray(batch.loss_mask)
    assert not np.asarray(found[0])[outside].any()
    assert not np.asarray(found[1])[outside].any()
    read = {(r, p) for r in range(ROWS) for p in np.asarray(batch.parents)[r, np.asarray(batch.loss_mask)[r]]}
    unread = [(r, t) for r in range(ROWS) for t in range(LENGTH) if (r, t) not in read]
    assert not np.asarray(grads[0])[tuple(np.array(unread).T)].any()


def test_chunks_beyond_the_count_are_not_computed():
    """NaN in the columns that no chunk covers reaches neither value nor gradient."""
    hidden = jnp.ones((1, 12, 4)).at[:, 6:].set(jnp.nan)
    head, targets = jnp.eye(5, 4), jnp.zeros((1, 12), jnp.int32)

    def total(hidden, head):
        logprobs, _ = gather_logprobs(hidden, head, targets, jnp.int32(2), 3, 1.0)
        return jnp.sum(logprobs), logprobs

    grads, logprobs = jax.grad(total, (0, 1), has_aux=True)(hidden, head)
    assert np.isfinite(logprobs).all()
    assert not logprobs[:, 6:].any()
    assert all(np.isfinite(g).all() for g in grads)


def test_bfloat16_hidden_states_make_float32_logits():
    """Products of bfloat16 inputs summed and kept in float32: far closer than a bfloat16 logit's spacing."""
    hidden, head, batch, _ = random_case(3, 1.0)
    low = hidden.astype(jnp.bfloat16), head.astype(jnp.bfloat16)
    wide = (x.astype(jnp.float32) for x in low)
    np.testing.assert_allclose(jit_score(*low, batch, 1.0)[0], plain(*wide, batch, 1.0)[0], atol=1e-5)


def two_logits(temperature: float) -> float:
    """Log-probability of the first of two symbols with logits [2, 0]."""
    batch = lay(answer([0], [0]), length=2)
    hidden, head = jnp.ones((1, 2, 1)), jnp.array([[2.0], [0.0]])
    return float(jit_score(hidden, head, batch, temperature)[0][0, 1])


def test_tok_03_temperature_is_in_the_score():
    """Logits [2, 0] at T = 0.6: -0.035052, at T = 1: -0.126928. Left out, ratios start at 1.0962."""
    assert two_logits(0.6) == pytest.approx(-math.log1p(math.exp(-2 / 0.6)), abs=1e-6) == pytest.approx(-0.035052, abs=1e-6)
    assert two_logits(1.0) == pytest.approx(-0.126928, abs=1e-6)
    assert math.exp(two_logits(0.6) - two_logits(1.0)) == pytest.approx(1.0962, abs=1e-4)


def test_tok_04_temperature_divides_logits_not_logprobs():
    """-0.126928 / 0.6 = -0.211547 is the plausible wrong number."""
    assert abs(two_logits(0.6) - two_logits(1.0) / 0.6) > 0.17


def test_tok_07_first_response_token_is_trained():
    """Tokens 5 6 | 7 8 9: scores at 2, 3, 4, read from positions 1, 2, 3; nothing else is touched."""
    batch = lay(answer([5, 6], [7, 8, 9]), length=8)
    rng = np.random.default_rng(0)
    hidden, head = normal(rng, 1, 8, 4), normal(rng, 12, 4)

    def total(hidden):
        logprobs, _ = jit_score(hidden, head, batch, 1.0)
        return jnp.sum(logprobs), logprobs

    grad, logprobs = jax.grad(total, has_aux=True)(hidden)
    assert np.flatnonzero(logprobs[0]).tolist() == [2, 3, 4]
    assert np.flatnonzero(np.abs(grad[0]).max(-1)).tolist() == [1, 2, 3]
    prompt_moved, last_prompt_token_moved = hidden.at[0, 0].add(1), hidden.at[0, 1].add(1)
    np.testing.assert_array_equal(jit_score(prompt_moved, head, batch, 1.0)[0], logprobs)
    assert np.flatnonzero(jit_score(last_prompt_token_moved, head, batch, 1.0)[0][0] != logprobs[0]).tolist() == [2]


@pytest.mark.parametrize("mode", ["padded", "packed", "shared_prefix"])
def test_tok_08_log_probabilities_are_aligned(mode: str):
    """A model that is a table of p(next | last) over three symbols: every sequence of four by enumeration."""
    table = np.log(np.array([[0.7, 0.2, 0.1], [0.05, 0.5, 0.45], [0.3, 0.3, 0.4]]))
    total = 0.0
    sequences = list(itertools.product(range(3), repeat=3))
    for first in range(3):
        batch = lay(*(answer([first], s) for s in sequences), length=150, mode=mode, rows=27 if mode == "padded" else 1)
        hidden = jax.nn.one_hot(batch.tokens, 3)
        logprobs, _ = jit_score(hidden, jnp.asarray(table.T, jnp.float32), batch, 1.0)
        found = by_completion(logprobs, batch)
        assert found.keys() == set(sequences)
        for s in sequences:
            expected = [table[a, b] for a, b in itertools.pairwise((first, *s))]
            np.testing.assert_allclose(found[s], expected, atol=1e-5)
        total += sum(math.exp(x.sum()) for x in found.values())
    assert total == pytest.approx(3, rel=1e-5)


def test_tok_09_padding_does_not_move_a_short_row(scoring):
    """Positions follow the sequence, not the row: 3 and 7 tokens together, alone, in rows of several lengths."""
    short, long = answer([5], [6, 7]), answer([9, 8, 7], [1, 2, 3, 4])
    together = by_completion(scoring(b := lay(short, long, length=16, mode="padded", rows=2)), b)
    for trajectory in (short, long):
        ids = trajectory.turns[0].completion_ids
        for length in (7, 64):
            alone = by_completion(scoring(b := lay(trajectory, length=length)), b)
            np.testing.assert_allclose(together[ids], alone[ids], atol=1e-5)


def test_tok_10_packed_neighbor_is_invisible(scoring):
    """Every token of A changes; the bits of B's log-probabilities do not."""
    rng = np.random.default_rng(0)
    b = answer([3, 1, 4], [1, 5, 9, 2, 6])
    seen = []
    for _ in range(3):
        a = answer(rng.integers(1, VOCAB, 7).tolist(), rng.integers(1, VOCAB, 11).tolist())
        batch = lay(a, b)
        assert len(set(batch.segment_ids[0].tolist()) - {0}) == 2
        seen.append(by_completion(scoring(batch), batch)[(1, 5, 9, 2, 6)])
    np.testing.assert_array_equal(seen[0], seen[1])
    np.testing.assert_array_equal(seen[0], seen[2])


def test_completions_of_a_shared_prompt_see_it_and_not_each_other(scoring):
    prompt, first, second = [3, 1, 4, 1], [5, 9, 2], [6, 5, 3, 5, 8]
    shared = lay(answer(prompt, first), answer(prompt, second), mode="shared_prefix")
    assert np.sum(shared.segment_ids > 0) == len(prompt) + len(first) + len(second)
    found = by_completion(scoring(shared), shared)
    for completion in (first, second):
        alone = by_completion(scoring(b := lay(answer(prompt, completion))), b)[tuple(completion)]
        np.testing.assert_allclose(found[tuple(completion)], alone, atol=1e-5)

    other = lay(answer(prompt, [7, 7, 7]), answer(prompt, second), mode="shared_prefix")
    np.testing.assert_array_equal(by_completion(scoring(other), other)[tuple(second)], found[tuple(second)])
    moved = lay(answer([3, 1, 4, 2], first), answer([3, 1, 4, 2], second), mode="shared_prefix")
    for completion in (first, second):
        assert np.abs(by_completion(scoring(moved), moved)[tuple(completion)] - found[tuple(completion)]).min() > 1e-4


def test_segments_of_a_rewritten_history_do_not_see_each_other(scoring):
    """A turn that does not extend the last one is a context of its own, though of the same trajectory."""
    two = done(turn([1, 2], [3, 4]), turn([1, 9], [5, 6]))
    found = by_completion(scoring(b := lay(two)), b)[(3, 4, 5, 6)]
    parts = [by_completion(scoring(b := lay(answer(*x))), b) for x in (([1, 2], [3, 4]), ([1, 9], [5, 6]))]
    np.testing.assert_allclose(found, np.concatenate([parts[0][(3, 4)], parts[1][(5, 6)]]), atol=1e-5)
