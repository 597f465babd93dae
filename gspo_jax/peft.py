"""Adapters as PEFT folders: `adapter_model.safetensors` and `adapter_config.json`, what peft and vLLM load and save."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from gspo_jax.adapters import Adapter, UnknownTarget, adapter_of, adapter_sizes, adapter_table
from gspo_jax.models.tables import SPELLINGS
from gspo_jax.pretrained import ModelNotFoundError, resolve_model
from gspo_jax.types import Params
from serving_bridge.convert import DTYPES, Weight, WeightError, export_weights, load_weights
from serving_bridge.folders import copy_tokenizer, new_folder
from serving_bridge.shards import Shards

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

PLAIN = {
    "peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": (True, "gaussian", "orthogonal", "eva"),
    "target_modules": (), "use_rslora": (True,), "lora_dropout": (),
}  # fmt: skip
"""Keys of a PEFT config that change what an adapter computes, and the values beside nothing (no, none, empty) that we do; with
none listed, any value will do. Others must say nothing: `pissa` and the like change the model beneath the adapter."""

HARMLESS = ("r", "lora_alpha", "base_model_name_or_path", "revision", "task_type", "inference_mode", "auto_mapping",
            "peft_version", "megatron_core", "qalora_group_size", "runtime_config")  # fmt: skip
"""Keys that are read elsewhere or change nothing we compute."""


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
    with new_folder(out, overwrite=overwrite) as folder:
        typed = {name: x.astype(DTYPES[dtype], copy=False) for name, x in tensors.items()}
        save_file(typed, folder / WEIGHTS, {"format": "pt"})
        (folder / CONFIG).write_text(config_text(adapter, base))
        copy_tokenizer(tokenizer, folder)
    return out


def config_text(adapter: Adapter, base: str) -> str:
    """The adapter_config.json of an adapter on the model `base`."""
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True,
        "r": adapter.rank, "lora_alpha": adapter.alpha, "lora_dropout": 0.0, "use_rslora": adapter.rslora,
        "target_modules": adapter.targets if isinstance(adapter.targets, str) else list(adapter.targets),
        "bias": "none", "fan_in_fan_out": False, "modules_to_save": None,
        "init_lora_weights": True,
    }  # fmt: skip
    return json.dumps(config, indent=2) + "\n"


def read_config(folder: Path) -> dict[str, Any]:
    """The adapter_config.json of a PEFT folder. WeightError when it is unreadable or asks for what we do not compute."""
    file = folder / CONFIG
    try:
        config = json.loads(file.read_text())
        rank, alpha = config["r"], config["lora_alpha"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightError(f"{file}: not a readable LoRA config ({error!r}); it needs r and lora_alpha") from None
    for name, value in sorted(config.items(), key=lambda item: item[0] != "target_parameters"):  # what the others follow from
        allowed = PLAIN.get(name, (None,))
        if value and name not in HARMLESS and allowed and value not in allowed:
            raise WeightError(f"{file}: {name} = {value!r} is not supported; leave it out to use the adapter without it")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise WeightError(f"{file}: r = {rank!r} must be an integer >= 1")
    if not isinstance(alpha, int | float) or not alpha > 0:
        raise WeightError(f"{file}: lora_alpha = {alpha!r} must be a number > 0")
    return config


def base_model(folder: Path) -> tuple[str, Path]:
    """The name that a PEFT folder gives its base model, and where that is. WeightError naming both when there is none."""
    name = read_config(folder).get("base_model_name_or_path")
    try:
        if not isinstance(name, str):
            raise ModelNotFoundError("it must be a Hugging Face id or a folder")
        return name, resolve_model(name)
    except ModelNotFoundError as error:
        raise WeightError(f"{folder / CONFIG}: base_model_name_or_path = {name!r}: {error}") from None


def adapter_in(folder: Path, table: Sequence[Weight]) -> Adapter:
    """The adapter of a PEFT folder for the model of `table`, without its weights.

    Raises WeightError naming what does not fit: settings, target modules.
    """
    config = read_config(folder)
    try:
        return adapter_of(
            table,
            config.get("target_modules") or (),
            config["r"],
            float(config["lora_alpha"]),
            rslora=bool(config.get("use_rslora")),
            experts=any(".experts." in name for name in _tensor_names(folder)),
        )
    except UnknownTarget as error:
        raise WeightError(f"{folder / CONFIG}: target_modules: {error}") from None


def load_adapter(folder: Path, table: Sequence[Weight], sizes: Mapping[str, int]) -> tuple[Adapter, Params]:
    """`adapter_in`, and its float32 parameters, bit for bit. WeightError lists missing, unused and misshapen tensors too."""
    adapter = adapter_in(folder, table)
    rows, sizes = _spelled(adapter_table(adapter), _tensor_names(folder)), adapter_sizes(adapter, sizes)
    return adapter, load_weights(folder, rows, sizes, np.float32, put=lambda _, x: jnp.asarray(x), file=WEIGHTS)


def _tensor_names(folder: Path) -> Sequence[str]:
    if not (folder / WEIGHTS).is_file():
        raise WeightError(f"{folder} holds no {WEIGHTS}; other formats are not read")
    return Shards(folder, WEIGHTS).names


def _spelled(rows: Sequence[Weight], names: Sequence[str]) -> Sequence[Weight]:
    """The rows under the names of a file: peft writes those of the model in memory, not those of a multimodal checkpoint."""
    for body, _ in SPELLINGS:
        start = f"base_model.model.{body}layers."
        if any(name.startswith(start) for name in names):
            return [replace(row, name=start + row.name.partition("layers.")[2]) for row in rows]
    return rows
