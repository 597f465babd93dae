"""The config: what loads, what is refused and how it is said, what is shown, what identifies a run."""

import ast
import json
import re
import string
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from gspo_jax.config import (
    ConfigError,
    difference,
    episodes,
    evaluation_seeds,
    fingerprint,
    groups,
    load_config,
    minibatch_size,
    minibatches,
    model_id,
    outbound_hosts,
    parse_config,
    reference,
    require_task,
    resolved,
    row_length,
    total_steps,
    unused_keys,
)
from gspo_jax.config_report import SPELLINGS
from gspo_jax.mesh import mesh_shape
from gspo_jax.sections import Config, Guards, acts, keys, tables

ROOT = Path(__file__).parent.parent
DATA = ROOT / "tests" / "data"
EXAMPLES = ("seed000.toml", "seed001.toml", "rl_ok.toml")
SMALL = """
[services]
task_app = "arithmetic"
[model]
base = "tiny"
trainer_mode = "full"
[rollout]
episodes_per_batch = 16
[training]
iterations_per_epoch = 3
group_size = 4
learning_rate = 1e-6
"""


def parse(text="", *overrides):
    """The config of SMALL with the tables of `text` merged over it."""
    data = tomllib.loads(SMALL)
    for name, value in tomllib.loads(text).items():
        data[name] = {**data[name], **value} if isinstance(value, dict) and name in data else value
    return parse_config(data, overrides)


def problems(text="", *overrides):
    with pytest.raises(ConfigError) as caught:
        parse(text, *overrides)
    return caught.value.problems


# What loads


def test_example_configs_load_unchanged_with_their_numbers():
    numbers = {
        "seed000.toml": (100, 64, 16, 64, 1, tuple(range(10))),
        "seed001.toml": (20, 32, 8, 16, 2, tuple(range(50))),
        "rl_ok.toml": (2, 8, 2, 2, 4, (0, 1)),
    }
    for name, expected in numbers.items():
        c, warnings = load_config(DATA / name)
        assert (total_steps(c), episodes(c), groups(c), minibatch_size(c), minibatches(c), evaluation_seeds(c)) == expected
        assert warnings[0] == "topology: deprecated; write compute.topology"
        assert c.rollout.max_concurrent_rollouts == {"seed000.toml": 32, "seed001.toml": 8, "rl_ok.toml": 4}[name]


def test_only_the_config_without_trainer_mode_warns_about_it():
    assert [any("model.trainer_mode" in w for w in load_config(DATA / name)[1]) for name in EXAMPLES] == [True, False, False]


def test_every_shipped_config_loads_without_warning_or_idle_key():
    paths = sorted((ROOT / "configs").glob("**/*.toml"))
    assert paths, "configs/ holds no TOML"
    for path in paths:
        config, warnings = load_config(path)
        assert (warnings, unused_keys(config)) == ([], []), path


def test_default_minibatches_are_four_or_the_most_that_divide():
    for count, expected in ((16, 4), (8, 4), (6, 3), (10, 2), (2, 2)):
        config, _ = parse(f"training.group_size = 2\nrollout.episodes_per_batch = {count}")
        assert (minibatches(config), minibatch_size(config) * minibatches(config)) == (expected, count)
    assert resolved(parse()[0])["training"]["batch_size"] == 4


def test_answers_follow_from_the_config():
    config, _ = parse("evaluation = {seeds = [7, 3], instances = 4}\nserving.context_length = 700")
    assert evaluation_seeds(config) == (7, 3, 8, 9)
    assert evaluation_seeds(parse("evaluation.seeds = [4]")[0]) == (4,)
    assert evaluation_seeds(parse("evaluation.instances = 2")[0]) == (0, 1)
    assert (evaluation_seeds(parse()[0]), row_length(config), model_id(config)) == ((), 700, "tiny")
    assert (require_task(config), outbound_hosts(config)) == ("arithmetic", [])
    assert row_length(parse("training.row_length = 2048")[0]) == 2048


