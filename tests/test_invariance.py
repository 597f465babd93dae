"""A loss and its gradient are one number: whatever the split, layout, order, padding, precision, chunks or devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers_model import VOCAB, done, group, on, random_groups, tiny_policy, turn

from gspo_jax import policy
from gspo_jax.batch import Packing, pack
from gspo_jax.learner import learner
from gspo_jax.objective import VARIETIES, build_objective
from gspo_jax.policy import logprobs_of
from gspo_jax.sections import Algorithm
from gspo_jax.types import Batch

LAYOUTS = (Packing(32, 2, "padded"), Packing(32, 2, "packed"), Packing(32, 2, "shared_prefix"))
SPLIT = Packing(32, 1, "padded")
MICRO = 4
"""Micro-batches of every layout, the missing ones blank: one compiled shape."""
EVERYTHING = {
    "kl_beta": 0.1,
    "entropy_bonus": 0.02,
    "correction": {"weight": "token_mask", "low": 0.9, "high": 1.2, "normalize": True, "off_policy_max": 0.05},
}
"""Penalties and corrections all at once."""
CASES = [(name, {}) for name in VARIETIES] + [(name, EVERYTHING) for name in ("gspo", "gspo_token", "dapo", "dr_grpo")]


def tables(dtype) -> dict[str, np.ndarray]:
    """Log-probabilities of a token given the one before it, under four policies close to each other."""
    rng = np.random.default_rng(0)
    base = rng.uniform(-4, -0.1, (VOCAB, VOCAB))
    scales = {"now": 0.0, "old": 0.05, "behavior": 0.1, "reference": 0.3}
    return {name: (base + scale * rng.standard_normal(base.shape)).astype(dtype) for name, scale in scales.items()}


def with_policies(batch: Batch, known: dict[str, np.ndarray], garbage: float) -> Batch:
    """The batch with every policy's log-probabilities, and `garbage` wherever nothing is trained."""
    before, trained = np.take_along_axis(batch.tokens, batch.parents, -1), np.asarray(batch.loss_mask)
    dtype = known["now"].dtype

    def only_trained(values) -> np.ndarray:
        return np.where(trained, values, garbage).astype(dtype)

    return batch._replace(
        proximal_logprobs=only_trained(known["old"][before, batch.tokens]),
        behavior_logprobs=only_trained(known["behavior"][before, batch.tokens]),
        reference_logprobs=only_trained(known["reference"][before, batch.tokens]),
        advantages=only_trained(batch.advantages),
        trajectories=batch.trajectories.astype(dtype),
    )


def total_of(algorithm: Algorithm):
    """`(known, groups, advantages, packing, garbage) -> ` loss and gradient with respect to the policy's table."""
    objective = build_objective(algorithm, 30)

    def mean(table, whole: Batch):
        if objective.prepare:
            whole, _ = objective.prepare(whole)
        before = jnp.take_along_axis(jnp.asarray(whole.tokens), jnp.asarray(whole.parents), -1)
        logprobs = table[before, jnp.asarray(whole.tokens)]
        whole = whole._replace(entropy=jnp.square(jnp.where(whole.loss_mask, logprobs, 0)))
        parts, _ = jax.vmap(objective.loss)(logprobs[0], jax.tree.map(lambda x: jnp.asarray(x)[0], whole))
        return jnp.sum(parts.total) / jnp.sum(parts.count)

    function = jax.jit(jax.value_and_grad(mean))

    def total(known, groups, advantages, packing: Packing, garbage: float = 0.0):
        batch = pack(groups, advantages, sum(len(g.trajectories) for g in groups), packing)
        missing = max(MICRO - batch.tokens.shape[1], 0)
        batch = jax.tree.map(lambda x: np.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2)), batch)
        return jax.device_get(function(known["now"], with_policies(batch, known, garbage)))

    return total


def groups_and_advantages(seed: int):
    rng = np.random.default_rng(seed)
    groups = random_groups(seed, 2, 4, prompt=5, completion=12)
    return groups, [rng.standard_normal(4).tolist() for _ in groups]


def assert_close(found, expected, rtol: float) -> None:
    scale = np.abs(expected[1]).max()
    np.testing.assert_allclose(found[0], expected[0], rtol=rtol, atol=rtol * scale)
    np.testing.assert_allclose(found[1], expected[1], rtol=rtol, atol=rtol * scale)


