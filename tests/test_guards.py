"""Guards: each fires exactly where its definition says, once per onset, and says what to change in the config."""

import math
import re

import jax.numpy as jnp
import numpy as np
import pytest
from helpers_model import done, group, micro, turn

from gspo_jax.batch import Packing, pack
from gspo_jax.config import ConfigError, parse_config
from gspo_jax.guards import FIRST_MISMATCH, PATIENCE, TRUNCATED, Finding, check
from gspo_jax.losses import gspo
from gspo_jax.metrics import finite, with_aliases
from gspo_jax.runlog import append, read_lines
from gspo_jax.sections import Config, Guards, keys

BASE = {
    "model": {"base": "tiny", "trainer_mode": "full"},
    "rollout": {"episodes_per_batch": 16},
    "training": {"iterations_per_epoch": 3, "group_size": 4, "learning_rate": 1e-6},
}
HEALTHY = {
    **{f"policy/ratio_mean_{i}": 1.0 + 1e-5 * (i - 1) for i in (1, 2, 3, 4)},
    **{f"policy/clip_fraction_{i}": 0.1 * (i - 1) for i in (1, 2, 3, 4)},
    "policy/clip_fraction": 0.15,
    "policy/clip_fraction_low": 0.05,
    "policy/clip_fraction_to_16": 0.9,
    "drift/logprob_abs": 1e-4,
    "optimizer/grad_norm": 0.3,
    "optimizer/skipped": 0.0,
    "optimizer/empty": 0.0,
    "group/flat_fraction": 0.75,
    "mismatch/mean": 1e-3,
    "mismatch/sequence_mean": 1e-5,
    "rollout/truncated_fraction": 0.05,
}
BAD = {
    "dead_ratio": {"drift/logprob_abs": 0.0},
    "flat_groups": {"group/flat_fraction": 1.0},
    "first_mismatch": {"mismatch/mean": 0.86},
    "clip_fraction": {f"policy/clip_fraction_{i}": 0.0 for i in (2, 3, 4)},
    "mismatch_alarm": {"mismatch/mean": 0.06},
    "mismatch_stop": {"mismatch/mean": 0.3},
    "mismatch": {"mismatch/sequence_mean": 1e-3},
    "truncation": {"rollout/truncated_fraction": 0.5},
}
"""What makes each guard fire, kept up for `PATIENCE` steps from step 0."""


def config_of(*overrides: str) -> Config:
    return parse_config(BASE, overrides)[0]


def observed(config: Config, steps, first: int = 0, history=()) -> list[tuple[int, Finding]]:
    """Every finding of consecutive steps, each a change to HEALTHY, looked at as a run looks at its steps."""
    out, history = [], list(history)
    for number, changed in enumerate(steps, first):
        history = [*history, {"step": number, **HEALTHY, **changed}][-PATIENCE - 1 :]
        out += [(number, finding) for finding in check(config, history)]
    return out


def fired(config: Config, *steps) -> list[tuple[int, str, str]]:
    return [(number, f.severity, f.guard) for number, f in observed(config, steps)]


def test_a_healthy_run_is_not_disturbed():
    assert fired(config_of(), *[{}] * (2 * PATIENCE + 5)) == []
    assert check(config_of(), []) == []


def test_every_guard_names_its_cause_and_existing_keys():
    """A message about a key that does not exist sends people looking for it."""
    words = {
        "dead_ratio": "exactly 1 in all 4 minibatches of step 0",
        "flat_groups": "every group of the last 20 steps was flat",
        "first_mismatch": "0.86 nats per token before any update",
        "clip_fraction": "nothing was clipped in 20 steps",
        "mismatch_alarm": "0.06 nats per token with the same weights, more than 0.05",
        "mismatch_stop": "0.3 nats per token with the same weights, more than 0.2",
        "mismatch": "differs by 0.001 between sampler and trainer",
        "truncation": "50% of the trajectories were cut",
    }
    assert words.keys() == BAD.keys() == Guards.model_fields.keys() - {"wide_eps"}
    for name, changed in BAD.items():
        found = [f for _, f in observed(config_of(), [changed] * PATIENCE) if f.guard == name]
        text = (found[-1] if name == "flat_groups" else found[0]).message
        assert words[name] in text
        assert f"guards.{name} = " in text
        named = set(re.findall(r"\b(?:algorithm|guards|model|optimizer|policy|serving|training)(?:\.[a-z_]+)+", text))
        assert len(named) > 1, "only how to be silent, not what to change"
        assert named <= keys().keys() | {"policy.max_tokens"}
        assert "\n" not in text