def test_a_config_without_a_task_loads_but_cannot_train():
    data = tomllib.loads(SMALL)
    del data["services"]
    config, _ = parse_config(data)
    with pytest.raises(ConfigError, match=r"services\.task_url: missing"):
        require_task(config)


def test_other_spellings_mean_the_same():
    plain, _ = parse("rollout.max_turns = 5\njudge.enabled = true\ncompute.topology.gpus_for_vllm = 1")
    other, warnings = parse("training.max_turns = 5\nverifier.enabled = true\ntopology.gpus_for_vllm = 1")
    assert plain == other
    assert warnings == ["topology: deprecated; write compute.topology"]
    data = tomllib.loads(SMALL.replace("group_size = 4", "").replace("[rollout]", "[rollout]\ngroup_size = 4"))
    assert parse_config(data)[0] == parse()[0]
    by_policy = tomllib.loads(SMALL.replace("[model]", "[policy]").replace("base =", "model_name ="))
    assert parse_config(by_policy)[0].model.base == "tiny"


def test_two_spellings_that_disagree_are_an_error_unless_deprecated():
    assert problems("rollout.group_size = 8") == (
        "rollout.group_size: 8 contradicts training.group_size = 4; keep training.group_size only",
    )
    assert "contradicts" in problems("rollout.max_turns = 2\ntraining.max_turns = 3")[0]
    assert "contradicts" in problems('policy.model_name = "other"')[0]
    config, _ = parse("topology.gpus_for_ref = 1\ntopology.tensor_parallel = 4\ncompute.topology.tensor_parallel = 2")
    assert (config.compute.topology.tensor_parallel, config.compute.topology.gpus_for_ref) == (2, 1)


def test_a_problem_names_the_spelling_of_the_file():
    data = tomllib.loads(SMALL.replace("group_size = 4", "").replace("[rollout]", "[rollout]\ngroup_size = 1"))
    with pytest.raises(ConfigError, match=r"training\.group_size: 1 must be .* equal to 2 \(written rollout\.group_size\)"):
        parse_config(data)


def test_sampling_keys_of_policy_config_count_as_the_policys():
    config, warnings = parse("rollout.policy_config = {temperature = 0.5, use_vision = false}")
    assert (config.policy.temperature, warnings) == (0.5, [])
    config, warnings = parse("rollout.policy_config.temperature = 0.5\npolicy.temperature = 0.8")
    assert config.policy.temperature == config.rollout.policy_config["temperature"] == 0.8
    assert warnings == ["rollout.policy_config.temperature: 0.5 gives way to policy.temperature = 0.8"]


# What is refused


def test_cfg_01_misspelt_and_misplaced_keys_are_named_with_the_right_place():
    """Misspelt or misplaced keys were ignored and the run used defaults."""
    assert problems("rollout.max_turn = 3") == ("rollout.max_turn: unknown key; did you mean rollout.max_turns?",)
    assert problems("learning_rate = 1e-5") == ("learning_rate: unknown key at top level; it belongs to [training]",)
    assert problems("[train]\nnum-epochs = 3") == ("train: unknown key; did you mean [training]?",)
    assert problems("training.num-epochs = 3") == ("training.num-epochs: unknown key; did you mean training.num_epochs?",)
    assert problems("judge.enable = false") == ("judge.enable: unknown key; did you mean judge.enabled?",)
    assert problems("training.lora.rank = 3")[0].startswith("training.lora.rank: unknown key; the keys here are r, alpha")
    assert problems('rollout."a.b" = 3')[0].startswith("rollout.a.b: unknown key")
    assert problems("", "training.learning_rat=1e-5") == (
        "training.learning_rat: unknown key; did you mean training.learning_rate?",
    )


def test_sec_04_an_address_one_level_too_high_is_refused():
    """A misplaced base_url was ignored and prompts went to the vendor's default address."""
    assert problems('judge.api_base = "http://127.0.0.1:1"') == (
        "judge.api_base: unknown key in [judge]; it belongs to [rubric]",
    )
    assert outbound_hosts(load_config(DATA / "seed000.toml")[0]) == ["https://my-rl-task.usesynth.ai"]


