"""Other projects' recorded losses recomputed with ours: `run_case(case)` looks at producer, settings and inputs alone.

What a producer computes that is no objective of the library (VESPO, DPPO, IPO, KL-Cov, top-entropy) is built here from the
library's parts, as a user would.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspo_jax import advantages as adv
from gspo_jax import corrections as fix
from gspo_jax import kl, losses
from gspo_jax.aggregation import Aggregate, budget_mean, lengths, pool, pool_max, row_mean, row_sum, spread, token_mean
from gspo_jax.types import Batch, Mean

type Case = Mapping[str, Any]
OWN = {"areal": "behave_logps", "nemo-rl": "generation_logps", "openrlhf": "rollout_logps", "prime-rl": "rollout_logps"}
"""Under what name a producer's sampler log-probabilities stand."""


def run_case(case: Case) -> dict[str, Any]:
    """What the producer's function returns for this case, in float64: `loss` and `grad_logps`, or the case's other outputs."""
    with jax.enable_x64(True):
        return PRODUCERS[case["producer"]["package"]](_Inputs(case), case["settings"])


class _Inputs:
    """The arrays of a case, with "nan" and "inf" as numbers."""

    def __init__(self, case: Case) -> None:
        self.raw = case["inputs"]
        self.function = case["producer"]["function"]
        self.behavior = OWN.get(case["producer"]["package"], "sampling_logps")

    def __contains__(self, name: str) -> bool:
        return self.raw.get(name) is not None

    def __getitem__(self, name: str) -> np.ndarray:
        return np.vectorize(float)(np.array(self.raw[name]))

    def get(self, name: str, default: np.ndarray | None = None) -> np.ndarray | None:
        return self[name] if self.raw.get(name) is not None else default

    @property
    def mask(self) -> np.ndarray:
        mask = self["mask"] > 0 if "mask" in self else np.ones(np.shape(self.raw.get("logps", self.raw.get("log_ratio"))), bool)
        return mask & (self["tool_mask"] > 0) if "tool_mask" in self else mask

    def batch(self, rows: float | None = None, old: np.ndarray | None = None) -> Batch:
        """Row i is trajectory i + 1. `rows` is the denominator of row means, by default every row."""
        mask = self.mask
        index = np.broadcast_to(np.arange(mask.shape[1], dtype=np.int32), mask.shape)
        number = np.broadcast_to(np.arange(1, len(mask) + 1, dtype=np.int32)[:, None], mask.shape)
        zeros = np.zeros(mask.shape)
        if "advantages_per_token" in self:
            given = self["advantages_per_token"]
        else:
            given = np.broadcast_to(self["advantages"][:, None], mask.shape) if "advantages" in self else zeros
        old = self.get("old_logps") if old is None else old
        rows = float(len(mask) if rows is None else rows)
        return Batch(
            tokens=index, positions=index, segment_ids=number, prefix_ids=np.zeros_like(index),
            parents=np.maximum(index - 1, 0), trajectory_ids=np.where(mask, number, 0).astype(np.int32), loss_mask=mask,
            advantages=given, behavior_logprobs=self.get(self.behavior, zeros),
            versions=np.zeros_like(index), trajectories=np.asarray(rows), proximal_logprobs=old,
            reference_logprobs=self.get("ref_logps"),
        )  # fmt: skip

    @property
    def filled(self) -> int:
        """Rows with at least one trained token."""
        return int(self.mask.any(1).sum())


def _differentiate(x: _Inputs, batch: Batch, loss: losses.Loss, scale: float = 1.0) -> dict[str, Any]:
    def value(logps):
        old = jax.lax.stop_gradient(logps) if batch.proximal_logprobs is None else batch.proximal_logprobs
        total, _ = loss(logps, batch._replace(proximal_logprobs=old))
        return total.value * scale

    found, grad = jax.value_and_grad(value)(jnp.asarray(x["logps"]))
    return {"loss": float(found), "grad_logps": np.asarray(grad)}


def _plus(loss: losses.Loss, *terms: tuple[float, Callable, Aggregate]) -> losses.Loss:
    """A loss and weighted penalties, each under the denominator given with it."""

    def total(logps, batch: Batch):
        mean, stats = loss(logps, batch)
        for coefficient, values, aggregate in terms:
            mean = Mean(mean.total + coefficient * aggregate(values(logps, batch), batch).value * mean.count, mean.count)
        return mean, stats

    return total


