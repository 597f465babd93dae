"""What a run starts from: the policy, the weights it trains, and those it does not."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from gspo_jax import adapters, peft, runlog
from gspo_jax.adapters import Adapter, UnknownTarget, adapter_sizes, adapter_table
from gspo_jax.config import ConfigError, model_id
from gspo_jax.digest import params_digest
from gspo_jax.models.quantize import is_quantized, join_layers, matrix, nbytes, quantize
from gspo_jax.policy import Policy, compute_leaf, describe_policy, load_params, save_policy
from gspo_jax.pretrained import looks_like_id, resolve_model
from gspo_jax.runlog import RunError
from gspo_jax.sections import Config
from gspo_jax.sharding import WHOLE, Layout, layout_of
from gspo_jax.types import Params
from serving_bridge.convert import StoredLeaf, folder_tensors, place
from serving_bridge.trees import get, leaves, put
from serving_bridge.weights import leaf_shape, tensor_names

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
    fresh: bool = True
    """Whether the adapter leaves the model as it is, as before its first step."""
    layout: Layout = WHOLE
    """Where parameters and batches are on the mesh; those of `params` and `frozen` are there."""

    def whole(self, params: Params, frozen: Params | None) -> Params:
        """The parameters the model computes with."""
        return adapters.attach(self.adapter, params, frozen)

    def merged(self, params: Params) -> Params:
        """Full float32 parameters, an adapter added to the weights beneath it."""
        if self.adapter is None or self.frozen is None:
            return params
        return adapters.merged(self.adapter, params, self.frozen, self.policy.config.sizes())

    @property
    def quantized(self) -> bool:
        """Whether weights beneath the adapter are quantized."""
        return any(is_quantized(leaf) for _, leaf in leaves(self.frozen or {}))

    def dequantized(self) -> Params:
        """The weights beneath an adapter as float32 parameters: what the model computes with, quantized or not."""
        found: dict[str, Any] = {}
        for row in self.policy.table:
            leaf = matrix(get(self.frozen or {}, row.path), jnp.float32)
            put(found, row.path, leaf.reshape(leaf_shape(row, self.policy.config.sizes())))
        return found

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
        state = trained * 4 * (1 + MOMENTS)
        if self.frozen is None:
            return f"trains all {trained:,} parameters; weights, gradient and moments take {_size(state)}"
        everything = adapters.count(self.frozen)
        return (
            f"trains {trained:,} parameters beside {everything:,} frozen ones ({100 * trained / everything:.2f} %); weights, "
            f"gradient and moments take {_size(nbytes(self.frozen) + state)}, full fine-tuning "
            f"{_size(everything * 4 * (1 + MOMENTS))}"
        )


def _size(size: int) -> str:
    return f"{size / 1e6:,.0f} MB" if size >= 1e7 else f"{size / 1e6:.2g} MB"


class Source(NamedTuple):
    """Where a run's weights come from."""

    model: Path
    adapter: Path | None
    """A PEFT folder on that model."""
    name: str
    """What an adapter is recorded to belong to: an id that any machine resolves, or a folder."""


def load_start(config: Config, mesh: Mesh | None = None) -> Start:
    """What the config's `[model]` and `[training.lora]` describe, on a mesh if there is one.

    A `source` that is a PEFT folder is gone on with in the modes lora and qlora, and added to its base model in the mode full.
    Raises ConfigError, ModelNotFoundError, WeightError.
    """
    source = locate(config)
    policy = describe_policy(source.model, compute_dtype=config.model.compute_dtype, remat=config.model.remat)
    adapter, sizes = plan_adapter(config, policy, source), policy.config.sizes()
    check_sequence(config, policy)
    layout = start_layout(mesh, policy, adapter)
    if adapter is None:
        params = load_params(policy, policy.folder, keep_placed(layout))
        if source.adapter:
            params = layout.state(adapters.merged(*peft.load_adapter(source.adapter, policy.table, sizes), params, sizes))
        return Start(policy, params, layout=layout)
    if source.adapter:
        _, params = peft.load_adapter(source.adapter, policy.table, sizes)
    else:
        params = adapters.init_adapter(adapter, sizes, config.run.seed)
    frozen = load_frozen(policy, config.training.lora.quantization if config.model.trainer_mode == "qlora" else None, layout)
    return Start(policy, layout.state(params), frozen, adapter, source.name, source.adapter is None, layout)


def start_layout(mesh: Mesh | None, policy: Policy, adapter: Adapter | None) -> Layout:
    """The layout of a policy and the adapter on it, if any."""
    if adapter is None:
        return layout_of(mesh, policy.table, policy.config.sizes())
    return layout_of(mesh, (*policy.table, *adapter_table(adapter)), adapter_sizes(adapter, policy.config.sizes()))


def check_sequence(config: Config, policy: Policy) -> None:
    """ConfigError where `mesh.sequence` does not divide the heads of linear attention that its devices exchange."""
    parts, heads = config.mesh.sequence, policy.config.linear_num_key_heads if policy.config.recurrent else 0
    if heads % parts:
        raise ConfigError("config", [
            f"mesh.sequence: {parts} devices do not divide the {heads} heads of linear attention of {policy.architecture} "
            f"among them; use a divisor of {heads}"
        ])  # fmt: skip


