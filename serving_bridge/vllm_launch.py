"""How a vLLM server of ours is started: its command line, its environment, and the options nobody may change."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from serving_bridge.supervise import without_secrets

MAX_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM takes for --max-lora-rank
PLUGIN = Path(__file__).parent / "plugin"
DEVICES = Path("/dev")
INSTALL = "run `make install-vllm`, or set serving.launch.python to an interpreter that has vLLM"
_NOT_FOR_VLLM = re.compile(r"PYTHON(PATH|HOME|WARNINGS)|VIRTUAL_ENV|JAX_.*|XLA_.*")
_FIXED = (
    "host port uds ssl-keyfile ssl-certfile root-path headless grpc config model served-model-name logprobs-mode "
    "generation-config override-generation-config weight-transfer-config middleware enable-scale-out "
    "enable-lora max-lora-rank max-loras api-server-count kv-cache-dtype quantization speculative-config "
    "data-parallel-size pipeline-parallel-size logits-processors"
)
# Options that extra arguments may not touch, and why.
_TAKEN = dict.fromkeys(_FIXED.split(), "training rests on the value that the server is started with") | {
    "max-model-len": "change serving.context_length",
    "max-num-seqs": "change serving.slots",
    "dtype": "change serving.dtype",
    "tensor-parallel-size": "change compute.topology.tensor_parallel",
    "tp": "change compute.topology.tensor_parallel",
    "api-key": "the server wants a token already, and everyone on the machine can read a command line",
    "hf-token": "the server is offline, and everyone on the machine can read a command line",
}
SEEDS = "with chunked prefill on a CPU, a request with a seed ends the engine (CPU Generator does not use offset)"


@dataclass(frozen=True)
class Launch:
    """How to start a server. `slots` are sequences decoded together, `context_length` tokens of prompt and completion.

    `python` is an interpreter that has vLLM, `model` a Hugging Face folder, `log` a file that each start appends to, `shm` the
    only folder whose files the server maps. `token` must come with every request but GET /health. `gpus` count among those that
    this process may use; without any it runs on the CPU, or on GPUs that vLLM finds. `max_lora_rank` 0: no adapters.
    """

    python: Path
    model: Path
    name: str
    log: Path
    context_length: int
    slots: int
    dtype: str
    backend: str
    shm: Path
    token: str = field(repr=False)
    gpus: tuple[int, ...] = ()
    tensor_parallel: int = 1
    max_lora_rank: int = 0
    extra_args: tuple[str, ...] = ()
    start_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if not (self.token and self.token.isascii() and self.token.isprintable()):
            raise ValueError("the token of a vLLM server must be printable ASCII of at least one character")
        if not self.name.isprintable() or self.name[:1] in ("", "-"):
            raise ValueError(f"the served name is {self.name!r}; it must be printable text that does not start with '-'")
        if self.dtype not in ("bfloat16", "float32"):
            raise ValueError(f"dtype is {self.dtype!r}; it must be 'bfloat16' or 'float32'")
        for key in ("context_length", "slots", "tensor_parallel"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} is {getattr(self, key)}; it must be at least 1")
        if self.gpus and len(self.gpus) < self.tensor_parallel:
            raise ValueError(f"tensor_parallel is {self.tensor_parallel}; gpus must name as many, not {len(self.gpus)}")
        if not 0 <= self.max_lora_rank <= MAX_LORA_RANKS[-1]:
            raise ValueError(f"the adapter's rank is {self.max_lora_rank}; vLLM serves ranks 1 to {MAX_LORA_RANKS[-1]}")


def on_cpu(gpus: Sequence[int]) -> bool:
    """True when a server that is given `gpus` runs on the CPU: none are given and the machine has no NVIDIA GPU."""
    return not gpus and not any(DEVICES.glob("nvidia[0-9]*"))


def command(launch: Launch, port: int) -> list[str]:
    """The command line. ValueError names an extra argument that would change what training rests on."""
    cpu = on_cpu(launch.gpus)
    for argument in launch.extra_args:
        _refuse(argument, cpu)
    options = {
        "model": str(launch.model.absolute()),
        "served-model-name": launch.name,
        "host": "127.0.0.1",
        "port": str(port),
        "max-model-len": str(launch.context_length),
        "dtype": launch.dtype,
        "max-num-seqs": str(launch.slots),
        "logprobs-mode": "processed_logprobs",
        "generation-config": "vllm",
        "weight-transfer-config": json.dumps({"backend": launch.backend}),
        "middleware": "gspo_vllm.guard.AdminToken",
        "seed": "0",
    }
    flags = ["--enable-scale-out"]
    if cpu:
        options["max-num-batched-tokens"] = str(max(8192, launch.context_length))
        flags += ["--enforce-eager", "--no-enable-chunked-prefill"]
    if launch.tensor_parallel > 1:
        options["tensor-parallel-size"] = str(launch.tensor_parallel)
    if launch.max_lora_rank:
        flags.append("--enable-lora")
        options["max-lora-rank"] = str(next(rank for rank in MAX_LORA_RANKS if rank >= launch.max_lora_rank))
        options["max-loras"] = "1"
    pairs = [word for name, value in options.items() for word in (f"--{name}", value)]
    program = "vllm.entrypoints.openai.api_server"
    return [str(launch.python.absolute()), "-m", program, *pairs, *flags, *launch.extra_args]


def _refuse(argument: str, cpu: bool) -> None:
    # vLLM takes --a-b, --a_b, --a-b=value, --a-b.key value, and any unambiguous beginning of a long name.
    name = re.split(r"[=.]", argument)[0].lstrip("-").replace("_", "-").removeprefix("no-")
    if not argument.startswith("-") or argument[1:2].isdigit():
        return
    seeds = {"enable-chunked-prefill": SEEDS} if cpu and not argument.startswith("--no") else {}
    for flag, advice in (_TAKEN | seeds).items():
        if flag == name or (argument.startswith("--") and flag.startswith(name)):
            raise ValueError(f"serving.launch.extra_args holds {argument!r}, which sets --{flag}: {advice}")


def environment(launch: Launch, site: Path) -> dict[str, str]:
    """The environment: ours without what is meant for this interpreter or may be secret. `site`: a folder of `write_site`."""
    env = {name: value for name, value in without_secrets(os.environ).items() if not _NOT_FOR_VLLM.fullmatch(name)}
    env |= dict.fromkeys(("VLLM_SERVER_DEV_MODE", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK", "HF_HUB_OFFLINE"), "1")
    env |= {
        "GSPO_VLLM_SHM": str(launch.shm.absolute()),
        "GSPO_VLLM_TOKEN": launch.token,
        "PYTHONPATH": os.pathsep.join((str(PLUGIN), str(site.absolute()))),
        "PYTHONSAFEPATH": "1",  # else `-m` lets modules in the working directory shadow vLLM's
        "PATH": os.pathsep.join((str(launch.python.absolute().parent), env.get("PATH", os.defpath))),
        "VLLM_RPC_BASE_PATH": str(site.absolute()),  # it leaves its sockets there
    }
    if "VLLM_PLUGINS" in env:
        env["VLLM_PLUGINS"] += ",gspo_vllm"
    if launch.gpus:
        ours = env.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(max(launch.gpus) + 1)))
        if max(launch.gpus) >= len(names := ours.split(",")):
            raise ValueError(f"GPU {max(launch.gpus)} is not among CUDA_VISIBLE_DEVICES = {ours}; see compute.topology")
        env["CUDA_VISIBLE_DEVICES"] = ",".join(names[gpu] for gpu in launch.gpus)
    if launch.max_lora_rank:
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
    if on_cpu(launch.gpus):
        # Freed memory that is kept halves the time of a weight update.
        kept = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000", "MALLOC_ARENA_MAX": "1"}
        return {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind"} | kept | env
    return env


def write_site(site: Path) -> None:
    """Makes `site`, once on an interpreter's path, tell vLLM of the plugin as if it were installed there."""
    (info := site / "gspo_vllm-0.dist-info").mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gspo_vllm\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\ngspo_vllm = gspo_vllm:register\n")
