"""Several processes as one run with `jax.distributed`: where this one belongs, and waiting for the others to come."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
from jax._src.distributed import global_state  # the only way to the coordinator's key-value store
from jax.errors import JaxRuntimeError

from gspo_jax.team import CLOSE_SECONDS, GRACE_SECONDS, LOST_SECONDS, Team, TeamError

JOIN_SECONDS = 300
"""How long a process waits for the others to come."""


class Place(NamedTuple):
    """Where a process belongs. What is None is found by `jax.distributed`: SLURM, Kubernetes, Open MPI, Cloud TPU."""

    coordinator: str | None
    processes: int | None
    process: int | None


def find_place(
    coordinator: str | None, processes: int | None, process: int | None, environment: Mapping[str, str]
) -> Place | None:
    """The place that is given, completed by JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID; None: alone.

    A `coordinator` "auto" leaves to detection what neither says. TeamError for numbers that contradict each other.
    """

    def number(name: str) -> int | None:
        text = environment.get(name)
        if text and not text.strip().isdecimal():
            raise TeamError(f"{name}={text!r} is not a number")
        return int(text) if text else None

    address = coordinator or environment.get("JAX_COORDINATOR_ADDRESS") or None
    processes = number("JAX_NUM_PROCESSES") if processes is None else processes
    process = number("JAX_PROCESS_ID") if process is None else process
    if address is None and processes is None and process is None:
        return None
    if address is None:
        raise TeamError("--processes and --process need --coordinator HOST:PORT (or auto, or JAX_COORDINATOR_ADDRESS)")
    if address != "auto" and not address.rpartition(":")[2].isdecimal():
        raise TeamError(f"--coordinator {address!r} is neither HOST:PORT nor auto")
    if processes is not None and process is not None and not 0 <= process < processes:
        raise TeamError(f"--process {process} is not one of --processes {processes}; they count from 0")
    if address == "auto":
        address = environment.get("JAX_COORDINATOR_ADDRESS") or None
    return Place(address, processes, process)


def join(place: Place, lost_after: float = LOST_SECONDS) -> "Team":
    """The team, once all are there. Before JAX is first used. TeamError when they do not come within JOIN_SECONDS.

    `lost_after`: seconds of silence after which a process is taken to be gone.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM away from us
    whole = None not in place
    try:
        jax.distributed.initialize(
            place.coordinator,
            place.processes,
            place.process,
            cluster_detection_method="deactivate" if whole else None,  # which would leave a process one device under SLURM
            initialization_timeout=JOIN_SECONDS,
            heartbeat_timeout_seconds=int(lost_after + GRACE_SECONDS + CLOSE_SECONDS),
            shutdown_timeout_seconds=int(CLOSE_SECONDS),
        )
    except (JaxRuntimeError, RuntimeError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise TeamError(f"the processes did not come together at {place.coordinator or 'the coordinator'}: {reason}") from None
    return Team(global_state.client, global_state.process_id, global_state.num_processes, lost_after)
