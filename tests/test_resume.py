"""A run that was killed, stopped or extended, and went on, is the run that was not; and its log replays."""

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers_train import STEPS, Commands, Finished, child, config_file, config_of, events, lines

from gspo_jax import replay
from gspo_jax.train import TrainingError, train
from gspo_jax.watcher import Watcher
from rollout.task import Task
from rollout.types import Trajectory

pytest_plugins = ("helpers_train",)


def count(file: Path) -> int:
    return file.read_text().count("\n") if file.exists() else 0


def same_run(run_dir: Path, finished: Finished) -> None:
    assert lines(run_dir / "digests.jsonl") == finished.digests()
    assert [r["step"] for r in lines(run_dir / "metrics.jsonl")] == list(range(STEPS))
    rewards = [[r["reward/mean"] for r in lines(run / "metrics.jsonl")] for run in (run_dir, finished.run_dir)]
    assert rewards[0] == rewards[1]


def copied(finished: Finished, folder: Path) -> Path:
    """The finished run in a place where it may be changed."""
    return shutil.copytree(finished.run_dir, folder / "run")


@pytest.mark.timeout(600)
def test_det_01_ckp_08_a_run_killed_three_times_is_the_run_that_was_not(
    finished: Finished, model: Path, compiled: Path, tmp_path: Path, command: Commands
):
    """Each restart lost or repeated a window of prompts."""
    file, run_dir = config_file(tmp_path, model), tmp_path / "runs" / "tiny"
    rollouts, checkpoints = run_dir / "rollouts", run_dir / "checkpoints"

    def during_rollout() -> bool:  # of step 1, whose replies take up to 0.5 s
        return count(run_dir / "digests.jsonl") == 1

    def during_update() -> bool:  # the rollouts of a step are written just before its update
        return (rollouts / "000003.jsonl").exists() and count(run_dir / "digests.jsonl") == 3

    def during_checkpoint() -> bool:  # Orbax writes beside the name and renames
        return checkpoints.exists() and any(p.name.startswith("4.") for p in checkpoints.iterdir())

    for moment in (during_rollout, during_update, during_checkpoint):
        resume = ["--resume"] if run_dir.exists() else []
        with child("gspo_jax.train", file, *resume, compiled=compiled, folder=tmp_path, TASK_DELAY="0.5") as running:
            running.wait_for(moment)
            running.kill()
        assert count(run_dir / "digests.jsonl") < STEPS or not (checkpoints / "4").exists()
    done = command.train(file, "--resume")
    assert (done.code, done.errors) == (0, [])
    same_run(run_dir, finished)
    assert [e["step"] for e in events(run_dir, "run.resumed")] == [0, 2, 2]


@pytest.mark.timeout(600)
def test_cli_02_signals_stop_a_run_at_once_and_it_can_go_on(
    finished: Finished, model: Path, compiled: Path, tmp_path: Path, command: Commands
):
    """After Ctrl-C a process lived on, holding the port; a terminated run was recorded as completed."""
    places = {number: tmp_path / number.name for number in (signal.SIGINT, signal.SIGTERM)}
    for place in places.values():
        place.mkdir()
    ends = {}
    children = [
        child("gspo_jax.train", config_file(place, model), compiled=compiled, folder=place, TASK_DELAY="0.5")
        for place in places.values()
    ]
    with children[0] as first, children[1] as second:
        for running, (number, place) in zip((first, second), places.items(), strict=True):
            running.wait_for(lambda place=place: count(place / "runs" / "tiny" / "digests.jsonl") >= 1)
            ends[number] = running.stop(number, seconds=15)
    assert (ends[signal.SIGINT].code, ends[signal.SIGTERM].code) == (130, 143)
    for end in ends.values():
        assert "Traceback" not in end.err
        assert "--resume" in end.err
    assert command.train(places[signal.SIGINT] / "tiny.toml", "--resume").code == 0
    same_run(places[signal.SIGINT] / "runs" / "tiny", finished)


class Versions(Watcher):
    """A watcher that keeps the version behind every sampled token, in order of arrival."""

    def __init__(self) -> None:
        self.seen: list[set[int]] = []

    def rollout(self, trajectory: Trajectory) -> None:
        self.seen.append({v for turn in trajectory.turns for v in turn.versions})


