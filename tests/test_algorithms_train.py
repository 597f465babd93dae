"""The algorithm's options through the whole loop: real rollouts, real updates, and a replay that finds the same bits."""

import json
from pathlib import Path

import numpy as np
import pytest
from helpers_train import GROUPS, MEMBERS, STEPS, Commands, base, config_file, events, lines

from gspo_jax import replay, runlog
from gspo_jax.config import parse_config
from gspo_jax.train import TrainingError, train
from rollout.task import Env, Task

pytest_plugins = ("helpers_train",)


def letters(text: str) -> float:
    return float(sum(letter in "aeiou" for letter in text))


def two_turns() -> Env:
    """Asks twice; each answer has a reward of its own, and says apart from it whether it holds a vowel at all."""

    def reset(seed, split, config):
        return 0, [{"role": "user", "content": f"say {seed}"}]

    def step(state, message):
        reward = letters(message["content"] or "")
        scores = {"reward": reward, "vowel": float(reward > 0)}
        return state + 1, [{"role": "user", "content": "again"}], scores, state == 1

    return Env(reset, step, splits={"train": 6, "test": 4})


def run(model: Path, folder: Path, task, *overrides: str, steps: int = 2):
    """The steps of a run with these overrides."""
    words = (f"training.iterations_per_epoch={steps}", "evaluation.instances=0", *overrides)
    config, _ = parse_config(base(model), words)
    return list(train(config, task=task, run_dir=folder))


def replayed(run_dir: Path) -> list[list[str]]:
    return [done.differs for done in replay.replay(run_dir)]


def test_turn_credit_kl_entropy_and_corrections_together(model: Path, tmp_path: Path):
    """GSPO-token with an advantage per turn, an unbiased KL to the start, an entropy bonus and bounded sampler weights."""
    steps = run(
        model, tmp_path / "run", two_turns(),
        'algorithm.variety="gspo_token"', 'algorithm.credit="turn"', "rollout.max_turns=2", "algorithm.kl_beta=0.05",
        "algorithm.entropy_bonus=0.01", 'algorithm.correction.weight="token_truncate"', "serving.context_length=96",
    )  # fmt: skip
    first, second = (step.metrics for step in steps)
    assert first["policy/kl_reference"] is not None
    assert second["policy/kl_reference"] > 1e-6, "the policy moved away from its start"
    assert first["correction/weight_mean"] == pytest.approx(1, abs=1e-3)
    assert first["policy/ratio_mean_1"] == 1.0
    assert first["drift/logprob_abs"] > 0
    assert {len(t.turn_rewards or ()) for group in steps[0].groups for t in group.trajectories} <= {1, 2}
    assert first["task/objective_vowel"] is not None
    assert replayed(tmp_path / "run") == [[], []]


@pytest.mark.parametrize("devices", [1, 2])
def test_kl_in_the_reward_lowers_it_by_the_estimate(model: Path, tmp_path: Path, devices: int):
    """Nothing at the first step, whose policy is the reference; later the trained reward is less than the task's."""
    steps = run(
        model, tmp_path / "run", two_turns(), f"mesh.fsdp={devices}", f"training.rows_per_microbatch={devices}",
        'algorithm.variety="dapo"', 'algorithm.advantage="reinforce_pp"', "algorithm.kl_beta=0.5", 'algorithm.kl_in="reward"',
        'algorithm.kl_estimator="k1"', 'algorithm.overlong="mask"', 'guards.truncation="off"', "rollout.max_turns=2",
        "serving.context_length=96",
    )  # fmt: skip
    first, second = (step.metrics for step in steps)
    assert first["reward/mean"] == pytest.approx(first["reward/raw_mean"], abs=1e-4)
    assert abs(second["reward/mean"] - second["reward/raw_mean"]) > 1e-3
    assert first["policy/kl_reference"] == pytest.approx(0, abs=1e-6)
    assert second["policy/kl_reference"] > 1e-4
    cut = np.mean([t.status == "cut" for group in steps[0].groups for t in group.trajectories])
    assert first["rollout/left_out_fraction"] == pytest.approx(cut)
    assert replayed(tmp_path / "run") == [[], []]


