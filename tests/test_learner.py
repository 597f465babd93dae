"""The update: one number whatever the split, layout, order or device count; nothing at all when it is not finite."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers_model import VOCAB, done, group, on, random_groups, tiny_policy, turn, void
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_jax.batch import Packing, pack
from gspo_jax.corrections import geometric_filter, prepare
from gspo_jax.learner import Learner, learner
from gspo_jax.losses import gspo
from gspo_jax.policy import logprobs_of
from gspo_jax.types import Batch, Mean, TrainState
from rollout.types import Group

PROBLEMS, MEMBERS, MINIBATCH = 4, 4, 4
LAYOUTS = (
    Packing(24, 4, "padded"),
    Packing(40, 1, "padded"),
    Packing(24, 2, "packed"),
    Packing(64, 1, "packed"),
    Packing(24, 1, "shared_prefix"),
)


def table_params(seed: int = 0) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    return {"table": jnp.asarray(rng.standard_normal((VOCAB, VOCAB)), jnp.float32), "bias": jnp.zeros(VOCAB)}


def table_logprobs(params, batch: Batch):
    """The smallest policy: p(next | last) is a table."""
    before = jnp.take_along_axis(jnp.asarray(batch.tokens), jnp.asarray(batch.parents), 1)
    logp = jax.nn.log_softmax(params["table"][before] + params["bias"], -1)
    found = jnp.take_along_axis(logp, jnp.asarray(batch.tokens)[..., None], -1)[..., 0]
    entropy = -jnp.sum(jnp.exp(logp) * logp, -1)
    return jnp.where(batch.loss_mask, found, 0), jnp.where(batch.loss_mask, entropy, 0)


sgd = optax.sgd(2.0, momentum=0.5)
TABLE: Learner = learner(table_logprobs, gspo, sgd, max_grad_norm=0.05)
ADAM: Learner = learner(table_logprobs, gspo, optax.adamw(1e-5))  # so small a rate that no row is ever clipped
table_update, adam_update = jax.jit(TABLE.update), jax.jit(ADAM.update)


def advantages_of(groups: Sequence[Group], seed: int = 0) -> list[list[float]]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(len(g.trajectories)).tolist() for g in groups]


def small_batch(seed: int = 0, minibatch: int = MINIBATCH, packing: Packing = LAYOUTS[0]) -> Batch:
    groups = random_groups(seed, PROBLEMS, MEMBERS)
    return pack(groups, advantages_of(groups, seed), minibatch, packing)


def assert_same_bits(a, b) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def assert_same_update(a, b, rtol: float = 1e-5) -> None:
    """Parameters and every metric of two updates agree; the ratio of the first minibatch is exactly 1 in both."""
    (state_a, metrics_a), (state_b, metrics_b) = a, b
    for x, y in zip(jax.tree.leaves(state_a.params), jax.tree.leaves(state_b.params), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=rtol, atol=rtol * float(jnp.abs(y).max()))
    assert metrics_a.keys() == metrics_b.keys()
    assert metrics_a["policy/ratio_mean_1"] == metrics_b["policy/ratio_mean_1"] == 1.0
    for name in metrics_a:
        np.testing.assert_allclose(float(metrics_a[name]), float(metrics_b[name]), rtol=10 * rtol, atol=1e-5, err_msg=name)


@pytest.fixture(scope="module")
def reference() -> Callable[[int], tuple]:
    """The update of `small_batch(seed)` in the plainest layout: one row a trajectory, one micro-batch."""
    return lambda seed: table_update(TABLE.init(table_params()), small_batch(seed))


def plain_update(groups: list[Group], advantages: list[list[float]], minibatch: int, low: float = 3e-4, high: float = 4e-4):
    """The step written down from the paper, trajectory by trajectory, without a Batch: clipped, momentum, four minibatches."""
    members = [(t.turns[0], a) for g, row in zip(groups, advantages, strict=True)
               for t, a in zip(g.trajectories, row, strict=True)]  # fmt: skip

    def mean_logprob(params, turn_, old=None):
        last = np.array([turn_.prompt_ids[-1], *turn_.completion_ids[:-1]])
        logp = jax.nn.log_softmax(params["table"][last] + params["bias"], -1)
        return jnp.mean(logp[np.arange(len(last)), np.array(turn_.completion_ids)])

    start = params = table_params()
    trace, losses = jax.tree.map(jnp.zeros_like, params), []
    for i in range(0, len(members), minibatch):

        def loss(params, part=members[i : i + minibatch], first=i == 0):
            total = 0.0
            for t, a in part:
                new = mean_logprob(params, t)
                s = jnp.exp(new - (jax.lax.stop_gradient(new) if first else mean_logprob(start, t)))
                total += (jnp.where(s > 1 + high, 1 + high, s) if a >= 0 else jnp.where(s < 1 - low, 1 - low, s)) * a
            return -total / len(part)

        value, grads = jax.value_and_grad(loss)(params)
        losses.append(float(value))
        scale = min(1.0, 0.05 / float(optax.tree.norm(grads)))
        trace = jax.tree.map(lambda m, g, scale=scale: 0.5 * m + scale * g, trace, grads)
        params = jax.tree.map(lambda p, m: p - 2.0 * m, params, trace)
    return params, losses


def test_update_is_the_papers_step_written_down_plainly():
    groups = random_groups(11, 2, 4, completion=5)
    advantages = advantages_of(groups)
    state, metrics = table_update(TABLE.init(table_params()), pack(groups, advantages, 4, Packing(24, 4, "padded")))
    expected, losses = plain_update(groups, advantages, 4)
    for name in expected:
        np.testing.assert_allclose(state.params[name], expected[name], rtol=1e-5, atol=2e-6)
    assert float(metrics["policy/loss"]) == pytest.approx(np.mean(losses), rel=1e-4)
    assert int(state.step) == 1


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 3), packing=st.sampled_from(LAYOUTS), order=st.permutations(range(MEMBERS)))
def test_update_does_not_depend_on_layout_split_or_order(reference, seed: int, packing: Packing, order: list[int]):
    """Micro-batches of any number of rows, padded or packed or sharing prompts, rows longer than needed, members reordered."""
    groups = random_groups(seed, PROBLEMS, MEMBERS)
    rows = advantages_of(groups, seed)
    groups = [group(*(g.trajectories[i] for i in order), seed=p) for p, g in enumerate(groups)]
    batch = pack(groups, [[row[i] for i in order] for row in rows], MINIBATCH, packing)
    assert_same_update(table_update(TABLE.init(table_params()), batch), reference(seed))


def test_update_has_a_trust_region(reference):
    """The steps above are large enough to clip: otherwise those tests would not see the proximal policy."""
    _, metrics = reference(0)
    assert metrics["policy/clip_fraction_1"] == 0
    assert 0 < metrics["policy/clip_fraction"] < 1
    assert abs(float(metrics["policy/ratio_mean_4"]) - 1) > 1e-6


def test_void_trajectories_are_in_nothing(reference):
    """Failed members change neither the denominator nor the step."""
    groups = random_groups(0, PROBLEMS, MEMBERS)
    rows = advantages_of(groups, 0)
    failed = void(turn([1, 2], [3, 4]))
    groups = [group(*g.trajectories[:2], failed, *g.trajectories[2:]) for g in groups]
    batch = pack(groups, [[*row[:2], 0.0, *row[2:]] for row in rows], MEMBERS + 1, LAYOUTS[0])
    assert_same_update(table_update(TABLE.init(table_params()), batch), reference(0))


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_update_does_not_depend_on_the_device_count(reference, devices: int):
    layout = on(devices)
    state = layout.state(TABLE.init(table_params()))
    assert len(state.params["table"].sharding.device_set) == devices
    batch = layout.batch(small_batch(0, packing=Packing(24, 8, "padded")))
    assert not batch.tokens.sharding.is_fully_replicated
    found = table_update(state, batch)
    assert_same_update(found, reference(0))


def test_shd_08_rows_that_fill_a_mesh_are_trained_as_nothing():
    """Five rows on a mesh of four, filled up to eight: loss, step and every metric of the five."""
    groups = [group(*random_groups(5, 1, 5)[0].trajectories)]
    rows = advantages_of(groups)
    layout = on(4)
    batch = layout.batch(pack(groups, rows, 5, Packing(24, 8, "padded")))
    padded = table_update(layout.state(TABLE.init(table_params())), batch)
    plain = table_update(TABLE.init(table_params()), pack(groups, rows, 5, Packing(24, 5, "padded")))
    assert_same_update(padded, plain)


@pytest.fixture(scope="module")
def llama():
    """The tiny model's update, and the result of it on one device in the plainest layout."""
    policy, params = tiny_policy(num_hidden_layers=1)

    def run(packing: Packing, devices: int = 1):
        layout = on(devices, policy)
        found = learner(logprobs_of(policy, layout=layout), gspo, optax.sgd(0.5), max_grad_norm=0.05)
        update = jax.jit(found.update)
        return update(layout.state(found.init(params)), layout.batch(small_batch(1, packing=packing)))

    return run, run(Packing(16, 8, "padded"))


