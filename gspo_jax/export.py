"""A run's weights as a Hugging Face or PEFT folder: `python -m gspo_jax.export RUN OUT`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from gspo_jax.commands import RunError, is_run, load_run, run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes as in `gspo_jax.train`."""
    parser = argparse.ArgumentParser(prog="python -m gspo_jax.export", description="Write a run's model for other tools.")
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("out", type=Path, help="folder to write; must not exist yet")
    parser.add_argument("--latest", action="store_true", help="the newest checkpoint instead of the best by held-out reward")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="default: bfloat16; float32 for an adapter")
    parser.add_argument("--merge", action="store_true", help="an adapter added to its base model, as a full model")
    args = parser.parse_args(argv)

    def work() -> None:
        if not is_run(args.run):
            raise RunError(f"{args.run} is not a run directory (it has no checkpoints/)")
        if args.out.exists():
            raise RunError(f"{args.out} exists; name a folder that does not")
        start, params = load_run(args.run, best=not args.latest)
        start.save(params, args.out, dtype=args.dtype, merge=args.merge)
        print(args.out)

    return run_command(work)


if __name__ == "__main__":
    sys.exit(main())
