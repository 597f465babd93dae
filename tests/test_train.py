"""A run from its config to its run directory: what it writes, what it yields, that it learns and that it repeats itself."""

import asyncio
import json
import threading
from pathlib import Path

import numpy as np
import pytest
from helpers_train import GROUPS, MEMBERS, STEPS, Commands, Finished, config_file, config_of, events, lines

from gspo_jax.config import resolved
from gspo_jax.policy import load_policy
from gspo_jax.train import train
from gspo_jax.watcher import Step
from rollout.task import Task

pytest_plugins = ("helpers_train",)

NAMES = (
    "reward/mean", "reward/std", "reward/raw_mean", "eval/reward_mean", "policy/loss", "policy/ratio_mean",
    "policy/ratio_max", "policy/clip_fraction", "policy/kl_reference", "policy/entropy", "advantage/mean",
    "mismatch/mean", "mismatch/p99", "mismatch/max", "rollout/truncated_fraction", "rollout/void_fraction",
    "rollout/staleness_max", "group/flat_fraction", "optimizer/grad_norm", "optimizer/skipped", "tokens/trained",
    "tokens/sampled", "time/rollout", "time/update", "time/sync", "time/step", "mean_return", "policy_loss",
    "kl_divergence", "clip_fraction", "advantage_mean",
)  # fmt: skip


def vowels(text: str, _: object) -> float:
    return float(sum(letter in "aeiou" for letter in text))


def short(model: Path, *overrides: str):
    """Two steps without evaluation."""
    return config_of(model, "training.iterations_per_epoch=2", "evaluation.instances=0", *overrides)


# The run directory


def test_a_run_ends_with_0_and_tells_where_everything_is(finished: Finished):
    assert finished.ran.code == 0
    assert finished.ran.errors == []
    for name in ("plots/reward.png", "export", "gspo_jax.serve"):
        assert name in finished.ran.out
    assert finished.ran.out.count("\nstep ") == STEPS
    assert finished.ran.out.count("held-out reward after") == 3
    assert "before and after" in finished.ran.out


def test_config_json_holds_the_resolved_config_and_the_identity(finished: Finished, model: Path):
    found = json.loads((finished.run_dir / "config.json").read_text())
    assert found["config"]["training"]["learning_rate"] == 1e-2
    assert found["config"]["optimizer"]["beta1"] == 0.9  # a default
    assert found["config"].keys() == resolved(config_of(model)).keys()
    assert found["versions"].keys() >= {"gspo-jax", "jax", "jaxlib", "numpy", "python"}
    assert found["device"]["platform"] == "cpu"
    assert found["device"]["count"] >= 1
    assert found["threads"] >= 1
    assert found["git"] is None or len(found["git"]["commit"]) == 40


def test_metrics_jsonl_has_every_promised_name_on_every_step(finished: Finished):
    records = lines(finished.run_dir / "metrics.jsonl")
    assert [r["step"] for r in records] == list(range(STEPS))
    for record in records:
        assert [name for name in NAMES if name not in record] == []
        assert record["policy/ratio_mean_1"] == 1.0  # the first minibatch meets the very weights it is compared with
        assert record["mismatch/max"] < 1e-3
        assert record["rollout/void_fraction"] == 0.0
        assert record["tokens/trained"] == record["tokens/sampled"] > 0
        assert record["time/step"] == pytest.approx(record["time/rollout"] + record["time/update"] + record["time/sync"])
        assert (record["eval/reward_mean"] is not None) == (record["step"] in (1, 3))
        assert record["mean_return"] == record["reward/mean"]
        assert record["policy_loss"] == record["policy/loss"]
        assert record["kl_divergence"] == record["policy/kl_reference"]
        assert record["clip_fraction"] == record["policy/clip_fraction"]
        assert record["advantage_mean"] == record["advantage/mean"]


def test_rollouts_hold_every_trajectory_and_the_rewards_that_were_logged(finished: Finished):
    for record in lines(finished.run_dir / "metrics.jsonl"):
        rows = lines(finished.run_dir / "rollouts" / f"{record['step']:06d}.jsonl")
        assert [(r["group"], r["member"]) for r in rows] == [(g, m) for g in range(GROUPS) for m in range(MEMBERS)]
        assert np.mean([r["reward"] for r in rows]) == pytest.approx(record["reward/mean"])
        for row in rows:
            (turn,) = row["turns"]
            said = turn["messages"][-1]["content"] or ""
            assert row["reward"] == 10.0 + vowels(said, None)
            assert len(turn["completion_ids"]) == len(turn["logprobs"]) == len(turn["versions"]) > 0
            assert set(turn["versions"]) == {record["step"]}  # sampled from the weights of just before the step


