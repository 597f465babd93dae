"""Host memory of loading a model: `python benchmarks/load_memory.py [--layers 8]` prints a row per way and device count.

A synthetic bfloat16 checkpoint with the shapes of Qwen3-4B (36 layers; 8 of them unless told otherwise: 2.4 GB on the disk) in
files of at most 2 GiB is loaded in a process of its own per row. MB: the largest file; what is kept, over all devices; by how
much the resident memory grew at most, pages of mapped files included; and that growth over the sum of the other two.

full: float32 masters. lora: frozen weights in bfloat16. qlora: kernels in nf4, counted as half a byte a weight.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import jax
import ml_dtypes
import numpy as np

from gspo_jax.mesh import MeshShape, make_mesh
from gspo_jax.models.quantize import nbytes
from gspo_jax.policy import Policy, describe_policy, load_params
from gspo_jax.start import keep_placed, load_frozen, start_layout
from serving_bridge.shards import write_shards
from serving_bridge.weights import tensor_names, tensor_shape

CONFIG = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "hidden_size": 2560,
    "intermediate_size": 9728, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "max_position_embeddings": 40960, "tie_word_embeddings": True, "attention_bias": False,
    "hidden_act": "silu", "dtype": "bfloat16",
}  # fmt: skip
FILE = 2 * 2**30
MODES = ("full", "lora", "qlora")


def write_model(folder: Path, layers: int) -> None:
    """A checkpoint of so many layers: values of a short pattern, since only their number matters."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
    policy = _policy(folder)
    sizes = policy.config.sizes()
    shapes = {name: tensor_shape(row, sizes) for row in policy.table for _, name in tensor_names(row, sizes)}
    pattern = np.linspace(-1, 1, 4099).astype(ml_dtypes.bfloat16)

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        for name, shape in shapes.items():
            yield name, np.resize(pattern, shape)

    write_shards(folder, tensors(), [(name, 2 * int(np.prod(shape))) for name, shape in shapes.items()], FILE)


def _policy(folder: Path) -> Policy:
    return describe_policy(folder, compute_dtype="bfloat16", remat="none")


def resident() -> SimpleNamespace:
    """Bytes of this process in memory: now, and at most since the mark was reset."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return SimpleNamespace(**{name: int(lines[key].split()[0]) * 1024 for name, key in (("now", "VmRSS"), ("most", "VmHWM"))})


def load(folder: Path, mode: str, devices: int) -> dict[str, int]:
    """What one load in this process takes, in bytes."""
    policy = _policy(folder)
    mesh = make_mesh(MeshShape(fsdp=devices)) if devices > 1 else None
    layout = start_layout(mesh, policy, None)
    jax.block_until_ready([jax.device_put(np.zeros(1), device) for device in jax.devices()])
    Path("/proc/self/clear_refs").write_text("5")
    before = resident().now
    if mode == "full":
        params = load_params(policy, folder, keep_placed(layout))
    else:
        params = load_frozen(policy, "nf4" if mode == "qlora" else None, layout)
    jax.block_until_ready(params)
    grown = resident().most - before
    kept = sum(nbytes(shard.data) for x in jax.tree.leaves(params) for shard in x.addressable_shards)
    return {"kept": kept, "grown": grown}


def child(folder: Path, mode: str, devices: int) -> dict[str, int]:
    """`load` in a process with so many virtual CPU devices."""
    words = [sys.executable, __file__, "--folder", str(folder), "--mode", mode, "--devices", str(devices)]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    done = subprocess.run(words, capture_output=True, text=True, timeout=1800, check=False, env=env)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8, help="of 36")
    parser.add_argument("--folder", type=Path, help="a checkpoint to load instead of a synthetic one")
    parser.add_argument("--mode", choices=MODES, help="load once, in this process")
    parser.add_argument("--devices", type=int, default=1)
    args = parser.parse_args()
    if args.mode:
        print(json.dumps(load(args.folder, args.mode, args.devices)))
        return
    with tempfile.TemporaryDirectory() as side:
        folder = args.folder or Path(side) / "model"
        if not args.folder:
            write_model(folder, args.layers)
        largest = max(file.stat().st_size for file in folder.glob("*.safetensors"))
        print("| mode | devices | file MB | kept MB | grown MB | grown / (file + kept) |\n|" + " --- |" * 6, flush=True)
        for mode in MODES:
            for devices in (1, 4):
                found = child(folder, mode, devices)
                sizes = (largest, found["kept"], found["grown"])
                ratio = found["grown"] / (largest + found["kept"])
                print(
                    f"| {mode} | {devices} | " + " | ".join(f"{x / 1e6:,.0f}" for x in sizes) + f" | {ratio:.2f} |", flush=True
                )


if __name__ == "__main__":
    main()
