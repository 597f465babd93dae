"""What a step reports about its rollouts: the numbers that were optimized, and nothing of what failed."""

import numpy as np
import pytest
from helpers_train import GROUPS, MEMBERS, Commands, ask, config_file, events, fake_app, lines, served

from gspo_jax.advantages import group_std
from gspo_jax.metrics import ALIASES, rollout_metrics, with_aliases
from rollout.types import Group, Problem, Trajectory, Turn

pytest_plugins = ("helpers_train",)


def member(reward: float | None, tokens: int = 2, *, status: str = "done", version: int = 3, **metrics: float) -> Trajectory:
    turn = Turn((1, 2), (5,) * tokens, (-1.0,) * tokens, (version,) * tokens, "stop")
    return Trajectory((turn,), reward, "void" if reward is None else status, metrics=metrics)  # pyright: ignore


def reported(*rows: list[Trajectory], version: int = 3) -> dict[str, float | None]:
    groups = [Group(Problem(i), tuple(row)) for i, row in enumerate(rows)]
    advantages = [group_std([t.reward for t in row]) for row in rows]
    return rollout_metrics(groups, advantages, version)


def test_met_01_the_logged_reward_is_what_the_advantages_came_from():
    """The dashboard's reward did not match what was optimized."""
    found = reported([member(1.0, outcome=0.2), member(0.5, outcome=2.0)], [member(4.0), member(2.5)])
    assert found["reward/mean"] == pytest.approx((1 + 0.5 + 4 + 2.5) / 4)
    assert found["reward/std"] == pytest.approx(np.std([1, 0.5, 4, 2.5]))
    assert found["advantage/mean"] == pytest.approx(0, abs=1e-6)


def test_met_06_parts_of_the_reward_are_logged_beside_it():
    """A shaping term replaced the raw score in the log."""
    found = reported([member(1.0, right=1.0, speed=0.25), member(2.0, right=0.0)])
    assert found["reward/raw_mean"] == 1.5
    assert found["task/right"] == 0.5
    assert found["task/speed"] == 0.25  # over those that have it


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