# Each guard at its edges


@pytest.mark.parametrize(
    ("changed", "dead"),
    [
        ({}, True),
        ({"drift/logprob_abs": 1e-12}, False),  # the smallest movement is a movement
        ({"drift/logprob_abs": None}, False),
        ({"optimizer/grad_norm": 0.0}, False),  # nothing to learn: weights were not meant to move
        ({"optimizer/grad_norm": None}, False),
        ({"optimizer/skipped": 1.0}, False),
        ({"optimizer/empty": 1.0}, False),
    ],
)
def test_dead_ratio_means_weights_that_should_have_moved(changed, dead):
    found = fired(config_of(), {**BAD["dead_ratio"], **changed})
    assert found == [(0, "error", "dead_ratio")] * dead


def test_a_warm_up_starts_at_a_learning_rate_of_0():
    """Its first optimizer steps move nothing; the guard waits until it is over."""
    config = config_of("optimizer.warmup_steps=5")
    assert fired(config, *[BAD["dead_ratio"]] * 3) == [(2, "error", "dead_ratio")]  # steps of four minibatches


def test_one_minibatch_has_a_ratio_of_1_by_construction():
    """A run of one minibatch a step was stopped for the only ratio it can have."""
    names = [f"policy/{kind}_{i}" for kind in ("ratio_mean", "clip_fraction") for i in (2, 3, 4)]
    one = {"step": 0, **{k: v for k, v in HEALTHY.items() if k not in names}, "drift/logprob_abs": 0.0}
    for step in range(2 * PATIENCE):
        assert check(config_of(), [{**one, "step": i} for i in range(step + 1)]) == []
    two = one | {"policy/ratio_mean_2": 1.0}
    assert [f.guard for f in check(config_of(), [two])] == ["dead_ratio"]


def test_flat_groups_warn_at_first_and_stop_after_twenty():
    flat = BAD["flat_groups"]
    assert fired(config_of(), *[flat] * PATIENCE) == [(0, "warn", "flat_groups"), (PATIENCE - 1, "error", "flat_groups")]
    almost = {"group/flat_fraction": 0.999}
    steps = [*[flat] * (PATIENCE - 1), almost, *[flat] * (PATIENCE - 1)]
    assert fired(config_of(), *steps) == [(0, "warn", "flat_groups"), (PATIENCE, "warn", "flat_groups")]
    assert fired(config_of("guards.flat_groups=warn"), *[flat] * 3 * PATIENCE) == [(0, "warn", "flat_groups")]
    assert fired(config_of("guards.flat_groups=off"), *[flat] * 3 * PATIENCE) == []


def test_alg_15_first_mismatch_is_looked_at_before_any_update_only():
    """Dropout left on in the trainer: 0.86 nats per token from the sampler with the weights untouched."""
    config = config_of("guards.mismatch=off", "guards.mismatch_alarm=off", "guards.mismatch_stop=off")
    for gap, bad in ((0.86, True), (math.nextafter(FIRST_MISMATCH, 1), True), (FIRST_MISMATCH, False), (None, False)):
        assert fired(config, {"mismatch/mean": gap}) == [(0, "error", "first_mismatch")] * bad
    assert fired(config, {}, *[BAD["first_mismatch"]] * 3) == []
    assert FIRST_MISMATCH == 0.05


