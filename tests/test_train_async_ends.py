"""Runs that sample beside training end: killed, interrupted, left, or at an outage; and go on with a log that replays."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fastapi.responses import JSONResponse
from helpers_train import (
    GROUPS,
    MEMBERS,
    STEPS,
    Commands,
    ask,
    child,
    config_file,
    config_of,
    events,
    fake_app,
    lines,
    listening,
    served,
)

from gspo_jax import replay
from gspo_jax.train import TrainingError, train
from gspo_jax.watcher import Watcher

pytest_plugins = ("helpers_train",)

EPISODES = GROUPS * MEMBERS


def consistent(run_dir: Path, ahead: int, command: Commands) -> float:
    """The log holds every step once, no token older than allowed, and replays; returns the largest staleness."""
    metrics = lines(run_dir / "metrics.jsonl")
    assert [r["step"] for r in metrics] == [d["step"] for d in lines(run_dir / "digests.jsonl")] == list(range(STEPS))
    for step in range(STEPS):
        rows = lines(run_dir / "rollouts" / f"{step:06d}.jsonl")
        assert [(r["group"], r["member"]) for r in rows] == [(g, m) for g in range(GROUPS) for m in range(MEMBERS)]
        drawn = [v for row in rows for turn in row["turns"] for v in turn["versions"]]
        assert max(drawn) <= step
        assert step - min(drawn) == metrics[step]["rollout/staleness_max"] <= ahead
        if metrics[step]["mismatch/max"] is not None:
            assert metrics[step]["mismatch/max"] < 1e-3
    assert command(replay.main, run_dir).errors == []
    return max(r["rollout/staleness_max"] for r in metrics)


def test_a_run_killed_while_sampling_and_training_goes_on_with_a_log_that_replays(
    model: Path, compiled: Path, tmp_path: Path, command: Commands
):
    """What was played ahead is lost with the process and played anew; delays of up to 0.3 s mix the steps in flight."""
    file, run_dir = config_file(tmp_path, model), tmp_path / "runs" / "tiny"
    flags = ["--set", "rollout.max_staleness=2", "--set", "run.checkpoint_every=1", "--set", "algorithm.flat_groups=refill"]
    with child("gspo_jax.train", file, *flags, compiled=compiled, folder=tmp_path, TASK_DELAY="0.3") as running:
        running.wait_for(lambda: (run_dir / "checkpoints" / "2").exists())
        running.kill()
    assert len(lines(run_dir / "metrics.jsonl")) < STEPS
    done = command.train(file, "--resume", *flags)
    assert (done.code, done.errors) == (0, [])
    assert events(run_dir, "run.resumed")[0]["step"] >= 2
    assert consistent(run_dir, 2, command) > 0


def test_cli_02_ctrl_c_ends_a_process_at_once_with_rollouts_of_three_steps_in_flight(
    model: Path, compiled: Path, tmp_path: Path
):
    """After Ctrl-C a process lived on, holding the port."""
    file, run_dir = config_file(tmp_path, model), tmp_path / "runs" / "tiny"
    flags = ["--set", "rollout.max_staleness=2", "--set", "rollout.max_concurrent_rollouts=24"]
    with child("gspo_jax.train", file, *flags, compiled=compiled, folder=tmp_path, TASK_DELAY="20") as running:
        running.wait_for((run_dir / "rollouts" / "eval_000000.jsonl").exists)
        ended = running.stop(signal.SIGINT, seconds=15)
    assert ended.code == 130
    assert "Traceback" not in ended.err
    assert "--resume" in ended.err
    assert "never" not in ended.err  # no task destroyed, no exception never retrieved


class Interrupts(Watcher):
    """Presses Ctrl-C in the given phase of step 1."""

    def __init__(self, phase: str) -> None:
        self.where, self.step = phase, -1

    def phase(self, name: str) -> None:
        self.step += name == "rollout"
        if self.step == 1 and name == self.where:
            if name == "rollout":  # while it waits for the groups
                main = threading.main_thread().ident
                threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT)).start()
            else:
                signal.raise_signal(signal.SIGINT)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("phase", ["rollout", "update", "sync", "between steps"])
def test_interrupted_or_left_in_any_phase_nothing_of_a_run_goes_on(
    model: Path, tmp_path: Path, phase: str, caplog: pytest.LogCaptureFixture
):
    """No thread, no port, no complaint of the event loop, with rollouts of two further steps in flight that would not end."""
    over, held = threading.Event(), threading.Event()

    async def answer(request: Mapping[str, Any]) -> dict[str, float]:
        await ask(request)
        while request["env"]["seed"] >= (GROUPS if phase == "rollout" else 2 * GROUPS) and not over.is_set():
            held.set()
            await asyncio.sleep(0.02)
        return {"reward": float(request["env"]["seed"])}

    with served(fake_app(answer, info={"taskset": {}})) as url:
        threads, ports = threading.active_count(), listening(os.getpid())
        overrides = ("rollout.max_staleness=2", "rollout.max_concurrent_rollouts=24", "evaluation.instances=0")
        config = config_of(model, *overrides, f"services.task_url={url}", "guards.clip_fraction=off")
        iterator = train(config, run_dir=tmp_path / "run", watcher=Interrupts(phase))
        assert next(iterator).step == 0
        assert held.wait(20)
        began = time.monotonic()
        if phase == "between steps":
            iterator.close()
        else:
            with pytest.raises(KeyboardInterrupt):
                next(iterator)
        assert time.monotonic() - began < 15  # an episode may take 60
        while any(isinstance(thread, threading.Timer) for thread in threading.enumerate()):
            time.sleep(0.001)
        assert (threading.active_count(), listening(os.getpid())) == (threads, ports)
        over.set()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


def test_an_outage_ahead_stops_the_run_at_the_step_it_belongs_to(model: Path, tmp_path: Path):
    """Steps played before it are trained and logged; the report is that of a synchronous run."""

    async def answer(request: Mapping[str, Any]) -> Any:
        if request["env"]["seed"] >= 2 * GROUPS:
            return JSONResponse({"detail": "down"}, 503)
        return {"reward": float(len(await ask(request)))}

    with served(fake_app(answer, info={"taskset": {}})) as url:
        config = config_of(model, "rollout.max_staleness=2", "evaluation.instances=0", f"services.task_url={url}")
        iterator = train(config, run_dir=tmp_path / "run")
        assert [next(iterator).step for _ in range(2)] == [0, 1]
        with pytest.raises(TrainingError, match=rf"{EPISODES} of {EPISODES} rollouts failed, more than rollout.max_void"):
            next(iterator)
    assert [r["step"] for r in lines(tmp_path / "run" / "metrics.jsonl")] == [0, 1]
    assert not (tmp_path / "run" / "rollouts" / "000002.jsonl").exists()
