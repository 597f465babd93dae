"""Packing: every sampled token once, in its own context, whatever the layout; nothing made up, nothing lost."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers_model import done, group, micro, on, tiny_policy, turn, void
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_jax.batch import Packing, pack, segments_of
from gspo_jax.losses import gspo
from gspo_jax.policy import logprobs_of
from gspo_jax.types import Batch
from rollout.types import Group, Trajectory

MODES = ("padded", "packed", "shared_prefix")
LENGTH = 48


type Calls = list[tuple[list[int], list[int]]]
"""Prompt and completion of each turn."""


@st.composite
def conversations(draw, start: int) -> tuple[bool, Calls]:
    """Failed or not, and one to three turns, each continuing the last or rewriting history. Sampled ids all differ."""
    number, seen, turns = start, draw(st.lists(st.integers(1, 9), min_size=1, max_size=5)), []
    for _ in range(draw(st.integers(1, 3))):
        completion = list(range(number, number + draw(st.integers(0, 4))))
        number += len(completion)
        turns.append((seen, completion))
        if draw(st.booleans()):
            seen = [*seen, *completion, *draw(st.lists(st.integers(1, 9), max_size=3))]
        else:
            seen = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    return draw(st.integers(0, 5)) == 0, turns


@st.composite
def rollouts(draw) -> list[list[tuple[bool, Calls]]]:
    """Groups of two or four; half of them start from one prompt, as the members of a real group do."""
    members, out = draw(st.sampled_from([2, 4])), []
    for p in range(draw(st.integers(1, 3))):
        drawn = [draw(conversations(1000 * (p * members + m + 1))) for m in range(members)]
        if draw(st.booleans()):
            prompt = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
            drawn = [(failed, [(prompt, turns[0][1])]) for failed, turns in drawn]
        out.append(drawn)
    return out


def build(drawn: list[list[tuple[bool, Calls]]]) -> list[Group]:
    def trajectory(failed: bool, calls: Calls) -> Trajectory:
        turns = [
            replace(turn(prompt, ids, [-1e-4 * i for i in ids]), versions=tuple(i % 7 for i in ids)) for prompt, ids in calls
        ]
        return void(*turns) if failed else done(*turns)

    return [group(*(trajectory(*member) for member in members), seed=p) for p, members in enumerate(drawn)]


def advantages_of(groups: list[Group], left_out: int = 0) -> list[list[float | None]]:
    """A different number for every trajectory; None for every `left_out`-th."""
    numbers = itertools.count(1)
    return [
        [None if left_out and next(numbers) % left_out == 0 else 0.5 + p + 0.1 * m for m in range(len(g.trajectories))]
        for p, g in enumerate(groups)
    ]


def context(batch: Batch, r: int, t: int) -> list[int]:
    """Ids that the token at `t` of row `r` sees before itself, by the definition of a Batch."""
    own, prefix = batch.segment_ids[r, t], batch.prefix_ids[r, t]
    return [int(batch.tokens[r, i]) for i in range(t) if batch.segment_ids[r, i] in {own, prefix} - {0}]


def expected_tokens(trajectory: Trajectory) -> dict[int, tuple[list[int], float, int]]:
    """Sampled id -> the ids before it (prompt and completion so far), its log-probability and version, from the turns."""
    return {
        token: ([*t.prompt_ids, *t.completion_ids[:i]], t.logprobs[i], t.versions[i])
        for t in trajectory.turns
        for i, token in enumerate(t.completion_ids)
    }


@settings(max_examples=60, deadline=None)
@given(
    drawn=rollouts(),
    mode=st.sampled_from(MODES),
    rows=st.integers(1, 3),
    divisor=st.sampled_from([1, 2]),
    left_out=st.sampled_from([0, 2, 3]),
)
def test_every_sampled_token_is_trained_once_in_its_own_context(drawn: list, mode: str, rows: int, divisor: int, left_out: int):
    """Id, context, parent, position, log-probability, version and advantage of every trained token; no other is trained."""
    groups = build(drawn)
    advantages = advantages_of(groups, left_out)
    everyone = [(t, a) for g, row in zip(groups, advantages, strict=True) for t, a in zip(g.trajectories, row, strict=True)]
    taking = [(t, a) for t, a in everyone if t.status != "void" and a is not None]
    minibatch = len(groups[0].trajectories) // divisor
    batch = pack(groups, advantages, minibatch, Packing(LENGTH, rows, mode))
    assert len(batch.tokens) == len(everyone) // minibatch
    counts = batch.trajectories.sum(1).astype(int)
    assert counts.sum() == len(taking)
    assert counts.max() - counts.min() <= 1
    for m, start in enumerate(np.cumsum(counts) - counts):
        members = taking[start : start + counts[m]]
        expected = {k: (*v, a) for t, a in members for k, v in expected_tokens(t).items()}
        owner = {k: i for i, (t, _) in enumerate(members) for k in expected_tokens(t)}
        found: dict[int, int] = {}
        places: dict[int, set] = {}
        for u in range(batch.tokens.shape[1]):
            part = micro(batch, m, u)
            for r, t in np.argwhere(part.loss_mask):
                token = int(part.tokens[r, t])
                before, logprob, version, advantage = expected[token]
                found[token] = found.get(token, 0) + 1
                places.setdefault(owner[token], set()).add((u, int(part.trajectory_ids[r, t])))
                assert context(part, r, t) == before
                assert part.positions[r, t] == len(before)
                assert part.tokens[r, part.parents[r, t]] == before[-1]
                assert part.positions[r, part.parents[r, t]] == len(before) - 1
                assert part.behavior_logprobs[r, t] == np.float32(logprob)
                assert part.versions[r, t] == version
                assert part.advantages[r, t] == np.float32(advantage)
        assert found == dict.fromkeys(expected, 1)
        assert all(len(x) == 1 for x in places.values())
        assert len({next(iter(x)) for x in places.values()}) == len(places)


@settings(max_examples=30, deadline=None)
@given(drawn=rollouts(), mode=st.sampled_from(MODES))
def test_cells_without_a_trained_token_are_empty_and_finite(drawn: list, mode: str):
    groups = build(drawn)
    batch = pack(groups, advantages_of(groups, 3), 2, Packing(LENGTH, 2, mode))
    untrained = ~np.asarray(batch.loss_mask)
    for x in (batch.trajectory_ids, batch.advantages, batch.behavior_logprobs, batch.versions):
        assert not np.asarray(x)[untrained].any()
    for name, x in batch._asdict().items():
        assert x is None or np.isfinite(x).all(), name
    padding = np.asarray(batch.segment_ids) == 0
    for x in (batch.tokens, batch.positions, batch.prefix_ids, batch.parents):
        assert not np.asarray(x)[padding].any()
    assert [batch.proximal_logprobs, batch.reference_logprobs, batch.weights, batch.entropy] == [None] * 4
    micros = batch.tokens.shape[1]
    assert micros & (micros - 1) == 0


def test_turn_that_extends_the_last_continues_its_segment():
    """Observation tokens lie between the turns, untrained; ids are the recorded ones."""
    first, second = turn([1, 2], [3, 4], [-0.1, -0.2]), turn([1, 2, 3, 4, 5, 6], [7], [-0.3])
    two = done(replace(first, versions=(4, 5)), replace(second, versions=(6,)))
    (segment,) = segments_of(two, [0.5, -2.0], 1)
    assert segment.tokens == (1, 2, 3, 4, 5, 6, 7)
    assert segment.trained == (False, False, True, True, False, False, True)
    assert segment.logprobs == (0, 0, -0.1, -0.2, 0, 0, -0.3)
    assert segment.advantages == (0, 0, 0.5, 0.5, 0, 0, -2.0)
    assert segment.versions == (0, 0, 4, 5, 0, 0, 6)
    assert segment.prefix == 2


def test_rewritten_history_opens_a_segment_of_the_same_trajectory():
    two = done(turn([1, 2], [3, 4]), turn([1, 2, 3], [5]), turn([1, 2, 3, 5, 6], [7, 8]))
    segments = segments_of(two, 1.0, 1)
    assert [s.tokens for s in segments] == [(1, 2, 3, 4), (1, 2, 3, 5, 6, 7, 8)]
    for mode in MODES:
        batch = pack([group(two)], [[1.0]], 1, Packing(12, 2, mode))
        assert batch.tokens.shape[1] == 1
        assert np.sum(batch.trajectory_ids == 1) == 5
        assert batch.trajectories.sum() == 1


def test_shared_prompt_is_laid_down_once():
    members = [done(turn([1, 2, 3], [10 + i] * (i + 1))) for i in range(3)]
    batch = micro(pack([group(*members)], [[1.0, 2.0, 3.0]], 3, Packing(16)))
    row = [1, 2, 3, 10, 11, 11, 12, 12, 12]
    assert batch.tokens[0, :9].tolist() == row
    assert batch.segment_ids[0, :9].tolist() == [1, 1, 1, 2, 3, 3, 4, 4, 4]
    assert batch.prefix_ids[0, :9].tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 1]
    assert batch.positions[0, :9].tolist() == [0, 1, 2, 3, 3, 4, 3, 4, 5]
    assert batch.parents[0, :9].tolist() == [0, 0, 1, 2, 2, 4, 2, 6, 7]
    assert batch.trajectory_ids[0, :9].tolist() == [0, 0, 0, 1, 2, 2, 3, 3, 3]


def test_shared_prompt_is_repeated_when_a_row_is_full():
    members = [done(turn([1, 2, 3], [10 + i] * 4)) for i in range(3)]
    batch = pack([group(*members)], [[1.0] * 3], 3, Packing(11))
    assert batch.trajectories.tolist() == [[2, 1]]
    assert batch.tokens[0, 1, 0, :7].tolist() == [1, 2, 3, 12, 12, 12, 12]


def test_equal_prompts_of_different_groups_are_not_merged():
    """Sharing is a group's; a chance match elsewhere changes nothing."""
    groups = [group(done(turn([1, 2], [3])), seed=0), group(done(turn([1, 2], [4])), seed=1)]
    batch = micro(pack(groups, [[1.0], [1.0]], 2, Packing(8)))
    assert batch.tokens[0, :6].tolist() == [1, 2, 3, 1, 2, 4]


