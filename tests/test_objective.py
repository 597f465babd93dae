"""From a config to an objective: the papers' defaults; every key changes the result, what contradicts is refused by name."""

import inspect
import math
import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers_model import done, group, micro, turn

from gspo_jax.batch import Packing, pack
from gspo_jax.config import ConfigError, minibatch_size, minibatches, parse_config
from gspo_jax.config_checks import ELSEWHERE
from gspo_jax.objective import UNIFORM, VARIETIES, advantage_name, build_objective
from gspo_jax.sections import Algorithm, Correction, keys
from gspo_jax.types import Batch

BASE = {
    "model": {"base": "tiny", "trainer_mode": "full"},
    "policy": {"max_tokens": 40},
    "rollout": {"episodes_per_batch": 16, "max_turns": 2},
    "training": {"iterations_per_epoch": 3, "group_size": 4, "learning_rate": 1e-6},
}
BUDGET = 80
SIGNS = (1.0, -0.5, 2.0, -1.5)
MOVED = ((0.5, 0.1, 0.3, -0.1, 0.6), (-0.5, -0.2), (-0.3, 0.1, -0.4), (0.7, 0.2, 0.45, -0.05))
"""Token log-ratios, new to proximal, of four trajectories: up and down, with advantages of either sign."""
RHO = ((0.2, 0.1, -0.05, 0.15, 0.1), (-0.2, -0.06), (0.05, 0.02, -0.01), (-0.02, 0.01, -0.12, 0.06))
"""Token log-ratios, proximal to sampler."""
SIZES = tuple(map(len, MOVED))
TAKES = {
    "gspo": "eps_low eps_high",
    "gspo_token": "eps_low eps_high",
    "luspo": "eps_low eps_high",
    "gmpo": "eps_low eps_high",
    "ppo": "eps_low eps_high ratio_max aggregation",
    "grpo": "eps_low eps_high ratio_max",
    "dapo": "eps_low eps_high ratio_max",
    "dr_grpo": "eps_low eps_high ratio_max budget",
    "cispo": "cap floor aggregation",
    "sapo": "tau_positive tau_negative aggregation",
    "minirl": "eps_low eps_high aggregation",
    "reinforce": "aggregation",
}
"""The constants each algorithm's formula has, by its paper."""
DENOMINATOR = {
    **dict.fromkeys(("gspo", "gspo_token", "gmpo", "grpo", "sapo", "reinforce"), "row_mean"),
    **dict.fromkeys(("luspo", "minirl"), "row_sum"),
    **dict.fromkeys(("ppo", "dapo", "cispo"), "token_mean"),
    "dr_grpo": "budget_mean",
}
KNOBS = {
    "eps_low": 0.005,
    "eps_high": 0.006,
    "ratio_max": 1.5,
    "cap": 1.5,
    "floor": 0.75,
    "tau_positive": 2.0,
    "tau_negative": 3.0,
    "budget": 7.0,
}


def algorithm_of(*overrides: str) -> Algorithm:
    return parse_config(BASE, overrides)[0].algorithm