def _eps(s: Mapping, low: str, high: str, default: float = 0.2) -> dict[str, float]:
    first = default if s.get(low) is None else s[low]
    return {"eps_low": first, "eps_high": first if s.get(high) is None else s[high]}


# TRL


def trl(x: _Inputs, s: Mapping) -> dict[str, Any]:
    if x.function.endswith("_generate_and_score_completions"):
        return _trl_scores(x, s)
    kind, level, ga = s.get("loss_type", "dapo"), s.get("importance_sampling_level", "token"), s.get("ga", 1)
    batch = x.batch()
    tokens = float(batch.loss_mask.sum())
    if "num_items_in_batch" in x and kind in ("dapo", "cispo", "vespo"):
        window = float(x["num_items_in_batch"]) * ga / s.get("spg", ga) / s.get("num_processes", 1)
        scale = tokens / window
    else:
        scale = 1 / ga if s.get("training", True) and kind not in ("dapo", "cispo", "vespo") else 1.0
    budget = float(s.get("max_completion_length", 16))
    if any(name in s for name in ("shards", "micro_batches", "microbatches")):  # which add up to the whole
        scale = 1.0
    aggregate = {"dapo": token_mean, "cispo": token_mean, "vespo": token_mean, "bnpo": token_mean, "luspo": row_sum,
                 "dr_grpo": partial(budget_mean, budget=budget)}.get(kind, row_mean)  # fmt: skip
    correction = x["importance_sampling_ratio"] if s.get("use_vllm") and "importance_sampling_ratio" in x else None
    if correction is not None:
        batch = batch._replace(weights=np.broadcast_to(correction, batch.loss_mask.shape))
    if s.get("top_entropy_quantile", 1.0) < 1:
        entropies = x["entropies"]
        keep = entropies >= np.quantile(entropies[batch.loss_mask], 1 - s["top_entropy_quantile"])
        batch = batch._replace(weights=np.where(keep, 1.0 if batch.weights is None else batch.weights, 0.0))
    loss = _trl_loss(kind, level, aggregate, s, gmpo="gmpo" in x.function)
    if s.get("off_policy_mask_threshold") is not None:
        loss = fix.off_policy_masked(loss, s["off_policy_mask_threshold"])
    terms = []
    if s.get("beta"):
        terms.append((s["beta"], _trl_kl(level, s.get("use_bias_correction_kl", True)), aggregate))
    if s.get("entropy_coef"):
        terms.append((-s["entropy_coef"], lambda *_: jnp.asarray(x["entropies"]), token_mean))
    return _differentiate(x, batch, _plus(loss, *terms), scale)


def _trl_loss(kind: str, level: str, aggregate: Aggregate, s: Mapping, *, gmpo: bool) -> losses.Loss:
    band = _eps(s, "epsilon", "epsilon_high")
    if gmpo:
        return partial(losses.gmpo, **band)
    if kind == "cispo":
        return partial(losses.cispo, cap=s["epsilon_high"], aggregate=aggregate)
    if kind == "sapo":
        taus = {"tau_positive": s.get("sapo_temperature_pos", 1.0), "tau_negative": s.get("sapo_temperature_neg", 1.05)}
        return partial(losses.sapo, **taus, aggregate=aggregate)
    if kind == "vespo":
        return partial(vespo, aggregate=aggregate)
    if kind == "luspo":
        return partial(losses.luspo, **band)
    if level == "sequence" and aggregate is row_mean:
        return partial(losses.gspo, **band, max_log_ratio=float("inf"))
    if level.startswith("sequence"):
        return partial(losses.gspo_token, **band, aggregate=aggregate)
    return partial(losses.ppo, **band, ratio_max=s.get("delta"), aggregate=aggregate)


def _trl_kl(level: str, corrected: bool) -> Callable:
    if not corrected:
        return kl.plain
    if level == "token":
        return kl.importance_weighted

    def by_sequence(logps, batch: Batch):
        log_s = pool(logps - jnp.asarray(batch.proximal_logprobs), batch) / jnp.maximum(lengths(batch), 1)
        return jnp.exp(spread(log_s, batch)) * kl.plain(logps, batch)

    return by_sequence


