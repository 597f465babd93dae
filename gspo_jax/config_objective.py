"""What in `[algorithm]` contradicts itself or has no effect: every key changes the result or is an error."""

from collections.abc import Iterator

from gspo_jax.config_report import minibatches
from gspo_jax.guards import wide_eps
from gspo_jax.objective import UNIFORM, VARIETIES, advantage_name, constants
from gspo_jax.sections import Algorithm, Config, Section


def contradictions(config: Config) -> Iterator[str]:
    """One line per key of `[algorithm]` that cannot mean what it says."""
    algorithm = config.algorithm
    yield from _knobs(algorithm)
    yield from _credit(algorithm)
    yield from _kl(algorithm)
    yield from _correction(algorithm)
    if algorithm.correction.off_policy_max is not None and minibatches(config) == 1:
        yield (
            "algorithm.correction.off_policy_max: without effect with one minibatch per step, whose log-ratios are 0; set "
            "training.batch_size to a part of the step's episodes"
        )
    yield from _groups(algorithm)
    most = config.policy.max_tokens
    if algorithm.overlong_buffer > most:
        yield f"algorithm.overlong_buffer: {algorithm.overlong_buffer} is more than policy.max_tokens = {most}; use less"
    if config.guards.wide_eps == "error" and (line := wide_eps(config)):
        yield line


def remarks(config: Config) -> Iterator[str]:
    """Lines about what is allowed and probably not meant."""
    if config.guards.wide_eps == "warn" and (line := wide_eps(config)):
        yield line
    knobs = VARIETIES[config.algorithm.variety].knobs
    if ("eps_low" in knobs or "cap" in knobs) and minibatches(config) == 1:
        yield (
            "training.batch_size: one minibatch per step, so the ratio is always 1 and the clip never acts; for the paper's "
            "four minibatches use a quarter of the step's episodes"
        )
    if config.algorithm.variety == "reinforce" and minibatches(config) > 1:
        yield (
            f"training.batch_size: {minibatches(config)} minibatches per step, and reinforce has no ratio: all but the first "
            "are off policy; use the step's number of episodes"
        )


def _knobs(algorithm: Algorithm) -> Iterator[str]:
    name = algorithm.variety
    variety, given = VARIETIES[name], constants(algorithm)
    for knob, value in given.items():
        if knob in variety.knobs:
            continue
        written = "aggregation" if knob == "aggregate" else knob
        open_to = (other for other, v in VARIETIES.items() if knob in v.knobs and (knob, other) != ("aggregate", "gspo_token"))
        takers = ", ".join(open_to)
        if knob == "aggregate" and value != variety.aggregation:
            yield (
                f'algorithm.aggregation: "{value}" is not {name}, whose denominator is {variety.aggregation}; '
                + ("weighting by length is luspo; " if name == "gspo" else "")
                + f"varieties that leave it open: {takers}"
            )
        elif knob != "aggregate":
            yield f'algorithm.{written}: variety "{name}" does not take it; those that do: {takers}'
    if name == "gspo_token" and given.get("aggregate", "row_mean") != "row_mean":
        yield (
            f'algorithm.aggregation: "{given["aggregate"]}" with a sequence ratio weighs trajectories by length, which is not '
            'GSPO; write variety = "luspo" if that is meant'
        )
    used = variety.knobs | given
    if used.get("ratio_max") is not None and "eps_high" in used and used["ratio_max"] <= 1 + used["eps_high"]:
        yield f"algorithm.ratio_max: {used['ratio_max']} must be above 1 + eps_high = {1 + used['eps_high']:g}"
    if name == "cispo" and used["floor"] >= used["cap"]:
        yield f"algorithm.floor: {used['floor']} must be below cap = {used['cap']}"
    if variety.sequence and used["eps_low"] == 1:
        yield "algorithm.eps_low: 1 never clips; use about 3e-4"


