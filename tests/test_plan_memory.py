"""Planned against measured memory: one real update of SmolLM2-135M in a process of its own, which this file is, too.

Measured is how much the process grows (VmHWM after the update against VmRSS before there is any weight), predicted what the
compiler says the program holds: arguments, temporaries, and results that are not written over arguments.
"""

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parent.parent
SETS = ("training.rows_per_microbatch=4", "training.row_length=256", "serving.engine=vllm", "rollout.episodes_per_batch=16",
        "training.batch_size=8")  # fmt: skip
CLOSE = 0.10


def kilobytes(name: str) -> int:
    """A line of this process's status (Linux)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1])


def trimmed() -> None:
    """Freed memory goes back to the system, and the high-water mark down to what is held now."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def measure() -> dict[str, float]:
    """Plans an update of quickstart.toml, then runs it once with real weights."""
    from dataclasses import replace

    from gspo_jax.build import build_trainer
    from gspo_jax.config import load_config
    from gspo_jax.plan.abstract import abstract_batch, abstract_state, shapes_source
    from gspo_jax.plan.compiling import describe
    from gspo_jax.plan.targets import target_of
    from gspo_jax.start import load_start

    jax.config.update("jax_platforms", "cpu")
    config, _ = load_config(ROOT / "configs" / "quickstart.toml", SETS)
    mesh, start, _, work = describe(config, shapes_source(config), target_of("h100", 1, cpu=True))
    trainer = build_trainer(config, start)
    shapes = abstract_state(trainer, start, mesh), abstract_batch(config, start, mesh, work)
    update = trainer.compiled(shapes[0]).lower(*shapes).compile()
    memory = update.memory_analysis()
    predicted = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    predicted += memory.output_size_in_bytes - memory.alias_size_in_bytes
    trimmed()
    before = kilobytes("VmRSS")
    real = load_start(config)
    state = trainer.init(real.params)
    real = replace(real, params={})
    batch = jax.tree.map(lambda x: jax.numpy.asarray(x.repeat(work.minibatches, 0)), work.batch)
    state, batch = jax.device_put((state, batch), jax.tree.map(lambda x: x.sharding, shapes))
    jax.block_until_ready((state, batch))
    trimmed()
    jax.block_until_ready(update(state, batch))
    return {"predicted": predicted, "measured": 1024.0 * (kilobytes("VmHWM") - before)}


@pytest.mark.slow
def test_predicted_memory_is_what_an_update_takes():
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=280, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    assert found["predicted"] == pytest.approx(found["measured"], rel=CLOSE)


if __name__ == "__main__":
    print(json.dumps(measure()))
