"""The quickstart and the configs for GPUs, planned at reduced size."""

import json
import tomllib
from pathlib import Path

import pytest
from helpers_plan import small_folder

from gspo_jax.config import parse_config
from gspo_jax.plan.abstract import shapes_source
from gspo_jax.plan.compiling import compile_run
from gspo_jax.plan.report import report
from gspo_jax.plan.targets import target_of

FOLDER = Path(__file__).parent.parent / "configs"
CONFIGS = [FOLDER / "quickstart.toml", *sorted(FOLDER.glob("qwen3*.toml")), *sorted(FOLDER.glob("llama3*.toml"))]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs_plan_at_reduced_size(path: Path, tmp_path: Path):
    """Their own modes and packings, few layers, small widths and short rows, on four devices; all programs of one of them."""
    raw = tomllib.loads(path.read_text())
    folder = small_folder(tmp_path / "model", raw["model"]["base"])
    mode = raw["model"]["trainer_mode"]
    sets = [f"model.base={json.dumps(str(folder))}", "serving.context_length=64", "training.row_length=64",
            "policy.max_tokens=12", "rollout.episodes_per_batch=16", "training.group_size=4", "training.batch_size=8",
            "serving.slots=4", "compute.topology.gpus_for_training=4", "training.rows_per_microbatch=4"]  # fmt: skip
    config = parse_config(raw, sets)[0]
    target, everything = target_of("h100", 4, cpu=True), path.stem == "quickstart"
    built = compile_run(config, shapes_source(config), target, only_update=not everything)
    found = report(config, built, target, price=2.0)
    assert found["fits"]
    assert found["compiler"] == "xla:cpu (estimate)"
    assert found["donated"] >= 0.999
    assert (found["memory"]["frozen"] > 0) == (mode != "full")
    assert (found["memory"]["cache"] > 0) == (raw["serving"].get("engine") != "vllm")
    assert found["cost"] == pytest.approx(2 * found["gpu_hours"])
    assert 0 < found["mfu_ceiling"] < 1
    assert json.loads(json.dumps(found))["peaks"].keys() >= ({"update", "score", "decode"} if everything else {"update"})
