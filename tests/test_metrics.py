"""What a step reports about its rollouts: the numbers that were optimized, and nothing of what failed."""

import numpy as np
import pytest
from helpers_train import GROUPS, MEMBERS, Commands, ask, config_file, events, fake_app, lines, served

from gspo_jax.metrics import ALIASES, finite, rollout_metrics, with_aliases
from gspo_jax.sections import Algorithm
from gspo_jax.signal import signal
from rollout.types import Group, Problem, Trajectory, Turn

pytest_plugins = ("helpers_train",)


def member(reward: float | None, tokens: int = 2, *, status: str = "done", version: int = 3, **metrics: float) -> Trajectory:
    turn = Turn((1, 2), (5,) * tokens, (-1.0,) * tokens, (version,) * tokens, "stop")
    return Trajectory((turn,), reward, "void" if reward is None else status, metrics=metrics)  # pyright: ignore


def reported(*rows: list[Trajectory], version: int = 3, **algorithm) -> dict[str, float | None]:
    groups = [Group(Problem(i), tuple(row)) for i, row in enumerate(rows)]
    return rollout_metrics(groups, signal(Algorithm(**algorithm), groups, 10), version)


def test_met_01_the_logged_reward_is_what_the_advantages_came_from():
    """The dashboard's reward did not match what was optimized."""
    found = reported([member(1.0, outcome=0.2), member(0.5, outcome=2.0)], [member(4.0), member(2.5)])
    assert found["reward/mean"] == pytest.approx((1 + 0.5 + 4 + 2.5) / 4)
    assert found["reward/std"] == pytest.approx(np.std([1, 0.5, 4, 2.5]))
    assert found["advantage/mean"] == pytest.approx(0, abs=1e-6)
    shaped = reported([member(1.0, 9), member(0.5, 2)], overlong_buffer=4)  # 9 of 10 tokens: 3 of 4 into the buffer
    assert shaped["reward/mean"] == pytest.approx((1 - 0.75 + 0.5) / 2)
    assert shaped["reward/std"] == pytest.approx(np.std([0.25, 0.5]))


def test_met_06_parts_of_the_reward_are_logged_beside_it():
    """A shaping term replaced the raw score in the log."""
    found = reported([member(1.0, right=1.0, speed=0.25), member(2.0, right=0.0)])
    assert found["reward/raw_mean"] == 1.5
    assert found["task/right"] == 0.5
    assert found["task/speed"] == 0.25  # over those that have it
    shaped = reported([member(1.0, 10), member(2.0, 8)], overlong_buffer=4)
    assert (shaped["reward/raw_mean"], shaped["reward/mean"]) == (1.5, pytest.approx(1.5 - (1 + 0.5) / 2))


def test_void_trajectories_are_in_no_statistic():
    alive = [[member(1.0, 3, right=1.0), member(2.0, 5, status="cut", right=0.0)], [member(0.0, 1), member(3.0, 2)]]
    void = member(None, 50, version=0, right=100.0)
    with_void = reported([*alive[0], void], [void, *alive[1]])
    without = reported(*alive)
    assert with_void.pop("rollout/void_fraction") == pytest.approx(2 / 6)
    assert without.pop("rollout/void_fraction") == 0
    assert with_void == without
    assert without["rollout/truncated_fraction"] == 0.25
    assert without["tokens/sampled"] == 11


def test_a_failure_is_not_a_zero():
    assert reported([member(2.0), member(None), member(4.0)])["reward/mean"] == 3
    nothing = reported([member(None), member(None)])
    assert nothing["rollout/void_fraction"] == 1
    for name in ("reward/mean", "reward/std", "advantage/mean", "rollout/truncated_fraction"):
        assert nothing[name] is None


def test_flat_groups_are_those_without_a_difference():
    rows = [[member(1.0), member(1.0)], [member(0.0), member(1.0)], [member(2.0), member(None)], [member(0.0), member(0.0)]]
    assert reported(*rows)["group/flat_fraction"] == 0.75