@pytest.mark.parametrize(("guard", "bound"), [("mismatch_alarm", 0.05), ("mismatch_stop", 0.2)])
def test_wsy_01_a_gap_that_opens_later_is_noticed(guard, bound):
    """Trainer and sampler drifted apart step after step, with nobody looking after the first."""
    severity = {"mismatch_alarm": "warn", "mismatch_stop": "error"}[guard]
    for gap, bad in ((math.nextafter(bound, 1), True), (bound, False), (None, False)):
        found = [each for each in fired(config_of(), {}, {"mismatch/mean": gap}) if each[2] == guard]
        assert found == [(1, severity, guard)] * bad
    assert guard not in {each[2] for each in fired(config_of("guards.first_mismatch=off"), {"mismatch/mean": 1.0})}


def clips(*shares: float) -> dict[str, float]:
    return {f"policy/clip_fraction_{i}": share for i, share in enumerate(shares, 1)}


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([clips(0, 0, 0, 0)] * PATIENCE, "nothing was clipped"),
        ([clips(0.9, 0, 0, 0)] * PATIENCE, "nothing was clipped"),  # the first minibatch cannot clip
        ([clips(0, 0, 0, 0)] * (PATIENCE - 1), None),
        ([*[clips(0, 0, 0, 0)] * (PATIENCE - 1), clips(0, 0, 0, 0.01)], None),
        ([clips(0, 0.6, 0.6, 0.6)] * PATIENCE, "more than half"),  # 0.45 over all four
        ([clips(0, 0.25, 0.5, 0.75)] * PATIENCE, None),  # exactly half
        ([*[clips(0, 1, 1, 1)] * (PATIENCE - 1), clips(0, 0.5, 0.5, 0.5)], None),
        ([*[clips(0, 1, 1, 1)] * 10, *[clips(0, 0, 0, 0)] * 10], None),
        ([*[clips(0, 0.2, 0.2, 0.2)] * 30, *[clips(0, 1, 1, 1)] * PATIENCE], "more than half"),
    ],
)
def test_alg_17_clip_share_of_twenty_steps(steps, expected):
    """0 or more than half, in every one of 20 steps, over the minibatches after the first."""
    found = observed(config_of(), steps)
    assert len(found) == (expected is not None)
    for number, finding in found:
        assert (number, finding.severity, finding.guard) == (len(steps) - 1, "warn", "clip_fraction")
        assert expected in finding.message
        assert "algorithm.eps_low = 0.0003 and eps_high = 0.0004" in finding.message


@pytest.mark.parametrize("variety", ["gspo", "gspo_token", "luspo", "gmpo", "ppo", "grpo", "dapo", "dr_grpo", "minirl"])
def test_clip_share_is_watched_where_there_is_a_clip(variety):
    found = fired(config_of(f"algorithm.variety={variety}"), *[clips(0, 0, 0, 0)] * PATIENCE)
    assert found == [(PATIENCE - 1, "warn", "clip_fraction")]


@pytest.mark.parametrize("variety", ["cispo", "sapo", "reinforce"])
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_clip_share_is_not_watched_where_there_is_none(variety, share):
    """A soft gate never clips; that is no fault of the run."""
    assert fired(config_of(f"algorithm.variety={variety}"), *[clips(*[share] * 4)] * (PATIENCE + 2)) == []


def test_mismatch_is_measured_against_half_the_clip_range():
    half = (3e-4 + 4e-4) / 4  # the band is 7e-4 wide; half of it on either side of its middle
    for gap, wide in ((half * 1.01, True), (half * 0.99, False), (None, False)):
        assert fired(config_of(), {"mismatch/sequence_mean": gap}) == [(0, "warn", "mismatch")] * wide
    wider = config_of("algorithm.eps_low=0.004", "algorithm.eps_high=0.008")
    assert fired(wider, {"mismatch/sequence_mean": 0.0029}) == []
    assert fired(wider, {"mismatch/sequence_mean": 0.0031}) == [(0, "warn", "mismatch")]