def test_cfg_06_one_bad_key_does_not_reset_its_section():
    """One bad key made the program drop the whole section and go on with defaults."""
    assert problems('[run]\ndir = "/data"\nkeep_lst = 3') == ("run.keep_lst: unknown key; did you mean run.keep_last?",)


def test_cfg_02_an_override_reaches_every_derived_value():
    """An override changed one copy of a shared field and left the derived ones."""
    config, _ = parse(
        "rollout.policy_config.max_tokens = 100", "policy.max_tokens=50", "model.label=fresh one", "serving.context_length=64"
    )
    assert (config.rollout.policy_config["max_tokens"], config.run.name, row_length(config)) == (50, "fresh-one", 64)
    config, _ = parse("rollout.max_turns = 2", "training.max_turns=3")
    assert config.rollout.max_turns == 3


def test_cfg_04_an_override_keeps_siblings_and_a_wrong_section_is_an_error():
    """Overriding one nested key wiped its siblings; a section of the wrong type was skipped."""
    config, _ = parse("policy = {temperature = 0.7, max_tokens = 900}", "policy.temperature=0.9")
    assert (config.policy.temperature, config.policy.max_tokens) == (0.9, 900)
    config, _ = parse("policy = {temperature = 0.7, max_tokens = 900}", "policy={temperature = 0.9}")
    assert (config.policy.temperature, config.policy.max_tokens) == (0.9, 900)
    expected = "policy: 'oops' must be a table; write [policy] with its keys below it"
    assert problems('policy = "oops"', "policy.temperature=0.9") == (expected,)
    assert problems("policy.temperature = 0.7", "policy=oops") == (expected,)


def test_override_values_are_toml_and_bare_words_are_strings():
    overrides = (
        "evaluation.seeds=[1, 2]",
        "model.base=Qwen/Qwen3-0.6B",
        'run.name="7"',
        "run.log_rollouts=false",
        "training.learning_rate = 2e-6",
    )
    config, _ = parse("", *overrides)
    assert (config.evaluation.seeds, config.model.base, config.run.name) == ((1, 2), "Qwen/Qwen3-0.6B", "7")
    assert (config.run.log_rollouts, config.training.learning_rate) == (False, 2e-6)
    assert problems("", "nonsense") == ("override 'nonsense': write section.key=value",)
    assert "not valid TOML" in problems("", "evaluation.seeds=[1")[0]
    assert "one TOML value" in problems("", "run.seed=1\nx = 2")[0]


def test_an_override_of_one_alternative_replaces_the_other():
    config, _ = load_config(DATA / "seed000.toml", ["services.task_app=arithmetic", "model.source=runs/first"])
    assert (require_task(config), model_id(config)) == ("arithmetic", "runs/first")


def test_all_problems_are_reported_at_once():
    text = """
    learning_rate = 1
    policy = {max_tokens = 2000, temperature = 0}
    [algorithm]
    method = "ppo"
    eps_low = 1.5
    [training]
    learning_rate = -1.0
    num_epochs = true
    batch_size = 3
    [rollout]
    max_turn = 2
    episodes_per_batch = 18
    env_config = {a = [nan]}
    """
    expected = {
        "learning_rate",
        "policy.max_tokens",
        "policy.temperature",
        "algorithm.method",
        "algorithm.eps_low",
        "training.learning_rate",
        "training.num_epochs",
        "training.group_size",
        "rollout.max_turn",
        "rollout.env_config.a",
    }
    found = problems(text)
    assert {line.partition(":")[0] for line in found} == expected
    assert len(found) == len(expected)
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert str(caught.value).splitlines() == ["config: 10 problems", *(f"  {line}" for line in found)]


