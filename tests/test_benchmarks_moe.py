"""benchmarks/moe_routing.py measures what it says: hand-made expert choices, and one batch of its own tiny model."""

import importlib.util
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest

from gspo_jax.batch import Packing, pack

FILE = Path(__file__).parent.parent / "benchmarks" / "moe_routing.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    """The script as a module, its model cut to two layers and its completions to four tokens."""
    spec = importlib.util.spec_from_file_location("moe_routing", FILE)
    assert spec
    assert spec.loader
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.LENGTH, module.MEMBERS = 4, 4
    module.CONFIG["num_hidden_layers"] = 2
    return module


def test_changed_counts_experts_and_sets_whatever_their_order(bench):
    old = np.array([[[0, 1], [2, 3]], [[4, 5], [6, 7]]])
    new = np.array([[[1, 0], [2, 4]], [[6, 7], [7, 6]]])
    # Of four sets two differ; of eight experts 3, 4 and 5 are gone.
    assert bench.changed(old, new) == (2 / 4, 3 / 8)
    assert bench.changed(old, old[..., ::-1]) == (0, 0)


def test_changed_leaves_out_tokens_without_a_record(bench):
    old, new = np.array([[0, 1], [-1, -1], [2, 3]]), np.array([[0, 2], [5, 6], [-1, -1]])
    assert bench.changed(old, new) == (1, 1 / 2)


def test_moved_is_of_trained_tokens_and_of_their_mean(bench):
    mask = np.array([[False, True, True], [False, True, True]])
    new = np.array([[9.0, 0.3, -0.1], [9.0, 0.2, 0.2]])
    # |x| = .3 .1 .2 .2; the rows' means are .1 and .2
    assert bench.moved(new, np.zeros((2, 3)), mask) == pytest.approx((0.2, 0.15))


def test_recorded_experts_are_those_of_the_router_and_make_the_same_log_probabilities(bench):
    """In float32 nothing lies between the sampler's steps and the trainer's rows, so any shift of a token would show."""
    policy = bench.tiny_policy("float32")
    params = bench.initial(policy, 0)
    groups = bench.play(jax.jit(partial(bench.sample, policy)), params, 0, 0)
    rows = bench.DIGITS * bench.MEMBERS // bench.MINIBATCHES
    layout = Packing(bench.PROMPT + bench.LENGTH, rows, "padded")
    batch = pack(groups, [[0.0] * bench.MEMBERS] * bench.DIGITS, rows, layout)
    look = jax.jit(partial(bench.look, policy))
    routed, free = look(params, batch._replace(experts=None))
    shifted = np.roll(np.asarray(batch.experts), 1, 3)
    last = np.asarray(batch.experts)[..., -1, :, :]
    assert (last == -1).all()
    assert bench.changed(np.asarray(batch.experts), np.asarray(routed)) == (0, 0)
    assert bench.changed(shifted, np.asarray(routed)).sets > 0.1
    np.testing.assert_allclose(np.where(batch.loss_mask, free, 0), batch.behavior_logprobs, atol=2e-6)
    np.testing.assert_allclose(look(params, batch)[1], free, atol=1e-6)
    assert np.abs(look(params, batch._replace(experts=shifted))[1] - free).max() > 1e-3


def test_reward_is_the_fraction_of_steps_by_one(bench):
    def draw(params, prompts, key):
        ids = np.tile(np.array([1, 2, 3, 0]), (len(prompts), 1))
        return ids, np.zeros(ids.shape), np.zeros((*ids.shape[:1], 6, 2, 2), int)

    # After 0 all four are right; after any other digit the first is wrong, unless it is the one before: 0.
    rewards = [group.trajectories[0].reward for group in bench.play(draw, {}, 0, 0)]
    assert rewards == [1, 3 / 4, 3 / 4, 3 / 4]


def test_alone_keeps_the_first_minibatch(bench):
    def draw(params, prompts, key):
        ids = np.ones((len(prompts), bench.LENGTH), int)
        return ids, -np.ones(ids.shape), np.zeros((*ids.shape[:1], 6, 2, 2), int)

    groups = bench.play(draw, {}, 0, 0)
    batch = pack(groups, [[1.0] * bench.MEMBERS] * bench.DIGITS, 4, Packing(6, 4, "padded"))
    for whole, part in zip(jax.tree.leaves(batch), jax.tree.leaves(bench.alone(batch)), strict=True):
        np.testing.assert_array_equal(part[0], whole[0])
        assert not part[1:].any()
