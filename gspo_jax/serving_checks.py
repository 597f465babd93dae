"""What in `[serving]` and `[compute.topology]` cannot work together, known before anything is started."""

from collections.abc import Iterator
from urllib.parse import urlsplit

from gspo_jax.sections import Config

LOOPBACK = ("localhost", "127.0.0.1", "::1")
COLDEST = 0.01
"""vLLM samples at this temperature when a smaller one is asked for."""


def serving_problems(config: Config) -> Iterator[str]:
    """A line for each: the key, its value, the constraint."""
    serving = config.serving
    if serving.engine != "vllm":
        if serving.urls:
            yield f'serving.urls: {len(serving.urls)} servers, but serving.engine = "{serving.engine}"; set engine = "vllm"'
        return
    if config.algorithm.routing_replay == "sampler":
        yield 'algorithm.routing_replay: "sampler" needs the embedded sampler; set serving.engine = "jax"'
    if config.policy.temperature < COLDEST:
        yield f"policy.temperature: vLLM samples at {COLDEST} when it is asked for less; use >= {COLDEST}"
    yield from _elsewhere(config) if serving.urls else _gpus(config)


def _elsewhere(config: Config) -> Iterator[str]:
    """Servers that run already, perhaps on other hosts."""
    serving, mode = config.serving, config.model.trainer_mode
    remote = [host for url in serving.urls if (host := urlsplit(url).hostname) not in LOOPBACK]
    if mode == "qlora":
        yield (
            'model.trainer_mode: "qlora" trains on quantized weights, which the servers in serving.urls do not have; leave '
            'serving.urls out, so that the run starts servers with these weights, or use "lora"'
        )
    if remote and mode != "full":
        yield f'serving.urls: an adapter is read from memory of this host, not of {remote[0]}; use model.trainer_mode = "full"'
    if remote and mode == "full" and serving.transport in ("auto", "tcp") and serving.address in LOOPBACK:
        yield f"serving.address: {serving.address} is reached from this host only, and {remote[0]} is another; name this host"
    if remote and serving.transport == "shm":
        yield f'serving.transport: "shm" needs servers on this host, and {remote[0]} is another; use "tcp"'


def _gpus(config: Config) -> Iterator[str]:
    """The GPUs of servers that the run starts."""
    topology, servers = config.compute.topology, config.serving.launch.servers
    wanted, given = servers * topology.tensor_parallel, topology.gpus_for_vllm
    if given and given != wanted:
        yield (
            f"compute.topology.gpus_for_vllm: {given}, but {servers} servers (serving.launch.servers) on "
            f"{topology.tensor_parallel} GPUs each (tensor_parallel) take {wanted}"
        )
    if given and not topology.gpus_for_training:
        yield "compute.topology.gpus_for_training: must be >= 1 when gpus_for_vllm is given: servers get the GPUs after them"
    if topology.tensor_parallel > 1 and not given:
        yield f"compute.topology.gpus_for_vllm: {topology.tensor_parallel} GPUs (tensor_parallel) must be given to each server"
    mesh = config.mesh
    devices = mesh.replica * max(mesh.fsdp, 1) * mesh.tensor * mesh.sequence
    if given and devices > max(topology.gpus_for_training, 1):
        yield f"mesh: {devices} devices are more than compute.topology.gpus_for_training = {topology.gpus_for_training}"
