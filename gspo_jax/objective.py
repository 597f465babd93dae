"""From `[algorithm]` to a loss: which function, under which denominator, with which penalties and corrections."""

from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

from gspo_jax import corrections, losses
from gspo_jax.aggregation import Aggregate, budget_mean, row_mean, row_sum, token_mean
from gspo_jax.kl import ESTIMATORS, FORMS, penalized
from gspo_jax.losses import Loss
from gspo_jax.sections import Algorithm, Correction
from gspo_jax.types import Prepare


class Variety(NamedTuple):
    """A published algorithm: its function, its denominator, its advantage, and whether its ratio is the sequence's."""

    loss: Callable[..., Any]
    aggregation: str
    advantage: str = "group_std"
    sequence: bool = False

    @property
    def knobs(self) -> dict[str, Any]:
        """Names and defaults of the constants its function takes."""
        parameters = signature(self.loss).parameters.values()
        return {p.name: p.default for p in parameters if p.kind == p.KEYWORD_ONLY and p.name != "max_log_ratio"}


VARIETIES: Mapping[str, Variety] = {
    "gspo": Variety(losses.gspo, "row_mean", sequence=True),
    "gspo_token": Variety(losses.gspo_token, "row_mean", sequence=True),
    "luspo": Variety(losses.luspo, "row_sum", sequence=True),
    "gmpo": Variety(losses.gmpo, "row_mean"),
    "ppo": Variety(losses.ppo, "token_mean"),
    "grpo": Variety(losses.grpo, "row_mean"),
    "dapo": Variety(losses.dapo, "token_mean"),
    "dr_grpo": Variety(losses.dr_grpo, "budget_mean", "group_mean"),
    "cispo": Variety(losses.cispo, "token_mean"),
    "sapo": Variety(losses.sapo, "row_mean"),
    "minirl": Variety(losses.minirl, "row_sum", "group_mean"),
    "reinforce": Variety(losses.reinforce, "row_mean"),
}
UNIFORM = ("gspo", "luspo", "gmpo")
"""Varieties that take one advantage per trajectory."""
CLIPPED = tuple(name for name, variety in VARIETIES.items() if "eps_low" in variety.knobs)


class Objective(NamedTuple):
    """What a learner needs of an algorithm."""

    loss: Loss
    prepare: Prepare | None
    reference: bool
    """Whether the loss reads `batch.reference_logprobs`."""


def constants(algorithm: Algorithm) -> dict[str, Any]:
    """The constants of the objective's function that the config sets, by parameter name."""
    given = {
        "eps_low": algorithm.eps_low,
        "eps_high": algorithm.eps_high,
        "ratio_max": algorithm.ratio_max,
        "cap": algorithm.cap,
        "floor": algorithm.floor,
        "tau_positive": algorithm.tau_positive,
        "tau_negative": algorithm.tau_negative,
        "budget": algorithm.budget,
        "aggregate": algorithm.aggregation,
    }
    return {name: value for name, value in given.items() if value is not None}


def advantage_name(algorithm: Algorithm) -> str:
    """The advantage in use: the one set, else the variety's own."""
    return algorithm.advantage or VARIETIES[algorithm.variety].advantage


def build_objective(algorithm: Algorithm, budget: int) -> Objective:
    """The objective of a checked `[algorithm]`. `budget`: the most tokens of a trajectory, Dr. GRPO's default divisor."""
    variety, knobs = VARIETIES[algorithm.variety], constants(algorithm)
    if "budget" in variety.knobs:
        knobs.setdefault("budget", float(budget))
    aggregate = _aggregate(knobs.get("aggregate", variety.aggregation), knobs.get("budget", float(budget)))
    knobs.pop("aggregate", None)
    if "aggregate" in variety.knobs:
        knobs["aggregate"] = aggregate
    in_loss = algorithm.kl_beta > 0 and algorithm.kl_in == "loss"
    kl = partial(FORMS[algorithm.kl_form], estimator=ESTIMATORS[algorithm.kl_estimator]) if in_loss else None
    loss: Loss = partial(variety.loss, **knobs)
    if algorithm.correction.off_policy_max is not None:
        loss = corrections.off_policy_masked(loss, algorithm.correction.off_policy_max)
    if in_loss or algorithm.entropy_bonus:
        loss = penalized(loss, aggregate, kl=kl, beta=algorithm.kl_beta, entropy=algorithm.entropy_bonus)
    return Objective(loss, _prepare(algorithm.correction, aggregate), in_loss)


def _aggregate(name: str, budget: float) -> Aggregate:
    if name == "budget_mean":
        return partial(budget_mean, budget=budget)
    return {"row_mean": row_mean, "row_sum": row_sum, "token_mean": token_mean}[name]


_WEIGHTS = {
    "token_truncate": (corrections.token_truncate, corrections.token_weight),
    "token_mask": (corrections.token_mask, corrections.token_weight),
    "sequence_truncate": (corrections.sequence_truncate, corrections.sequence_weight),
    "sequence_mask": (corrections.sequence_mask, corrections.sequence_weight),
}
"""`correction.weight` to its function, and to the same weight without a bound."""


def _prepare(correction: Correction, aggregate: Aggregate) -> Prepare | None:
    parts: list[corrections.Correction] = []
    bounded, raw = _WEIGHTS.get(correction.weight, (None, None))
    if bounded is not None:
        bounds = {"low": correction.low, "high": correction.high}
        parts.append(partial(bounded, **{k: v for k, v in bounds.items() if v is not None}))
    if correction.geometric:
        low, high = correction.geometric
        parts.append(partial(corrections.geometric_filter, low=low, high=high))
    if correction.k3_max is not None:
        parts.append(partial(corrections.k3_filter, most=correction.k3_max))
    if not parts:
        return None
    normalize, leave = aggregate if correction.normalize else None, correction.rejected == "leave"
    return corrections.prepare(corrections.product(parts), raw=raw, normalize=normalize, leave=leave)
