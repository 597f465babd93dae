"""The loop: rollouts -> groups -> pack -> update -> publish. `python -m gspo_jax.train cfg.toml`."""

import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from gspo_jax import checkpoint, runlog
from gspo_jax.background import Background
from gspo_jax.build import build_trainer, check_capabilities
from gspo_jax.digest import params_digest
from gspo_jax.evaluate import evaluation_problems
from gspo_jax.guards import PATIENCE
from gspo_jax.host import use_first_gpus
from gspo_jax.loop import Loop
from gspo_jax.loop import TrainingError as TrainingError
from gspo_jax.mesh import mesh_of
from gspo_jax.rollouts import AnyTask, open_rollouts
from gspo_jax.sections import Config
from gspo_jax.start import check_frozen, load_start
from gspo_jax.steps import check_alike, check_team, first_state, follow
from gspo_jax.team import ALONE, Team
from gspo_jax.vllm_engine import training_gpus
from gspo_jax.watcher import Step, Watcher


def train(
    config: Config,
    *,
    task: AnyTask | None = None,
    run_dir: Path | None = None,
    resume: bool = False,
    watcher: Watcher | None = None,
    team: Team = ALONE,
) -> Generator[Step]:
    """Train, one yielded Step per rollout batch. Everything is closed when the iterator ends, is closed, or raises.

    `task` is served on a loopback port in place of `[services]`. Works inside a running event loop: rollouts have a thread
    of their own. Raises ConfigError, RunError, TrainingError, SignalError, CheckpointError, WeightError, TaskAppError.

    With `rollout.max_staleness` = k > 0 the rollouts of the next k steps are played while the weights are updated, and new
    weights reach those in flight. Timing then decides what is sampled, so two runs differ; what was consumed is logged and
    replays to the same bits. What a killed run had played ahead is played anew when it is resumed.

    `team`: the processes of the run, entered (`with team:`). All call this alike, process 0 yields the steps, the others
    none; `task`, `run_dir`, `resume` and `watcher` are those of process 0. Raises TeamError besides.
    """
    check_capabilities(config)
    use_first_gpus(training_gpus(config, team.count))
    with ExitStack() as stack:
        if team.leads:
            run = _lead(config, task, run_dir, watcher or Watcher(), team, stack, resume=resume)
        else:
            run = _follow(config, team, stack)
        yield from team.telling(run)  # innermost: the others hear of an exception before anything is closed


def _follow(config: Config, team: Team, stack: ExitStack) -> Iterator[Step]:
    """What every process but the first does, until the run ends."""
    check_alike(team, config)
    start = load_start(config, mesh_of(config))
    check_team(team, config, start.layout)
    trainer = build_trainer(config, start)
    _, _, begin = team.next()
    run_dir = Path(begin["run_dir"])
    state, _ = first_state(trainer, start.params, run_dir, begin["step"])
    if start.frozen is not None:
        params_digest(start.frozen)
    team.note(f"goes on with step {int(state.step)}")
    start = replace(start, params={})
    manager = stack.enter_context(checkpoint.open_checkpoints(run_dir, config.run.keep_last))
    follow(team, config, start, trainer, trainer.compiled(state), state, manager)
    yield from ()


def _lead(
    config: Config, task: AnyTask | None, run_dir: Path | None, watching: Watcher, team: Team, stack: ExitStack, *, resume: bool
) -> Iterator[Step]:
    check_alike(team, config)
    run_dir = runlog.open_run(config, run_dir or Path(config.run.dir) / config.run.name, resume=resume)
    start = load_start(config, mesh_of(config))
    check_team(team, config, start.layout)
    trainer = build_trainer(config, start)

    def on_event(event: dict[str, Any]) -> None:
        runlog.event(run_dir, **event)
        watching.event(event)

    stack.enter_context(runlog.lock(run_dir))
    step, caught = _newest(run_dir) if resume else (None, [])
    team.lead("begin", run_dir=str(run_dir.absolute()), step=step)
    state, best = first_state(trainer, start.params, run_dir, step)
    if resume:
        _forget(run_dir, int(state.step), caught, on_event)
    frozen_digest = check_frozen(start, run_dir)
    on_event({"type": "model", "message": start.summary()})
    start = replace(start, params={})  # the state has them, and its buffers are donated
    manager = stack.enter_context(checkpoint.open_checkpoints(run_dir, config.run.keep_last))
    background = Background()
    stack.callback(background.close)
    world = open_rollouts(config, start, task=task, run_dir=run_dir, on_event=on_event, gathered=start.layout.gathered)
    rollouts = background.enter(world)
    stack.callback(background.leave, world)
    update = trainer.compiled(state)
    held_out = evaluation_problems(config, rollouts)
    history = list(runlog.read_lines(run_dir / "metrics.jsonl"))[-PATIENCE - 1 :]
    loop = Loop(config, start, trainer, update, background, rollouts, held_out, manager, run_dir, watching,
                 best, history, frozen_digest, team)  # fmt: skip
    yield from loop.steps(state)


def _newest(run_dir: Path) -> tuple[int | None, list[str]]:
    """The step to resume from, and what is said of checkpoints that were passed over."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = checkpoint.latest(run_dir / "checkpoints")
    return step, [str(warning.message) for warning in caught]


def _forget(run_dir: Path, step: int, passed_over: Sequence[str], on_event: Callable[[dict[str, Any]], None]) -> None:
    """What was logged and saved of later steps than `step`, which are about to be run again."""
    checkpoint.discard_after(run_dir / "checkpoints", step)
    runlog.rewind(run_dir, step)
    for message in passed_over:
        on_event({"type": "checkpoint.incomplete", "message": message})
    runlog.event(run_dir, "run.resumed", step=step, **runlog.identity())


if __name__ == "__main__":
    from gspo_jax.train_command import main

    raise SystemExit(main())
