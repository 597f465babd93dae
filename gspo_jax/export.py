"""A run's weights as a Hugging Face folder: `python -m gspo_jax.export RUN OUT`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from gspo_jax.commands import RunError, is_run, load_run_or_model, run_command
from gspo_jax.policy import save_policy


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes as in `gspo_jax.train`."""
    parser = argparse.ArgumentParser(prog="python -m gspo_jax.export", description="Write a run's model for other tools.")
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("out", type=Path, help="folder to write; must not exist yet")
    parser.add_argument("--latest", action="store_true", help="the newest checkpoint instead of the best by held-out reward")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    args = parser.parse_args(argv)

    def work() -> None:
        if not is_run(args.run):
            raise RunError(f"{args.run} is not a run directory (it has no checkpoints/)")
        if args.out.exists():
            raise RunError(f"{args.out} exists; name a folder that does not")
        policy, params = load_run_or_model(str(args.run), best=not args.latest)
        save_policy(policy, params, args.out, dtype=args.dtype)
        print(args.out)

    return run_command(work)


if __name__ == "__main__":
    sys.exit(main())
