"""Guards against an objective that is not doing anything: pure functions of the metrics of the last steps.

A finding is one line that names the cause and the config key. A training step never looks at more than `PATIENCE` steps, so a
resumed run, whose metrics are in its log, finds what an unbroken one would.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from gspo_jax.objective import CLIPPED, VARIETIES, constants
from gspo_jax.sections import Config

PATIENCE = 20
WIDE = 0.01
"""A clip range above this on a sequence ratio, which stays within about 1e-3 of 1, was meant for token ratios."""
FIRST_MISMATCH = 0.05
"""Nats per token; a sound trainer and sampler of the same weights differ by 1e-6 (float32) to 1e-2 (bfloat16)."""
ALARM_MISMATCH, MOST_MISMATCH = 0.05, 0.2
"""Nats per token at later steps: worth a look, and not the same policy."""
TRUNCATED = 0.1
LATER = re.compile(r"policy/clip_fraction_(?!1$)\d+$")
"""Clip fractions of the minibatches after the first."""

type History = Sequence[Mapping[str, Any]]
"""Metrics of consecutive steps, the newest last, each with its `step`."""


class Finding(NamedTuple):
    """One guard that fired. `severity`: error | warn."""

    severity: str
    guard: str
    message: str


def check(config: Config, history: History) -> list[Finding]:
    """What is found at the newest step and was not yet at the one before: each cause is told once, when it begins."""
    now, before = _findings(config, history), _findings(config, history[:-1])
    known = {(f.guard, f.severity) for f in before}
    return [f for f in now if f.severity == "error" or (f.guard, f.severity) not in known]


def wide_eps(config: Config) -> str | None:
    """The line about a token-scale clip range on a sequence ratio, or None."""
    algorithm = config.algorithm
    variety = VARIETIES[algorithm.variety]
    if not variety.sequence:
        return None
    used = variety.knobs | constants(algorithm)
    wide = [name for name in ("eps_low", "eps_high") if used[name] > WIDE]
    if not wide:
        return None
    return (
        f"algorithm.{wide[0]}: {used[wide[0]]} is a token-scale clip range, and the sequence ratio of {algorithm.variety} "
        f"stays near 1: nothing would be clipped. Use about {variety.knobs[wide[0]]} (at most {WIDE}), or a token objective "
        'such as variety = "grpo"; guards.wide_eps = "warn" allows it'
    )


def _findings(config: Config, history: History) -> list[Finding]:
    if not history:
        return []
    found = []
    for name, (guard, severity) in _guards(config).items():
        if severity != "off" and (message := guard(config, history)):
            found.append(Finding(severity, name, message))
    if config.guards.flat_groups != "off" and _all_flat(history[-1]) and not any(f.guard == "flat_groups" for f in found):
        found.append(Finding("warn", "flat_groups", _flat_line(config, 1)))
    return found


def _guards(config: Config) -> dict[str, tuple[Callable[[Config, History], str | None], str]]:
    guards = config.guards
    return {
        "dead_ratio": (_dead_ratio, guards.dead_ratio),
        "flat_groups": (_flat_groups, guards.flat_groups),
        "first_mismatch": (_first_mismatch, guards.first_mismatch),
        "clip_fraction": (_clip_fraction, guards.clip_fraction),
        "mismatch": (_mismatch, guards.mismatch),
        "mismatch_alarm": (_mismatch_alarm, guards.mismatch_alarm),
        "mismatch_stop": (_mismatch_stop, guards.mismatch_stop),
        "truncation": (_truncation, guards.truncation),
    }


def _dead_ratio(config: Config, history: History) -> str | None:
    """Weights move between the minibatches of a step, so log-probabilities must."""
    now = history[-1]
    minibatches = sum(name.startswith("policy/ratio_mean_") for name in now)
    moving = (now.get("optimizer/grad_norm") or 0) > 0 and not now.get("optimizer/skipped")
    warming = now["step"] * minibatches < config.optimizer.warmup_steps  # the first optimizer step has learning rate 0
    if warming or minibatches < 2 or now.get("drift/logprob_abs") != 0 or not moving or now.get("optimizer/empty"):
        return None
    return (
        f"the ratio is exactly 1 in all {minibatches} minibatches of step {now['step']}: the weights do not move, so nothing "
        f"is learned and nothing can be clipped. Raise training.learning_rate = {config.training.learning_rate:g} (or shorten "
        'optimizer.warmup_steps); guards.dead_ratio = "warn" goes on'
    )


def _flat_groups(config: Config, history: History) -> str | None:
    last = history[-PATIENCE:]
    return _flat_line(config, PATIENCE) if len(last) == PATIENCE and all(map(_all_flat, last)) else None


def _all_flat(metrics: Mapping[str, Any]) -> bool:
    return metrics.get("group/flat_fraction") == 1


def _flat_line(config: Config, steps: int) -> str:
    when = "every group of this step is flat" if steps == 1 else f"every group of the last {steps} steps was flat"
    return (
        f"{when} (all members of a group got the same reward): all advantages are 0 and nothing is learned. Choose problems "
        'the policy solves sometimes, raise training.group_size, or set algorithm.flat_groups = "refill"; guards.flat_groups = '
        f'"{"off" if steps == 1 else "warn"}" {"is silent" if steps == 1 else "goes on"}'
    )


def _first_mismatch(config: Config, history: History) -> str | None:
    gap = history[-1].get("mismatch/mean")
    if history[-1]["step"] != 0 or gap is None or gap <= FIRST_MISMATCH:
        return None
    return (
        f"sampler and trainer differ by {gap:.3g} nats per token before any update, more than {FIRST_MISMATCH}: they do not "
        "compute the same policy. Compare policy.temperature, the chat template, dropout and dtypes on both sides; "
        'guards.first_mismatch = "warn" goes on'
    )


def _mismatch_alarm(config: Config, history: History) -> str | None:
    return _engines_differ(history, ALARM_MISMATCH, "mismatch_alarm", "off", "is silent")


def _mismatch_stop(config: Config, history: History) -> str | None:
    return _engines_differ(history, MOST_MISMATCH, "mismatch_stop", "warn", "goes on")


def _engines_differ(history: History, bound: float, guard: str, other: str, then: str) -> str | None:
    """On tokens of the weights that the step started from, so staleness is not in it. The first step has a guard of its own."""
    gap = history[-1].get("mismatch/mean")
    if history[-1]["step"] == 0 or gap is None or gap <= bound:
        return None
    return (
        f"sampler and trainer differ by {gap:.3g} nats per token with the same weights, more than {bound}: the sampler has old "
        "weights or an old cache, or computes another model. Look at weights.published and server.* in events.jsonl, compare "
        f'serving.dtype and model.compute_dtype; guards.{guard} = "{other}" {then}'
    )


def _clip_fraction(config: Config, history: History) -> str | None:
    """Over the minibatches that can clip: in the first the ratio is 1."""
    algorithm = config.algorithm
    if algorithm.variety not in CLIPPED or len(history) < PATIENCE:
        return None
    shares = [[v for name, v in metrics.items() if LATER.match(name)] for metrics in history[-PATIENCE:]]
    if not all(shares) or any(v is None for row in shares for v in row):
        return None
    means = [sum(row) / len(row) for row in shares]
    eps = VARIETIES[algorithm.variety].knobs | constants(algorithm)
    band = f"algorithm.eps_low = {eps['eps_low']:g} and eps_high = {eps['eps_high']:g}"
    if all(x == 0 for x in means):
        return (
            f"nothing was clipped in {PATIENCE} steps: the clip does not act. Narrow {band}, raise training.learning_rate, or "
            'set guards.clip_fraction = "off"'
        )
    if all(x > 0.5 for x in means):
        return (
            f"more than half was clipped in each of {PATIENCE} steps (now {means[-1]:.2f} after the first minibatch): most "
            f'samples give no gradient. Widen {band}, lower training.learning_rate, or set guards.clip_fraction = "off"'
        )
    return None


def _mismatch(config: Config, history: History) -> str | None:
    algorithm = config.algorithm
    variety, gap = VARIETIES[algorithm.variety], history[-1].get("mismatch/sequence_mean")
    if not variety.sequence or gap is None or algorithm.correction.weight != "off":
        return None
    eps = variety.knobs | constants(algorithm)
    half = (eps["eps_low"] + eps["eps_high"]) / 4
    if gap <= half:
        return None
    return (
        f"a trajectory's mean log-probability differs by {gap:.2g} between sampler and trainer, more than half the clip range "
        f'({half:.2g}): the data are off-policy before the first update. Set algorithm.correction.weight = "token_truncate", '
        'compute in float32 (model.compute_dtype), or guards.mismatch = "off"'
    )


def _truncation(config: Config, history: History) -> str | None:
    share = history[-1].get("rollout/truncated_fraction")
    if share is None or share <= TRUNCATED:
        return None
    return (
        f"{share:.0%} of the trajectories were cut, more than {TRUNCATED:.0%}: their rewards say little about their tokens. "
        f'Raise policy.max_tokens = {config.policy.max_tokens} or serving.context_length, set algorithm.overlong = "mask", or '
        'guards.truncation = "off"'
    )
