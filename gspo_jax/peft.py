"""Adapters as PEFT folders: `adapter_model.safetensors` and `adapter_config.json`, what peft and vLLM load and save."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from gspo_jax.adapters import Adapter, adapter_of, adapter_sizes, adapter_table
from gspo_jax.types import Params
from serving_bridge.convert import DTYPES, Weight, WeightError, export_weights, load_weights
from serving_bridge.folders import copy_tokenizer, new_folder
from serving_bridge.shards import Shards

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

PLAIN = {
    "peft_type": ("LORA",), "target_parameters": (None, []), "bias": ("none", None), "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None), "alpha_pattern": ({}, None), "use_dora": (False, None), "layers_to_transform": (None, []),
    "exclude_modules": (None, []), "trainable_token_indices": (None, []),
    "lora_bias": (False, None), "layer_replication": (None, []), "use_qalora": (False, None),
    "alora_invocation_tokens": (None, []),
}  # fmt: skip
"""Settings of a PEFT config that change what an adapter computes, and the values that mean what we compute."""


def is_adapter(folder: Path) -> bool:
    """Whether a folder is a PEFT adapter."""
    return (folder / CONFIG).is_file()


def save_adapter(
    out: Path,
    adapter: Adapter,
    params: Params,
    sizes: Mapping[str, int],
    *,
    base: str,
    tokenizer: Path,
    dtype: Literal["bfloat16", "float32"] = "float32",
    overwrite: bool = False,
) -> Path:
    """`out`, a PEFT folder of `params` (float32 is bit for bit) with the tokenizer of the folder `tokenizer`.

    `base` is recorded as the model it belongs to. Appears whole or not at all. WeightError when leaves are missing or of
    another shape; nothing is made up.
    """
    tensors = dict(export_weights(params, adapter_table(adapter), adapter_sizes(adapter, sizes)))
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True,
        "r": adapter.rank, "lora_alpha": adapter.alpha, "lora_dropout": 0.0, "use_rslora": adapter.rslora,
        "target_modules": list(adapter.targets), "bias": "none", "fan_in_fan_out": False, "modules_to_save": None,
        "init_lora_weights": True,
    }  # fmt: skip
    with new_folder(out, overwrite=overwrite) as folder:
        typed = {name: x.astype(DTYPES[dtype], copy=False) for name, x in tensors.items()}
        save_file(typed, folder / WEIGHTS, {"format": "pt"})
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        copy_tokenizer(tokenizer, folder)
    return out


def read_config(folder: Path) -> dict[str, Any]:
    """The adapter_config.json of a PEFT folder. WeightError when it is unreadable or asks for what we do not compute."""
    file = folder / CONFIG
    try:
        config = json.loads(file.read_text())
        rank, alpha = config["r"], config["lora_alpha"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightError(f"{file}: not a readable LoRA config ({error!r}); it needs r and lora_alpha") from None
    for name, allowed in PLAIN.items():
        if config.get(name, allowed[0]) not in allowed:
            raise WeightError(f"{file}: {name} = {config[name]!r} is not supported; supported: {allowed[0]!r}")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1 or not alpha > 0:
        raise WeightError(f"{file}: r = {rank!r} must be an integer >= 1 and lora_alpha = {alpha!r} a number > 0")
    return config


def load_adapter(folder: Path, table: Sequence[Weight], sizes: Mapping[str, int]) -> tuple[Adapter, Params]:
    """The adapter of a PEFT folder for the model of `table`, and its float32 parameters, bit for bit.

    Raises WeightError naming what does not fit: settings, target modules, missing, unused and misshapen tensors.
    """
    config = read_config(folder)
    targets = config.get("target_modules") or ()
    adapter = adapter_of(
        table,
        [targets] if isinstance(targets, str) else targets,
        config["r"],
        float(config["lora_alpha"]),
        rslora=bool(config.get("use_rslora")),
        experts=any(".experts." in name for name in Shards(folder, WEIGHTS).names),
    )
    params = load_weights(
        folder, adapter_table(adapter), adapter_sizes(adapter, sizes), np.float32, put=lambda _, x: jnp.asarray(x), file=WEIGHTS
    )
    return adapter, params