def vespo(logps, batch: Batch, *, aggregate: Aggregate):
    """arXiv 2602.10693: `sg(W^k e^{lambda (1 - W)}) A lp`, W the product of the row's ratios and weights."""
    trained = jnp.asarray(batch.loss_mask)
    advantage = jnp.where(trained, batch.advantages, 0)
    ratio = jnp.where(trained, logps - jnp.asarray(batch.proximal_logprobs), 0)
    if batch.weights is not None:
        ratio = ratio + jnp.where(trained, jnp.log(jnp.asarray(batch.weights)), 0)
    log_w = spread(pool(jnp.clip(ratio, -20, 20), batch), batch)
    log_w = jax.lax.stop_gradient(jnp.clip(log_w, -20, 20))
    k, scale = jnp.where(advantage >= 0, 2.0, 3.0), jnp.where(advantage >= 0, 3.0, 2.0)
    return aggregate(-jnp.exp(k * log_w + scale * (1 - jnp.exp(log_w))) * advantage * logps, batch), {}


def _trl_scores(x: _Inputs, s: Mapping) -> dict[str, Any]:
    size, weights, per = int(x["group_size"]), x["reward_weights"], x["rewards_per_func"]
    split = [slice(i, i + size) for i in range(0, len(per), size)]
    if s["multi_objective_aggregation"] == "normalize_then_sum":
        parts = [[_scored(per[g, k]) for g in split] for k in range(per.shape[1])]
        found = adv.per_reward(parts, list(weights), eps=1e-4)
    else:
        total = [None if np.isnan(row).all() else float(np.nansum(row * weights)) for row in per]
        groups = [total[g] for g in split]
        choose = {"group": partial(adv.group_std, eps=1e-4), "none": adv.group_mean}
        scale = s["scale_rewards"]
        found = adv.batch_std(groups, eps=1e-4) if scale == "batch" else [choose[scale](g) for g in groups]
    outputs: dict[str, Any] = {"advantages": np.concatenate(found)}
    if s.get("vllm"):
        mode, high, low = s["vllm"]
        low = 0.0 if low is None else low
        function = {"token_truncate": fix.token_truncate, "token_mask": fix.token_mask,
                    "sequence_truncate": fix.sequence_truncate, "sequence_mask": fix.sequence_mask}[mode]  # fmt: skip
        high = float("inf") if high is None else high
        if "mask" not in x:
            x.raw = {**x.raw, "mask": np.arange(12)[None] < x["completion_lengths"][:, None]}
        batch = x.batch(old=x["old_logps"])
        weight = np.asarray(function(batch, low=low, high=high))
        weight = weight[:, :1] if mode.startswith("sequence") else np.where(batch.loss_mask, weight, 1.0)
        outputs["weights"] = outputs["importance_sampling_ratio"] = weight
    return outputs


def _scored(rewards: np.ndarray) -> list[float | None]:
    return [None if np.isnan(r) else float(r) for r in rewards]


# verl


def verl(x: _Inputs, s: Mapping) -> dict[str, Any]:
    name = x.function.split(".")[-1].split(" ")[0]
    if "advantage" in name:
        return _verl_advantages(x, name, s)
    if name == "kl_penalty":
        return _kl_values(x, s["kl_penalty"])
    if name == "compute_rollout_correction_weights":
        return _verl_weights(x, s)
    if name == "compute_rollout_rejection_mask":
        return _verl_rejection(x, s)
    info = s.get("global_batch_info") or {}
    rows = info.get("global_batch_size")
    if "shards" in s:
        rows = len(x.mask)
    elif rows is not None:
        rows /= info.get("dp_size", 1)
    kind = name.removeprefix("compute_policy_loss_")
    batch = x.batch(rows=x.filled if rows is None and kind != "geo_mean" else rows)
    if "rollout_is_weights" in x:
        batch = batch._replace(weights=np.broadcast_to(x["rollout_is_weights"], batch.loss_mask.shape))
    aggregate = _verl_aggregate(s.get("loss_agg_mode", "token-mean"), float(info.get("loss_scale_factor") or x.mask.shape[1]))
    return _differentiate(x, batch, _verl_loss(kind, aggregate, s))


def _verl_aggregate(mode: str, horizon: float) -> Aggregate:
    return {"token-mean": token_mean, "seq-mean-token-sum": row_sum, "seq-mean-token-mean": row_mean,
            "seq-mean-token-sum-norm": partial(budget_mean, budget=horizon)}[mode]  # fmt: skip