@pytest.mark.parametrize(("packing", "devices"), [(Packing(32, 1, "shared_prefix"), 1), (Packing(16, 8, "padded"), 8)])
def test_update_of_a_real_model_does_not_depend_on_layout_or_devices(llama, packing: Packing, devices: int):
    run, plain = llama
    assert plain[1]["policy/ratio_max"] != 1
    assert_same_update(run(packing, devices), plain, rtol=2e-5)


def token_mean(logprobs, batch: Batch):
    """Every trained token's advantage is its loss."""
    values = jnp.where(batch.loss_mask, batch.advantages + 0 * logprobs, 0)
    return Mean(jnp.sum(values), jnp.sum(batch.loss_mask).astype(jnp.float32)), {}


def test_alg_10_sums_are_divided_once():
    """Ten tokens of loss 1 and ninety of loss 0 in two micro-batches: 0.1, not the 0.5 of a mean of means."""
    groups = [group(done(turn([1], [2] * 10)), done(turn([1], [2] * 90)))]
    batch = pack(groups, [[1.0, 0.0]], 2, Packing(91, 1, "padded"))
    assert batch.tokens.shape[:3] == (1, 2, 1)
    found = learner(table_logprobs, token_mean, sgd)
    _, metrics = jax.jit(found.update)(found.init(table_params()), batch)
    assert float(metrics["policy/loss"]) == pytest.approx(0.1)
    assert metrics["tokens/trained"] == 100