@pytest.mark.parametrize("x64", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize(("variety", "extras"), CASES, ids=[f"{name}{'+' * bool(extras)}" for name, extras in CASES])
def test_no_layout_changes_an_objective(variety: str, extras: dict, x64: bool):
    """Padded, packed and shared-prefix rows, other micro-batches, NaN in all padding, shuffled groups and members."""
    total = total_of(Algorithm.model_validate({"variety": variety, **extras}))
    groups, advantages = groups_and_advantages(3)
    order = (2, 0, 3, 1)
    shuffled = [group(*(groups[g].trajectories[m] for m in order), seed=g) for g in (1, 0)]
    with jax.enable_x64(x64):
        known, rtol = tables(np.float64 if x64 else np.float32), 1e-12 if x64 else 2e-5
        expected = total(known, groups, advantages, LAYOUTS[0])
        assert np.abs(expected[1]).max() > 1e-3
        for packing in (*LAYOUTS[1:], *([SPLIT] if extras else [])):
            assert_close(total(known, groups, advantages, packing, garbage=np.nan), expected, rtol)
        assert_close(total(known, shuffled, [[advantages[g][m] for m in order] for g in (1, 0)], LAYOUTS[2]), expected, rtol)


def test_tokens_that_are_not_trained_change_nothing():
    """A tool's answer after the last completion."""
    total, known = total_of(Algorithm.model_validate({"variety": "gspo"})), tables(np.float32)
    plain = [group(done(turn([1], [2, 3, 4])), done(turn([1], [5, 6])))]
    longer = [group(done(turn([1], [2, 3, 4]), turn([1, 2, 3, 4, 7, 8], [])), done(turn([1], [5, 6])))]
    expected = total(known, plain, [[1.0, -1.0]], LAYOUTS[0])
    assert_close(total(known, longer, [[1.0, -1.0]], LAYOUTS[0]), expected, 1e-6)


PLAINEST = Packing(24, 8, "padded")
STEP = Algorithm.model_validate(
    {"variety": "gspo_token", **EVERYTHING, "correction": {"weight": "token_truncate", "normalize": True}}
)


def step_batch(packing: Packing, minibatch: int = 4) -> Batch:
    groups, advantages = groups_and_advantages(5)
    batch = pack(groups, advantages, minibatch, packing)
    return batch._replace(reference_logprobs=np.where(batch.loss_mask, -3.0, 0).astype(np.float32))


def table_logprobs(params, batch: Batch):
    """The smallest policy: log-probabilities and entropies of a table of logits, one row per last token."""
    trained = jnp.asarray(batch.loss_mask)
    before = jnp.take_along_axis(jnp.asarray(batch.tokens), jnp.asarray(batch.parents), 1)
    logp = jax.nn.log_softmax(params["table"][before])
    found = jnp.take_along_axis(logp, jnp.asarray(batch.tokens)[..., None], -1)[..., 0]
    return jnp.where(trained, found, 0), jnp.where(trained, -jnp.sum(jnp.exp(logp) * logp, -1), 0)


def step(packing: Packing, *, devices: int = 1, donate: bool = False):
    """Parameters and metrics after one update of two minibatches under GSPO-token with every penalty and correction."""
    objective, layout = build_objective(STEP, 30), on(devices)
    found = learner(table_logprobs, objective.loss, optax.sgd(5.0), max_grad_norm=10.0, prepare=objective.prepare)
    params = {"table": jnp.asarray(np.random.default_rng(1).standard_normal((VOCAB, VOCAB)), jnp.float32)}
    update = jax.jit(found.update, donate_argnums=0 if donate else ())
    state, metrics = update(layout.state(found.init(params)), layout.batch(step_batch(packing)))
    return np.asarray(state.params["table"]), {name: float(x) for name, x in metrics.items()}


@pytest.fixture(scope="module")
def plainest():
    return step(PLAINEST)


@pytest.mark.parametrize(
    ("packing", "devices"),
    [
        (Packing(24, 1, "padded"), 1),
        (Packing(64, 1, "shared_prefix"), 1),
        (PLAINEST, 2),
        (PLAINEST, 4),
        (PLAINEST, 8),
        (Packing(64, 8, "shared_prefix"), 8),
    ],
)
def test_micro_batches_layout_and_devices_do_not_change_a_step(plainest, packing: Packing, devices: int):
    """Every shape of the one mesh axis there is."""
    params, metrics = step(packing, devices=devices)
    np.testing.assert_allclose(params, plainest[0], rtol=3e-5, atol=3e-5)
    for name in ("policy/loss", "optimizer/grad_norm", "correction/weight_mean", "policy/kl_reference", "drift/kl"):
        assert metrics[name] == pytest.approx(plainest[1][name], rel=1e-3, abs=1e-6), name
    assert metrics["policy/clip_fraction_2"] > 0


def test_donation_does_not_change_a_bit(plainest):
    assert np.array_equal(step(PLAINEST, donate=True)[0], plainest[0])


def gradient(model, params):
    """Of the same objective through a real model, on one micro-batch."""
    objective, logprobs = build_objective(STEP, 30), logprobs_of(model)
    batch = jax.tree.map(lambda x: jnp.asarray(x)[0, 0], step_batch(PLAINEST, 8))
    batch = batch._replace(proximal_logprobs=batch.behavior_logprobs)

    def value(params):
        found, entropy = logprobs(params, batch)
        return objective.loss(found, batch._replace(entropy=entropy))[0].value

    return jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(value))(params))


@pytest.fixture(scope="module")
def tiny():
    model, params = tiny_policy(num_hidden_layers=1)
    return model, params, gradient(model, params)


def assert_same_gradient(found, expected) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5 * max(1.0, np.abs(b).max()))


@pytest.mark.parametrize("chunks", [(1, 8), (4, 64)])
def test_chunks_of_the_vocabulary_matmul_do_not_change_the_gradient(tiny, chunks, monkeypatch):
    monkeypatch.setattr(policy, "LOGITS_TOKENS", chunks)
    assert_same_gradient(gradient(*tiny[:2]), tiny[2])


def test_rematerialisation_does_not_change_the_gradient(tiny):
    model, _ = tiny_policy(num_hidden_layers=1, remat="layer")
    assert_same_gradient(gradient(model, tiny[1]), tiny[2])
