"""Log-probabilities of given tokens: `python -m gspo_jax.score MODEL --input tokens.npz --output scores.npz`."""

import argparse
import sys
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int

from gspo_jax.commands import RunError, load_run_or_model, run_command
from gspo_jax.scoring import score_tokens


def read_tokens(path: Path, vocab_size: int) -> Int[np.ndarray, "b t"]:
    """`input_ids [b t]` of an .npz file (never unpickled). RunError naming what is wrong with it."""
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            ids = file["input_ids"]
    except (OSError, ValueError, KeyError, EOFError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise RunError(f"--input {path}: {error}; it must be an .npz file with an integer array input_ids [b t]") from None
    if ids.ndim != 2 or ids.dtype.kind not in "iu" or ids.shape[0] < 1 or ids.shape[1] < 2:
        raise RunError(f"--input {path}: input_ids is {ids.dtype} {list(ids.shape)}; it must be integers [b t] with t >= 2")
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise RunError(f"--input {path}: input_ids run from {ids.min()} to {ids.max()}; the model has ids 0..{vocab_size - 1}")
    return ids


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes as in `gspo_jax.train`."""
    parser = argparse.ArgumentParser(prog="python -m gspo_jax.score", description="Score tokens under a model.")
    parser.add_argument("model", help="run directory, Hugging Face folder or id")
    parser.add_argument("--input", type=Path, required=True, help=".npz with input_ids [b t]")
    parser.add_argument("--output", type=Path, required=True, help=".npz to write: next_logprobs [b t-1] float32")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="compute dtype (default: float32, or that of the run)")
    args = parser.parse_args(argv)

    def work() -> None:
        if args.temperature <= 0:
            raise RunError(f"--temperature {args.temperature} must be > 0")
        policy, params = load_run_or_model(args.model, compute_dtype=args.dtype)
        ids = read_tokens(args.input, policy.config.vocab_size)
        if ids.shape[1] > policy.config.max_position_embeddings:
            most = policy.config.max_position_embeddings
            raise RunError(f"--input {args.input}: rows of {ids.shape[1]} tokens; the model has {most} positions")
        np.savez(args.output, next_logprobs=score_tokens(policy, params, ids, temperature=args.temperature))

    return run_command(work)


if __name__ == "__main__":
    sys.exit(main())