def test_required_keys_are_named_with_their_type():
    with pytest.raises(ConfigError) as caught:
        parse_config({})
    assert {line.partition(":")[0] for line in caught.value.problems} == {
        "model.base",
        "rollout.episodes_per_batch",
        "training.iterations_per_epoch",
        "training.group_size",
        "training.learning_rate",
    }
    assert "training.learning_rate: missing; it has no default (number > 0)" in caught.value.problems


@pytest.mark.parametrize(("key", "off"), [("top_p", 0.9), ("top_k", 5), ("repetition_penalty", 1.1)])
def test_tok_05_filtered_sampling_is_refused_for_training(key, off):
    """Sampler log-probabilities were renormalized over the kept tokens, the trainer's were not."""
    assert problems(f"policy.{key} = {off}")[0].startswith(f"policy.{key}: {off} changes the distribution")
    assert problems(f"rollout.policy_config.{key} = {off}")[0].endswith(f"(written rollout.policy_config.{key})")


def test_cfg_07_batches_that_do_not_divide_are_refused_with_both_numbers_and_a_fix():
    """A batch not divisible by group size or mesh hung the first update, or the message contradicted arithmetic."""
    (line,) = problems("rollout.episodes_per_batch = 10")
    assert "10 episodes do not split into groups of 4; use episodes_per_batch = 8 or 12" in line
    (line,) = problems("training.batch_size = 5")
    assert "16 episodes do not split into minibatches of 5; use batch_size = 4 or 8" in line
    (line,) = problems("training.batch_size = 32")
    assert line.endswith("use batch_size = 16")
    (line,) = problems("training.group_size = 1")
    assert line == "training.group_size: 1 must be greater than or equal to 2"


@given(per_batch=st.integers(1, 60), batches=st.integers(1, 6), group=st.integers(2, 12))
@example(per_batch=1, batches=3, group=9)
def test_cfg_07_suggested_batches_are_valid(per_batch, batches, group):
    """The suggested value was itself refused."""
    text = "training.group_size = {}\nrollout.episodes_per_batch = {}\nrollout.batches_per_step = {}"
    try:
        parse(text.format(group, per_batch, batches))
    except ConfigError as error:
        for fix in re.findall(r"\d+", error.problems[0].partition("episodes_per_batch = ")[2]):
            config, _ = parse(text.format(group, fix, batches))
            assert groups(config) * group == episodes(config) == int(fix) * batches
    else:
        assert per_batch * batches % group == 0


def test_ppo_as_a_method_is_answered_with_the_variety():
    """A config for PPO with a value network trained without one, silently."""
    (line,) = problems('algorithm.method = "ppo"')
    assert 'algorithm.method: "ppo" is not available (there is no value network)' in line
    assert line.endswith('for PPO\'s clipped objective variety = "ppo"')
    assert parse('algorithm.variety = "ppo"')[0].algorithm.method == "policy_gradient"


def test_lengths_that_cannot_hold_are_refused():
    assert "context shorter" in problems("policy.max_tokens = 1024")[0]
    assert parse("policy.max_tokens = 1023")[0].policy.max_tokens == 1023
    assert problems("training.row_length = 1000")[0].startswith(
        "training.row_length: 1000 cannot hold serving.context_length = 1024"
    )


def test_alternatives_are_not_both_set():
    assert "keep one of them" in problems('services.task_url = "http://127.0.0.1:1"')[0]
    assert "keep one of them" in problems('model.source = "ft:x"')[0]


def test_values_are_not_coerced():
    for text, name in (
        ('run.seed = "1"', "run.seed"),
        ("run.seed = 1.0", "run.seed"),
        ("policy.temperature = true", "policy.temperature"),
        ("evaluation.seeds = [true]", "evaluation.seeds"),
        ("evaluation.seeds = 3", "evaluation.seeds"),
        ("rollout.max_staleness = -1", "rollout.max_staleness"),
        ("rollout.max_staleness = true", "rollout.max_staleness"),
        ("run.name = 2024-01-01", "run.name"),
    ):
        assert [line.partition(":")[0] for line in problems(text)] == [name]
    assert parse("policy.temperature = 1")[0].policy.temperature == 1.0


