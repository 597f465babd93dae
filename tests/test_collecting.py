"""Dynamic sampling: bounded rounds, no problem and no key twice, and one message when there is nothing to learn from."""

import asyncio
from collections.abc import Callable, Sequence

import pytest

from gspo_jax.batch import Packing, pack
from gspo_jax.collecting import Collector, collect
from gspo_jax.config import parse_config
from gspo_jax.rollouts import Rollouts, training_problems
from gspo_jax.sections import Config
from gspo_jax.signal import is_flat, signal
from rollout.types import Group, Problem, Trajectory, Turn

COUNT, MEMBERS = 4, 2
BASE = {
    "model": {"base": "tiny", "trainer_mode": "full"},
    "rollout": {"episodes_per_batch": COUNT * MEMBERS},
    "training": {"iterations_per_epoch": 9, "group_size": MEMBERS, "learning_rate": 1e-6},
}
FLAT, MIXED = (1.0, 1.0), (0.0, 1.0)
REFILL = ("algorithm.flat_groups=refill", "algorithm.refill_rounds=3")


def config_of(*overrides: str) -> Config:
    return parse_config(BASE, overrides)[0]


class FakeRollouts(Rollouts):
    """Answers every problem with the rewards `answer(problem, asked)` says; remembers what it was asked for."""

    def __init__(self, answer: Callable[[Problem, int], tuple[float | None, ...]], size: int | None = None) -> None:
        self.__dict__.update(answer=answer, sizes={"train": size} if size else {}, calls=[], keys=[])

    async def collect(self, problems, group_size, *, step, branch=0, first=0, on_done=None):
        self.calls.append((step, branch, first, tuple(problems)))
        groups = []
        for i, problem in enumerate(problems):
            rewards = self.answer(problem, len(self.keys))
            assert len(rewards) == group_size
            self.keys.append((step, first + i))
            groups.append(Group(problem, tuple(trajectory(r, m) for m, r in enumerate(rewards))))
            for t in groups[-1].trajectories if on_done else ():
                on_done(i, t)
        return tuple(groups)

    @property
    def asked(self) -> list[int]:
        """Problems of each round."""
        return [len(problems) for _, _, _, problems in self.calls]

    @property
    def problems(self) -> list[Problem]:
        return [problem for call in self.calls for problem in call[-1]]


def trajectory(reward: float | None, number: int = 0) -> Trajectory:
    turn = Turn((1, 2), (3, 4 + number), (-1.0, -1.0), (0, 0), "stop")
    metrics = {} if reward is None else {"right": float(reward > 0.5)}
    return Trajectory((turn,), reward, "void" if reward is None else "done", member=number, metrics=metrics)


def script(*rewards: tuple[float | None, ...]) -> Callable[[Problem, int], tuple[float | None, ...]]:
    """The given rewards in the order of asking, the last one from then on."""
    return lambda problem, asked: rewards[min(asked, len(rewards) - 1)]


def collected(config: Config, rollouts: FakeRollouts, step: int = 0, on_rollout=lambda t: None, on_round=lambda groups: None):
    return asyncio.run(collect(config, rollouts, step, on_rollout, on_round))


def reported(sampled: float, flat: float, rounds: float, void: float = 0.0) -> dict:
    """The metrics of a step of groups of four members, two tokens each."""
    return {
        "group/sampled": sampled,
        "group/sampled_flat_fraction": pytest.approx(flat),
        "group/refill_rounds": rounds,
        "rollout/void_fraction": void,
        "tokens/sampled": sampled * 2 * len(FLAT),
    }


def seeds(groups) -> list[int]:
    return [g.problem.seed for g in groups]


@pytest.mark.parametrize("how", ["keep", "skip"])
@pytest.mark.parametrize("rewards", [FLAT, MIXED])
def test_without_refill_there_is_one_round(how, rewards):
    """Flat groups cost no further rollouts unless they are asked for."""
    config, rollouts = config_of(f"algorithm.flat_groups={how}"), FakeRollouts(script(rewards))
    groups, metrics, message = collected(config, rollouts, step=2)
    assert rollouts.calls == [(2, 0, 0, tuple(training_problems(config, {}, 2, COUNT)))]
    assert seeds(groups) == [8, 9, 10, 11]
    assert (metrics, message) == ({}, None)


def test_a_full_first_round_needs_no_refill():
    groups, metrics, message = collected(config_of(*REFILL), rollouts := FakeRollouts(script(MIXED)))
    assert (rollouts.asked, seeds(groups), message) == ([4], [0, 1, 2, 3], None)
    assert metrics == reported(4.0, 0, 0.0)