def _verl_loss(kind: str, aggregate: Aggregate, s: Mapping) -> losses.Loss:
    low, high, c = s.get("clip_ratio_low", 0.2), s.get("clip_ratio_high", 0.2), s.get("clip_ratio_c", 3.0)
    band = {"eps_low": low, "eps_high": high}
    return {
        "vanilla": partial(losses.ppo, **band, ratio_max=c, aggregate=aggregate),
        "gspo": partial(losses.gspo_token, **band),
        "sapo": partial(losses.sapo, tau_positive=s.get("tau_pos", 1.0), tau_negative=s.get("tau_neg", 1.05)),
        "cispo": partial(losses.cispo, cap=1 + high, floor=1 - low, aggregate=aggregate),
        "geo_mean": partial(losses.gmpo, **band),
        "gpg": partial(losses.reinforce, aggregate=aggregate),
        "dppo_tv": partial(dppo, divergence=_difference, low=low, high=high, cap=c, aggregate=aggregate),
        "dppo_kl": partial(dppo, divergence=_binary_kl, low=low, high=high, cap=c, aggregate=aggregate),
        "kl_cov": partial(kl_cov, **s.get("policy_loss", {}), aggregate=aggregate),
    }[kind]


def _difference(p, q):
    return jnp.abs(p - q)


def _binary_kl(p, q):
    """KL of the sampled token against all others together, old against new."""
    return q * jnp.log(q / p) + (1 - q) * jnp.log((1 - q) / (1 - p))


def dppo(logps, batch: Batch, *, divergence: Callable, low: float, high: float, cap: float, aggregate: Aggregate):
    """arXiv 2602.04879: no clip, but a mask where the probability left the trust region outward."""
    trained = jnp.asarray(batch.loss_mask)
    old = jnp.where(trained, jnp.asarray(batch.proximal_logprobs), -1.0)
    new, advantage = jnp.where(trained, logps, -1.0), jnp.where(trained, batch.advantages, 0)
    p, q = jnp.exp(new), jnp.exp(old)
    outward = jnp.where(advantage > 0, (p > q) & (divergence(p, q) > high), (p < q) & (divergence(p, q) > low))
    weight = jax.lax.stop_gradient(jnp.minimum(jnp.exp(new - old), cap) * ~outward)
    return aggregate(-weight * advantage * new, batch), {}


def kl_cov(logps, batch: Batch, *, kl_cov_ratio: float, ppo_kl_coef: float, aggregate: Aggregate):
    """arXiv 2505.22617: unclipped, and |log-ratio| is penalised where advantage and log-probability vary together most."""
    trained = jnp.asarray(batch.loss_mask)
    log_ratio = jnp.where(trained, logps - jnp.asarray(batch.proximal_logprobs), 0)
    advantage = jnp.where(trained, batch.advantages, 0)
    count = jnp.sum(trained)
    fixed = jax.lax.stop_gradient(jnp.where(trained, logps, 0))
    spread_of = (advantage - jnp.sum(advantage) / count) * (fixed - jnp.sum(fixed) / count)
    chosen = jnp.sort(jnp.where(trained, spread_of, -jnp.inf), axis=None)[::-1][max(1, int(int(count) * kl_cov_ratio)) - 1]
    penalty = jnp.where(trained & (spread_of >= chosen), jnp.abs(log_ratio), 0)
    return aggregate(-advantage * jnp.exp(log_ratio) + ppo_kl_coef * penalty, batch), {}


def _verl_advantages(x: _Inputs, name: str, s: Mapping) -> dict[str, Any]:
    mask, rewards, index = x.mask, x["token_level_rewards"], x.raw["group_index"]
    scores = rewards.sum(1)
    members = [np.flatnonzero(np.array(index) == g) for g in dict.fromkeys(index)]
    groups = [[float(scores[i]) for i in group] for group in members]
    sizes = [[int(mask[i].sum()) for i in group] for group in members]
    if "plus_plus_outcome" in name:
        # A reward placed on an observation token reaches the sampled tokens before it.
        togo = [[np.cumsum(rewards[i][::-1])[::-1][mask[i]] for i in group] for group in members]
        steps = [[np.diff(r[::-1], prepend=0)[::-1].tolist() for r in group] for group in togo]
        found = adv.reinforce_pp(steps)
        out = np.zeros(mask.shape)
        for group, rows in zip(members, found, strict=True):
            for i, row in zip(group, rows, strict=True):
                out[i, mask[i]] = row
        return {"advantages_per_token": out}
    if "plus_plus_baseline" in name:
        found = adv.reinforce_pp_baseline(groups, sizes)
    elif "rloo" in name:
        found = [_alone(g) or adv.leave_one_out(g) for g in groups]
    elif "opo" in name:
        found = [adv.length_weighted(g, n) for g, n in zip(groups, sizes, strict=True)]
    else:
        one = adv.group_std if s.get("norm_adv_by_std_in_grpo", True) else adv.group_mean
        found = [_alone(g) or one(g) for g in groups]
    values = np.zeros(len(scores))
    for group, row in zip(members, found, strict=True):
        values[group] = row
    return {"advantages_per_token": np.where(mask, values[:, None], 0)}