def lines(*overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        parse_config(BASE, overrides)
    return caught.value.problems


def laid(rows) -> np.ndarray:
    """Values per trajectory at the trained tokens, 0 elsewhere: one row each, two prompt tokens in front."""
    out = np.zeros((len(rows), 8), np.float32)
    for i, row in enumerate(rows):
        out[i, 2 : 2 + len(row)] = row
    return out


@cache
def tiny_batch() -> Batch:
    """Four trajectories, with what was moved since the start of the step (see MOVED) and sampled apart (see RHO)."""
    rng = np.random.default_rng(3)
    members = [done(turn([1, 2], range(10 * i, 10 * i + len(row))), member=i) for i, row in enumerate(MOVED)]
    batch = micro(pack([group(*members)], [SIGNS], 4, Packing(8, 4, "padded")))
    proximal, difference, entropy = (laid([rng.uniform(low, high, len(row)) for row in MOVED])
                                     for low, high in ((-1.5, -0.8), (-0.5, 0.5), (1.5, 2.5)))  # fmt: skip
    return batch._replace(
        proximal_logprobs=proximal,
        behavior_logprobs=proximal - laid(RHO),
        reference_logprobs=proximal + difference,
        entropy=entropy,
    )


def new_logprobs() -> jax.Array:
    return jnp.asarray(tiny_batch().proximal_logprobs + laid(MOVED))


def objective_of(algorithm: Algorithm, batch: Batch | None = None):
    """The loss as a function of log-probabilities, on the corrected batch."""
    objective, batch = build_objective(algorithm, BUDGET), batch or tiny_batch()
    if objective.prepare:
        batch = batch._replace(weights=correction_weights(algorithm.correction))
    if not objective.reference:
        batch = batch._replace(reference_logprobs=None)  # whoever reads it all the same fails

    def loss(x):
        mean, _ = objective.loss(x, batch)
        return mean.total / mean.count

    return loss


def loss_of(*overrides: str) -> float:
    return float(objective_of(algorithm_of(*overrides))(new_logprobs()))


def measured(algorithm: Algorithm, batch: Batch | None = None) -> np.ndarray:
    """Loss and gradient in one array."""
    value, grad = jax.value_and_grad(objective_of(algorithm, batch))(new_logprobs())
    assert np.isfinite(value)
    return np.concatenate([[value], np.asarray(grad).ravel()])


def prepared(objective, batch: Batch) -> Batch:
    """What the learner does to a whole batch before its first step."""
    whole = Batch(*(None if x is None else np.asarray(x)[None, None] for x in batch))
    out, metrics = objective.prepare(whole)
    assert all(np.isfinite(v) for v in metrics.values())
    return Batch(*(None if x is None else jnp.asarray(x)[0, 0] for x in out))


@cache
def correction_weights(correction: Correction) -> jax.Array:
    """Of tiny_batch(). Only `normalize` and `rejected` look at more than the weights; neither is set where this is used."""
    assert (correction.normalize, correction.rejected) == (False, "stay")
    return prepared(build_objective(Algorithm(correction=correction), BUDGET), tiny_batch()).weights


@cache
def plain(variety: str) -> np.ndarray:
    return measured(Algorithm(variety=variety))


def by_trajectory(values) -> list[np.ndarray]:
    """Values at the trained tokens of each trajectory."""
    values, owner = np.asarray(values, np.float64), np.asarray(tiny_batch().trajectory_ids)
    return [values[owner == i] for i in range(1, len(SIZES) + 1)]


def aggregated(values, name: str, budget: float = BUDGET) -> float:
    """The named denominators in plain numpy."""
    rows = by_trajectory(values)
    return {
        "row_mean": np.mean([row.mean() for row in rows]),
        "row_sum": np.mean([row.sum() for row in rows]),
        "token_mean": np.concatenate(rows).mean(),
        "budget_mean": np.concatenate(rows).sum() / len(rows) / budget,
    }[name]


# Defaults


def test_gspo_alone_is_the_paper():
    """eps 3e-4 and 4e-4, group std, every trajectory equal, no KL, no correction, four minibatches."""
    config, warnings = parse_config(BASE, ["algorithm.variety=gspo"])
    assert warnings == []
    assert (minibatches(config), minibatch_size(config), advantage_name(config.algorithm)) == (4, 4, "group_std")
    objective = build_objective(config.algorithm, BUDGET)
    assert (objective.prepare, objective.reference) == (None, False)
    batch = tiny_batch()._replace(reference_logprobs=None, entropy=None)
    for shift in (0.01, -0.01, 2e-4):
        mean, _ = objective.loss(jnp.where(batch.loss_mask, batch.proximal_logprobs + shift, 0), batch)
        s = math.exp(shift)
        expected = -np.mean([a * (min(s, 1 + 4e-4) if a >= 0 else max(s, 1 - 3e-4)) for a in SIGNS])
        assert float(mean.count) == 4
        assert float(mean.total / mean.count) == pytest.approx(expected, rel=3e-6)
    assert parse_config(BASE)[0].algorithm == config.algorithm


@pytest.mark.parametrize("variety", VARIETIES)
def test_every_variety_is_complete_by_its_name(variety):
    one = ["training.batch_size=16"] if variety == "reinforce" else []  # which is on policy only
    config, warnings = parse_config(BASE, [f"algorithm.variety={variety}", *one])
    assert warnings == []
    found = measured(config.algorithm)
    assert np.isfinite(found).all()
    assert np.abs(found[1:]).max() > 0
    assert VARIETIES[variety].aggregation == DENOMINATOR[variety]
    assert advantage_name(config.algorithm) == ("group_mean" if variety in ("dr_grpo", "minirl") else "group_std")


def test_varieties_are_different_objectives():
    """Two names for one function would make an experiment of nothing. GSPO and GSPO-token agree by their definition."""
    names = [name for name in VARIETIES if name != "gspo_token"]
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            assert not np.allclose(plain(one), plain(other), rtol=1e-4), (one, other)
    np.testing.assert_allclose(plain("gspo"), plain("gspo_token"), rtol=1e-5, atol=1e-7)


def test_dr_grpo_divides_by_the_tokens_a_trajectory_may_have():
    for budget in (BUDGET, 20):
        mean, _ = build_objective(Algorithm(variety="dr_grpo"), budget).loss(new_logprobs(), tiny_batch())
        assert float(mean.count) == len(SIZES) * budget
    assert measured(algorithm_of("algorithm.variety=dr_grpo", "algorithm.budget=20"))[0] == pytest.approx(
        4 * plain("dr_grpo")[0]
    )


# Every key acts or is refused


def overrides_of(variety: str, knob: str, value: float) -> list[str]:
    return [f"algorithm.variety={variety}", f"algorithm.{knob}={value}"]


@pytest.mark.parametrize("variety", VARIETIES)
def test_every_constant_changes_the_loss_or_is_refused(variety):
    """A constant that its algorithm does not have was accepted and ignored."""
    for knob, value in KNOBS.items():
        if knob not in TAKES[variety].split():
            (line,) = lines(*overrides_of(variety, knob, value))
            takers = ", ".join(name for name in VARIETIES if knob in TAKES[name].split())
            assert line == f'algorithm.{knob}: variety "{variety}" does not take it; those that do: {takers}'
            continue
        assert loss_of(*overrides_of(variety, knob, value)) != pytest.approx(plain(variety)[0], rel=1e-5, abs=1e-8), (
            variety,
            knob,
        )


@pytest.mark.parametrize("variety", VARIETIES)
def test_every_denominator_changes_the_loss_or_is_refused(variety):
    """Aggregation is part of an algorithm; a sequence ratio with another one is an algorithm of another name."""
    own, values = DENOMINATOR[variety], {}
    for name in ("row_mean", "row_sum", "token_mean", "budget_mean"):
        overrides = (f"algorithm.variety={variety}", f"algorithm.aggregation={name}")
        if name == own:
            assert loss_of(*overrides) == pytest.approx(plain(variety)[0], rel=1e-6)
        elif "aggregation" in TAKES[variety].split():
            values[name] = loss_of(*overrides)
            assert values[name] != pytest.approx(plain(variety)[0], rel=1e-4), (variety, name)
        else:
            (line,) = lines(*overrides)
            assert line.startswith(f'algorithm.aggregation: "{name}" ')
            if variety in ("gspo", "gspo_token"):
                assert "luspo" in line
            elif variety != "luspo":
                assert f"is not {variety}, whose denominator is {own}; varieties that leave it open: " in line
    if "budget_mean" in values:  # the budget of an open denominator is policy.max_tokens * rollout.max_turns
        assert values["budget_mean"] * BUDGET == pytest.approx(values.get("row_sum", plain(variety)[0]), rel=1e-5)


@pytest.mark.parametrize("variety", VARIETIES)
@pytest.mark.parametrize(
    "overrides",
    [
        ("algorithm.kl_beta=0.1",),
        ("algorithm.entropy_bonus=0.1",),
        ("algorithm.correction.weight=token_truncate",),
        ("algorithm.correction.weight=sequence_mask", "algorithm.correction.high=1.1"),
        ("algorithm.correction.geometric=[0.97, 1.03]",),
        ("algorithm.correction.k3_max=0.005",),
        ("algorithm.correction.off_policy_max=0.001",),
    ],
    ids=lambda o: o[0].removeprefix("algorithm."),
)
def test_every_penalty_and_correction_acts_on_every_variety(variety, overrides):
    """An option was honoured by the token losses and dropped on the way to the sequence losses."""
    assert loss_of(f"algorithm.variety={variety}", *overrides) != pytest.approx(plain(variety)[0], rel=1e-4)


def test_every_way_to_a_kl_is_another_loss_or_gradient():
    seen = []
    for estimator in ("k1", "k2", "k3"):
        for form in ("importance_weighted", "plain", "straight_through"):
            if (estimator, form) in (("k1", "plain"), ("k2", "importance_weighted")):  # refused
                continue
            given = ("algorithm.kl_beta=0.1", f"algorithm.kl_estimator={estimator}", f"algorithm.kl_form={form}")
            seen.append(((estimator, form), measured(algorithm_of(*given))))
    for i, (name, found) in enumerate(seen):
        for other, against in seen[i + 1 :]:
            same = {name, other} == {("k2", "plain"), ("k2", "straight_through")}  # the value and gradient of k2, by definition
            assert np.allclose(found, against, rtol=1e-5, atol=1e-7) == same, (name, other)


# Penalties


def test_kl_is_beta_times_the_estimate_under_the_losss_denominator():
    """k3 straight through: the value is k3's, whatever the ratio."""
    d = np.where(tiny_batch().loss_mask, np.asarray(new_logprobs(), np.float64) - tiny_batch().reference_logprobs, 0)
    k3 = np.exp(-d) - 1 + d
    for variety in ("gspo", "luspo", "dapo", "dr_grpo"):
        found = loss_of(f"algorithm.variety={variety}", "algorithm.kl_beta=0.1", "algorithm.kl_form=straight_through")
        assert found - plain(variety)[0] == pytest.approx(0.1 * aggregated(k3, DENOMINATOR[variety]), rel=1e-4), variety


def test_a_reference_is_asked_for_only_when_the_loss_reads_it():
    """A run without a KL loaded a second model; a run with one in the reward needs it outside the loss."""
    off, loss, reward = (
        build_objective(algorithm_of(*given), BUDGET)
        for given in ((), ("algorithm.kl_beta=0.1",), ("algorithm.kl_beta=0.1", "algorithm.kl_in=reward"))
    )
    assert (off.reference, loss.reference, reward.reference) == (False, True, False)
    batch = tiny_batch()._replace(reference_logprobs=None)
    for objective in (off, reward):
        mean, _ = objective.loss(new_logprobs(), batch)
        assert float(mean.total / mean.count) == pytest.approx(plain("gspo")[0], rel=1e-6)
    with pytest.raises(ValueError, match="a KL penalty needs batch\\.reference_logprobs"):
        loss.loss(new_logprobs(), batch)


@pytest.mark.parametrize("variety", VARIETIES)
def test_entropy_bonus_is_under_the_losss_own_denominator(variety):
    """-c times the mean entropy, where mean is what the policy term means by it."""
    found = loss_of(f"algorithm.variety={variety}", "algorithm.entropy_bonus=0.3")
    bonus = 0.3 * aggregated(tiny_batch().entropy, DENOMINATOR[variety])
    assert found - plain(variety)[0] == pytest.approx(-bonus, rel=1e-4)


@pytest.mark.parametrize("aggregation", ["row_mean", "row_sum", "budget_mean"])
def test_penalties_follow_a_denominator_that_is_set(aggregation):
    given = ("algorithm.variety=ppo", f"algorithm.aggregation={aggregation}")
    without, with_bonus = loss_of(*given), loss_of(*given, "algorithm.entropy_bonus=0.3")
    assert with_bonus - without == pytest.approx(-0.3 * aggregated(tiny_batch().entropy, aggregation), rel=1e-4)


# Corrections


def rho() -> list[np.ndarray]:
    return [np.array(row) for row in RHO]


def weights_of(**correction) -> list[np.ndarray]:
    objective = build_objective(Algorithm(correction=Correction(**correction)), BUDGET)
    return by_trajectory(prepared(objective, tiny_batch()).weights)


def bounded(ratio: np.ndarray, action: str, low: float, high: float) -> np.ndarray:
    return np.clip(ratio, low, high) if action == "truncate" else np.where((ratio >= low) & (ratio <= high), ratio, 0)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("action", ["truncate", "mask"])
def test_correction_weights_are_the_ratio_of_trainer_to_sampler(level, action):
    """Per token, or the product over the trajectory; cut to the bounds, or 0 outside them."""
    low, high = 0.9, 1.2
    found = weights_of(weight=f"{level}_{action}", low=low, high=high)
    ratios = [np.exp(r) if level == "token" else np.full(r.size, math.exp(r.sum())) for r in rho()]
    for row, ratio in zip(found, ratios, strict=True):
        np.testing.assert_allclose(row, bounded(ratio, action, low, high), rtol=1e-5)
    every = np.concatenate(ratios)
    assert min(np.sum(every < low), np.sum(every > high), np.sum((every > low) & (every < high))) > 0


def test_correction_without_bounds_set_is_0_to_2():
    for row, r in zip(weights_of(weight="token_truncate"), rho(), strict=True):
        np.testing.assert_allclose(row, np.minimum(np.exp(r), 2.0), rtol=1e-5)


def kept(rows: list[np.ndarray], keep: list[bool]) -> None:
    assert any(keep)
    assert not all(keep)
    for row, yes in zip(rows, keep, strict=True):
        np.testing.assert_array_equal(row, float(yes))


def test_filters_keep_or_drop_whole_trajectories():
    means = [r.mean() for r in rho()]
    edge = math.exp(sorted(map(abs, means))[1] + 1e-4)
    kept(weights_of(geometric=(1 / edge, edge)), [1 / edge <= math.exp(m) <= edge for m in means])
    gaps = [np.mean(np.exp(r) - 1 - r) for r in rho()]
    most = float(np.mean(sorted(gaps)[1:3]))
    kept(weights_of(k3_max=most), [g <= most for g in gaps])


def test_everything_set_is_multiplied():
    edge = math.exp(sorted(abs(r.mean()) for r in rho())[2] + 1e-4)
    both = weights_of(weight="token_truncate", high=1.1, geometric=(1 / edge, edge), k3_max=10.0)
    for row, a, b in zip(
        both, weights_of(weight="token_truncate", high=1.1), weights_of(geometric=(1 / edge, edge)), strict=True
    ):
        np.testing.assert_allclose(row, a * b, rtol=1e-6)
    assert any(not row.any() for row in both)


@pytest.mark.parametrize(("variety", "aggregation"), [("gspo", "row_mean"), ("dapo", "token_mean")])
def test_normalized_weights_have_mean_1_under_the_losss_denominator(variety, aggregation):
    correction = Correction(weight="token_truncate", normalize=True)
    objective = build_objective(Algorithm(variety=variety, correction=correction), BUDGET)
    weights = prepared(objective, tiny_batch()).weights
    raw = np.where(
        tiny_batch().loss_mask, np.minimum(np.exp(tiny_batch().proximal_logprobs - tiny_batch().behavior_logprobs), 2), 0
    )
    assert aggregated(weights, aggregation) == pytest.approx(1.0, rel=1e-5)
    for row, each in zip(by_trajectory(weights), by_trajectory(raw), strict=True):
        np.testing.assert_allclose(row, each / aggregated(raw, aggregation), rtol=1e-5)


def test_rejected_trajectories_stay_in_the_denominator_or_leave_it():
    means = sorted(abs(r.mean()) for r in rho())
    edge = math.exp(means[1] + 1e-4)
    for rejected, count in (("stay", 4), ("leave", 2)):
        objective = build_objective(Algorithm(correction=Correction(geometric=(1 / edge, edge), rejected=rejected)), BUDGET)
        batch = prepared(objective, tiny_batch())
        mean, _ = objective.loss(new_logprobs(), batch)
        assert float(mean.count) == count
    assert float(mean.total) != 0


def test_off_policy_max_drops_what_fell_and_was_bad():
    """Negative advantage and a mean log-ratio below -max: the term is 0, the denominator is not."""
    batch, most = tiny_batch(), 0.05
    fell = [-np.mean(row) for row in MOVED]
    drop = [gap > most and sign < 0 for gap, sign in zip(fell, SIGNS, strict=True)]
    assert any(drop)
    assert any(gap > most and sign > 0 for gap, sign in zip(fell, SIGNS, strict=True))
    found = measured(algorithm_of("algorithm.variety=grpo", f"algorithm.correction.off_policy_max={most}"))
    gone = np.array([0.0, *(float(d) for d in drop)])[np.asarray(batch.trajectory_ids)]
    expected = measured(
        Algorithm(variety="grpo"), batch._replace(advantages=np.where(gone, 0, batch.advantages).astype(np.float32))
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)
    assert not np.allclose(found, plain("grpo"), rtol=1e-3)
    objective = build_objective(algorithm_of(f"algorithm.correction.off_policy_max={most}"), BUDGET)
    mean, stats = objective.loss(new_logprobs(), batch)
    assert objective.prepare is None
    assert float(mean.count) == len(SIZES)
    dropped = sum(n for n, d in zip(SIZES, drop, strict=True) if d)
    assert float(stats["correction/off_policy_fraction"].value) == pytest.approx(dropped / sum(SIZES))


def test_off_policy_drops_join_the_sampler_weights():
    given = Correction(weight="token_truncate", off_policy_max=0.05)
    both = measured(Algorithm(correction=given))
    assert not np.allclose(both, measured(Algorithm(correction=Correction(weight="token_truncate"))), rtol=1e-3)
    assert not np.allclose(both, measured(Algorithm(correction=Correction(off_policy_max=0.05))), rtol=1e-3)


# Contradictions


CASES = {
    "sequence ratio, token mean": (
        ["variety=gspo", "aggregation=token_mean"],
        'algorithm.aggregation: "token_mean" is not gspo, whose denominator is row_mean; weighting by length is luspo; '
        "varieties that leave it open: ",
    ),
    "token advantages, token mean": (
        ["variety=gspo_token", "aggregation=token_mean"],
        'algorithm.aggregation: "token_mean" with a sequence ratio weighs trajectories by length, which is not GSPO; '
        'write variety = "luspo" if that is meant',
    ),
    "dapo per trajectory": (
        ["variety=dapo", "aggregation=row_mean"],
        'algorithm.aggregation: "row_mean" is not dapo, whose denominator is token_mean; varieties that leave it open: ',
    ),
    "a constant of another": (
        ["variety=gspo", "cap=5.0"],
        'algorithm.cap: variety "gspo" does not take it; those that do: cispo',
    ),
    "ratio_max inside the band": (
        ["variety=dapo", "ratio_max=1.28"],
        "algorithm.ratio_max: 1.28 must be above 1 + eps_high = 1.28",
    ),
    "floor above cap": (["variety=cispo", "floor=5.0"], "algorithm.floor: 5.0 must be below cap = 5.0"),
    "credit per turn": (
        ["variety=gspo", "credit=turn"],
        'algorithm.credit: "turn" gives each turn its own advantage, and gspo has one per trajectory; use variety = "gspo_t',
    ),
    "turns and leave_one_out": (
        ["variety=gspo_token", "credit=turn", "advantage=leave_one_out"],
        'algorithm.advantage: "leave_one_out" does not go with credit = "turn"; use "group_std" or "group_mean"',
    ),
    "no weights": (
        ["advantage=per_reward"],
        'algorithm.reward_weights: missing for advantage = "per_reward"; write {metric = weight, ...}',
    ),
    "weights for nothing": (
        ["reward_weights={right = 1.0}"],
        'algorithm.reward_weights: only advantage = "per_reward" reads them, not "group_std"',
    ),
    "per_reward and length": (
        ["advantage=per_reward", "reward_weights={right = 1.0}", "overlong_buffer=8"],
        'algorithm.overlong_buffer: advantage = "per_reward" does not read the reward it shapes',
    ),
    "per_reward and KL": (
        ["advantage=per_reward", "reward_weights={right = 1.0}", "kl_beta=0.1", "kl_in=reward"],
        'algorithm.kl_in: "reward" is not read by advantage = "per_reward"; write kl_in = "loss"',
    ),
    "token rewards, sequence objective": (
        ["variety=gmpo", "advantage=reinforce_pp", "kl_beta=0.1", "kl_in=reward"],
        'algorithm.advantage: "reinforce_pp" with the KL in the reward differs from token to token, and gmpo has one advantage '
        'per trajectory; use a token objective or "gspo_token"',
    ),
    "an estimator of nothing": (
        ["kl_estimator=k2"],
        "algorithm.kl_estimator: without effect while algorithm.kl_beta = 0; set kl_beta, or leave it out",
    ),
    "a form of nothing": (["kl_form=plain"], "algorithm.kl_form: without effect while algorithm.kl_beta = 0; set kl_beta, "),
    "a place for nothing": (["kl_in=reward"], "algorithm.kl_in: without effect while algorithm.kl_beta = 0; set kl_beta, "),
    "a gradient of the reward": (
        ["kl_beta=0.1", "kl_in=reward", "kl_form=plain"],
        'algorithm.kl_form: a KL in the reward has no gradient; leave it out, or write kl_in = "loss"',
    ),
    "a loss without gradient": (
        ["kl_beta=0.1", "kl_estimator=k1", "kl_form=plain"],
        'algorithm.kl_estimator: "k1" as a plain loss has an expected gradient of 0; write "k2", or kl_in = "reward"',
    ),
    "a bound of nothing": (["correction.low=0.5"], 'algorithm.correction.low: without effect while weight = "off"'),
    "a cap of nothing": (["correction.high=3.0"], 'algorithm.correction.high: without effect while weight = "off"'),
    "bounds crossed": (
        ["correction.weight=token_mask", "correction.low=2.0"],
        "algorithm.correction.low: 2 must be below high = 2",
    ),
    "band crossed": (
        ["correction.geometric=[1.01, 0.99]"],
        "algorithm.correction.geometric: [1.01, 0.99] must be [low, high] with low < high",
    ),
    "band of one": (
        ["correction.geometric=[1.01]"],
        "algorithm.correction.geometric: [1.01] must be [low, high] with low < high",
    ),
    "normalize nothing": (
        ["correction.normalize=true"],
        "algorithm.correction.normalize: without effect while no weight and no filter is set",
    ),
    "weighted k2": (["kl_beta=0.1", "kl_estimator=k2"], 'algorithm.kl_estimator: "k2" is not unbiased when weighted; write'),
    "mask above its default low": (
        ["correction.weight=sequence_mask", "correction.high=0.4"],
        "algorithm.correction.low: 0.5 must be below high = 0.4",
    ),
    "turns that may differ at equal rewards": (
        ["variety=gspo_token", "credit=turn", "flat_groups=skip"],
        'algorithm.correctness: missing; with credit = "turn" groups of equal rewards may still differ',
    ),
    "whitened flat groups": (
        ["advantage=reinforce_pp_baseline", "flat_groups=refill"],
        'algorithm.correctness: missing; with advantage = "reinforce_pp_baseline"',
    ),
    "reject nothing": (
        ["correction.rejected=leave", "correction.weight=token_truncate"],
        'algorithm.correction.rejected: "leave" is without effect while nothing rejects; it goes with a mask or a filter',
    ),
    "rounds of nothing": (
        ["refill_rounds=5"],
        'algorithm.refill_rounds: without effect while flat_groups = "keep"; it goes with "refill"',
    ),
    "short of nothing": (
        ["flat_groups=skip", "refill_short=stop"],
        'algorithm.refill_short: without effect while flat_groups = "skip"; it goes with "refill"',
    ),
    "correctness of nothing": (
        ["correctness=right"],
        'algorithm.correctness: without effect while flat_groups = "keep"; it goes with "skip" and "refill"',
    ),
    "buffer": (["overlong_buffer=41"], "algorithm.overlong_buffer: 41 is more than policy.max_tokens = 40; use less"),
    "wide": (
        ["eps_high=0.2"],
        "algorithm.eps_high: 0.2 is a token-scale clip range, and the sequence ratio of gspo stays near 1",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_contradiction_is_one_line_that_names_the_key_and_the_way_out(case):
    overrides, expected = CASES[case]
    (line,) = lines(*(f"algorithm.{o}" for o in overrides))
    assert line.startswith(expected)


def test_keys_that_need_several_minibatches():
    """One minibatch per step: its log-ratios are 0, so the off-policy filter never acts; reinforce wants exactly that."""
    one = "training.batch_size=16"
    (line,) = lines("algorithm.correction.off_policy_max=0.1", one)
    assert line.startswith("algorithm.correction.off_policy_max: without effect with one minibatch per step")
    (warning,) = parse_config(BASE, ["algorithm.variety=reinforce"])[1]
    assert warning.startswith("training.batch_size: 4 minibatches per step, and reinforce has no ratio")
    assert parse_config(BASE, ["algorithm.variety=reinforce", one])[1] == []


def test_a_clip_range_that_never_clips_is_refused_also_when_wide_ones_are_allowed():
    assert lines("algorithm.eps_low=1.0", "guards.wide_eps=off") == ("algorithm.eps_low: 1 never clips; use about 3e-4",)
    assert parse_config(BASE, ["algorithm.variety=grpo", "algorithm.eps_low=1.0"])[1] == []


def test_what_is_nearly_a_contradiction_loads():
    """The same keys where they do have an effect."""
    for overrides in (
        ["variety=dapo", "ratio_max=1.29"],
        ["variety=cispo", "floor=4.9"],
        ["variety=gspo_token", "credit=turn", "advantage=group_mean"],
        ["variety=grpo", "credit=turn"],
        ["advantage=per_reward", "reward_weights={right = 1.0}", "kl_beta=0.1"],
        ["variety=gspo_token", "advantage=reinforce_pp", "kl_beta=0.1", "kl_in=reward"],
        ["advantage=reinforce_pp", "kl_beta=0.1"],
        ["kl_beta=0.1", "kl_estimator=k1"],
        ["kl_beta=0.1", "kl_estimator=k1", "kl_in=reward"],
        ["correction.weight=token_truncate", "correction.low=0.5", "correction.high=3.0", "correction.normalize=true"],
        ["correction.geometric=[0.99, 1.01]", "correction.rejected=leave"],
        ["correction.k3_max=0.1", "correction.normalize=true"],
        ["flat_groups=refill", "refill_rounds=5", "refill_short=stop", "correctness=right"],
        ["flat_groups=skip", "correctness=right"],
        ["overlong_buffer=40", "overlong=mask"],
    ):
        assert parse_config(BASE, [f"algorithm.{o}" for o in overrides])[1] == [], overrides


def test_contradictions_are_reported_together_with_the_others():
    found = lines(
        "algorithm.cap=2.0",
        "algorithm.kl_in=reward",
        "algorithm.correction.high=3.0",
        "algorithm.refill_rounds=1",
        "algorithm.eps_low=0.2",
        "policy.top_p=0.9",
        "training.batch_size=5",
    )
    assert sorted(line.partition(":")[0] for line in found) == [
        "algorithm.cap",
        "algorithm.correction.high",
        "algorithm.eps_low",
        "algorithm.kl_in",
        "algorithm.refill_rounds",
        "policy.top_p",
        "training.batch_size",
    ]


def test_one_minibatch_makes_a_clip_idle_and_is_remarked_on():
    """A ratio that is 1 by construction: the clip range is decoration."""
    one = "training.batch_size=16"
    for variety in VARIETIES:
        warnings = parse_config(BASE, [f"algorithm.variety={variety}", one])[1]
        clips = variety not in ("sapo", "reinforce")
        assert [w.startswith("training.batch_size: one minibatch per step, so the ratio is always 1") for w in warnings] == [
            True
        ] * clips


# Names of other stacks


@pytest.mark.parametrize("name", ELSEWHERE)
def test_another_stacks_name_is_answered_with_ours(name):
    target = ELSEWHERE[name]
    assert f"algorithm.{target}" in keys(), "it points at a key that does not exist"
    assert f"algorithm.{name}" not in keys(), "it shadows a key of ours"
    assert lines(f"algorithm.{name}=0.1") == (f"algorithm.{name}: unknown key; here it is called algorithm.{target}",)


def test_names_elsewhere_and_mistakes_are_reported_at_once():
    """One name per attempt would be a long afternoon."""
    found = lines("algorithm.clip_ratio=0.2", "algorithm.beta=0.1", "algorithm.kl_betta=0.1", "algorithm.variety=gsop")
    assert {line.partition(":")[0] for line in found} == {
        f"algorithm.{n}" for n in ("clip_ratio", "beta", "kl_betta", "variety")
    }
    assert "algorithm.kl_betta: unknown key; did you mean algorithm.kl_beta?" in found


def test_the_table_of_varieties_is_that_of_the_papers():
    """A new constant of a loss has to be reachable by a key, and listed here."""
    renamed = {"aggregate": "aggregation"}
    for name, variety in VARIETIES.items():
        offered = {renamed.get(p, p) for p in variety.knobs} - ({"aggregation"} if name == "gspo_token" else set())
        assert offered == set(TAKES[name].split()), name
        assert (name in UNIFORM) == (name in ("gspo", "luspo", "gmpo"))
        assert set(inspect.signature(variety.loss).parameters) >= {"logprobs", "batch"}
        assert re.search(rf"arXiv|row_mean|{name}", variety.loss.__doc__ or "")
    assert {*KNOBS, "aggregation"} == {k for row in TAKES.values() for k in row.split()}