def test_alg_13_refill_is_bounded_and_says_so(model: Path, tmp_path: Path):
    """A task that always pays 1: the rounds end, one message names the counts, and nothing is learned from nothing."""
    paying = Task(lambda problem: f"say {problem.seed}", lambda text, problem: 1.0, splits={"train": 6})
    (step,) = run(model, tmp_path / "run", paying, 'algorithm.flat_groups="refill"', "algorithm.refill_rounds=2", steps=1)
    assert step.metrics["group/sampled"] == 3 * GROUPS
    assert step.metrics["tokens/sampled"] > sum(len(t.turns[0].completion_ids) for g in step.groups for t in g.trajectories)
    assert (step.metrics["group/refill_rounds"], step.metrics["group/flat_fraction"]) == (2, 1)
    assert step.metrics["optimizer/empty"] == 2
    (told,) = events(tmp_path / "run", "groups.short")
    assert f"{3 * GROUPS}/{3 * GROUPS} groups are flat ({3 * GROUPS} all 1)" in told["message"]
    assert replayed(tmp_path / "run") == [[]]
    with pytest.raises(TrainingError, match="stopping"):
        run(model, tmp_path / "stop", paying, 'algorithm.flat_groups="refill"', 'algorithm.refill_short="stop"', steps=1)
    assert not (tmp_path / "stop" / "metrics.jsonl").exists()


def test_refill_replaces_flat_groups_by_new_problems(model: Path, tmp_path: Path):
    """Problems of even seed always pay the same: only odd ones are trained on, in full batches, and replay agrees."""

    def reward(text, problem):
        return 1.0 if problem.seed % 2 == 0 else letters(text) + len(text) / 100

    task = Task(lambda problem: f"say {problem.seed}", reward, splits={"train": 6})
    steps = run(model, tmp_path / "run", task, 'algorithm.flat_groups="refill"', "algorithm.refill_rounds=4")
    for step in steps:
        seeds = [group.problem.seed for group in step.groups]
        mixed = [seed for seed in seeds if seed % 2]
        assert len(seeds) == GROUPS
        assert len(mixed) == GROUPS or step.metrics["group/refill_rounds"] == 4
        logged = runlog.read_groups(runlog.rollout_file(tmp_path / "run", step.step))
        assert [group.problem.seed for group in logged] == seeds
    assert replayed(tmp_path / "run") == [[], []]


def test_a_guard_that_stops_a_run_is_one_line_and_a_key_turns_it_off(model: Path, tmp_path: Path, command: Commands):
    """A learning rate that moves nothing: the ratio is 1 in all minibatches, which looks healthy in every other number."""
    file = config_file(tmp_path, model)
    still = ("--set", "training.learning_rate=1e-30", "--set", "training.iterations_per_epoch=1")
    ran = command.train(file, *still)
    assert ran.code == 1
    (error,) = ran.errors
    assert "the ratio is exactly 1 in all 2 minibatches" in error
    assert "training.learning_rate = 1e-30" in error
    assert 'guards.dead_ratio = "warn"' in error
    assert not list((tmp_path / "runs" / "tiny" / "checkpoints").glob("1")), "a resume would pass the guard by"
    (told,) = events(tmp_path / "runs" / "tiny", "guard.error")
    assert told["message"] in error
    warned = command.train(file, *still, "--set", 'guards.dead_ratio="warn"', "--set", "run.name=warned")
    assert warned.code == 0
    assert "the ratio is exactly 1" in warned.out
    off = command.train(file, *still, "--set", 'guards.dead_ratio="off"', "--set", "run.name=off")
    assert "the ratio is exactly 1" not in off.out + off.err


def test_a_resumed_run_guards_with_the_steps_in_its_log(model: Path, tmp_path: Path, command: Commands):
    """Flat groups for 20 steps in a row, 19 of them logged before a kill: the first step after the resume is the twentieth."""
    file = config_file(tmp_path, model)
    flat = ("--set", "training.learning_rate=1e-4", "--set", "evaluation.instances=0")
    assert command.train(file, *flat, "--set", "training.iterations_per_epoch=2").code == 0
    log = tmp_path / "runs" / "tiny" / "metrics.jsonl"
    records = lines(log)
    assert len(records) == 2
    before = [{**records[0], "step": -19 + i, "group/flat_fraction": 1.0} for i in range(19)]
    log.write_text("".join(json.dumps(r) + "\n" for r in [*before, *({**r, "group/flat_fraction": 1.0} for r in records)]))
    flat_task = tmp_path / "task.py"
    flat_task.write_text(flat_task.read_text().replace("return 10.0", "return 10.0 + 0 *"))
    ran = command.train(file, *flat, "--resume", "--set", f"training.iterations_per_epoch={STEPS}")
    assert ran.code == 1
    assert "every group of the last 20 steps was flat" in ran.errors[0]
    assert MEMBERS > 1