def test_what_is_left_out_is_counted_and_in_no_mean_advantage():
    """Masked and filtered trajectories vanished from the update without a number that says so."""
    rows = (
        [member(3.0), member(0.0, status="cut"), member(0.0), member(None)],
        [member(1.0), member(1.0), member(1.0), member(1.0)],
    )
    found = reported(*rows, overlong="mask", flat_groups="skip", advantage="group_mean")
    assert found["rollout/left_out_fraction"] == 5 / 8
    assert found["advantage/mean"] == pytest.approx(((3 - 1) + (0 - 1)) / 2)
    assert found["rollout/truncated_fraction"] == 1 / 7
    assert found["rollout/void_fraction"] == 1 / 8
    assert reported(*rows)["rollout/left_out_fraction"] == 0
    nothing = reported(rows[1], flat_groups="skip")
    assert (nothing["rollout/left_out_fraction"], nothing["advantage/mean"], nothing["reward/mean"]) == (1, None, 1)


def test_mean_advantage_of_turns_is_over_tokens():
    """Turns of unequal length weigh as they do in the update of a trajectory: by their tokens."""
    turns = tuple(Turn((1, 2), (5,) * n, (-1.0,) * n, (3,) * n, "stop") for n in (1, 3))
    two = [Trajectory(turns, sum(r), "done", turn_rewards=r) for r in ((1.0, 0.0), (0.0, 2.0))]
    found = reported(two, variety="gspo_token", credit="turn", advantage="group_mean")
    # still to come: 1, 0 and 2, 2; less the means 1.5 and 1
    assert found["advantage/mean"] == pytest.approx(np.mean([(-0.5 + 3 * -1) / 4, (0.5 + 3 * 1) / 4]))
    assert found["advantage/mean"] == 0
    lonely = reported([*two, Trajectory(turns[:1], 0.0, "done", turn_rewards=(0.0,))], variety="gspo_token", credit="turn",
                      advantage="group_mean")  # fmt: skip
    assert lonely["advantage/mean"] == pytest.approx(np.mean([(0 + 3 * -2 / 3) / 4, (1 + 3 * 4 / 3) / 4, -1]))


def test_what_is_not_finite_is_none_in_the_log():
    """JSON has no NaN; a gap over no tokens is not 0."""
    assert finite({"a": np.float32(0.5), "b": np.nan, "c": np.inf}) == {"a": 0.5, "b": None, "c": None}


def test_staleness_is_counted_from_the_version_behind_each_token():
    assert reported([member(1.0, version=3), member(0.0, version=1)], version=4)["rollout/staleness_max"] == 3


def test_aliases_are_the_same_values_and_always_there():
    found = with_aliases({"reward/mean": 1.0, "policy/loss": 2.0, "policy/clip_fraction": 0.5, "advantage/mean": 0.0})
    assert found["mean_return"] == 1.0
    assert found["policy_loss"] == 2.0
    assert found["clip_fraction"] == 0.5
    assert found["advantage_mean"] == 0.0
    assert found["kl_divergence"] is None
    assert found.keys() >= {*ALIASES, *ALIASES.values()}


def test_rol_09_a_run_goes_on_without_the_members_that_failed(model, tmp_path, command: Commands):
    """A backend outage was trained on as bad answers."""
    calls: dict[int, int] = {}

    async def answer(request):
        seed = request["env"]["seed"]
        calls[seed] = calls.get(seed, 0) + 1
        failing = calls[seed] == 2  # one of each group of four
        text = await ask(request)
        return {"error": "away"} if failing else {"metrics": {"outcome_reward": 100.0 + len(text)}}

    with served(fake_app(answer)) as url:
        file = config_file(tmp_path, model, url)
        done = command.train(file, "--set", "training.iterations_per_epoch=2", "--set", "evaluation.instances=0")
    assert (done.code, done.errors) == (0, [])
    run_dir = tmp_path / "runs" / "tiny"
    for record in lines(run_dir / "metrics.jsonl"):
        rows = lines(run_dir / "rollouts" / f"{record['step']:06d}.jsonl")
        rewards = [row["reward"] for row in rows if row["status"] != "void"]
        assert len(rewards) == GROUPS * (MEMBERS - 1)
        assert min(rewards) >= 100
        assert record["rollout/void_fraction"] == 1 / MEMBERS
        assert record["reward/mean"] == pytest.approx(np.mean(rewards))
        sampled = sum(len(t["completion_ids"]) for row in rows if row["reward"] is not None for t in row["turns"])
        assert record["tokens/trained"] == record["tokens/sampled"] == sampled
        assert record["policy/ratio_mean_1"] == 1.0
    voids = events(run_dir, "rollout.void")
    assert len(voids) == 2 * GROUPS
    assert {e["reason"] for e in voids} == {"no_reward"}
    assert done.out.count("void rollout (no_reward)") == 2 * GROUPS
