"""A trained policy behind an OpenAI-compatible endpoint: `python -m gspo_jax.serve MODEL --port 8000`."""

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Sequence

from gspo_jax.commands import RunError, load_run_or_model, run_command
from gspo_jax.policy import Policy
from gspo_jax.sampler import Sampler
from gspo_jax.types import Params
from rollout.server import serve
from serving_bridge.chat import load_chat
from serving_bridge.gateway import Gateway, build_gateway_app

REQUEST_SECONDS = 600.0


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until Ctrl-C; exit codes as in `gspo_jax.train`."""
    parser = argparse.ArgumentParser(prog="python -m gspo_jax.serve", description="Serve a model to any OpenAI client.")
    parser.add_argument("model", help="run directory (best checkpoint), Hugging Face folder or id")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--context-length", type=int, default=1024)
    parser.add_argument("--slots", type=int, default=8, help="requests decoded together")
    parser.add_argument("--name", default="policy", help="the model's name in the API")
    args = parser.parse_args(argv)

    def work() -> None:
        policy, params = load_run_or_model(args.model)
        if not 2 <= args.context_length <= policy.config.max_position_embeddings or args.slots < 1:
            raise RunError(f"--context-length must be 2..{policy.config.max_position_embeddings} and --slots >= 1")
        asyncio.run(_serve(args, policy, params))

    return run_command(work)


async def _serve(args: argparse.Namespace, policy: Policy, params: Params) -> None:
    chat = load_chat(policy.folder)
    sampler = Sampler(policy, slots=args.slots, context_length=args.context_length, seed=0, decode=chat.decode)
    await sampler.publish(0, params)
    gateway = Gateway(sampler.sample, chat, model=args.name, context_length=args.context_length, timeout_s=REQUEST_SECONDS)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(sampler.aclose)
        server = await stack.enter_async_context(await serve(build_gateway_app(gateway), args.host, args.port))
        print(f"{server.url}/v1/chat/completions (model {args.name!r}); Ctrl-C stops", flush=True)
        await server.wait()


if __name__ == "__main__":
    sys.exit(main())
