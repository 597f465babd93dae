"""`python -m gspo_jax.plan cfg.toml`: does a run fit, what will it cost, proved by compiling it ahead of time."""

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax

from gspo_jax.build import check_capabilities
from gspo_jax.commands import run_command
from gspo_jax.config import load_config
from gspo_jax.mesh import mesh_shape
from gspo_jax.models import cuda
from gspo_jax.plan.abstract import shapes_source
from gspo_jax.plan.compiling import compile_run
from gspo_jax.plan.report import report, summary, words
from gspo_jax.plan.search import Try, search
from gspo_jax.plan.targets import GPUS, target_of
from gspo_jax.sections import Config


def main(argv: Sequence[str] | None = None) -> int:
    """0 fits, 1 does not fit, 2 wrong input, 130 Ctrl-C, 143 terminated."""
    parser = argparse.ArgumentParser(prog="python -m gspo_jax.plan", description="Does a run fit, and what will it cost?")
    parser.add_argument("config", type=Path, help="TOML file")
    parser.add_argument("--gpu", default="h100", help=f"kind of GPU: {', '.join(GPUS)} (default: h100)")
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs for training (default: compute.topology.gpus_for_training)")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a key of the file")
    parser.add_argument("--price", type=float, help="of one GPU for one hour")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--no-search", action="store_true", help="do not look for settings that fit")
    args = parser.parse_args(argv)
    fits = False

    def work() -> None:
        nonlocal fits
        fits = _plan(args)

    return run_command(work) or int(not fits)


def _plan(args: argparse.Namespace) -> bool:
    found = plan(args.config, args.set, gpu=args.gpu, gpus=args.gpus, price=args.price)
    if not args.json:
        print("\n".join(words(found)), flush=True)
    if not found["fits"] and not args.no_search:
        found["tries"], found["proposal"] = [], None
        _search(args, found)
    if args.json:
        print(json.dumps(found))
    return found["fits"]


def plan(
    path: Path, sets: Sequence[str] = (), *, gpu: str = "h100", gpus: int | None = None, price: float | None = None
) -> dict[str, Any]:
    """The report (`report.report`) of a config file. Raises what `load_config` and `load_start` raise for wrong input."""
    config = _config(path, sets, gpus)
    count = devices_of(config)
    _quiet(count)
    target = target_of(gpu, count)
    return report(config, compile_run(config, shapes_source(config), target), target, price)


def _config(path: Path, sets: Sequence[str], gpus: int | None) -> Config:
    config, notes = load_config(path, [*sets, *([f"compute.topology.gpus_for_training={gpus}"] if gpus is not None else [])])
    for line in notes:
        print(line, file=sys.stderr)
    check_capabilities(config)
    return config


def devices_of(config: Config) -> int:
    """Devices to compile for: those that train, told by the topology or else by the mesh, and those of a reference."""
    topology, mesh = config.compute.topology, config.mesh
    told = topology.gpus_for_training or mesh.replica * max(mesh.fsdp, 1) * mesh.tensor * mesh.sequence
    return told + topology.gpus_for_ref


def _quiet(devices: int) -> None:
    """Before JAX is first used: the host computes nothing, and has as many virtual devices as are planned for."""
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.ERROR)  # "an NVIDIA GPU may be present"
    jax.config.update("jax_platforms", "cpu")
    if not cuda.installed():
        with suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", max(devices, jax.config.jax_num_cpu_devices))


def _search(args: argparse.Namespace, found: dict[str, Any]) -> None:
    config = _config(args.config, args.set, args.gpus)
    target, source = target_of(args.gpu, devices_of(config)), shapes_source(config)

    def attempt(sets: tuple[str, ...]) -> tuple[bool, str]:
        changed = _config(args.config, [*args.set, *sets], args.gpus)
        tried = report(changed, compile_run(changed, source, target), target)
        return tried["fits"], summary(tried)

    def tell(done: Try) -> None:
        found["tries"].append(done._asdict())
        if not args.json:
            print(f"tried {' '.join(done.sets)}: {done.outcome}", flush=True)

    proposal = search(config, mesh_shape(config, len(target.devices)), attempt, tell)
    found["proposal"] = proposal
    if args.json:
        return
    if proposal is None:
        print("nothing that was tried fits; use more GPUs, shorter rows, or an adapter (model.trainer_mode)")
    else:
        print("fits with: " + " ".join(f"--set {word}" for word in proposal))


if __name__ == "__main__":
    raise SystemExit(main())
