"""What is wrong with a config, one line per mistake: the key, its value, the constraint, and what to write instead."""

import difflib
import math
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from gspo_jax.config_report import describe
from gspo_jax.sections import PATTERNS, Config, is_secret, keys, masked, tables

ELSEWHERE = {
    "epsilon": "eps_low", "clip_ratio": "eps_low", "clip_ratio_low": "eps_low", "eps_clip": "eps_low",
    "eps_clip_low": "eps_low", "ratio_clip_min": "eps_low", "clip_eps_low": "eps_low", "epsilon_low": "eps_low",
    "epsilon_high": "eps_high", "clip_ratio_high": "eps_high", "eps_clip_high": "eps_high", "ratio_clip_max": "eps_high",
    "eps_clip_higher": "eps_high", "clip_eps_high": "eps_high",
    "clip_ratio_c": "ratio_max", "ratio_clip_c": "ratio_max", "delta": "ratio_max", "epsilon_c": "ratio_max",
    "beta": "kl_beta", "kl_coef": "kl_beta", "kl_loss_coef": "kl_beta", "kl_ctl": "kl_beta",
    "reference_policy_kl_penalty": "kl_beta",
    "kl_loss_type": "kl_estimator", "kl_loss_mode": "kl_estimator", "kl_penalty": "kl_estimator",
    "use_bias_correction_kl": "kl_form", "entropy_coef": "entropy_bonus", "entropy_coeff": "entropy_bonus",
    "loss_type": "variety", "loss_mode": "variety", "policy_loss": "variety", "policy_loss_type": "variety",
    "loss_algo": "variety", "importance_sampling_level": "variety", "sequence_level_importance_ratios": "variety",
    "loss_agg_mode": "aggregation", "loss_reduction": "aggregation", "token_level_loss": "aggregation",
    "scale_rewards": "advantage", "adv_estimator": "advantage", "advantage_estimator": "advantage",
    "norm_adv_by_std_in_grpo": "advantage", "loss_scale_factor": "budget", "mask_truncated_completions": "overlong",
    "filter_groups": "flat_groups", "dynamic_sampling": "flat_groups", "use_dynamic_sampling": "flat_groups",
    "overlong_buffer_len": "overlong_buffer", "off_policy_mask_threshold": "correction.off_policy_max",
    "opsm_delta": "correction.off_policy_max", "rollout_is": "correction.weight", "rollout_is_threshold": "correction.high",
    "rollout_rs": "correction.geometric", "truncated_importance_sampling_ratio": "correction.high",
    "vllm_importance_sampling_mode": "correction.weight", "vllm_importance_sampling_cap": "correction.high",
}  # fmt: skip
"""What other stacks call the keys of `[algorithm]`."""


def lookup(raw: Any, name: str) -> Any:
    """The value at a dotted name, None when absent (TOML has no null)."""
    for part in name.split("."):
        if not isinstance(raw, Mapping) or part not in raw:
            return None
        raw = raw[part]
    return raw


def not_finite(value: Any, name: str = "") -> Iterator[str]:
    """A line for every nan or infinity, also inside free tables."""
    if isinstance(value, Mapping):
        for child, item in value.items():
            yield from not_finite(item, f"{name}.{child}".lstrip("."))
    elif isinstance(value, list):
        for item in value:
            yield from not_finite(item, name)
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{name}: {value} must be a finite number"


def mistakes(error: ValidationError, raw: Mapping[str, Any]) -> tuple[list[str], set[str]]:
    """`(lines, wrong keys)` of a validation error of `raw`."""
    lines, wrong = [], set()
    for detail in error.errors(include_url=False, include_input=False):
        path, value = _locate(detail, raw)
        wrong.add(".".join(path))
        if detail["type"] == "extra_forbidden":
            lines.append(unknown(".".join(path[:-1]), path[-1]))
        elif detail["type"] != "finite_number":
            lines.append(_line(detail, ".".join(path), value))
    return lines, wrong