def test_mismatch_is_no_matter_for_token_ratios_or_when_corrected():
    gap = {"mismatch/sequence_mean": 0.01}
    assert fired(config_of("algorithm.variety=grpo"), gap) == []
    assert fired(config_of("algorithm.correction.weight=token_truncate"), gap) == []
    for variety in ("gspo_token", "luspo"):
        assert fired(config_of(f"algorithm.variety={variety}"), gap) == [(0, "warn", "mismatch")]


def test_truncation_above_a_tenth():
    for share, cut in ((TRUNCATED, False), (0.11, True), (None, False)):
        assert fired(config_of(), {"rollout/truncated_fraction": share}) == [(0, "warn", "truncation")] * cut
    assert TRUNCATED == 0.1


# How often, and how loud


@pytest.mark.parametrize("name", ["mismatch", "truncation"])
def test_a_warning_is_told_when_it_begins_and_when_it_comes_back(name):
    """The same line every step buries the log; silence after it came back hides it."""
    bad = BAD[name]
    assert fired(config_of(), {}, bad, bad, bad, {}, {}, bad, bad) == [(1, "warn", name), (6, "warn", name)]


def test_the_clip_warning_comes_back_after_twenty_more_steps():
    bad, good = clips(0, 0, 0, 0), clips(0, 0.2, 0.2, 0.2)
    found = fired(config_of(), *[bad] * (PATIENCE + 5), good, *[bad] * (PATIENCE + 5))
    assert found == [(PATIENCE - 1, "warn", "clip_fraction"), (2 * PATIENCE + 5, "warn", "clip_fraction")]


def test_an_error_is_found_again_at_every_step():
    """A resumed run that still is wrong must stop as the first one did."""
    assert fired(config_of(), *[BAD["dead_ratio"]] * 3) == [(i, "error", "dead_ratio") for i in range(3)]


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("severity", ["error", "warn", "off"])
def test_severity_is_what_the_config_says(name, severity):
    config = config_of(*(f"guards.{other}={severity if other == name else 'off'}" for other in BAD))
    found = fired(config, *[BAD[name]] * PATIENCE)
    if severity == "off":
        assert found == []
        return
    assert {guard for _, _, guard in found} == {name}
    assert found[-1][1] == severity
    if severity == "warn":
        assert len(found) == 1, "a condition that lasts is told once"


def test_two_causes_at_once_are_two_findings():
    found = fired(config_of(), {**BAD["dead_ratio"], **BAD["truncation"]})
    assert found == [(0, "error", "dead_ratio"), (0, "warn", "truncation")]


# What the numbers may be


def test_nothing_measured_is_no_finding_and_no_crash():
    """A step without trained tokens has None where others have numbers; an older log lacks keys."""
    for name in HEALTHY:
        assert fired(config_of(), *[{name: None}] * (PATIENCE + 2)) == [], name
    for variety in ("gspo", "grpo", "sapo"):
        config = config_of(f"algorithm.variety={variety}")
        assert fired(config, *[dict.fromkeys(HEALTHY)] * (PATIENCE + 2)) == []
        assert check(config, [{"step": i} for i in range(PATIENCE + 2)]) == []


def test_a_resumed_run_finds_what_an_unbroken_one_finds(tmp_path):
    """The history is the log's: through JSON, with aliases, cut at any step, also in the middle of a condition."""
    bad = BAD["mismatch"] | BAD["truncation"]
    steps = [
        *[BAD["first_mismatch"] | bad, bad, {"mismatch/sequence_mean": None}, bad],
        *[BAD["flat_groups"] | BAD["dead_ratio"]] * (PATIENCE + 2),
        *[bad, {}],
        *[BAD["clip_fraction"]] * (PATIENCE + 3),
        *[BAD["mismatch_alarm"], BAD["mismatch_stop"], {}, BAD["mismatch_stop"]],
        *[{}, bad, bad],
    ]
    config = config_of("guards.first_mismatch=warn", "guards.dead_ratio=warn", "guards.mismatch_stop=warn")
    whole = observed(config, steps)
    assert {f.guard for _, f in whole} == BAD.keys()
    file = tmp_path / "metrics.jsonl"
    for number, changed in enumerate(steps):
        if number % 3 == 0:
            before = list(read_lines(file))[-PATIENCE - 1 :]
            assert observed(config, steps[number:], number, before) == [pair for pair in whole if pair[0] >= number]
        values = {k: math.nan if v is None else v for k, v in {**HEALTHY, **changed}.items()}
        append(file, {"step": number, **with_aliases(finite(values))})


