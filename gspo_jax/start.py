"""What a run starts from: the policy, the weights it trains, and those it does not."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from gspo_jax import adapters, peft
from gspo_jax.adapters import Adapter
from gspo_jax.config import ConfigError, model_id
from gspo_jax.models.quantize import nbytes, quantize
from gspo_jax.policy import Policy, compute_leaf, describe_policy, load_params, save_policy
from gspo_jax.pretrained import resolve_model
from gspo_jax.sections import Config
from gspo_jax.types import Params

PREFIX = re.compile(r"(?:ft|fft|qft|rl):(?P<base>[^:]+):(?P<run>[A-Za-z0-9][A-Za-z0-9._-]*)")
"""A trained model by the id it was given: kind, base model, run."""
MOMENTS = 3
"""Float32 arrays of the size of the trained weights that an AdamW step holds besides them: gradient and two moments."""


@dataclass(frozen=True)
class Start:
    """A policy with the weights of before the first step."""

    policy: Policy
    params: Params
    """What is trained, float32: all parameters, or an adapter's."""
    frozen: Params | None = None
    """With an adapter, the model beneath it, in the compute type or quantized."""
    adapter: Adapter | None = None
    base: str = ""
    """What an adapter is recorded to belong to."""

    def whole(self, params: Params, frozen: Params | None) -> Params:
        """The parameters the model computes with."""
        return params if self.adapter is None or frozen is None else adapters.attach(self.adapter, params, frozen)

    def merged(self, params: Params) -> Params:
        """Full float32 parameters, an adapter added to the weights beneath it."""
        if self.adapter is None or self.frozen is None:
            return params
        return adapters.merged(self.adapter, params, self.frozen, self.policy.config.sizes())

    def save(self, params: Params, out: Path, *, dtype: Any = None, merge: bool = False) -> None:
        """A folder for other tools at `out`: Hugging Face, or PEFT for an adapter unless `merge`; whole or not at all.

        `dtype`: bfloat16 for a model and float32 for an adapter unless given.
        """
        if self.adapter is None or merge:
            save_policy(self.policy, self.merged(params), out, dtype=dtype or "bfloat16")
            return
        peft.save_adapter(out, self.adapter, params, self.policy.config.sizes(), base=self.base, tokenizer=self.policy.folder,
                          dtype=dtype or "float32", overwrite=True)  # fmt: skip

    def summary(self) -> str:
        """How much is trained, and what it takes."""
        trained = adapters.count(self.params)
        if self.frozen is None:
            return f"trains all {trained:,} parameters; weights, gradient and moments take {_mega(trained * 4 * (1 + MOMENTS))}"
        held = nbytes(self.frozen) + trained * 4 * (1 + MOMENTS)
        everything = adapters.count(self.frozen)
        return (
            f"trains {trained:,} parameters beside {everything:,} frozen ones ({100 * trained / everything:.2f} %); weights, "
            f"gradient and moments take {_mega(held)}, full fine-tuning {_mega(everything * 4 * (1 + MOMENTS))}"
        )


def _mega(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"


def load_start(config: Config) -> Start:
    """What the config's `[model]` and `[training.lora]` describe.

    A `source` that is a PEFT folder is gone on with in the modes lora and qlora, and added to its base model in the mode full.
    Raises ConfigError, ModelNotFoundError, WeightError.
    """
    folder, found = locate(config)
    base = peft.read_config(found)["base_model_name_or_path"] if found else model_id(config)
    policy = describe_policy(folder, compute_dtype=config.model.compute_dtype, remat=config.model.remat)
    if config.model.trainer_mode == "full":
        params = load_params(policy, policy.folder)
        if found:
            adapter, trained = peft.load_adapter(found, policy.table, policy.config.sizes())
            params = adapters.merged(adapter, trained, params, policy.config.sizes())
        return Start(policy, params)
    frozen = load_frozen(policy, config.training.lora.quantization if config.model.trainer_mode == "qlora" else None)
    adapter, params = _adapter(config, policy, found)
    return Start(policy, params, frozen, adapter, base if not Path(base).is_dir() else str(Path(base).absolute()))


def _adapter(config: Config, policy: Policy, found: Path | None) -> tuple[Adapter, Params]:
    lora, sizes = config.training.lora, policy.config.sizes()
    if found is None:
        adapter = adapters.adapter_of(policy.table, lora.target_modules, lora.r, lora.alpha, rslora=lora.rslora)
        return adapter, adapters.init_adapter(adapter, sizes, config.run.seed)
    adapter, params = peft.load_adapter(found, policy.table, sizes)
    asked = {"r": lora.r, "alpha": lora.alpha, "rslora": lora.rslora}
    has = {"r": adapter.rank, "alpha": adapter.alpha, "rslora": adapter.rslora}
    told = lora.model_fields_set
    wrong = [f"training.lora.{name}: {asked[name]} contradicts the {has[name]} of the adapter in {found}; leave it out"
             for name in asked if name in told and asked[name] != has[name]]  # fmt: skip
    if wrong:
        raise ConfigError("config", wrong)
    return adapter, params


def load_frozen(policy: Policy, qtype: str | None) -> Params:
    """Weights nobody trains, leaf by leaf in the compute type; with `qtype` (nf4, int8) the kernels quantized."""
    kernels = {row.path: row for row in policy.table if row.path.endswith("/kernel") and "router" not in row.path.split("/")}

    def keep(path: str, leaf: np.ndarray) -> Any:
        row = kernels.get(path)
        if qtype and row is not None:
            stack, inputs = adapters.kernel_axes(row)
            return quantize(jnp.asarray(leaf), inputs, stack, qtype, policy.dtype)
        return compute_leaf(path, jnp.asarray(leaf), policy.dtype)

    return load_params(policy, policy.folder, put=keep)


def locate(config: Config) -> tuple[Path, Path | None]:
    """`(model folder, PEFT folder or None)` of `model.base` or `model.source`."""
    folder = _source(config) if config.model.source else resolve_model(model_id(config))
    if not peft.is_adapter(folder):
        return folder, None
    return resolve_model(peft.read_config(folder)["base_model_name_or_path"]), folder


def _source(config: Config) -> Path:
    """The folder of a trained model: of a run, by its directory or its id `ft:base:run`; else as for `model.base`."""
    name = config.model.source or ""
    match = PREFIX.fullmatch(name)
    run_dir = Path(config.run.dir) / match["run"] if match else Path(name).expanduser()
    if match or (run_dir / "checkpoints").is_dir():
        if not (run_dir / "export").is_dir():
            how = f"finish it with --resume, or write one with python -m gspo_jax.export {run_dir} FOLDER"
            raise ConfigError("config", [f"model.source: {name!r}: {run_dir} has no export/ (the run did not end); {how}"])
        return run_dir / "export"
    return run_dir if peft.is_adapter(run_dir) else resolve_model(name)