def test_probable_slips_are_hinted_at():
    (hint,) = parse("training = {batch_size = 4, group_size = 8}\nrollout.episodes_per_batch = 32")[1]
    assert hint.endswith("counts trajectories per minibatch, not groups; for 4 groups write 32")
    assert "distributes 3 GPUs" in parse("compute.gpu_count = 2\ncompute.topology.gpus_for_training = 3")[1][0]
    (hint,) = parse("rollout.max_staleness = 2")[1]
    assert hint.startswith("rollout.max_staleness: 2, and algorithm.correction is off")
    assert parse('rollout.max_staleness = 2\nalgorithm.correction.weight = "token_truncate"')[1] == []
    assert parse("rollout.max_staleness = 0")[1] == []


def test_unreadable_files_are_named(tmp_path):
    missing, broken, binary = tmp_path / "a.toml", tmp_path / "b.toml", tmp_path / "c.toml"
    broken.write_text("[model]\nbase = ?\n")
    binary.write_bytes(b"\xff\xfe")
    for path, words in ((missing, "no such file"), (broken, "line 2"), (binary, "UTF-8"), (tmp_path, "cannot be read")):
        with pytest.raises(ConfigError, match=words) as caught:
            load_config(path)
        assert str(caught.value).startswith(str(path))


def test_mesh_is_checked_against_the_machine():
    assert mesh_shape(parse("")[0], 4) == (1, 4, 1, 1)
    assert mesh_shape(parse("mesh = {replica = 2, tensor = 2}")[0], 8) == (2, 2, 2, 1)
    assert mesh_shape(parse("mesh = {fsdp = 2, sequence = 2}")[0], 8) == (1, 2, 1, 2)
    with pytest.raises(ConfigError, match="do not divide"):
        mesh_shape(parse("mesh.tensor = 2")[0], 3)
    with pytest.raises(ConfigError, match="fsdp 2 = 2 devices, but 1 found; make the product <= 1"):
        mesh_shape(parse("mesh.fsdp = 2")[0], 1)


def test_topology_gives_the_first_devices_to_training():
    """A laptop that has fewer trains on what it has."""
    text = "compute.topology = {gpus_for_training = 3, gpus_for_vllm = 4, gpus_for_ref = 1}"
    assert mesh_shape(parse(text)[0], 8) == (1, 3, 1, 1)
    assert mesh_shape(parse(text)[0], 1) == (1, 1, 1, 1)
    kept = parse("algorithm.kl_beta = 0.1\ncompute.topology.gpus_for_ref = 2")[0]
    assert mesh_shape(kept, 8) == (1, 6, 1, 1)


def test_a_reference_has_to_be_somewhere():
    for text, words in (
        ('algorithm.kl_beta = 0.1\ncompute.topology.reference_placement = "none"', "refers to a reference policy"),
        ('compute.topology.reference_placement = "dedicated"', "needs at least 1"),
        ('compute.topology = {reference_placement = "shared", gpus_for_ref = 1}', 'use "dedicated"'),
    ):
        (line,) = problems(text)
        assert words in line


