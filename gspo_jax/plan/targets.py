"""The GPUs a run is planned for: what the compiler has to know of them, and what bounds their speed."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from gspo_jax.config import ConfigError
from gspo_jax.models import cuda

GPUS_PER_NODE = 8
"""As in DGX and HGX machines: joined by NVLink, one network card of 400 Gbit/s each to the others."""


class Gpu(NamedTuple):
    """Public facts of a GPU, dense rates."""

    name: str
    capability: tuple[int, int]
    cores: int
    memory: int
    """Bytes."""
    bandwidth: float
    """Bytes per second from memory."""
    flops: float
    """Per second, bfloat16 tensor cores."""
    link: float
    """Bytes per second to the GPUs of the same node, in one direction."""
    network: float
    """Bytes per second to other nodes, in one direction."""
    clock_ghz: float
    l2: int
    shared_block: int
    """Bytes of shared memory that a block may opt in to."""
    shared_core: int


GPUS = {
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 84942979072, 3.35232e12, 989e12, 450e9, 50e9, 1.98, 52428800, 232448,
                233472),
    "h200": Gpu("NVIDIA H200", (9, 0), 132, 150754820096, 4.8e12, 989e12, 450e9, 50e9, 1.98, 52428800, 232448, 233472),
    "a100": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 84974239744, 2.039e12, 312e12, 300e9, 25e9, 1.41, 41943040, 166912,
                167936),
}  # fmt: skip
"""By the word that `--gpu` takes."""
RESERVE = 3 * 2**30
"""Bytes of a GPU that a program cannot have: CUDA context, NCCL buffers, cuBLAS workspaces, loaded kernels, fragmentation."""


def target_text(gpu: Gpu) -> str:
    """The compiler's description of a GPU (`GpuTargetConfigProto` as text)."""
    major, minor = gpu.capability
    accelerated = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {gpu.shared_block} shared_memory_per_core: {gpu.shared_core}
  core_count: {gpu.cores} fpus_per_core: {128 if major >= 9 else 64} clock_rate_ghz: {gpu.clock_ghz}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {gpu.bandwidth:.0f} l2_cache_size: {gpu.l2} device_memory_size: {gpu.memory}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {major} minor: {minor}{accelerated} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{gpu.name}"
"""


class Target(NamedTuple):
    """Devices to compile for."""

    gpu: Gpu
    devices: Sequence[Any]
    compiler: str
    """"xla:gpu h100" for the real compiler of that GPU, "xla:cpu (estimate)" without it."""

    @property
    def platforms(self) -> tuple[str, ...] | None:
        """What to lower for, where it is not the devices' own platform."""
        return ("cuda",) if self.compiler.startswith("xla:gpu") else None


def target_of(word: str, count: int, *, cpu: bool = False) -> Target:
    """`count` GPUs of a kind, or virtual CPU devices in their place where the CUDA compiler is missing (or `cpu`).

    ConfigError for an unknown kind, and for more CPU devices than this process was started with.
    """
    if word not in GPUS:
        raise ConfigError("arguments", [f"--gpu {word}: unknown; known: {', '.join(GPUS)}"])
    if not cpu and cuda.installed():
        nodes, each = (count // GPUS_PER_NODE, GPUS_PER_NODE) if count % GPUS_PER_NODE == 0 else (1, count)
        found = topologies.get_topology_desc(
            topology_name=word, platform="cuda", topology=f"1x{nodes}x{each}", target_config=target_text(GPUS[word])
        )
        return Target(GPUS[word], found.devices, f"xla:gpu {word}")
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise ConfigError(
            "arguments", [f"--gpus {count}: this process has {len(devices)} virtual CPU devices to stand for them"]
        )
    return Target(GPUS[word], devices[:count], "xla:cpu (estimate)")