def _alone(group: list[float]) -> list[float] | None:
    """verl takes mean 0 and deviation 1 for a group of one; ours is 0."""
    return [r / (1 + adv.EPSILON) for r in group] if len(group) == 1 else None


def _kl_values(x: _Inputs, kind: str, ratio: bool = False) -> dict[str, Any]:
    form = "straight_through" if kind.endswith("+") else "importance_weighted" if ratio else "plain"
    estimator = {"k1": kl.k1, "kl": kl.k1, "k2": kl.k2, "mse": kl.k2, "k3": kl.k3, "low_var_kl": kl.k3, "abs": jnp.abs}[
        kind.rstrip("+")
    ]
    batch = x.batch()
    values = partial(kl.FORMS[form], batch=batch, estimator=estimator)
    return {
        "kl": np.asarray(values(jnp.asarray(x["logps"]))),
        "grad_logps": np.asarray(jax.grad(lambda lp: values(lp).sum())(x["logps"])),
    }


def _rho(x: _Inputs) -> Batch:
    """A batch whose log rho is the case's `log_ratio`."""
    return x.batch(old=x["log_ratio"])


def _verl_weights(x: _Inputs, s: Mapping) -> dict[str, Any]:
    level, threshold = s["rollout_is"], s["rollout_is_threshold"]
    if isinstance(threshold, str):
        low, high = map(float, threshold.split("_"))
        correction = partial({"token": fix.token_mask, "sequence": fix.sequence_mask}[level], low=low, high=high)
    else:
        correction = partial({"token": fix.token_truncate, "sequence": fix.sequence_truncate}[level], high=threshold)
    batch = jax.tree.map(lambda a: np.asarray(a)[None, None], _rho(x))
    filled, _ = fix.prepare(
        correction, normalize={"token": token_mean, "sequence": row_mean}[level] if s["rollout_is_batch_normalize"] else None
    )(batch)
    return {"weights": np.asarray(filled.weights)[0, 0]}


def _verl_rejection(x: _Inputs, s: Mapping) -> dict[str, Any]:
    kind, batch, mask = s["rollout_rs"], _rho(x), x.mask
    level, _, estimator = kind.rpartition("_")
    threshold = s["rollout_rs_threshold"]
    low, high = map(float, threshold.split("_")) if isinstance(threshold, str) else (-np.inf, threshold)
    rho = fix.log_rho(batch)
    if estimator == "k1":
        low, high = 1 / high, 1 / low  # the band is on behavior / proximal
        weights = {"token": fix.token_mask, "seq_sum": fix.sequence_mask, "seq_mean": fix.geometric_filter}[level](
            batch, low=low, high=high
        )
        kept = np.asarray(weights) > 0
    elif (level, estimator) == ("seq_mean", "k3"):
        kept = np.asarray(fix.k3_filter(batch, most=high)) > 0
    else:
        values = jnp.where(batch.loss_mask, kl.k2(rho) if estimator == "k2" else kl.k3(-rho), 0)
        if level != "token":
            totals = pool(values, batch) / (jnp.maximum(lengths(batch), 1) if level == "seq_mean" else 1)
            totals = pool_max(values, batch) if level == "seq_max" else totals
            values = spread(totals, batch)
        kept = np.asarray(values <= high)
    return {"mask": (kept & mask).astype(int)}


# The others


