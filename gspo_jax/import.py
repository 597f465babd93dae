"""What a vLLM server serves, compared and brought back: `python -m gspo_jax.import URL [OUT]`."""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from gspo_jax import peft
from gspo_jax.adapters import attach
from gspo_jax.commands import RunError, run_command
from gspo_jax.policy import Policy, load_policy, save_policy
from gspo_jax.pretrained import resolve_model
from gspo_jax.scoring import score_tokens
from gspo_jax.types import Params
from gspo_jax.vllm_engine import MOST_PROBE_GAP, PROBE
from serving_bridge.chat import load_chat
from serving_bridge.convert import load_weights
from serving_bridge.shards import SINGLE
from serving_bridge.stage import PREFIX, SHARED_MEMORY
from serving_bridge.vllm_client import VllmClient

PROBE_GAP = {"float32": 1e-3}
"""Most that server and importer may differ on any token of the probe, by the server's dtype; else MOST_PROBE_GAP on average."""


class Found(NamedTuple):
    """What the server says that it serves."""

    model: str
    root: str
    adapter: str | None
    """Folder of the adapter, if the name is one's."""
    version: str
    dtype: str
    logprobs: list[float]
    """Of the probe, computed there."""
    adapters: bool = False
    """Whether versions are those of an adapter, the model beneath it being that of its folder."""


def main(argv: Sequence[str] | None = None) -> int:
    """Prints one JSON object; exit codes as in `gspo_jax.train`."""
    parser = argparse.ArgumentParser(
        prog="python -m gspo_jax.import",
        description="Compare what a vLLM server serves with our own reading of it, and write it as a folder to train on.",
    )
    parser.add_argument("url", help="of the server, http://host:port")
    parser.add_argument("out", type=Path, nargs="?", help="folder to write; must not exist yet; without it, only compare")
    parser.add_argument("--model", help="a name that it serves; default: its adapter if it has one, else its model")
    parser.add_argument("--token-env", default="GSPO_VLLM_TOKEN", help="environment variable with the server's token")
    args = parser.parse_args(argv)

    def work() -> None:
        if args.out is not None and args.out.exists():
            raise RunError(f"{args.out} exists; name a folder that does not")
        print(json.dumps(_import(args.url, args.model, os.environ.get(args.token_env, ""), args.out)))

    return run_command(work)


def _import(url: str, name: str | None, token: str, out: Path | None) -> dict[str, Any]:
    base = asyncio.run(_models(url, token))
    served = sorted((each for each in base if name in (None, each["id"])), key=lambda each: not each.get("parent"))
    if not served:
        raise RunError(f"{url} serves no {name!r}; it has {', '.join(each['id'] for each in base)}")
    entry = served[0]
    roots = {each["id"]: each["root"] for each in base}
    root, adapter = (roots.get(entry["parent"], ""), entry["root"]) if entry.get("parent") else (entry["root"], None)
    policy, params = load_policy(resolve_model(root))
    ids = tuple(int(token) for token in load_chat(policy.folder).tokenizer.encode(PROBE))[
        : (entry.get("max_model_len") or 64) - 1
    ]
    adapters = any(each.get("parent") for each in base)
    found = asyncio.run(_asked(url, token, entry["id"], root, adapter, ids))._replace(adapters=adapters)
    params, source, trained = _weights(policy, params, found)
    now = asyncio.run(_version(url, token))
    if now != found.version:
        raise RunError(f"the server went on from {found.version!r} to {now!r} while its weights were read; try again")
    expected = score_tokens(policy, params, np.asarray([ids], np.int32))[0]
    gaps = np.abs(np.asarray(found.logprobs) - expected)
    _require_close(found, source, gaps)
    if out is not None:
        _write(out, policy, params, trained, found, root)
    return {
        "model": found.model, "architecture": policy.architecture, "read": str(source), "version": found.version,
        "dtype": found.dtype, "tensors": len(policy.table), "probe_gap_mean": float(gaps.mean()),
        "probe_gap_max": float(gaps.max()), "out": None if out is None else str(out),
    }  # fmt: skip


async def _version(url: str, token: str) -> str:
    async with VllmClient(url, "", token=token) as client:
        return str((await client.get("/weight_info")).get("weight_version"))


async def _models(url: str, token: str) -> list[dict[str, Any]]:
    async with VllmClient(url, "", token=token) as client:
        return (await client.get("/v1/models"))["data"]


async def _asked(url: str, token: str, name: str, root: str, adapter: str | None, ids: tuple[int, ...]) -> Found:
    async with VllmClient(url, name, token=token) as client:
        info = await client.get("/server_info", config_format="json")
        version = str((await client.get("/weight_info")).get("weight_version"))
        dtype = str(info["vllm_config"]["model_config"]["dtype"]).removeprefix("torch.")
        return Found(name, root, adapter, version, dtype, await client.probe(ids))


def _weights(policy: Policy, params: Params, found: Found) -> tuple[Params, Path, Any]:
    """The parameters that are served, where they were read, and an adapter with its own, if there is one.

    Weights that a trainer on this host published are read where it staged them; the table compares names, shapes and types.
    """
    sizes = policy.config.sizes()
    if found.adapter is not None:
        folder = Path(found.adapter)
        if not peft.is_adapter(folder):
            raise RunError(f"{folder}, from which the server loaded {found.model!r}, is not a PEFT folder on this host")
        adapter, trained = peft.load_adapter(folder, policy.table, sizes)
        return attach(adapter, trained, params), folder, (adapter, trained)
    publisher, _, number = found.version.rpartition(".")
    if found.adapters or not publisher.startswith(PREFIX):
        return params, policy.folder, None
    folder = SHARED_MEMORY / Path(publisher).name / (str(int(number) % 2) if number.isdecimal() else "")
    if not (folder / SINGLE).is_file():
        raise RunError(
            f"the server has weights that a trainer published as {found.version!r}, and they are not staged on this host (any "
            "more): its model folder has those of before. Export the run instead: python -m gspo_jax.export RUN OUT"
        )
    return load_weights(folder, policy.table, sizes, put=lambda _, leaf: jnp.asarray(leaf)), folder, None


def _require_close(found: Found, source: Path, gaps: np.ndarray) -> None:
    most, gap = PROBE_GAP.get(found.dtype, MOST_PROBE_GAP), gaps.max() if found.dtype in PROBE_GAP else gaps.mean()
    if not gap <= most:
        raise RunError(
            f"the server computes {gap:.3g} nats per token away from {source}, more than {most:g} ({found.dtype}): it does not "
            f"serve these weights (it calls them {found.version!r})"
        )


def _write(out: Path, policy: Policy, params: Params, trained: Any, found: Found, root: str) -> None:
    if trained is None:
        save_policy(policy, params, out, dtype="float32" if found.dtype == "float32" else "bfloat16")
        return
    adapter, weights = trained
    peft.save_adapter(out, adapter, weights, policy.config.sizes(), base=root, tokenizer=policy.folder)


if __name__ == "__main__":
    sys.exit(main())