def test_alg_16_small_steps_are_not_rounded_away():
    """A hundred steps of -3e-6 from 0.02001953: 0.0197195, whose bfloat16 is 0.01977539; bfloat16 weights would not move."""

    def logprobs(params, batch: Batch):
        found = jnp.where(batch.loss_mask, params["w"], 0)
        return found, jnp.zeros_like(found)

    def loss(logprobs, batch: Batch):
        return Mean(jnp.sum(logprobs), jnp.ones(())), {}

    found = learner(logprobs, loss, optax.sgd(3e-6))
    update = jax.jit(found.update)
    batch = pack([group(done(turn([1], [2])))], [[1.0]], 1, Packing(2))
    state = found.init({"w": jnp.float32(0.02001953)})
    for _ in range(100):
        state, _ = update(state, batch)
    assert state.params["w"].dtype == jnp.float32
    assert float(state.params["w"]) == pytest.approx(0.02001953 - 3e-4, rel=1e-5)
    assert float(state.params["w"].astype(jnp.bfloat16)) == pytest.approx(0.01977539, abs=1e-8)


def spoil(batch: Batch, minibatch: int, value: float) -> Batch:
    """One trained token's advantage is no longer finite."""
    advantages = np.array(batch.advantages)
    first = np.argwhere(batch.loss_mask[minibatch])[0]
    advantages[(minibatch, *first)] = value
    return batch._replace(advantages=advantages)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_alg_19_update_that_is_not_finite_changes_nothing(value: float):
    """Parameters, moments and optimizer count keep their bits; the counter counts, and goes back to 0 afterwards."""
    good = small_batch(0, PROBLEMS * MEMBERS, Packing(24, 16, "padded"))
    state, _ = adam_update(ADAM.init(table_params()), good)
    bad = spoil(good, 0, value)
    for count in range(1, 6):
        after, metrics = adam_update(state, bad)
        assert_same_bits((after.params, after.opt_state), (state.params, state.opt_state))
        assert (int(after.skipped), int(after.step)) == (int(state.skipped) + 1, int(state.step) + 1)
        assert int(after.skipped) == count
        assert metrics["optimizer/skipped"] == 1
        state = after
    recovered, metrics = adam_update(state, good)
    straight, _ = adam_update(state._replace(skipped=jnp.int32(0), step=jnp.int32(1)), good)
    assert (int(recovered.skipped), float(metrics["optimizer/skipped"])) == (0, 0.0)
    assert_same_bits((recovered.params, recovered.opt_state), (straight.params, straight.opt_state))
    assert not np.array_equal(recovered.params["table"], state.params["table"])