def nemo(x: _Inputs, s: Mapping) -> dict[str, Any]:
    sequence, by_token = s.get("sequence_level_importance_ratios", False), s.get("token_level_loss", True)
    band = _eps(s, "ratio_clip_min", "ratio_clip_max")
    aggregate = token_mean if by_token else row_mean
    if sequence:
        loss = partial(losses.gspo, **band, max_log_ratio=float("inf"))
    else:
        loss = partial(losses.ppo, **band, ratio_max=s.get("ratio_clip_c"), aggregate=aggregate)
    batch = x.batch()
    if s.get("use_importance_sampling_correction"):
        high, low = s.get("truncated_importance_sampling_ratio"), s.get("truncated_importance_sampling_ratio_min")
        batch = batch._replace(
            weights=_truncated(s.get("truncated_importance_sampling_type", "tis"), low, high, sequence)(batch)
        )
    terms = []
    if beta := s.get("reference_policy_kl_penalty"):
        estimator = kl.ESTIMATORS[s.get("reference_policy_kl_type", "k3")]

        def on_policy(logps, batch: Batch):
            return kl.importance_weighted(
                logps, batch._replace(proximal_logprobs=jax.lax.stop_gradient(logps)), estimator=estimator
            )

        terms.append((beta, on_policy, aggregate))
    return _differentiate(x, batch, _plus(loss, *terms))


def _truncated(kind: str, low: float | None, high: float | None, sequence: bool) -> fix.Correction:
    low, high = 0.0 if low is None else low, float("inf") if high is None else high
    if kind == "seq-mask-tis":
        return fix.product([partial(fix.geometric_filter, low=low, high=high), partial(fix.token_truncate, high=float("inf"))])
    if kind == "icepop":
        return partial(fix.sequence_mask if sequence else fix.token_mask, low=low, high=high)
    return partial(fix.sequence_truncate if sequence else fix.token_truncate, low=low, high=high)


def openrlhf(x: _Inputs, s: Mapping) -> dict[str, Any]:
    if s.get("policy_loss_type") == "gspo":
        loss = partial(losses.gspo, **_eps(s, "clip_eps_low", "clip_eps_high"), max_log_ratio=float("inf"))
        return _differentiate(x, x.batch(rows=x.filled), loss)
    low, high = s["clip"]
    batch = x.batch()
    batch = batch._replace(weights=_truncated(s["type"], *s["thresholds"], sequence=False)(batch))
    return _differentiate(x, batch, partial(losses.ppo, eps_low=low, eps_high=high, aggregate=token_mean))


def areal(x: _Inputs, s: Mapping) -> dict[str, Any]:
    batch = x.batch()
    if "eps" not in s:
        return _differentiate(
            x, batch, partial(losses.gspo_token, **_eps(s, "eps_clip", "eps_clip_higher"), aggregate=token_mean)
        )
    low, high = s["eps"]
    rule = s["rejection_sampling"]
    bounds = {"low": rule.get("lower") or 0.0, "high": float("inf") if rule.get("upper") is None else rule["upper"]}
    if rule["level"] == "token":
        function = fix.token_truncate if rule["action"] == "clamp" else fix.token_mask
        correction = partial(function, **bounds)
    else:
        keep = {"mean": fix.geometric_filter, "sum": fix.sequence_mask}[rule["agg"]]

        def correction(batch: Batch):
            if rule["action"] == "clamp":
                return spread(jnp.clip(fix.geometric_ratio(batch), bounds["low"], bounds["high"]), batch)
            return spread(fix.geometric_ratio(batch), batch) * (keep(batch, **bounds) > 0)

    single = (x["old_logps"] - x["behave_logps"]).astype(np.float32)  # its weights are float32
    weights = correction(batch._replace(behavior_logprobs=x["old_logps"] - single))
    batch = batch._replace(weights=np.asarray(weights).astype(np.float32))
    return _differentiate(x, batch, partial(losses.ppo, eps_low=low, eps_high=high, aggregate=token_mean))


def polgrad(x: _Inputs, s: Mapping) -> dict[str, Any]:
    low, high = s["eps"]
    aggregate = {"SEQ_MEAN_TOKEN_MEAN": row_mean, "SEQ_MEAN_TOKEN_SUM": row_sum, "TOKEN_MEAN": token_mean}[s["aggregation"]]
    loss = {"SEQUENCE": losses.gspo_token, "SEQUENCE_TOKEN": losses.gspo_token, "TOKEN": losses.ppo}[s["ratio"]]
    if s["ratio"] == "SEQUENCE" and aggregate is row_mean:
        return _differentiate(x, x.batch(), partial(losses.gspo, eps_low=low, eps_high=high, max_log_ratio=float("inf")))
    return _differentiate(x, x.batch(), partial(loss, eps_low=low, eps_high=high, aggregate=aggregate))