names = st.text(string.ascii_lowercase + "_-", min_size=1, max_size=16).filter(lambda s: s.strip("-_"))
literals = st.recursive(
    st.one_of(
        st.integers(-(2**63), 2**63 - 1).map(str),
        st.booleans().map(lambda b: str(b).lower()),
        st.floats().map(str),
        st.text(string.printable, max_size=8).map(json.dumps),
        st.sampled_from(["1979-05-27", "07:32:00", "0x10", "1e400"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]"),
        st.dictionaries(names, inner, max_size=3).map(lambda d: "{" + ", ".join(f"{k} = {v}" for k, v in d.items()) + "}"),
    ),
    max_leaves=4,
)
KNOWN = {*keys(), *(name for name, _ in tables()), *(s.old for s in SPELLINGS)}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(name=names, table=st.sampled_from(["", "[rollout]", "[training]", "[model]", "[evaluation]"]), value=literals)
def test_cfg_01_any_unknown_key_is_refused_by_name(tmp_path, name, table, value):
    """Whatever the misspelling and its value, the error names it and nothing else breaks."""
    dotted = f"{table[1:-1]}.{name}".lstrip(".")
    if dotted in KNOWN:
        return
    text = (DATA / "seed000.toml").read_text()
    path = tmp_path / "fuzz.toml"
    path.write_text(text.replace(table, f"{table}\n{name} = {value}", 1) if table else f"{name} = {value}\n{text}")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert any(line.startswith(f"{dotted}: unknown key") for line in caught.value.problems)


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(sorted({*keys(), *(name for name, _ in tables() if name)})), value=literals)
def test_any_value_of_a_known_key_loads_or_is_refused_by_name(name, value):
    """No value crashes the loader or makes a config that cannot be written down."""
    try:
        config, _ = parse("", f"{name}={value}")
    except ConfigError as error:
        refused = str(error)
    else:
        refused = name
        json.dumps(resolved(config), allow_nan=False)
    assert name.split(".")[0] in refused


# What is shown, and what identifies a run


def test_sec_02_a_canary_secret_appears_nowhere(tmp_path):
    """An API key appeared in the tracker's copy of the run's config."""
    canary = "sk-test-canary"
    text = f"""
    services = {{headers = {{Authorization = "Bearer {canary}", X-Session = "{canary}"}}, task_url = "https://me:{canary}@host/x?api_key={canary}"}}
    vllm = {{api_key = "{canary}", nested = {{hf_token = ["{canary}"]}}}}
    rollout.env_config.password = "{canary}"
    """
    data = tomllib.loads(text)
    good = tomllib.loads(SMALL)
    good |= {"services": data["services"], "vllm": data["vllm"]}
    good["rollout"] |= data["rollout"]
    config, warnings = parse_config(good)
    assert canary in config.services.headers["Authorization"]
    shown = [
        json.dumps(resolved(config)),
        repr(config),
        str(config),
        repr(config.services),
        *warnings,
        *unused_keys(config),
        *outbound_hosts(config),
    ]
    with pytest.raises(ConfigError) as caught:
        parse_config(
            good
            | {
                "services": data["services"]
                | {"task_app": "x", "api_key_env": canary, "headers": {"k": [canary]}, "judge_url": f"ftp://{canary}@h"}
            }
        )
    shown.append(str(caught.value))
    for override in (
        f"services.headers.Authorization:{canary}",
        f"services.api_key_env={canary}",
        f"services.api_key=[{canary}",
    ):
        with pytest.raises(ConfigError) as caught:
            parse_config(good, [override])
        shown.append(str(caught.value))
    assert [text for text in shown if canary in text] == []
    with pytest.raises(TypeError):
        config.services.headers["Authorization"] = "x"  # type: ignore[index]
    with pytest.raises(ValidationError):
        config.services.timeout_s = 1.0


def test_resolved_round_trips_through_json_and_keeps_limits_visible():
    plain = resolved(parse("tags.when = 2024-01-01")[0])
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert (plain["policy"]["max_tokens"], plain["services"]["api_key_env"], plain["tags"]) == (
        512,
        "ENVIRONMENT_API_KEY",
        {"when": "2024-01-01"},
    )


