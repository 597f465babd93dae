"""GB/s of a weight update over NCCL, from JAX on one GPU to vLLM on another: `python benchmarks/nccl_gpu.py --model FOLDER`.

Needs two NVIDIA GPUs, jax[cuda12] or jax[cuda13], and a vLLM whose NCCL has the same version (GSPO_NCCL_LIBRARY can point at
vLLM's libnccl.so.2). It starts vLLM on the second GPU, or takes the server at --url, whose admin token is $GSPO_VLLM_TOKEN.
Every update sends other weights than the one before, and a probe's log-probabilities must be the trainer's. Exit code 0: they
are; 1: they are not, or the update failed; 2: this machine cannot run it.

`--dry-run` does the same with a tiny model on the CPU and sockets in NCCL's place, and compares bytes.
"""

import argparse
import asyncio
import os
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from gspo_jax.outgoing import Outgoing, pack
from gspo_jax.policy import Policy, load_policy
from gspo_jax.scoring import score_tokens
from gspo_jax.types import Params
from serving_bridge.nccl import BUFFER_BYTES, NcclSender
from serving_bridge.nccl_library import Library, NcclError, NcclMissing
from serving_bridge.publish import PublishError, publish
from serving_bridge.stage import Staged
from serving_bridge.transports import Nccl
from serving_bridge.vllm_client import ServerError, VllmClient
from serving_bridge.vllm_launch import Launch
from serving_bridge.vllm_server import ServerDied, VllmServer

ROOT = Path(__file__).parent.parent
DTYPE = "bfloat16"
CHANGED = 1.02
"""Every second update sends all weights times this."""
PROBE, MOST_GAP = 64, 0.1
"""Tokens of the probe; the mean difference of their log-probabilities that two engines in bfloat16 may have."""
DRY_BUFFER_MB = 2**-8
"""The tiny model has 42 KiB, and it takes several chunks to have one on its way while the next is packed."""
UNFIT = 2

type Check = Callable[[VllmClient, Params, Params], Any]
"""`await check(client, sent, sent before)` gives what to print, or raises ValueError."""


def unfit() -> str:
    """Why this machine cannot run it; empty if it can."""
    found = len(list(Path("/dev").glob("nvidia[0-9]*")))
    if found < 2:
        return f"it has {found} NVIDIA GPUs, and two are needed: one for JAX, one for vLLM. --dry-run needs none"
    try:
        jax.config.update("jax_cuda_visible_devices", "0")  # else JAX would take the memory of vLLM's GPU as well
        jax.devices("gpu")
        Library()
    except (RuntimeError, NcclMissing) as error:
        return f"{error}. Install 'jax[cuda12]' or 'jax[cuda13]'"
    return ""


def transport_of(outgoing: Outgoing, weights: Callable[[int], Params], library: Library, buffer_bytes: int) -> Nccl:
    """The trainer's own transport, whose tensors come from the device instead of a staged file."""

    def arrays(staged: Staged) -> Iterator[tuple[str, Any]]:
        return outgoing.on_device(weights(staged.version))

    tensors = [(tensor.name, DTYPE, tensor.shape) for tensor in outgoing.tensors]
    sender = partial(NcclSender, library=library, buffer_bytes=buffer_bytes)
    return Nccl(arrays, jax.jit(pack), tensors, sender=sender)


async def measure(client: VllmClient, policy: Policy, params: Params, library: Library, check: Check, args: Any) -> None:
    """Prints a line per update. Raises ServerError, PublishError, NcclError or ValueError."""
    outgoing = Outgoing(policy.table, policy.config.sizes(), "BF16")
    names, size = tuple(tensor.name for tensor in outgoing.tensors), sum(tensor.nbytes for tensor in outgoing.tensors)
    changed = jax.tree.map(lambda x: x * CHANGED, params)

    def weights(version: int) -> Params:
        return changed if version % 2 else params

    transport = transport_of(outgoing, weights, library, int(args.buffer_mb * 2**20))
    run = Path(f"nccl-{secrets.token_hex(4)}")
    try:
        await transport.connect(client, args.timeout)
        for version in range(1, args.updates + 1):
            staged = Staged(version, run / "device" / "memory", size, names)
            took = await publish(client, staged, transport, args.timeout)
            said = await check(client, weights(version), weights(version + 1))
            first = " (compiles)" if version == 1 else ""
            print(
                f"update {version}: {size} bytes in {took.transfer:.3f} s, {size / 1e9 / took.transfer:.2f} GB/s{first};"
                f" paused {took.paused:.3f} s; {said}"
            )
    finally:
        await transport.aclose()