def test_minibatches_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match=r"3 trajectories do not divide into minibatches of training.batch_size=2"):
        pack([group(*[done(turn([1], [2]))] * 3)], [[0.0] * 3], 2, Packing(8))


@pytest.mark.parametrize("mode", MODES)
def test_trajectory_longer_than_a_row_is_refused_not_cut(mode: str):
    with pytest.raises(ValueError, match=r"9 tokens does not fit training.row_length=8"):
        pack([group(done(turn([1, 2, 3], [4] * 6)))], [[0.0]], 1, Packing(8, 1, mode))
    pack([group(done(turn([1, 2], [4] * 6)))], [[0.0]], 1, Packing(8, 1, mode))


def test_trajectory_without_a_sampled_token_counts():
    """It was rolled out and rewarded: part of the denominator, no token of it in the loss."""
    for mode in MODES:
        batch = pack([group(done(), done(turn([1, 2], [])), done(turn([1], [5])))], [[1.0] * 3], 3, Packing(8, 2, mode))
        assert batch.trajectories.sum() == 3
        assert batch.loss_mask.sum() == 1


def test_batch_of_void_trajectories_is_empty():
    batch = pack([group(void(turn([1], [2])), void())], [[0.0, 0.0]], 2, Packing(8, 2))
    assert batch.tokens.shape == (1, 1, 2, 8)
    assert not any(np.any(x) for x in batch if x is not None)