def test_fingerprint_follows_the_numbers_and_nothing_else():
    base, _ = parse()
    for text in (
        "run = {dir = 'x', name = 'y', keep_last = 9}",
        "training.num_epochs = 5",
        "training.log_interval = 1",
        "services.timeout_s = 3",
        "vllm.x = 1",
        "tags.x = 1",
        "training.batch_size = 4",
        "evaluation.every_n_iters = 2",
    ):
        other, _ = parse(text)
        assert fingerprint(other) == fingerprint(base), text
        assert difference(resolved(base), resolved(other)) == []
    for text, line in (
        ("run.seed = 1", "run.seed: 0 -> 1"),
        ("training.batch_size = 8", "training.batch_size: 4 -> 8"),
        ("rollout.env_config.level = 2", "rollout.env_config.level: absent -> 2"),
        ('model.base = "b"', 'model.base: "tiny" -> "b"'),
        ("algorithm.kl_beta = 0.1", "algorithm.kl_beta: 0.0 -> 0.1"),
        ("algorithm.eps_low = 5e-4", "algorithm.eps_low: null -> 0.0005"),
        ("algorithm.correction.k3_max = 0.1", "algorithm.correction.k3_max: null -> 0.1"),
    ):
        other, _ = parse(text)
        assert fingerprint(other) != fingerprint(base)
        assert line in difference(resolved(base), resolved(other))


def test_a_run_that_a_guard_stopped_can_be_resumed_without_it():
    """Its message says `guards.x = "warn" goes on`; guards look at numbers and never change one."""
    base, _ = parse()
    for name in Guards.model_fields:
        for severity in ("warn", "off"):
            assert difference(resolved(base), resolved(parse(f'guards.{name} = "{severity}"')[0])) == []


def test_the_horizon_counts_only_where_the_learning_rate_depends_on_it():
    decayed = [
        parse(f'optimizer.schedule = "cosine"\ntraining.num_epochs = {n}\ntraining.iterations_per_epoch = {m}')[0]
        for n, m in ((2, 6), (3, 4), (3, 5))
    ]
    assert fingerprint(decayed[0]) == fingerprint(decayed[1])
    assert difference(resolved(decayed[1]), resolved(decayed[2])) == ["total_steps: 12 -> 15"]


def test_equal_configs_of_another_key_order_have_one_fingerprint():
    data = tomllib.loads(SMALL)
    backwards = {name: dict(reversed(value.items())) for name, value in reversed(data.items())}
    assert fingerprint(parse_config(data)[0]) == fingerprint(parse_config(backwards)[0])


# Every key


READ_BY_HELPER = {
    "services.task_url": "require_task",
    "services.task_app": "require_task",
    "model.base": "model_id",
    "model.source": "model_id",
    "rollout.episodes_per_batch": "episodes|groups",
    "rollout.batches_per_step": "episodes|groups",
    "training.group_size": "groups",
    "training.num_epochs": "total_steps",
    "training.iterations_per_epoch": "total_steps",
    "training.batch_size": "minibatches|minibatch_size",
    "training.row_length": "row_length",
    "evaluation.instances": "evaluation_seeds",
    "evaluation.seeds": "evaluation_seeds",
}
"""Key -> the helper of gspo_jax.config that reads it, or two of which one is enough; the rest of the code must call it."""
SETTLED_AT_LOAD = {
    "policy.top_p": "refused unless off",
    "policy.top_k": "refused unless off",
    "policy.repetition_penalty": "refused unless off",
    "guards.wide_eps": "the clip range is looked at here",
    "tags": "recorded in config.json",
}
READ_DIRECTLY = {
    "algorithm": "variety eps_low eps_high ratio_max cap floor tau_positive tau_negative budget aggregation advantage"
    " reward_weights credit kl_beta kl_estimator kl_form kl_in entropy_bonus flat_groups refill_rounds refill_short correctness"
    " overlong overlong_buffer routing_replay",
    "algorithm.correction": "weight low high geometric k3_max off_policy_max normalize rejected",
    "guards": "dead_ratio flat_groups first_mismatch clip_fraction mismatch mismatch_alarm mismatch_stop truncation",
    "services": "api_key_env headers timeout_s",
    "model": "trainer_mode label compute_dtype remat",
    "mesh": "replica fsdp tensor sequence",
    "policy": "max_tokens temperature stop_sequences",
    "rollout": "env_name policy_name max_turns max_concurrent_rollouts env_config policy_config ops timeout_s max_attempts"
    " max_staleness max_void",
    "training": "learning_rate log_interval packing rows_per_microbatch",
    "training.lora": "r alpha rslora target_modules quantization",
    "evaluation": "every_n_iters samples split",
    "data": "split seed_start",
    "optimizer": "beta1 beta2 eps weight_decay max_grad_norm warmup_steps schedule",
    "serving": "engine slots context_length host urls token_env transport dtype rounding delta address sync_timeout_s",
    "serving.launch": "python servers extra_args start_timeout_s max_restarts",
    "compute.topology": "gpus_for_vllm gpus_for_training gpus_for_ref tensor_parallel reference_placement",
    "training.weight_sync": "verify_every_k",
    "run": "name seed dir checkpoint_every keep_last log_rollouts",
}
"""Table -> its keys that code outside the config modules reads as `table.key`, of a table in a table by its last name."""
DIRECT = {f"{table}.{name}" for table, row in READ_DIRECTLY.items() for name in row.split()}
OWN = ("config.py", "config_checks.py", "config_objective.py", "config_report.py", "sections.py")