def skyrl(x: _Inputs, s: Mapping) -> dict[str, Any]:
    low, high = s["eps"]
    aggregate = {"sequence_mean": row_mean, "token_mean": token_mean}[s["loss_reduction"]]
    return _differentiate(x, x.batch(), partial(losses.gspo_token, eps_low=low, eps_high=high, aggregate=aggregate))


def slime(x: _Inputs, s: Mapping) -> dict[str, Any]:
    if "kl_loss_type" in s:
        return _kl_values(x, s["kl_loss_type"], ratio=True)
    if "opsm_delta" in s:
        kept = fix.off_policy_filter(jnp.asarray(x["logps"]), x.batch(), most=s["opsm_delta"])
        of_row = np.where(x.mask.any(1), np.asarray(kept).max(1), 1.0)
        return {"mask": np.broadcast_to(of_row[:, None], x.mask.shape)}
    loss = partial(losses.gspo, **_eps(s, "eps_clip", "eps_clip_high"), max_log_ratio=float("inf"))
    return _differentiate(x, x.batch(), loss)


def liger(x: _Inputs, s: Mapping) -> dict[str, Any]:
    low, high = s["eps"]
    if s["loss_type"] == "luspo":
        return _differentiate(x, x.batch(), partial(losses.luspo, eps_low=low, eps_high=high))
    return trl(x, {"epsilon": low, "epsilon_high": high, **s})


def tunix(x: _Inputs, s: Mapping) -> dict[str, Any]:
    if x.function.endswith("compute_advantages"):
        size, rewards = s["num_generations"], x["rewards"]
        return {
            "advantages": np.concatenate([adv.group_std(rewards[i : i + size].tolist()) for i in range(0, len(rewards), size)])
        }
    band = _eps(s, "epsilon", "epsilon_high")
    aggregate = {"sequence-mean-token-mean": row_mean, "token-mean": token_mean, "sequence-mean-token-sum": row_sum}[
        s["loss_agg_mode"]
    ]
    loss = losses.gspo_token if s["loss_algo"] == "gspo-token" else partial(losses.ppo, ratio_max=s.get("epsilon_c"))
    estimator = {"kl": kl.k1, "mse": kl.k2, "low_var_kl": kl.k3}[s["kl_loss_mode"]]
    terms = [(s["beta"], partial(kl.plain, estimator=estimator), aggregate)] if s["beta"] else []
    logps = x["logps"]
    old = logps - np.clip(logps - x["old_logps"], -20, 20)  # before the mean, which moves s where a token is beyond it
    return _differentiate(x, x.batch(rows=x.filled, old=old), _plus(partial(loss, **band, aggregate=aggregate), *terms))


def prime(x: _Inputs, s: Mapping) -> dict[str, Any]:
    batch = x.batch()
    name = x.function.split(".")[-1]

    def loss(logps, batch: Batch):
        trained = jnp.asarray(batch.loss_mask)
        behavior = jnp.where(trained, batch.behavior_logprobs, -1.0)
        log_ratio = jnp.where(trained, logps, -1.0) - behavior
        gap = jax.lax.stop_gradient(jnp.exp(jnp.where(trained, logps, -1.0)) - jnp.exp(behavior))
        advantage = s["adv_tau"] * jnp.where(trained, batch.advantages, 0)
        if name == "ipo_loss_fn":
            kept = 1.0 * (jnp.abs(gap) <= s["ipo_threshold"])
        else:
            kept = 1.0 - jnp.where(advantage > 0, gap > s["dppo_mask_high"], gap < -s["dppo_mask_low"])
        return token_mean(-kept * advantage * jnp.exp(log_ratio) + s["kl_tau"] * log_ratio**2, batch), {}

    return _differentiate(x, batch, loss)


def easydel(x: _Inputs, s: Mapping) -> dict[str, Any]:
    return trl(x, s)


PRODUCERS: dict[str, Callable[[_Inputs, Mapping], dict[str, Any]]] = {
    "trl": trl,
    "verl": verl,
    "nemo-rl": nemo,
    "openrlhf": openrlhf,
    "areal": areal,
    "polgrad": polgrad,
    "skyrl": skyrl,
    "slime": slime,
    "liger-kernel": liger,
    "google-tunix": tunix,
    "prime-rl": prime,
    "easydel": easydel,
}
