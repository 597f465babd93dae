"""Recompute a run's updates from its log, without any engine: `python -m gspo_jax.replay RUN [--step N]`."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gspo_jax import checkpoint, runlog
from gspo_jax.build import build_trainer
from gspo_jax.commands import recorded_config, run_command
from gspo_jax.digest import params_digest
from gspo_jax.mesh import mesh_of
from gspo_jax.runlog import RunError
from gspo_jax.start import check_frozen, load_start
from gspo_jax.train import TrainingError


@dataclass(frozen=True)
class Replayed:
    """One step's digests: what the log says and what was recomputed."""

    step: int
    logged: dict[str, str]
    found: dict[str, str]

    @property
    def differs(self) -> list[str]:
        """Which of `params` and `batch` are not the same bits."""
        return [name for name in ("batch", "params") if self.logged[name] != self.found[name]]


def replay(run_dir: Path, last: int | None = None) -> Iterator[Replayed]:
    """Every logged step (up to `last`) again, from the base model; with `last`, from the newest checkpoint before it.

    RunError when the log is not complete enough.
    """
    config = recorded_config(run_dir)
    logged = {r["step"]: {"params": r["params"], "batch": r["batch"]} for r in runlog.read_lines(run_dir / "digests.jsonl")}
    if not logged or (last is not None and last not in logged):
        raise RunError(f"{run_dir}/digests.jsonl has no step {last if last is not None else 0}; it has {len(logged)} steps")
    begin = load_start(config, mesh_of(config))
    check_frozen(begin, run_dir)
    trainer = build_trainer(config, begin)
    state = trainer.init(begin.params)
    del begin
    directory = run_dir / "checkpoints"
    if last is not None and (start := _checkpoint_before(directory, last)) is not None:
        state, _ = checkpoint.restore(directory, start, state)
    update = trainer.compiled(state)
    for step in range(int(state.step), (max(logged) if last is None else last) + 1):
        file = runlog.rollout_file(run_dir, step)
        try:
            prepared = trainer.batch(runlog.read_groups(file), state.params)
        except ValueError as error:
            raise TrainingError(f"step {step}: {file} does not hold the batch of this step: {error}") from None
        state, _ = update(state, prepared.batch, trainer.frozen)
        yield Replayed(step, logged[step], {"params": params_digest(state.params), "batch": prepared.digest})


def _checkpoint_before(directory: Path, step: int) -> int | None:
    """The newest complete checkpoint from which `step` can still be run, or None."""
    found = sorted((int(p.name) for p in directory.glob("*") if p.name.isdigit() and int(p.name) <= step), reverse=True)
    return next((n for n in found if all((directory / str(n) / part).is_dir() for part in checkpoint.PARTS)), None)


def main(argv: Sequence[str] | None = None) -> int:
    """0 when every digest is reproduced, 1 naming the first that is not; else as in `gspo_jax.train`."""
    parser = argparse.ArgumentParser(prog="python -m gspo_jax.replay", description="Recompute a run from its log.")
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--step", type=int, help="stop after this step, starting from the newest checkpoint before it")
    args = parser.parse_args(argv)

    def work() -> None:
        recorded, here = runlog.read_run(args.run), runlog.identity()
        for name in ("versions", "device", "threads"):
            if recorded[name] != here[name]:
                print(f"note: {name} were {recorded[name]}, here {here[name]}: bits may differ", file=sys.stderr)
        for done in replay(args.run, args.step):
            if done.differs:
                raise TrainingError(f"step {done.step}: {' and '.join(done.differs)} differ from digests.jsonl: "
                                    f"logged {done.logged}, recomputed {done.found}")  # fmt: skip
            print(f"step {done.step}: batch and params reproduced", flush=True)

    return run_command(work)


if __name__ == "__main__":
    sys.exit(main())
