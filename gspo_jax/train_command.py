"""`python -m gspo_jax.train cfg.toml`: the loop with a display, plots, transcripts, and exit codes that tell the truth."""

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from rich.console import Console

from gspo_jax.background import Background
from gspo_jax.build import check_capabilities, check_routing, packing_mode
from gspo_jax.commands import run_command
from gspo_jax.config import load_config, model_id
from gspo_jax.config_report import groups, minibatch_size, minibatches, outbound_hosts, total_steps, unused_keys
from gspo_jax.display import open_display, show_transcripts
from gspo_jax.distributed import find_place, join
from gspo_jax.plots import write_plots
from gspo_jax.policy import describe_policy
from gspo_jax.rollouts import open_rollouts
from gspo_jax.sections import Config
from gspo_jax.start import Start, locate, plan_adapter
from gspo_jax.team import ALONE, LOST_SECONDS, Team, TeamError
from gspo_jax.train import TrainingError, train


def main(argv: Sequence[str] | None = None) -> int:
    """0 done, 1 the run failed, 2 wrong input, 130 Ctrl-C, 143 terminated."""
    parser = argparse.ArgumentParser(prog="python -m gspo_jax.train", description="Train a language model with GSPO.")
    parser.add_argument("config", type=Path, help="TOML file")
    parser.add_argument("--run-dir", type=Path, help="where this run writes (default: run.dir/run.name)")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint")
    parser.add_argument("--dry-run", action="store_true", help="check config, model and task app, train nothing")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a key of the file")
    several = parser.add_argument_group("several processes", "One run, the same command in each; docs/cluster.md.")
    several.add_argument("--coordinator", metavar="HOST:PORT|auto", help="where process 0 listens; auto: ask the cluster")
    several.add_argument("--processes", type=int, metavar="N", help="how many there are")
    several.add_argument("--process", type=int, metavar="I", help="which this is, counted from 0")
    several.add_argument("--lost-after", type=float, default=LOST_SECONDS, metavar="SECONDS", help="of silence (default: 60)")
    args = parser.parse_args(argv)
    team = ALONE

    def work() -> None:
        nonlocal team
        try:
            if not args.dry_run and (place := find_place(args.coordinator, args.processes, args.process, os.environ)):
                team = join(place, args.lost_after)
            with team:
                _work(args, team)
        except TeamError as error:
            raise TrainingError(str(error)) from None

    code = run_command(work)
    team.leave(code)
    return code


def _work(args: argparse.Namespace, team: Team) -> None:
    config, notes = load_config(args.config, args.set)
    for line in notes + _notes(config) if team.leads else []:
        print(line, file=sys.stderr)
    if args.dry_run:
        _dry_run(config, args.run_dir)
    elif team.leads:
        _train(config, args.run_dir, team, resume=args.resume)
    else:
        for _ in train(config, team=team):
            pass


def _notes(config: Config) -> list[str]:
    notes = []
    if unused := unused_keys(config):
        notes.append(f"note: set, but without effect in this version: {', '.join(unused)}")
    if config.serving.engine == "auto":
        notes.append("note: serving.engine = auto: the embedded JAX sampler")
    if hosts := outbound_hosts(config):
        notes.append(f"note: this run talks to {', '.join(hosts)}")
    return notes


def _train(config: Config, run_dir: Path | None, team: Team, *, resume: bool) -> None:
    console = Console(soft_wrap=not sys.stdout.isatty())
    run_dir = run_dir or Path(config.run.dir) / config.run.name
    try:
        with open_display(console) as display, closing(
            train(config, run_dir=run_dir, resume=resume, watcher=display, team=team)
        ) as steps:  # fmt: skip
            for step in steps:
                display.stepped(step)
                if step.evaluation:
                    write_plots(run_dir)
    except KeyboardInterrupt:
        kept = f"; {run_dir} is kept up to its last checkpoint, continue it with --resume"
        raise (TeamError(team.cause + kept) if team.cause else KeyboardInterrupt(kept)) from None
    write_plots(run_dir)
    show_transcripts(console, run_dir, total_steps(config))
    console.print(f"curves   {run_dir}/plots/reward.png, {run_dir}/plots/health.png", markup=False)
    mode = config.model.trainer_mode
    layout = "Hugging Face" if mode == "full" else "PEFT"
    console.print(f"model    {run_dir}/export ({layout} layout)", markup=False)
    if mode == "qlora":  # an adapter trained on quantized weights is another policy on the plain ones
        console.print(
            f"merge    python -m gspo_jax.export {run_dir} FOLDER --merge (the policy that was trained)", markup=False
        )
    what = run_dir if mode == "qlora" else run_dir / "export"
    console.print(f"serve    python -m gspo_jax.serve {what} --port 8000", markup=False)


def _dry_run(config: Config, run_dir: Path | None) -> None:
    check_capabilities(config)
    source = locate(config)
    policy = describe_policy(source.model, compute_dtype=config.model.compute_dtype, remat=config.model.remat)
    packing_mode(config, policy)
    start = Start(policy, {}, adapter=plan_adapter(config, policy, source), base=source.name)
    check_routing(config, policy)
    with ExitStack() as opened:
        background = Background()
        opened.callback(background.close)
        world = open_rollouts(config, start)
        sizes = background.enter(world).sizes
        opened.callback(background.leave, world)
    adapter = f" with {source.adapter}" if source.adapter else ""
    print(f"model    {model_id(config)} ({policy.architecture}) in {policy.folder}{adapter}")
    print(f"task     answers; problems per split: {dict(sizes) or 'not stated'}")
    print(
        f"plan     {total_steps(config)} steps of {groups(config)} groups x {config.training.group_size}, "
        f"{minibatches(config)} minibatches of {minibatch_size(config)}"
    )
    run_dir = run_dir or Path(config.run.dir) / config.run.name
    print(f"run dir  {run_dir}{' (holds a run)' if (run_dir / 'metrics.jsonl').exists() else ''}")
