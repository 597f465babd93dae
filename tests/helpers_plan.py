"""Shapes of published models, shrunk: what a plan can be tried with in seconds."""

import json
from pathlib import Path
from typing import Any

from gspo_jax.pretrained import SHAPES

SMALL: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_window_layers": 2,
}  # fmt: skip
EXTRA = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "qwen3_5": {"num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
                "linear_value_head_dim": 16},
}  # fmt: skip


def small_folder(path: Path, base: str = "Qwen/Qwen3-8B", **overrides: Any) -> Path:
    """A folder with the shipped config.json of a model, shrunk; a Llama's where the base is not among them."""
    file = SHAPES / base / "config.json"
    raw = json.loads((file if file.is_file() else SHAPES / "meta-llama/Llama-3.1-8B-Instruct/config.json").read_text())
    text = raw.get("text_config", raw)
    text |= {**SMALL, **EXTRA.get(raw["model_type"], {}), **overrides}
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(raw))
    return path