def test_alg_19_minibatches_around_the_bad_one_are_applied():
    """The third of four is left out: the optimizer counts three, the fourth resets the counter."""
    state, metrics = adam_update(ADAM.init(table_params()), spoil(small_batch(), 2, np.nan))
    assert metrics["optimizer/skipped"] == 1
    assert int(state.skipped) == 0
    assert int(optax.tree.get(state.opt_state, "count")) == 3
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))
    last, metrics = adam_update(ADAM.init(table_params()), spoil(spoil(small_batch(), 2, np.nan), 3, np.inf))
    assert (int(last.skipped), float(metrics["optimizer/skipped"])) == (2, 2.0)


def test_alg_19_infinite_log_ratio_is_left_out():
    """A log-probability that overflows in the model itself, not in the loss."""

    def logprobs(params, batch: Batch):
        found, entropy = table_logprobs(params, batch)
        return found * jnp.where(jnp.asarray(batch.tokens) == 2, params["huge"] * 1e30, 1), entropy

    found = learner(logprobs, gspo, optax.adam(1e-2))
    state = found.init(table_params() | {"huge": jnp.float32(1e30)})
    groups = [group(done(turn([1], [2, 3])), done(turn([1], [4])))]
    after, metrics = jax.jit(found.update)(state, pack(groups, [[1.0, -1.0]], 2, Packing(4)))
    assert metrics["optimizer/skipped"] == 1
    assert_same_bits((after.params, after.opt_state), (state.params, state.opt_state))


def test_alg_09_nothing_to_learn_moves_nothing():
    """All groups flat, or no trained token: bits stay, though momentum is not zero."""
    batch = small_batch()
    state, _ = adam_update(ADAM.init(table_params()), batch)
    flat = batch._replace(advantages=np.zeros_like(batch.advantages))
    empty = flat._replace(loss_mask=np.zeros_like(batch.loss_mask), trajectory_ids=np.zeros_like(batch.trajectory_ids))
    blank = jax.tree.map(np.zeros_like, batch)
    for nothing in (flat, empty, blank):
        after, metrics = adam_update(state, nothing)
        assert_same_bits((after.params, after.opt_state), (state.params, state.opt_state))
        assert (metrics["optimizer/empty"], metrics["optimizer/skipped"], metrics["policy/loss"]) == (4, 0, 0)
        assert int(after.skipped) == 0
        unmeasured = {name for name, x in metrics.items() if not math.isfinite(x)}
        assert not any(name.startswith(("optimizer/", "policy/loss", "tokens/")) for name in unmeasured)


def test_state_is_donated():
    """The buffers of the old state are used for the new one: no second copy of parameters and moments."""
    donating = jax.jit(ADAM.update, donate_argnums=0)
    state, batch = jax.tree.map(jnp.copy, ADAM.init(table_params())), small_batch()
    size = sum(x.nbytes for x in jax.tree.leaves(state))
    analysis = donating.lower(state, batch).compile().memory_analysis()
    assert analysis.alias_size_in_bytes >= size
    state = state._replace(step=jnp.int32(7), skipped=jnp.int32(0))
    new, _ = donating(state, batch)
    assert all(x.is_deleted() for x in jax.tree.leaves(state))
    assert int(new.step) == 8


def test_shd_06_lengths_do_not_compile_again():
    """Thirty batches of other lengths: rows are of fixed length and micro-batches a power of two, so few programs exist."""
    traces = []

    def logprobs(params, batch: Batch):
        traces.append(batch.tokens.shape)
        return table_logprobs(params, batch)

    found = learner(logprobs, gspo, sgd)
    update = jax.jit(found.update)
    state = found.init(table_params())
    shapes, warm = set(), 0
    for seed in range(30):
        groups = random_groups(seed, 2, 4, prompt=1 + seed % 6, completion=1 + seed % 20)
        batch = pack(groups, advantages_of(groups), 4, Packing(32, 1, "packed"))
        if batch.tokens.shape in shapes:
            before = len(traces)
            state, _ = update(state, batch)
            assert len(traces) == before
            warm += 1
        else:
            shapes.add(batch.tokens.shape)
            state, _ = update(state, batch)
    assert len(shapes) <= 4
    assert warm >= 26