# Advantages of parts


def advantages_by_token(batch: Batch) -> dict[int, float]:
    """Advantage of every trained token by its id."""
    return dict(zip(batch.tokens[batch.loss_mask].tolist(), batch.advantages[batch.loss_mask].tolist(), strict=True))


CONTINUED = done(turn([1, 2], [10, 11]), turn([1, 2, 10, 11, 5], [12]), turn([1, 2, 10, 11, 5, 12, 6], [13, 14, 15]))
REWRITTEN = done(turn([1, 2], [20, 21]), turn([7, 8], [22]), turn([7, 8, 22, 9], [23, 24, 25]))
SHORT = done(turn([1, 2], [30, 31, 32]))
PARTS = ((10, 11), (12,), (13, 14, 15)), ((20, 21), (22,), (23, 24, 25)), ((30, 31, 32),)


@pytest.mark.parametrize("mode", MODES)
def test_advantages_of_turns_land_on_the_turns_tokens(mode: str):
    """One segment of three turns, two segments, and a prompt shared with a trajectory of one turn."""
    given = [[1.0, -2.0, 3.0], [4.0, 5.0, -6.0], [7.0]]
    members = [CONTINUED, REWRITTEN, SHORT]
    expected = {t: a for part, row in zip(PARTS, given, strict=True) for ids, a in zip(part, row, strict=True) for t in ids}
    assert advantages_by_token(pack([group(*members)], [given], 3, Packing(16, 2, mode))) == expected
    given[2] = 7.0  # pyright: ignore
    assert advantages_by_token(pack([group(*members)], [given], 3, Packing(16, 2, mode))) == expected