# The clip range of a sequence ratio


def test_alg_17_a_token_scale_clip_range_never_clips_a_sequence_ratio():
    """PPO's 0.2 on ratios within 1e-3 of 1: clip share 0 in every step. Refused at load; if allowed, the share is watched."""
    groups = [group(done(turn([1], [2, 3, 4])), done(turn([1], [5, 6, 7])))]
    batch = micro(pack(groups, [[1.0, -1.0]], 2, Packing(4, 2, "padded")))
    batch = batch._replace(proximal_logprobs=np.zeros((2, 4), np.float32))
    ratio = jnp.log(jnp.array([[1.001] * 4, [0.999] * 4], jnp.float32))
    share = {eps: float(gspo(ratio, batch, eps_low=eps, eps_high=eps)[1]["policy/clip_fraction"].value) for eps in (0.2, 3e-4)}
    assert share == {0.2: 0.0, 3e-4: 1.0}
    with pytest.raises(ConfigError, match=r"algorithm\.eps_low: 0\.2 is a token-scale clip range"):
        config_of("algorithm.eps_low=0.2", "algorithm.eps_high=0.2")
    allowed = config_of("algorithm.eps_low=0.2", "algorithm.eps_high=0.2", "guards.wide_eps=off")
    (found,) = observed(allowed, [clips(0, *[share[0.2]] * 3)] * 50)
    assert (found[0], found[1].guard) == (PATIENCE - 1, "clip_fraction")
    assert "algorithm.eps_low = 0.2 and eps_high = 0.2" in found[1].message


@pytest.mark.parametrize(("variety", "normal"), [("gspo", "0.0003"), ("gspo_token", "0.0003"), ("luspo", "0.002")])
def test_wide_eps_of_a_sequence_ratio(variety, normal):
    wide = (f"algorithm.variety={variety}", "algorithm.eps_low=0.0101")
    with pytest.raises(ConfigError) as caught:
        config_of(*wide)
    (line,) = caught.value.problems
    assert line.startswith("algorithm.eps_low: 0.0101 is a token-scale clip range")
    assert f"the sequence ratio of {variety} stays near 1: nothing would be clipped. Use about {normal} (at most 0.01)" in line
    assert 'variety = "grpo"' in line
    assert 'guards.wide_eps = "warn"' in line
    config, warnings = parse_config(BASE, [*wide, "guards.wide_eps=warn"])
    assert config.algorithm.eps_low == 0.0101
    assert warnings == [line]
    assert parse_config(BASE, [*wide, "guards.wide_eps=off"])[1] == []
    assert parse_config(BASE, [f"algorithm.variety={variety}", "algorithm.eps_low=0.01", "algorithm.eps_high=0.01"])[1] == []
    with pytest.raises(ConfigError, match=r"algorithm\.eps_high: 0\.2 "):
        config_of(f"algorithm.variety={variety}", "algorithm.eps_high=0.2")


@pytest.mark.parametrize("variety", ["gmpo", "ppo", "grpo", "dapo", "dr_grpo", "minirl"])
def test_a_token_scale_clip_range_is_right_for_token_ratios(variety):
    overrides = (f"algorithm.variety={variety}", "algorithm.eps_low=0.2", "algorithm.eps_high=0.2")
    assert parse_config(BASE, overrides)[1] == []
