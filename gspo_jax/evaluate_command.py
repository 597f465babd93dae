"""`python -m gspo_jax.evaluate RUN|MODEL cfg.toml`: held-out reward of any model on a config's task."""

import argparse
import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from gspo_jax.background import Background
from gspo_jax.build import check_capabilities
from gspo_jax.commands import load_start_or_model, run_command
from gspo_jax.config import ConfigError, load_config
from gspo_jax.evaluate import evaluate, evaluation_problems
from gspo_jax.rollouts import open_rollouts


def main(argv: Sequence[str] | None = None) -> int:
    """Prints one JSON object; exit codes as in `gspo_jax.train`."""
    parser = argparse.ArgumentParser(prog="python -m gspo_jax.evaluate", description="Held-out reward of a model.")
    parser.add_argument("model", help="run directory (best checkpoint), Hugging Face folder or id")
    parser.add_argument("config", type=Path, help="TOML file with the task and [evaluation]")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a key of the file")
    args = parser.parse_args(argv)

    def work() -> None:
        config, _ = load_config(args.config, args.set)
        start, params = load_start_or_model(args.model, compute_dtype=config.model.compute_dtype)
        check_capabilities(config)
        with ExitStack() as opened:
            background = Background()
            opened.callback(background.close)
            world = open_rollouts(config, start)
            rollouts = background.enter(world)
            opened.callback(background.leave, world)
            problems = evaluation_problems(config, rollouts)
            if not problems:
                raise ConfigError(str(args.config), ["evaluation.instances: no held-out problems; set instances or seeds"])
            background.run(rollouts.publish(0, params))
            found = background.run(evaluate(rollouts, problems, config.evaluation.samples))
        print(json.dumps({
            "reward_mean": found.reward_mean, "reward_sem": found.reward_sem,
            "problems": len(problems), "samples": config.evaluation.samples,
        }))  # fmt: skip

    return run_command(work)