def test_each_round_asks_for_what_is_missing():
    """Three of four flat, then two of three, then the last two mixed: 4 + 3 + 2 groups for a step of 4."""
    answers = [FLAT, MIXED, FLAT, FLAT, FLAT, FLAT, MIXED, MIXED, MIXED]
    groups, metrics, message = collected(config_of(*REFILL), rollouts := FakeRollouts(script(*answers)))
    assert rollouts.asked == [4, 3, 2]
    assert message is None
    mixed = [problem.seed for problem, rewards in zip(rollouts.problems, answers, strict=True) if rewards == MIXED]
    assert seeds(groups) == mixed
    assert metrics == reported(9.0, 5 / 9, 2.0)


@pytest.mark.parametrize("rounds", [1, 2, 5])
@pytest.mark.parametrize("size", [None, 48])
def test_rounds_are_bounded_and_repeat_no_problem_and_no_key(rounds, size):
    """A repeated key would sample the same tokens again; a repeated problem would count its group twice."""
    config = config_of("algorithm.flat_groups=refill", f"algorithm.refill_rounds={rounds}")
    rollouts = FakeRollouts(script(FLAT), size)
    for step in range(2):
        collected(config, rollouts, step)
    assert rollouts.asked == [COUNT] * 2 * (1 + rounds)
    assert len(set(rollouts.keys)) == len(rollouts.keys) == 2 * COUNT * (1 + rounds)
    assert len({p.seed for p in rollouts.problems}) == len(rollouts.keys)  # within an epoch: 48 problems are enough


def test_keys_do_not_repeat_when_rounds_ask_for_fewer():
    answers = [MIXED, FLAT, FLAT, FLAT, MIXED, FLAT, FLAT, FLAT, MIXED]
    collected(config_of(*REFILL), rollouts := FakeRollouts(script(*answers)))
    assert rollouts.asked == [4, 3, 2, 1]
    assert len(set(rollouts.keys)) == len({p.seed for p in rollouts.problems}) == 10


@pytest.mark.parametrize(("short", "then"), [("train", "training on 0 of 2"), ("stop", "stopping")])
def test_alg_13_a_task_that_always_pays_ends_with_one_message(short, then):
    """The filter looped for ever, or crashed without a word: 2 + 3 * 2 groups, then a message with the counts."""
    config = config_of(*REFILL, f"algorithm.refill_short={short}", "rollout.episodes_per_batch=4")
    rollouts = FakeRollouts(script(FLAT))
    groups, metrics, message = collected(config, rollouts)
    assert rollouts.asked == [2, 2, 2, 2]
    assert message.startswith(f"8/8 groups are flat (8 all 1) after 3 rounds of new problems: {then}. ")
    assert "algorithm.refill_rounds" in message
    assert "\n" not in message
    assert seeds(groups) == [0, 1]
    assert metrics == reported(8.0, 1, 3.0)
    taken = signal(config.algorithm, groups, 8).advantages
    batch = pack(groups, taken, 2, Packing(8))
    assert (batch.trajectories.sum(), batch.loss_mask.any()) == (0, False)


def test_what_is_missing_is_filled_with_flat_groups_that_take_no_part():
    """The step keeps its shape; only what can be learned from is learned from."""
    answers = [FLAT, MIXED, (0.0, 0.0), FLAT, FLAT, FLAT, MIXED, FLAT]
    config = config_of("algorithm.flat_groups=refill", "algorithm.refill_rounds=1")
    groups, _, message = collected(config, rollouts := FakeRollouts(script(*answers)))
    assert rollouts.asked == [4, 3]
    assert seeds(groups) == [1, rollouts.problems[6].seed, 0, 2]
    assert "5/7 groups are flat (4 all 1, 1 all 0) after 1 round of new problems" in message
    assert "training on 2 of 4" in message
    advantages = signal(config.algorithm, groups, 8).advantages
    assert [all(a is None for a in row) for row in advantages] == [False, False, True, True]
    assert pack(groups, advantages, 4, Packing(8)).trajectories.sum(1).tolist() == [2, 2]


def test_failures_are_no_difference():
    """A group with one survivor has no baseline; it is replaced like a flat one."""
    answers = [(None, 1.0), (None, None), MIXED]
    groups, metrics, message = collected(config_of(*REFILL), rollouts := FakeRollouts(script(*answers)))
    assert rollouts.asked == [4, 2]
    assert message is None
    assert not any(is_flat(g, None) for g in groups)
    assert metrics["group/sampled_flat_fraction"] == pytest.approx(2 / 6)
    assert metrics["rollout/void_fraction"] == pytest.approx(3 / (6 * 2))


def test_an_outage_stops_at_its_first_round():
    """Refill hid failed rollouts: the mixed groups came first, and the rounds went on through an outage."""
    seen = []

    def refuse(groups):
        seen.append(len(groups))
        raise RuntimeError("more than rollout.max_void failed")

    rollouts = FakeRollouts(script((None, None)))
    with pytest.raises(RuntimeError, match="max_void"):
        collected(config_of(*REFILL), rollouts, on_round=refuse)
    assert (seen, rollouts.asked) == ([4], [4])