def _locate(detail: ErrorDetails, raw: Any) -> tuple[list[str], Any]:
    """The names and the value a validation error is about; positions in arrays and union branches are not names."""
    path, value = [], raw
    for part in detail["loc"]:
        if isinstance(part, str) and isinstance(value, Mapping) and (part in value or detail["type"] == "missing"):
            path.append(part)
            value = value.get(part)
    return path, value


def _line(detail: ErrorDetails, name: str, value: Any) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "missing":
        return f"{name}: missing; it has no default ({describe(keys()[name])})"
    if name == "algorithm.method" and value == "ppo":
        return (
            'algorithm.method: "ppo" is not available (there is no value network); write method = "policy_gradient", and for '
            'PPO\'s clipped objective variety = "ppo"'
        )
    if kind in ("model_type", "dict_type", "mapping_type"):
        what = f"must be a table; write [{name}] with its keys below it"
    elif kind == "string_pattern_mismatch":
        what = PATTERNS[context["pattern"]]
    else:
        what = detail["msg"].replace("Input should be", "must be").replace("String should have", "must have")
    shown = "***" if is_secret(name) and isinstance(value, str) else repr(masked(value, name))
    return f"{name}: {shown} {what}"


def unknown(table: str, name: str) -> str:
    """The line for a key that `table` does not have: the nearest name, or the table where a key of that name belongs."""
    sections = dict(tables())
    here, inside = sections[table].model_fields, f"{table}." if table else ""
    if table == "algorithm" and name in ELSEWHERE:
        return f"algorithm.{name}: unknown key; here it is called algorithm.{ELSEWHERE[name]}"
    homes = [f"[{other}]" if other else "the top level" for other, section in sections.items() if name in section.model_fields]
    close = difflib.get_close_matches(name, here, 1, 0.85)
    near = close or difflib.get_close_matches(name, here, 1, 0.6)
    if homes and not close:
        return f"{inside}{name}: unknown key {f'in [{table}]' if table else 'at top level'}; it belongs to {' or '.join(homes)}"
    leaves = {leaf.rpartition(".")[2]: leaf for leaf in keys()}
    far = difflib.get_close_matches(name, leaves, 1, 0.8)
    if near or far:
        meant = f"{inside}{near[0]}" if near else leaves[far[0]]
        return f"{inside}{name}: unknown key; did you mean {f'[{meant}]' if meant in sections else meant}?"
    return f"{inside}{name}: unknown key; the keys here are {', '.join(here)}"


def exclusive(raw: Mapping[str, Any]) -> Iterator[str]:
    """Lines about keys of which exactly one, or at most one, may be set."""
    base, source = lookup(raw, "model.base"), lookup(raw, "model.source")
    if base is None and source is None:
        yield 'model.base: missing; name the model to train, for example base = "Qwen/Qwen3-0.6B", or model.source'
    elif base is not None and source is not None:
        yield f"model.source: {source!r} contradicts model.base = {base!r}; keep one of them"
    url, app = lookup(raw, "services.task_url"), lookup(raw, "services.task_app")
    if url is not None and app is not None:
        yield f"services.task_app: {app!r} contradicts services.task_url = {masked(url)!r}; keep one of them"


def across(values: Mapping[str, Any]) -> Iterator[str]:
    """Lines about keys that contradict each other; `values` has None for whatever is absent or wrong by itself."""
    yield from _filtered_sampling(values)
    yield from _batches(values)
    tokens, context, length = (values[k] for k in ("policy.max_tokens", "serving.context_length", "training.row_length"))
    if tokens is not None and context is not None and tokens >= context:
        yield (
            f"policy.max_tokens: {tokens} leaves no room for a prompt in serving.context_length = {context}: context shorter "
            f"than prompt and completion; use max_tokens <= {context - 1} or context_length > {tokens}"
        )
    if length and context is not None and length < context:
        yield f"training.row_length: {length} cannot hold serving.context_length = {context} tokens; use 0 or >= {context}"
    yield from _reference(values)