def _credit(algorithm: Algorithm) -> Iterator[str]:
    name, uniform = advantage_name(algorithm), algorithm.variety in UNIFORM
    if algorithm.credit == "turn":
        if uniform:
            yield (
                f'algorithm.credit: "turn" gives each turn its own advantage, and {algorithm.variety} has one per trajectory; '
                'use variety = "gspo_token"'
            )
        if name not in ("group_std", "group_mean"):
            yield f'algorithm.advantage: "{name}" does not go with credit = "turn"; use "group_std" or "group_mean"'
    if name == "per_reward" and not algorithm.reward_weights:
        yield 'algorithm.reward_weights: missing for advantage = "per_reward"; write {metric = weight, ...}'
    if name != "per_reward" and algorithm.reward_weights:
        yield f'algorithm.reward_weights: only advantage = "per_reward" reads them, not "{name}"'
    if name == "per_reward" and algorithm.overlong_buffer:
        yield 'algorithm.overlong_buffer: advantage = "per_reward" does not read the reward it shapes'
    if name == "reinforce_pp" and uniform and algorithm.kl_beta > 0 and algorithm.kl_in == "reward":
        yield (
            f'algorithm.advantage: "reinforce_pp" with the KL in the reward differs from token to token, and '
            f'{algorithm.variety} has one advantage per trajectory; use a token objective or "gspo_token"'
        )


def _kl(algorithm: Algorithm) -> Iterator[str]:
    changed = _changed(algorithm)
    if algorithm.kl_beta == 0:
        for name in ("kl_estimator", "kl_form", "kl_in"):
            if name in changed:
                yield f"algorithm.{name}: without effect while algorithm.kl_beta = 0; set kl_beta, or leave it out"
        return
    if algorithm.kl_in == "reward":
        if "kl_form" in changed:
            yield 'algorithm.kl_form: a KL in the reward has no gradient; leave it out, or write kl_in = "loss"'
        if advantage_name(algorithm) == "per_reward":
            yield 'algorithm.kl_in: "reward" is not read by advantage = "per_reward"; write kl_in = "loss"'
    elif algorithm.kl_estimator == "k1" and algorithm.kl_form == "plain":
        yield 'algorithm.kl_estimator: "k1" as a plain loss has an expected gradient of 0; write "k2", or kl_in = "reward"'
    elif algorithm.kl_estimator == "k2" and algorithm.kl_form == "importance_weighted":
        yield 'algorithm.kl_estimator: "k2" is not unbiased when weighted; write kl_form = "plain", or "k3"'


def _correction(algorithm: Algorithm) -> Iterator[str]:
    correction = algorithm.correction
    changed, on = _changed(correction), correction.weight != "off"
    filters = bool(correction.geometric) or correction.k3_max is not None
    for name in ("low", "high"):
        if name in changed and not on:
            yield f'algorithm.correction.{name}: without effect while weight = "off"'
    smallest = 0.5 if correction.weight.endswith("mask") else 0.0
    low = smallest if correction.low is None else correction.low
    high = 2.0 if correction.high is None else correction.high
    if on and low >= high:
        yield f"algorithm.correction.low: {low:g} must be below high = {high:g}"
    if correction.geometric and (len(correction.geometric) != 2 or correction.geometric[0] >= correction.geometric[1]):
        yield f"algorithm.correction.geometric: {list(correction.geometric)} must be [low, high] with low < high"
    if correction.normalize and not on and not filters:
        yield "algorithm.correction.normalize: without effect while no weight and no filter is set"
    if correction.rejected == "leave" and not correction.weight.endswith("mask") and not filters:
        yield 'algorithm.correction.rejected: "leave" is without effect while nothing rejects; it goes with a mask or a filter'


def _groups(algorithm: Algorithm) -> Iterator[str]:
    changed = _changed(algorithm)
    for name in ("refill_rounds", "refill_short"):
        if name in changed and algorithm.flat_groups != "refill":
            yield f'algorithm.{name}: without effect while flat_groups = "{algorithm.flat_groups}"; it goes with "refill"'
    reads = 'credit = "turn"' if algorithm.credit == "turn" else f'advantage = "{advantage_name(algorithm)}"'
    other = algorithm.credit == "turn" or advantage_name(algorithm) in ("per_reward", "reinforce_pp", "reinforce_pp_baseline")
    if other and algorithm.flat_groups != "keep" and algorithm.correctness is None:
        yield (
            f"algorithm.correctness: missing; with {reads} groups of equal rewards may still differ, so flat_groups = "
            f'"{algorithm.flat_groups}" needs the metric to judge them by'
        )
    if algorithm.correctness and algorithm.flat_groups == "keep":
        yield 'algorithm.correctness: without effect while flat_groups = "keep"; it goes with "skip" and "refill"'


def _changed(section: Section) -> set[str]:
    """The keys that are not at their default: a config read back from a run directory has every key set."""
    return {name for name, field in type(section).model_fields.items() if getattr(section, name) != field.get_default()}