@pytest.mark.parametrize("mode", MODES)
def test_advantages_of_tokens_land_on_their_tokens(mode: str):
    given = [np.array([token / 4 for ids in part for token in ids]) for part in PARTS]
    batch = pack([group(CONTINUED, REWRITTEN, SHORT)], [given], 3, Packing(16, 2, mode))
    assert advantages_by_token(batch) == {token: token / 4 for part in PARTS for ids in part for token in ids}


def test_any_other_number_of_advantages_is_refused_with_the_numbers():
    for wrong in ([1.0, 2.0], [1.0] * 6, [], np.ones(3), np.ones(7)):
        count = "6 tokens" if isinstance(wrong, np.ndarray) else "3 turns"
        with pytest.raises(ValueError, match=rf"{len(wrong)} advantages for a trajectory of {count}: one per {count[2:-1]}"):
            pack([group(CONTINUED)], [[wrong]], 1, Packing(16))
    with pytest.raises(ValueError, match="argument"):
        pack([group(CONTINUED, SHORT)], [[1.0]], 2, Packing(16))


# Who takes part


def test_those_that_take_part_are_spread_evenly_over_the_steps():
    """A filtered minibatch was small, or empty, while others were full: steps of unequal noise, or of none."""
    groups = [group(*(done(turn([1], [10 * g + m + 2])) for m in range(4)), seed=g) for g in range(4)]
    advantages: list[list[float | None]] = [[None] * 4, [1.0, None, 2.0, 3.0], [None] * 4, [4.0, 5.0, 6.0, None]]
    batch = pack(groups, advantages, 4, Packing(4, 1, "padded"))
    assert batch.trajectories.sum(1).tolist() in ([1, 2, 1, 2], [2, 1, 2, 1], [2, 2, 1, 1], [1, 1, 2, 2])
    order = [t for m in range(4) for t in batch.tokens[m][batch.loss_mask[m]].tolist()]
    assert order == [12, 14, 15, 32, 33, 34]
    few = pack(groups, [[None] * 4, [None] * 4, [None] * 4, [None, None, None, 1.0]], 4, Packing(4, 1, "padded"))
    assert sorted(few.trajectories.sum(1).tolist()) == [0, 0, 0, 1]


def test_nobody_takes_part_is_an_empty_batch():
    batch = pack([group(done(turn([1], [2])), done(turn([1], [3])))], [[None, None]], 1, Packing(8, 2))
    assert batch.tokens.shape == (2, 1, 2, 8)
    assert not any(np.any(x) for x in batch if x is not None)