def test_ckp_14_the_sampler_of_a_resumed_run_serves_the_restored_weights(model: Path, tmp_path: Path):
    """A resumed job's generators kept the base weights; the trainer alone had been restored."""
    task = Task(lambda problem: f"say {problem.seed}", lambda text, _: float(len(text)), splits={"train": 6})
    run_dir, watcher = tmp_path / "run", Versions()
    config = config_of(model, "training.iterations_per_epoch=2", "evaluation.instances=0")
    list(train(config, task=task, run_dir=run_dir))
    # the horizon is no part of a run's identity: two steps more
    config = config_of(model, "training.iterations_per_epoch=3", "evaluation.instances=0")
    steps = list(train(config, task=task, run_dir=run_dir, resume=True, watcher=watcher))
    assert [s.step for s in steps] == [2]
    assert watcher.seen[0] == {2}
    # a sampler with other weights than the learner's would show as mismatch
    assert (steps[0].metrics["mismatch/max"] or 1.0) < 1e-3
    assert [r["step"] for r in lines(run_dir / "metrics.jsonl")] == [0, 1, 2]


def test_ckp_02_a_checkpoint_without_all_its_parts_is_passed_over(finished: Finished, tmp_path: Path, command: Commands):
    """Resume chose a step of which one part had never been written."""
    run_dir = copied(finished, tmp_path)
    shutil.rmtree(run_dir / "checkpoints" / "4" / "run")
    # with a checkpoint after every step, the remains of the fourth would be in the way of the third
    done = command.train(finished.config, "--run-dir", run_dir, "--resume", "--set", "run.checkpoint_every=1")
    assert (done.code, done.errors) == (0, [])
    (event,) = events(run_dir, "checkpoint.incomplete")
    assert str(run_dir / "checkpoints" / "4") in event["message"]
    assert "'run'" in event["message"]
    assert events(run_dir, "run.resumed")[-1]["step"] == 2
    same_run(run_dir, finished)
    assert sorted(p.name for p in (run_dir / "checkpoints" / "4").iterdir() if p.is_dir())[-2:] == ["run", "state"]


def test_a_log_line_cut_short_by_a_crash_does_not_stop_the_resumed_run(finished: Finished, tmp_path: Path, command: Commands):
    run_dir = copied(finished, tmp_path)
    shutil.rmtree(run_dir / "checkpoints" / "4")
    for name in ("events.jsonl", "metrics.jsonl", "digests.jsonl"):
        with (run_dir / name).open("a") as file:
            file.write('{"step": 3, "ti')
    done = command.train(finished.config, "--run-dir", run_dir, "--resume")
    assert (done.code, done.errors) == (0, [])
    same_run(run_dir, finished)
    assert events(run_dir, "run.finished")


def test_resuming_a_finished_run_does_nothing_but_finish_it(finished: Finished, tmp_path: Path, command: Commands):
    run_dir = copied(finished, tmp_path)
    shutil.rmtree(run_dir / "export")  # killed between the last checkpoint and the export
    done = command.train(finished.config, "--run-dir", run_dir, "--resume")
    assert (done.code, done.errors) == (0, [])
    same_run(run_dir, finished)
    assert f"steps {STEPS}..{STEPS - 1}" not in done.out
    name = "export/model.safetensors"
    assert (run_dir / name).read_bytes() == (finished.run_dir / name).read_bytes()