def plan_adapter(config: Config, policy: Policy, source: Source) -> Adapter | None:
    """The adapter that is trained, without its weights; None in the mode full. ConfigError for what does not fit."""
    if config.model.trainer_mode == "full":
        return None
    lora = config.training.lora
    others = folder_tensors(policy.folder) - {
        name for row in policy.table for _, name in tensor_names(row, policy.config.sizes())
    }
    avoid = {name.removesuffix(".weight") for name in others}
    try:
        asked = adapters.adapter_of(policy.table, lora.target_modules, lora.r, lora.alpha, rslora=lora.rslora, avoid=avoid)
    except UnknownTarget as error:
        raise ConfigError("config", [f"training.lora.target_modules: {error}"]) from None
    if source.adapter is None:
        return asked
    found = peft.adapter_in(source.adapter, policy.table)
    has = {"r": found.rank, "alpha": found.alpha, "rslora": found.rslora, "target_modules": found.targets}
    wants = {"r": asked.rank, "alpha": asked.alpha, "rslora": asked.rslora, "target_modules": asked.targets}
    different = [name for name in wants if name in lora.model_fields_set and wants[name] != has[name]]
    if different:
        raise ConfigError("config", [
            f"training.lora.{name}: {wants[name]} contradicts the {has[name]} of the adapter in {source.adapter}; leave it out"
            for name in different
        ])  # fmt: skip
    return found


def load_frozen(policy: Policy, qtype: str | None, layout: Layout = WHOLE) -> Params:
    """Weights nobody trains, in their places, in the compute type; with `qtype` (nf4, int8) the kernels quantized, a layer at a
    time."""
    kernels, placed = {row.path: row for row in adapters.kernel_rows(policy.table)}, keep_placed(layout)

    def keep(path: str, leaf: StoredLeaf) -> Any:
        row = kernels.get(path)
        if not qtype or row is None:
            return placed(path, compute_leaf(path, leaf, policy.dtype))
        stack, inputs = adapters.kernel_axes(row)
        layers = (jnp.asarray(leaf.read([slice(i, i + 1)])) for i in range(leaf.shape[0]))
        parts = (quantize(layer, inputs, stack, qtype, policy.dtype) for layer in layers)
        return join_layers(parts, leaf.shape[0], lambda part: _sharding(layout, path, part))

    return load_params(policy, policy.folder, keep)


def keep_placed(layout: Layout) -> Callable[[str, StoredLeaf], Any]:
    """For `load_params`: every leaf is read into its place, each device's part by itself."""

    def keep(path: str, leaf: StoredLeaf) -> Any:
        sharding = _sharding(layout, path)
        return jax.device_put(leaf.read()) if sharding is None else place(leaf, sharding)

    return keep


def _sharding(layout: Layout, path: str, leaf: Any = None) -> NamedSharding | None:
    return None if layout.mesh is None else NamedSharding(layout.mesh, layout.spec(path, leaf))


def locate(config: Config) -> Source:
    """Where the weights of `model.base` or `model.source` are."""
    name = model_id(config)
    folder = _trained(name, Path(config.run.dir)) if config.model.source else resolve_model(name)
    if peft.is_adapter(folder):
        base, model = peft.base_model(folder)
        return Source(model, folder, base)
    return Source(folder, None, name if looks_like_id(name) else str(folder.absolute()))


def _trained(name: str, runs: Path) -> Path:
    """The folder of a trained model: of a run, by its directory or its id `ft:base:run`; else as for `model.base`."""
    match = PREFIX.fullmatch(name)
    run_dir = runs / match["run"] if match else Path(name).expanduser()
    if not match and not (run_dir / "checkpoints").is_dir():
        return run_dir if peft.is_adapter(run_dir) else resolve_model(name)
    if not (run_dir / "export").is_dir():
        how = f"finish it with --resume, or write one with python -m gspo_jax.export {run_dir} FOLDER"
        raise ConfigError("config", [f"model.source: {name!r}: {run_dir} has no export/ (the run did not end); {how}"])
    if match:
        model = runlog.read_run(run_dir)["config"]["model"]
        trained = model.get("base") or model.get("source")
        if trained != match["base"]:
            raise ConfigError("config", [f"model.source: {name!r}: the run in {run_dir} trained {trained!r}"])
    return run_dir / "export"


def check_frozen(start: Start, run_dir: Path) -> str | None:
    """Fingerprint of the weights that are not trained, if any. RunError unless the run in `run_dir` began with the same."""
    if start.frozen is None:
        return None
    recorded = next((line["frozen"] for line in runlog.read_lines(run_dir / "digests.jsonl") if "frozen" in line), None)
    found = params_digest(start.frozen)
    if recorded is not None and recorded != found:
        raise RunError(
            f"{run_dir}: the weights beneath the adapter are not those it was trained on ({found} instead of {recorded}); "
            f"restore the model that model.base names ({start.base}), or the versions in config.json"
        )
    return found