def test_alg_14_seven_of_eight_give_the_update_of_the_seven():
    """Eight rows on a mesh of four, one of them filtered out: the empty row pads, and neither count nor gradient sees it."""
    rng = np.random.default_rng(0)
    members = [done(turn([1, 2, i + 3], rng.integers(1, 30, n).tolist())) for i, n in enumerate((1, 5, 2, 4, 3, 5, 1, 2))]
    advantages = rng.standard_normal(8).tolist()
    filtered = pack([group(*members)], [[*advantages[:3], None, *advantages[4:]]], 8, Packing(8, 8, "padded"))
    seven = pack([group(*members[:3], *members[4:])], [[*advantages[:3], *advantages[4:]]], 7, Packing(8, 7, "padded"))
    assert (filtered.tokens.shape[2], seven.tokens.shape[2]) == (8, 7)
    assert filtered.trajectories.tolist() == seven.trajectories.tolist() == [[7]]
    table = {"table": jnp.asarray(rng.standard_normal((40, 40)), jnp.float32)}

    @jax.jit
    def part(params, batch: Batch):
        def loss(params):
            before = jnp.take_along_axis(batch.tokens, batch.parents, 1)
            every = jax.nn.log_softmax(params["table"][before], -1)
            found = jnp.take_along_axis(every, batch.tokens[..., None], -1)[..., 0]
            old = jax.lax.stop_gradient(found) + 1e-3 * jnp.sin(batch.tokens.astype(jnp.float32))
            mean, _ = gspo(found, batch._replace(proximal_logprobs=old))
            return mean.value, mean.count

        return jax.value_and_grad(loss, has_aux=True)(params)

    (expected, count), grads = part(table, micro(seven))
    layout = on(4)
    (loss, same), found = part(layout.state(table), jax.tree.map(lambda x: x[0, 0], layout.batch(filtered)))
    assert count == same == 7
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    np.testing.assert_allclose(found["table"], grads["table"], rtol=1e-5, atol=1e-8)
    assert np.abs(grads["table"]).max() > 1e-3
    for x, y in zip(micro(filtered), micro(seven), strict=True):
        if np.ndim(x) == 2:
            np.testing.assert_array_equal(x[:7], y)
            assert not np.any(x[7])


# One number whatever the layout


@pytest.fixture(scope="module")
def derivative():
    """Summed loss, count and summed gradient of all micro-batches; the ratio is off 1 by a fixed pattern."""
    policy, params = tiny_policy(num_hidden_layers=1)
    logprobs = logprobs_of(policy)

    @jax.jit
    def part(params, batch: Batch):
        def total(params):
            found, _ = logprobs(params, batch)
            off = 1e-4 * jnp.sin(jnp.asarray(batch.tokens, jnp.float32))
            loss, _ = gspo(found, batch._replace(proximal_logprobs=jax.lax.stop_gradient(found) + off))
            return loss.total, loss.count

        return jax.value_and_grad(total, has_aux=True)(params)

    def run(batch: Batch):
        parts = [part(params, micro(batch, 0, u)) for u in range(batch.tokens.shape[1])]
        return jax.tree.map(lambda *x: np.sum(x, 0), *parts)

    return run


@pytest.mark.parametrize("seed", [0, 1])
def test_layouts_give_one_loss_and_one_gradient(derivative, seed: int):
    """Padded, packed and shared-prefix; single and several turns, a rewritten history, a void member."""
    rng = np.random.default_rng(seed)

    def ids(n: int) -> list[int]:
        return rng.integers(1, 97, n).tolist()

    prompt, first = ids(5), ids(4)
    members = [done(turn(prompt, ids(int(n)))) for n in rng.integers(1, 9, 4)]
    members += [
        done(turn(prompt, first), turn([*prompt, *first, 7, 8], ids(3))),
        done(turn(prompt, first), turn(ids(6), ids(3))),
    ]
    plain = derivative(pack([group(*members)], [[1.0, -0.5, 2.0, -1.0, 0.25, -2.0]], 6, Packing(24, 2, "padded")))
    assert plain[0][1] == 6
    groups = [group(*members[:3], void(turn(prompt, ids(3))), *members[3:], void())]
    advantages = [[1.0, -0.5, 2.0, 0.0, -1.0, 0.25, -2.0, 0.0]]
    scale = max(np.abs(g).max() for g in jax.tree.leaves(plain[1]))
    for mode in MODES:
        found = derivative(pack(groups, advantages, 8, Packing(24, 2, mode)))
        assert found[0][1] == 6
        assert found[0][0] == pytest.approx(plain[0][0], rel=1e-5)
        for a, b in zip(jax.tree.leaves(found[1]), jax.tree.leaves(plain[1]), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * scale)
