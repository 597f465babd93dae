"""What all processes of a run do alike: begin, learn, publish, save. Process 0 does it as part of its loop, the others at its
word."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from orbax.checkpoint import CheckpointManager

from gspo_jax import checkpoint, runlog
from gspo_jax.build import Prepared, Trainer
from gspo_jax.config import ConfigError
from gspo_jax.config_report import resolved
from gspo_jax.digest import params_digest
from gspo_jax.engines import gather_published
from gspo_jax.metrics import finite
from gspo_jax.sections import Config
from gspo_jax.sharding import Layout, here
from gspo_jax.start import Start
from gspo_jax.team import Team, TeamError
from gspo_jax.types import Metrics, Params, TrainState
from rollout.types import Group

type Update = Callable[..., tuple[TrainState, Metrics]]


class Learned(NamedTuple):
    """What a step did, but for its state."""

    prepared: Prepared
    metrics: dict[str, float | None]
    digest: dict[str, str]
    """Of the parameters after the step, and of its batch."""


def learn(
    team: Team, trainer: Trainer, update: Update, state: TrainState, groups: Sequence[Group]
) -> tuple[TrainState, Learned]:
    """One step from its groups. TeamError when not all processes packed the same batch."""
    prepared = trainer.batch(groups, state.params)
    _agree(team, f"the batch of step {int(state.step)}", {"batch": prepared.digest})
    state, updated = update(state, prepared.batch, trainer.frozen)
    digest = {"params": params_digest(state.params), "batch": prepared.digest}
    return state, Learned(prepared, finite(jax.device_get(updated)), digest)


def first_state(trainer: Trainer, params: Params, run_dir: Path, step: int | None) -> tuple[TrainState, float | None]:
    """A fresh state, or that of checkpoint `step`; and the best held-out reward before it."""
    if step is None:
        return trainer.init(params), None
    state, run = checkpoint.restore(run_dir / "checkpoints", step, trainer.like(params))
    return state, run["best"]


def on_host(params: Params) -> Params:
    """The parameters as arrays of this process; all processes take part, and only process 0 keeps them."""
    return jax.tree.map(lambda leaf: np.asarray(kept) if (kept := here(leaf)) is not leaf else leaf, params)


def follow(
    team: Team, config: Config, start: Start, trainer: Trainer, update: Update, state: TrainState, manager: CheckpointManager
) -> None:
    """The rest of a run on every process but the first: what process 0 says, until it says that this was all."""
    publish = gather_published(config, start)
    while True:
        what, text, words = team.next()
        match what:
            case "learn":
                state, _ = learn(team, trainer, update, state, runlog.groups_of(runlog.records(text)))
                team.note(f"step {int(state.step)} learned")
            case "publish":
                publish(int(state.step), state.params)
            case "save":
                checkpoint.save(manager, state, {"best": words["best"]}, words["reward"])
            case "export":
                on_host(state.params)
            case _:
                return


def check_team(team: Team, config: Config, layout: Layout) -> None:
    """ConfigError for what one process can do and several cannot."""
    if team.count == 1:
        return
    algorithm, topology = config.algorithm, config.compute.topology
    devices = [] if layout.mesh is None else layout.mesh.devices.flat
    idle = sorted(set(range(team.count)) - {device.process_index for device in devices})
    served = config.serving.engine == "vllm" and not config.serving.urls
    problems = {
        f"mesh: no device of process {', '.join(map(str, idle))} takes part; use mesh.fsdp = 0, or fewer processes": idle,
        'algorithm.kl_in: "reward" is computed by one process only; use "loss"': algorithm.kl_beta > 0
        and algorithm.kl_in == "reward",
        "compute.topology.gpus_for_ref, reference_placement: devices of its own for a reference are for a run of one process; "
        'use "shared"': algorithm.kl_beta > 0 and (topology.reference_placement == "dedicated" or topology.gpus_for_ref),
        "serving.engine: servers that this run starts would need the quantized weights whole, which are split over several "
        "processes; start them apart and name them in serving.urls": served and config.model.trainer_mode == "qlora",
    }
    if found := [message for message, wrong in problems.items() if wrong]:
        raise ConfigError("config", found)


def check_alike(team: Team, config: Config) -> None:
    """TeamError naming what is not the same in all processes: a key of the config, a library version, the devices of each."""
    if team.count == 1:
        return
    _agree(team, "the start", _facts(config))
    if jax.default_backend() == "cpu":  # an executable of the cache waits forever for one compiled elsewhere, seen in jax 0.12
        jax.config.update("jax_enable_compilation_cache", False)


def _agree(team: Team, name: str, facts: Mapping[str, Any]) -> None:
    """TeamError naming the facts that are not the same in all processes."""
    found = [json.loads(text) for text in team.meet(name, json.dumps(facts))]
    for process, other in enumerate(found):
        keys = [key for key in found[0] | other if found[0].get(key) != other.get(key)]
        if keys:
            told = "; ".join(f"{key}: {found[0].get(key)!r} on process 0, {other.get(key)!r}" for key in keys[:5])
            raise TeamError(f"process {process} is not as process 0: {told}")


def _facts(config: Config) -> dict[str, Any]:
    identity = runlog.identity()
    device = identity["device"] | {"count": jax.local_device_count()}
    return dict(_flat("", {**resolved(config), "versions": identity["versions"], "device": device}))


def _flat(name: str, value: Any) -> list[tuple[str, Any]]:
    if not isinstance(value, Mapping) or not value:
        return [(name, value)]
    return [pair for key, child in value.items() for pair in _flat(f"{name}.{key}".lstrip("."), child)]