def probe(policy: Policy) -> Check:
    """Compares the server's log-probabilities of random tokens with the trainer's."""
    ids = np.random.default_rng(0).integers(0, policy.config.vocab_size, PROBE)

    async def check(client: VllmClient, sent: Params, before: Params) -> str:
        there = np.array(await client.probe(ids.tolist()))
        here, other = (score_tokens(policy, params, ids[None])[0] for params in (sent, before))
        gap, moved = np.abs(there - here).mean(), np.abs(other - here).mean()
        if not gap < min(MOST_GAP, moved / 2):
            raise ValueError(f"log-probabilities differ by {gap:.4f} on average; by {moved:.4f} from the weights before")
        return f"mean log-probability gap {gap:.4f} (to the weights before: {moved:.4f})"

    return check


@asynccontextmanager
async def server(args: Any, folder: Path, work: Path) -> AsyncIterator[VllmClient]:
    """A client of the server at --url, or of one that runs on the second GPU for as long as this."""
    if args.url:
        async with VllmClient(args.url, args.name, token=os.environ.get("GSPO_VLLM_TOKEN", "")) as client:
            yield client
        return
    launch = Launch(
        Path(args.python), folder, args.name, work / "vllm.log", context_length=1024, slots=64, dtype=DTYPE, backend="nccl",
        shm=work, token=secrets.token_urlsafe(24), gpus=(1,), start_timeout_s=args.timeout,
    )  # fmt: skip
    vllm = VllmServer(launch)
    try:
        await vllm.start()
        async with VllmClient(vllm.url, args.name, token=launch.token) as client:
            yield client
    finally:
        await vllm.stop()


async def real(args: Any) -> None:
    policy, params = load_policy(args.model, compute_dtype=DTYPE)
    with tempfile.TemporaryDirectory() as work:
        async with server(args, policy.folder, Path(work)) as client:
            await measure(client, policy, params, Library(), probe(policy), args)


async def dry(args: Any) -> None:
    """The same on the CPU, against the tests' NCCL of sockets and server of a few routes."""
    sys.path.insert(0, str(ROOT / "tests"))
    from helpers_model import tiny_policy  # pyright: ignore[reportMissingImports]
    from nccl_fakes import FakeLibrary, FakeVllm  # pyright: ignore[reportMissingImports]

    args.buffer_mb = min(args.buffer_mb, DRY_BUFFER_MB)
    policy, params = tiny_policy()
    outgoing, vllm = Outgoing(policy.table, policy.config.sizes(), "BF16"), FakeVllm()

    async def check(client: VllmClient, sent: Params, before: Params) -> str:
        expected = {name: array.tobytes() for name, array in outgoing.arrays(sent)}
        if {name: data for name, (_, _, data) in vllm.received.items()} != expected:
            raise ValueError("other bytes arrived")
        return f"{len(expected)} tensors arrived bit for bit"

    try:
        async with VllmClient(vllm.url, args.name) as client:
            await measure(client, policy, params, FakeLibrary(), check, args)
    finally:
        vllm.close()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="Hugging Face folder or id")
    parser.add_argument("--url", help='a running server with --weight-transfer-config \'{"backend": "nccl"}\'')
    parser.add_argument("--name", default="policy", help="the name under which it serves the model")
    parser.add_argument("--python", default=str(ROOT / ".venv-vllm/bin/python"), help="interpreter that has vLLM")
    parser.add_argument("--updates", type=int, default=6)
    parser.add_argument("--buffer-mb", type=float, default=BUFFER_BYTES / 2**20, help="MiB of a chunk; each side holds two")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for a start, a connection, an update")
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args(argv)
    if not args.dry_run and (why := unfit()):
        print(f"nccl_gpu: this machine cannot run it: {why}", file=sys.stderr)
        return UNFIT
    try:
        asyncio.run(dry(args) if args.dry_run else real(args))
    except (ServerError, ServerDied, PublishError, NcclError, ValueError) as error:
        print(f"nccl_gpu: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