def used_by_the_code():
    """`(reads, calls)`: every `table.key` that is read as an attribute, and every called name, outside the config modules."""
    reads, calls = set(), set()
    for package in ("gspo_jax", "rollout", "serving_bridge"):
        for path in (ROOT / package).rglob("*.py"):
            if path.parent.name == "gspo_jax" and path.name in OWN:
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute):
                    reads.add(f"{getattr(node.value, 'id', getattr(node.value, 'attr', ''))}.{node.attr}")
                elif isinstance(node, ast.Call):
                    calls.add(getattr(node.func, "id", getattr(node.func, "attr", "")))
    return reads, calls


def test_cfg_05_every_key_is_accounted_for():
    """Options were accepted and validated but read by nobody."""
    silent = {name for name, field in keys().items() if acts(field) in ("idle", "fixed")}
    accounted = DIRECT | READ_BY_HELPER.keys() | SETTLED_AT_LOAD.keys()
    assert accounted | silent == keys().keys()
    assert not accounted & silent


def test_cfg_05_every_key_that_should_act_is_read_by_the_code():
    """A refactor dropped the reader of an option and nobody noticed."""
    reads, calls = used_by_the_code()
    unread = sorted(name for name in DIRECT if ".".join(name.split(".")[-2:]) not in reads)
    uncalled = sorted({helper for helper in READ_BY_HELPER.values() if not calls & set(helper.split("|"))})
    assert (unread, uncalled) == ([], [])


def test_cfg_05_every_idle_key_is_reported_when_set():
    """Keys of parts this version does not have were swallowed."""
    samples = {"string": '"x"', "boolean": "true", "integer": "1", "number": "0.5", "table": "{}", "array": '["x"]'}
    special = {"url": '"http://h"', "api_base": '"http://h"'}
    for name, field in keys().items():
        if acts(field) != "idle":
            continue
        kind = str(field.annotation)
        literal = re.search(r"Literal\['(\w+)'", kind)
        choices = [f'"{literal[1]}"'] if literal else [*special.values(), *samples.values()]
        for choice in choices:
            try:
                config, _ = parse("", f"{name}={choice}")
            except ConfigError:
                continue
            assert any(key == name or key.startswith(f"{name}.") for key in unused_keys(config)), name
            break
        else:
            pytest.fail(f"no sample value fits {name}")


def test_every_key_and_table_has_a_one_line_description():
    for name, field in keys().items():
        assert field.description, name
        assert "\n" not in field.description
    assert all(section.__doc__ and "\n" not in section.__doc__.strip() for _, section in tables())
    assert all(section.model_config == {**Config.model_config} for _, section in tables())


def test_the_reference_in_docs_is_the_generated_one():
    text = (ROOT / "docs" / "config.md").read_text()
    assert text == reference(), "run: python -m gspo_jax.config > docs/config.md"
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) == len(keys()) + len(SPELLINGS)
    assert all(a != b for a, b in pairwise(rows))