def test_a_run_is_not_overwritten(finished: Finished, command: Commands):
    before = (finished.run_dir / "metrics.jsonl").read_bytes()
    done = command.train(finished.config)
    assert done.code == 2
    (error,) = done.errors
    assert str(finished.run_dir) in error
    assert "--resume" in error
    assert (finished.run_dir / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("resume", [True, False])
def test_a_run_of_another_config_is_not_continued(finished: Finished, command: Commands, resume: bool):
    flags = ["--resume"] if resume else []
    done = command.train(finished.config, *flags, "--set", "training.learning_rate=1e-3", "--set", "run.seed=5")
    assert done.code == 2
    (_,) = done.errors
    if resume:
        assert "training.learning_rate: 0.01 -> 0.001" in done.err
        assert "run.seed: 0 -> 5" in done.err


def test_a_run_that_never_began_leaves_its_name_free(model: Path, tmp_path: Path, command: Commands):
    file = config_file(tmp_path, model)
    flags = ["--set", "training.iterations_per_epoch=1", "--set", "evaluation.instances=0"]
    missing = command.train(file, *flags, "--set", f"model.base={tmp_path}/none")
    assert missing.code == 2
    done = command.train(file, *flags)
    assert (done.code, done.errors) == (0, [])
    assert json.loads((tmp_path / "runs" / "tiny" / "config.json").read_text())["config"]["model"]["base"] == str(model)


# Replay


def test_replay_reproduces_every_digest(finished: Finished, command: Commands):
    done = command(replay.main, finished.run_dir)
    assert (done.code, done.errors) == (0, [])
    assert done.out.splitlines() == [f"step {n}: batch and params reproduced" for n in range(STEPS)]


def tampered(run_dir: Path, step: int, change) -> None:
    file = run_dir / "rollouts" / f"{step:06d}.jsonl"
    rows = lines(file)
    change(rows)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def another_reward(rows: list) -> None:
    rows[3]["reward"] += 0.5


def another_id(rows: list) -> None:
    rows[5]["turns"][0]["completion_ids"][1] ^= 1


def a_lost_line(rows: list) -> None:
    rows.pop()


@pytest.mark.parametrize("change", [another_reward, another_id, a_lost_line])
def test_replay_names_the_step_that_was_tampered_with(finished: Finished, tmp_path: Path, command: Commands, change):
    run_dir = copied(finished, tmp_path)
    tampered(run_dir, 2, change)
    done = command(replay.main, run_dir, "--step", 3)
    assert done.code == 1
    (error,) = done.errors
    assert "step 2" in error
    assert "batch" in error


def test_replay_of_one_step_starts_from_the_checkpoint_before_it(finished: Finished, tmp_path: Path, command: Commands):
    run_dir = copied(finished, tmp_path)
    shutil.rmtree(run_dir / "checkpoints" / "4")
    (run_dir / "rollouts" / "000001.jsonl").unlink()  # not needed from checkpoint 2 on
    done = command(replay.main, run_dir, "--step", 3)
    assert (done.code, done.errors) == (0, [])
    assert done.out.splitlines() == [f"step {n}: batch and params reproduced" for n in (2, 3)]


@pytest.mark.parametrize("step", [STEPS, -1])
def test_replay_of_a_step_that_never_was(finished: Finished, command: Commands, step: int):
    done = command(replay.main, finished.run_dir, "--step", step)
    assert done.code == 2
    (error,) = done.errors
    assert str(step) in error


def test_replay_of_what_is_no_run(finished: Finished, model: Path, tmp_path: Path, command: Commands):
    broken = copied(finished, tmp_path)
    (broken / "rollouts" / "000000.jsonl").write_text("{not json}\n")
    for place, named in ((tmp_path / "none", "none"), (model, str(model)), (broken, "000000.jsonl")):
        done = command(replay.main, place)
        assert done.code == 2
        (error,) = done.errors
        assert named in error


def test_cli_03_a_run_directory_has_one_owner_who_cannot_outlive_its_process(
    finished: Finished, tmp_path: Path, command: Commands
):
    """A killed owner holds nothing, a living one keeps others out, whatever the directory says of itself."""
    folder = copied(finished, tmp_path)
    hold = "with lock(pathlib.Path(sys.argv[1])): print('mine', flush=True); time.sleep(60)"
    code = f"import sys, time, pathlib\nfrom gspo_jax.runlog import lock\n{hold}"
    owner = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "mine\n"
        words = (finished.config, "--run-dir", folder, "--resume")
        refused = command.train(*words)
        assert refused.code == 2
        assert "in use by another process" in refused.errors[0]
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
    assert command.train(*words).code == 0


def test_ckp_07_a_run_does_not_go_on_with_other_problems(model: Path, tmp_path: Path):
    """A resumed run skipped rows of another dataset that it had consumed of the first."""
    config = config_of(model, "evaluation.instances=0", "run.checkpoint_every=1", "training.iterations_per_epoch=2")
    for size, words in ((6, None), (5, "5} problems by split, and had {'train': 6}")):
        task = Task(lambda problem: f"say {problem.seed}", lambda text, _: float(len(text)), splits={"train": size})
        if words is None:
            next(iter(train(config, task=task, run_dir=tmp_path / "run")))
            continue
        with pytest.raises(TrainingError, match=re.escape(words)):
            list(train(config, task=task, run_dir=tmp_path / "run", resume=True))