def test_correctness_decides_what_is_refilled():
    """Partial credit differs, correctness does not: 0.1 and 0.2 are both wrong."""
    answers, config = [(0.1, 0.2), MIXED], config_of(*REFILL, "algorithm.correctness=right")
    collected(config, rollouts := FakeRollouts(script(*answers)))
    assert rollouts.asked == [4, 1]
    collected(config_of(*REFILL), rollouts := FakeRollouts(script(*answers)))
    assert rollouts.asked == [4]


@pytest.mark.parametrize("size", [None, 40])
def test_a_step_asks_for_the_same_problems_whatever_came_before(size):
    """A resumed run plays the problems that the unbroken one plays, whatever earlier steps had to refill."""
    config = config_of(*REFILL)
    steady, shaky = FakeRollouts(script(MIXED), size), FakeRollouts(script(FLAT), size)
    for step in range(3):
        collected(config, steady, step)
        collected(config, shaky, step)
    fresh = FakeRollouts(script(FLAT), size)
    collected(config, fresh, 2)
    assert fresh.calls == shaky.calls[-4:]
    assert steady.calls == [shaky.calls[4 * step] for step in range(3)]
    assert steady.calls[1] != steady.calls[2]


def test_every_trajectory_of_every_round_is_told():
    told: list[Trajectory] = []
    collected(config_of(*REFILL), rollouts := FakeRollouts(script(FLAT, FLAT, MIXED)), on_rollout=told.append)
    assert rollouts.asked == [4, 2]
    assert len(told) == 6 * MEMBERS
    assert [t.reward for t in told[:4]] == [1.0] * 4


# Steps ahead of the learner


class SlowRollouts(FakeRollouts):
    """FakeRollouts whose every call takes a while; `running` are the steps in flight."""

    def __init__(self, answer: Callable[[Problem, int], tuple[float | None, ...]]) -> None:
        super().__init__(answer)
        self.__dict__["running"] = []

    async def collect(self, problems, group_size, *, step, branch=0, first=0, on_done=None):
        self.running.append(step)
        try:
            for _ in range(20):
                await asyncio.sleep(0)
            return await super().collect(problems, group_size, step=step, branch=branch, first=first, on_done=on_done)
        finally:
            self.running.remove(step)


async def quiet() -> None:
    """Until nothing happens any more."""
    for _ in range(200):
        await asyncio.sleep(0)


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_steps_are_played_ahead_with_all_their_rounds_and_are_what_they_are_alone(ahead):
    """Refill goes on in the background; a step's groups, problems and keys do not depend on how far ahead it was played."""
    config = config_of(*REFILL, f"rollout.max_staleness={ahead}")

    def answer(problem: Problem, _: int) -> tuple[float, ...]:
        return MIXED if problem.seed % 3 else FLAT

    async def main() -> None:
        rollouts = SlowRollouts(answer)
        collector = Collector(config, rollouts, 2, lambda _: None, lambda _: None)
        for step in range(2, 9):
            assert await collector.next() == await collect(config, FakeRollouts(answer), step, lambda _: None, lambda _: None)
            await quiet()
            assert {call[0] for call in rollouts.calls} == set(range(2, min(step + ahead, 8) + 1))
        assert rollouts.running == []

    asyncio.run(main())


def test_rollouts_are_told_when_they_end_or_when_their_step_is_the_current_one():
    """A display that counts to the size of a step was told of later steps' rollouts."""
    told: list[int] = []

    async def main() -> None:
        config = config_of("rollout.max_staleness=2")
        collector = Collector(config, SlowRollouts(script(MIXED)), 0, lambda t: told.append(t.member), lambda _: None)
        for step in range(4):
            await collector.next()
            assert len(told) == (step + 1) * COUNT * MEMBERS
            await quiet()
            assert len(told) == (step + 1) * COUNT * MEMBERS
        await collector.aclose()

    asyncio.run(main())


def test_an_outage_ahead_is_raised_at_its_step_and_closing_ends_what_is_played():
    def refuse(groups: Sequence[Group]) -> None:
        if any(t.reward is None for g in groups for t in g.trajectories):
            raise RuntimeError("more than rollout.max_void failed")

    async def main() -> None:
        config = config_of("rollout.max_staleness=2")
        rollouts = SlowRollouts(lambda problem, _: MIXED if problem.seed < 2 * COUNT else (None, None))
        collector = Collector(config, rollouts, 0, lambda _: None, refuse)
        await collector.next()
        await quiet()
        assert (await collector.next())[2] is None
        with pytest.raises(RuntimeError, match="max_void"):
            await collector.next()
        assert rollouts.running == []
        other = Collector(config, rollouts, 0, lambda _: None, refuse)
        await other.next()
        await asyncio.sleep(0)
        await other.aclose()
        assert (rollouts.running, asyncio.all_tasks()) == ([], {asyncio.current_task()})

    asyncio.run(main())