def _reference(values: Mapping[str, Any]) -> Iterator[str]:
    """A KL refers to a policy that has to be somewhere."""
    beta, count = values["algorithm.kl_beta"], values["compute.topology.gpus_for_ref"]
    where = values["compute.topology.reference_placement"]
    if where == "none" and beta:
        yield (
            f'compute.topology.reference_placement: "none", but algorithm.kl_beta = {beta} refers to a reference policy; '
            'use "shared", or kl_beta = 0'
        )
    if where == "dedicated" and count == 0:
        yield 'compute.topology.gpus_for_ref: 0, but reference_placement = "dedicated" needs at least 1'
    if where == "shared" and count:
        yield f'compute.topology.gpus_for_ref: {count}, but reference_placement = "shared" needs none; use "dedicated"'


def _filtered_sampling(values: Mapping[str, Any]) -> Iterator[str]:
    """A filtered sampler renormalizes its log-probabilities over the kept tokens, the trainer does not."""
    for name, off in (("policy.top_p", 1.0), ("policy.top_k", 0), ("policy.repetition_penalty", 1.0)):
        if values[name] is not None and values[name] != off:
            yield (
                f"{name}: {values[name]} changes the distribution that tokens are drawn from, so sampled and trained "
                f"log-probabilities would differ; training needs {off}"
            )


def _batches(values: Mapping[str, Any]) -> Iterator[str]:
    per_batch, batches = values["rollout.episodes_per_batch"], values["rollout.batches_per_step"]
    group, minibatch = values["training.group_size"], values["training.batch_size"]
    if per_batch is None or batches is None:
        return
    total = per_batch * batches
    told = f"rollout.episodes_per_batch {per_batch} * rollout.batches_per_step {batches} = {total} episodes"
    if group and total % group:
        step = group // math.gcd(group, batches)
        low = per_batch // step * step
        better = f"{low} or {low + step}" if low else f"{step}"
        yield f"training.group_size: {told} do not split into groups of {group}; use episodes_per_batch = {better}"
    if minibatch and total % minibatch:
        low = next(n for n in range(min(minibatch, total), 0, -1) if total % n == 0)
        high = next((n for n in range(minibatch, total + 1) if total % n == 0), None)
        better = f"{low} or {high}" if high else f"{low}"
        yield f"training.batch_size: {told} do not split into minibatches of {minibatch}; use batch_size = {better}"


def hints(config: Config) -> Iterator[str]:
    """Lines about what is allowed and probably not meant."""
    group, minibatch = config.training.group_size, config.training.batch_size
    if minibatch and minibatch < group and config.rollout.episodes_per_batch == minibatch * group:
        yield (
            f"training.batch_size: {minibatch} counts trajectories per minibatch, not groups; "
            f"for {minibatch} groups write {minibatch * group}"
        )
    yield from _idle_adapter(config)
    yield from _uncorrected(config)
    layout = config.compute.topology
    used = layout.gpus_for_vllm + layout.gpus_for_training + layout.gpus_for_ref
    if used and config.compute.gpu_count and used != config.compute.gpu_count:
        yield f"compute.gpu_count: {config.compute.gpu_count}, but compute.topology distributes {used} GPUs"


def _uncorrected(config: Config) -> Iterator[str]:
    """Asynchronous methods weigh tokens of older weights by how likely they are now (arXiv 2505.24298, 2509.19128)."""
    correction, steps = config.algorithm.correction, config.rollout.max_staleness
    if steps and correction.weight == "off" and not (correction.geometric or correction.k3_max or correction.off_policy_max):
        yield (
            f"rollout.max_staleness: {steps}, and algorithm.correction is off: tokens of older weights are learned from as if "
            'they were the current policy\'s; set algorithm.correction.weight = "token_truncate"'
        )


def _idle_adapter(config: Config) -> Iterator[str]:
    mode, told = config.model.trainer_mode, config.training.lora.model_fields_set
    if mode == "full" and "trainer_mode" in config.model.model_fields_set and told - {"dropout"}:
        yield f'training.lora.{min(told)}: without effect in model.trainer_mode = "full"'
    if mode == "lora" and "quantization" in told:
        yield 'training.lora.quantization: without effect in model.trainer_mode = "lora"; write "qlora"'