def test_mismatch_is_per_token_absolute_and_from_the_start_of_the_step():
    """Gaps of both signs that would cancel: mean, 99th percentile and maximum of their sizes, on all minibatches."""
    groups = [group(*(done(turn([1 + m], [3 + m] * 25)) for m in range(8)))]
    batch = pack(groups, [[1.0, -1.0] * 4], 4, Packing(26, 4, "padded"))
    params = table_params()
    exact = np.stack([[table_logprobs(params, jax.tree.map(lambda x, m=m: x[m, 0], batch))[0]] for m in range(2)])
    trained = np.argwhere(batch.loss_mask)
    gaps = np.where(np.arange(200) % 2, 1, -1) * np.arange(1, 201) / 1000
    off = np.zeros(batch.tokens.shape)
    off[tuple(trained.T)] = np.random.default_rng(0).permutation(gaps)
    _, metrics = table_update(TABLE.init(params), batch._replace(behavior_logprobs=(exact + off).astype(np.float32)))
    assert float(metrics["mismatch/mean"]) == pytest.approx(0.1005, rel=1e-4)
    assert float(metrics["mismatch/p99"]) == pytest.approx(0.198, rel=1e-4)
    assert float(metrics["mismatch/max"]) == pytest.approx(0.2, rel=1e-4)
    still = table_update(TABLE.init(params), batch._replace(behavior_logprobs=exact.astype(np.float32)))[1]
    assert float(still["mismatch/max"]) < 1e-6


@pytest.mark.parametrize("leave", [False, True])
def test_what_a_correction_rejects_is_still_in_the_mismatch(leave: bool):
    """Rejected tokens left the mask, so their trainer log-probabilities read 0: a gap of nats that nobody had."""
    groups = [group(*(done(turn([1 + m], [3 + m] * 5)) for m in range(4)))]
    batch = pack(groups, [[1.0, -1.0, 0.5, -0.5]], 2, Packing(8, 2, "padded"))
    params = table_params()
    exact = np.stack([[table_logprobs(params, jax.tree.map(lambda x, m=m: x[m, 0], batch))[0]] for m in range(2)])
    off = np.where(np.asarray(batch.trajectory_ids) == 1, 0.5, 0.01) * batch.loss_mask
    keep_near = prepare(partial(geometric_filter, low=0.9, high=1.1), leave=leave)
    found = learner(table_logprobs, gspo, sgd, prepare=keep_near)
    batch = batch._replace(behavior_logprobs=(exact + off).astype(np.float32))
    _, metrics = jax.jit(found.update)(found.init(params), batch)
    assert float(metrics["correction/rejected_fraction"]) == 0.5
    assert float(metrics["mismatch/max"]) == pytest.approx(0.5, rel=1e-5)
    assert float(metrics["mismatch/mean"]) == pytest.approx(0.255, rel=1e-5)
    assert metrics["policy/ratio_mean_1"] == 1


def test_sampler_logprobs_never_enter_the_ratio(reference):
    """Behavior log-probabilities that are plainly wrong change the mismatch report and nothing else."""
    batch = small_batch(0)
    wrong = batch._replace(behavior_logprobs=np.where(batch.loss_mask, -50.0, 0).astype(np.float32))
    state, metrics = table_update(TABLE.init(table_params()), wrong)
    assert_same_bits(state, reference(0)[0])
    assert metrics["mismatch/mean"] > 40


def test_norm_is_clipped_after_the_division():
    """The norm of the mean gradient is what is reported and clipped, whatever the micro-batch split."""
    norms = []
    for limit in (1e-3, 1e3):
        found = learner(table_logprobs, gspo, optax.sgd(1.0), max_grad_norm=limit)
        update = partial(jax.jit(found.update), found.init(table_params()))
        state, metrics = update(small_batch(0, PROBLEMS * MEMBERS, Packing(24, 16, "padded")))
        moved = float(optax.tree.norm(jax.tree.map(jnp.subtract, state.params, table_params())))
        norms.append(float(metrics["optimizer/grad_norm"]))
        assert moved == pytest.approx(min(limit, norms[-1]), rel=1e-3)
    assert norms[0] == norms[1] > 1e-3


def test_fresh_state_counts_nothing():
    state = TABLE.init(table_params())
    assert isinstance(state, TrainState)
    assert (int(state.step), int(state.skipped)) == (0, 0)