def test_events_digests_checkpoints_and_evaluations(finished: Finished):
    assert [e["step"] for e in events(finished.run_dir, "evaluation")] == [0, 2, 4]
    assert [e["step"] for e in events(finished.run_dir, "checkpoint")] == [2, 4]
    assert events(finished.run_dir, "run.finished")[-1]["step"] == STEPS
    digests = finished.digests()
    assert [d["step"] for d in digests] == list(range(STEPS))
    assert len({d["params"] for d in digests}) == len({d["batch"] for d in digests}) == STEPS
    assert {int(p.name) for p in (finished.run_dir / "checkpoints").iterdir()} == {2, 4}
    assert {p.name for p in (finished.run_dir / "rollouts").glob("eval_*")} == {f"eval_{n:06d}.jsonl" for n in (0, 2, 4)}


def test_plots_are_pictures(finished: Finished):
    for name in ("reward", "health"):
        data = (finished.run_dir / "plots" / f"{name}.png").read_bytes()
        assert data.startswith(b"\x89PNG\r\n\x1a\n")
        assert data.endswith(b"IEND\xaeB`\x82")
        width, height = (int.from_bytes(data[i : i + 4], "big") for i in (16, 20))
        assert min(width, height) >= 400


def test_the_export_loads_again_and_is_not_the_base_model(finished: Finished, model: Path):
    policy, exported = load_policy(finished.run_dir / "export")
    _, before = load_policy(model)
    assert policy.architecture == "llama"
    config = json.loads((finished.run_dir / "export" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    moved = np.abs(np.asarray(exported["embedding"]) - np.asarray(before["embedding"])).max()
    assert 1e-3 < moved < 1


# The iterator


@pytest.fixture(scope="module")
def steps(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Step]:
    """A run by the script API from inside a running event loop, as in a notebook."""

    async def cell() -> list[Step]:
        task = Task(lambda problem: f"say {problem.seed}", vowels, splits={"train": 6})
        return list(train(short(model), task=task, run_dir=tmp_path_factory.mktemp("script") / "run"))

    return asyncio.run(cell())


def test_train_yields_a_step_per_rollout_batch_also_inside_an_event_loop(steps: list[Step]):
    assert [s.step for s in steps] == [0, 1]
    for step in steps:
        assert [len(g.trajectories) for g in step.groups] == [MEMBERS] * GROUPS
        rewards = [t.reward for g in step.groups for t in g.trajectories if t.reward is not None]
        assert step.metrics["reward/mean"] == pytest.approx(np.mean(rewards))
        assert step.evaluation is None
        assert step.metrics["eval/reward_mean"] is None
        seeds = [g.problem.seed for g in step.groups]
        assert len(set(seeds)) == GROUPS
    assert len({g.problem.seed for s in steps for g in s.groups}) == 2 * GROUPS  # one epoch visits a problem once


def test_leaving_the_iterator_early_closes_everything(model: Path, tmp_path: Path):
    task = Task(lambda problem: "say", vowels)
    iterator = train(short(model), task=task, run_dir=tmp_path / "run")
    next(iterator)
    assert any(t.name == "rollouts" for t in threading.enumerate())
    iterator.close()
    assert not any(t.name == "rollouts" for t in threading.enumerate())


def test_the_policy_learns_a_trivial_task(model: Path, tmp_path: Path):
    config = config_of(model, "training.iterations_per_epoch=14", "evaluation.instances=0", "run.checkpoint_every=100")
    task = Task(lambda problem: "say", vowels)
    rewards = [step.metrics["reward/mean"] or 0.0 for step in train(config, task=task, run_dir=tmp_path / "run")]
    print(rewards)
    assert np.mean(rewards[-4:]) > 2 * np.mean(rewards[:3])


# The same numbers again


def test_two_runs_of_one_config_are_the_same_bits_whatever_the_delays(
    finished: Finished, model: Path, tmp_path: Path, command: Commands, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TASK_DELAY", "0.2")
    assert command.train(config_file(tmp_path, model)).code == 0
    again = tmp_path / "runs" / "tiny"
    assert lines(again / "digests.jsonl") == finished.digests()
    held_out = [[e["reward_mean"] for e in events(run, "evaluation")] for run in (again, finished.run_dir)]
    assert held_out[0] == held_out[1]


def test_another_seed_is_another_run(finished: Finished, model: Path, tmp_path: Path, command: Commands):
    done = command.train(
        config_file(tmp_path, model), "--set", "run.seed=1", "--set", "evaluation.instances=0",
        "--set", "training.iterations_per_epoch=1",
    )  # fmt: skip
    assert done.code == 0
    (digest,) = lines(tmp_path / "runs" / "tiny" / "digests.jsonl")
    assert digest["batch"] != finished.digests()[0]["batch"]
    assert digest["params"] != finished.digests()[0]["params"]
