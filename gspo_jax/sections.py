"""The sections of a config: frozen, strict tables. Unknown keys are errors; every key says what it does.

`key` declares a key the code reads, `fixed` one whose every accepted value means the same, `idle` one that is accepted so
that existing files load but that this version does not act on (`gspo_jax.config.unused_keys` names the ones a file sets).
Checks that involve two keys live in `gspo_jax.config_checks`.
"""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

_SECRET = re.compile(r"key|token|secret|password|passwd|authorization|credential|cookie|header", re.IGNORECASE)
_COUNT = re.compile(r"max_\w*tokens$")
_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)|(?<=[?&])([^=&\s]*(?:key|token|secret|password)[^=&\s]*)=[^&\s]+", re.IGNORECASE)

_listed = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
Texts = Annotated[tuple[str, ...], _listed]
Seeds = Annotated[tuple[Annotated[int, Field(ge=0)], ...], _listed]
Ops = Annotated[tuple[str | dict[str, Any], ...], _listed]
Urls = Annotated[tuple[Annotated[str, Field(pattern=r"^https?://[^\s/]+")], ...], _listed]
Headers = Annotated[Mapping[str, str], AfterValidator(MappingProxyType)]
Band = Annotated[tuple[Annotated[float, Field(gt=0)], ...], _listed]
Targets = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda value: (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value),
    AfterValidator(lambda names: () if names == ("all-linear",) else names),
]
Severity = Literal["error", "warn", "off"]
Objectives = Literal[
    "gspo", "gspo_token", "luspo", "gmpo", "ppo", "grpo", "dapo", "dr_grpo", "cispo", "sapo", "minirl", "reinforce"
]
Advantages = Literal[
    "group_std",
    "group_mean",
    "batch_std",
    "leave_one_out",
    "length_weighted",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "per_reward",
]
Table = dict[str, Any]
Name = Annotated[str, Field(min_length=1)]
EnvironmentVariable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Url = Annotated[str, Field(pattern=r"^https?://[^\s/]+")]
DirectoryName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
PATTERNS = {
    r"^[A-Za-z_][A-Za-z0-9_]*$": "must be the name of an environment variable, not its value",
    r"^https?://[^\s/]+": "must be a URL that starts with http:// or https://",
    r"^[A-Za-z0-9][A-Za-z0-9._-]*$": "must be letters, digits, '.', '_' and '-', the first a letter or digit",
}
"""What a value that does not match one of the patterns above must be, in words."""


def is_secret(name: str) -> bool:
    """True when a value of this (dotted) name may be a secret."""
    return _SECRET.search(name) is not None and not _COUNT.search(name)


def masked(value: Any, name: str = "") -> Any:
    """`value` with text under secret names and credentials in URLs replaced by ***; a key that names an `_env` is no secret."""
    if isinstance(value, Mapping):
        return {child: masked(item, f"{name}.{child}") for child, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(masked(item, name) for item in value)
    if not isinstance(value, str):
        return value
    if is_secret(name) and not name.endswith("_env"):
        return "***"
    return _IN_URL.sub(lambda match: f"{match[1]}=***" if match[1] else "***", value)


def key(default: Any, description: str, acts: str = "read", **limits: Any) -> Any:
    """A field with its one-line description. `default` ... makes it required, a section class a table of defaults."""
    settled = {"default_factory": default} if isinstance(default, type) else {"default": default}
    return Field(**settled, description=description, json_schema_extra={"acts": acts}, **limits)


def fixed(default: Any, description: str) -> Any:
    """A field whose accepted values all mean what this version does."""
    return key(default, description, "fixed")


def idle(default: Any, description: str, **limits: Any) -> Any:
    """A field that is checked and recorded but that this version does not act on."""
    return key(default, description, "idle", **limits)


class Section(BaseModel):
    """A table of the config. Its repr masks secrets."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)

    def __repr_args__(self) -> Iterator[tuple[str, Any]]:
        for name in type(self).model_fields:
            yield name, masked(getattr(self, name), name)


class Correction(Section):
    """Detached weights for the gap between sampler and trainer; what is not set is off. Everything set is multiplied."""

    weight: Literal["off", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = key(
        "off", "importance weight trainer / sampler: per token or the trajectory's product; cut to [low, high], or 0 outside it"
    )
    low: float | None = key(None, "smallest weight; default: 0 for truncate, 0.5 for mask", ge=0)
    high: float | None = key(None, "largest weight; default: 2", gt=0)
    geometric: Band = key((), "keep trajectories whose geometric mean ratio lies in [low, high], such as [0.99, 1.01]")
    k3_max: float | None = key(None, "keep trajectories whose mean k3 estimate of the gap is at most this", gt=0)
    off_policy_max: float | None = key(
        None, "drop trajectories of negative advantage whose mean log-ratio fell by more than this", gt=0
    )
    normalize: bool = key(False, "divide the weights by their mean over the rollout batch")
    rejected: Literal["stay", "leave"] = key("stay", "whether tokens of weight 0 still count in ratios and denominators")


class Algorithm(Section):
    """What is optimized. `variety` alone is the published objective; a key that its variety does not take is an error."""

    type: Literal["online"] = fixed("online", "reinforcement learning on fresh rollouts")
    method: Literal["policy_gradient", "gspo"] = fixed("policy_gradient", 'both mean what variety says; there is no "ppo"')
    variety: Objectives = key("gspo", "the objective; formulas, constants and sources: docs/objectives.md")
    eps_low: float | None = key(None, "clip range below 1 of the ratio; default: the variety's", gt=0, le=1)
    eps_high: float | None = key(None, "clip range above 1 of the ratio; default: the variety's", gt=0)
    ratio_max: float | None = key(None, "bound on the ratio of negative advantages (dual clip c, two-sided delta)", gt=1)
    cap: float | None = key(None, "cispo: largest ratio used as weight", gt=0)
    floor: float | None = key(None, "cispo: smallest ratio used as weight", ge=0)
    tau_positive: float | None = key(None, "sapo: temperature of the gate for positive advantages", gt=0)
    tau_negative: float | None = key(None, "sapo: temperature of the gate for other advantages", gt=0)
    budget: float | None = key(None, "dr_grpo: tokens a trajectory is divided by; default: max_tokens * max_turns", gt=0)
    aggregation: Literal["row_mean", "row_sum", "token_mean", "budget_mean"] | None = key(
        None, "denominator, for the varieties that leave it open; default: the variety's"
    )
    advantage: Advantages | None = key(None, "how rewards become advantages; default: the variety's, mostly group_std")
    reward_weights: dict[str, float] = key({}, "per_reward: weight of each of the task app's metrics")
    credit: Literal["trajectory", "turn"] = key("trajectory", "one advantage per trajectory, or one per turn from turn rewards")
    kl_beta: float = key(0.0, "weight of the KL to the frozen starting weights; 0 computes no reference", ge=0)
    kl_estimator: Literal["k1", "k2", "k3"] = key("k3", "how the KL is estimated from sampled tokens")
    kl_form: Literal["importance_weighted", "plain", "straight_through"] = key(
        "importance_weighted", "gradient of the KL in the loss: unbiased, as it stands, or that of k2"
    )
    kl_in: Literal["loss", "reward"] = key("loss", "a term of the loss, or taken off the reward, summed over tokens")
    entropy_bonus: float = key(0.0, "weight of the mean entropy of trained tokens", ge=0)
    flat_groups: Literal["keep", "skip", "refill"] = key(
        "keep", "groups without a difference: keep with advantage 0, leave out, or replace by new problems (dynamic sampling)"
    )
    refill_rounds: int = key(3, "most rounds of new problems in a step", ge=1)
    refill_short: Literal["train", "stop"] = key(
        "train", "when groups still lack after the last round: train on the others, or stop"
    )
    correctness: Name | None = key(None, "the task app's metric that says whether groups are flat; default: the reward")
    overlong: Literal["keep", "mask"] = key(
        "keep", "cut trajectories: train on them, or leave them out of loss and denominators"
    )
    overlong_buffer: int = key(0, "tokens before policy.max_tokens over which the reward falls by up to 1; 0: off", ge=0)
    correction: Correction = key(Correction, "")
    routing_replay: Literal["off", "sampler"] = key(
        "off", "mixtures of experts: let every router decide anew, or use the experts the sampler chose (arXiv 2510.11370)"
    )


class Guards(Section):
    """What to do about an objective that is not doing anything: stop the run ("error"), say so once ("warn"), or nothing."""

    dead_ratio: Severity = key("error", "the ratio is exactly 1 in all minibatches of a step, although weights moved")
    wide_eps: Severity = key("error", "a token-scale clip range (above 0.01) on a sequence ratio")
    flat_groups: Severity = key("error", "every group of 20 steps in a row was flat (a first such step is a warning)")
    first_mismatch: Severity = key("error", "sampler and trainer differ by more than 0.05 nats per token at the first step")
    clip_fraction: Severity = key("warn", "20 steps in a row clipped nothing, or more than half")
    mismatch_alarm: Severity = key("warn", "sampler and trainer differ by more than 0.05 nats per token at a later step")
    mismatch_stop: Severity = key("error", "sampler and trainer differ by more than 0.2 nats per token at a later step")
    mismatch: Severity = key("warn", "a trajectory's mean sampler-trainer gap is wider than half the clip range")
    truncation: Severity = key("warn", "more than a tenth of the trajectories were cut")


class Services(Section):
    """Where episodes are played: `task_url` or `task_app`, not both."""

    task_url: Url | None = key(None, "URL of a running task app")
    task_app: Name | None = key(None, 'a task app to start: path of a .py file, or a bundled name such as "arithmetic"')
    api_key_env: EnvironmentVariable = key("ENVIRONMENT_API_KEY", "environment variable that holds the task app's API key")
    headers: Headers = key({}, "extra HTTP headers for the task app; their values are never shown", validate_default=True)
    timeout_s: float = key(10.0, "seconds to wait for health and task_info replies", gt=0)
    judge_url: Url | None = idle(None, "URL of a judge service")


class Topology(Section):
    """How many GPUs do what."""

    type: str = idle("single_node_split", "name of the layout")
    gpus_for_vllm: int = key(0, "GPUs for sampling with vLLM, over all its servers", ge=0)
    gpus_for_training: int = key(0, "GPUs for updates, the first ones; 0: all that the others leave", ge=0)
    gpus_for_ref: int = key(0, "GPUs for the reference of a KL, after those for updates and before those of vLLM", ge=0)
    tensor_parallel: int = key(1, "GPUs over which one vLLM server splits the model", ge=1)
    reference_placement: Literal["none", "shared", "dedicated"] | None = key(
        None, "where the reference of a KL lives: on the GPUs for updates, or on its own; default: on its own if it has any"
    )


class Compute(Section):
    """The machine a hosted run asks for; a local run uses the devices it finds."""

    gpu_type: str | None = idle(None, "GPU model")
    gpu_count: int | None = idle(None, "number of GPUs", ge=1)
    nodes: int | None = idle(None, "number of machines", ge=1)
    topology: Topology = key(Topology, "how many GPUs do what")


class Model(Section):
    """The policy's weights: `base` or `source`, not both."""

    base: Name | None = key(None, "Hugging Face id or directory of the model to start from")
    source: Name | None = key(None, "a trained model or adapter to go on from: run directory, export, ft:base:run")
    trainer_mode: Literal["full", "lora", "qlora"] = key("lora", "train all weights, an adapter, or one on quantized weights")
    label: Name = key("policy", "name under which the policy is served, and default name of the run")
    compute_dtype: Literal["float32", "bfloat16"] = key("bfloat16", "dtype of activations; parameters and loss are float32")
    remat: Literal["none", "layer"] = key("layer", "recompute activations of each layer in the backward pass, or store them")


class Policy(Section):
    """How completions are sampled."""

    max_tokens: int = key(512, "most tokens of one completion", ge=1)
    temperature: float = key(1.0, "sampling temperature, also applied to the trained log-probabilities", gt=0)
    top_p: float = key(1.0, "nucleus sampling; training needs 1.0", gt=0, le=1)
    top_k: int = key(0, "top-k sampling; training needs 0 (off)", ge=0)
    repetition_penalty: float = key(1.0, "penalty on repeated tokens; training needs 1.0", gt=0)
    stop_sequences: Texts = key((), "strings that end a completion")
    inference_url: Url | None = idle(None, "an external sampler")


class Rollout(Section):
    """How episodes are played."""

    env_name: Name | None = key(None, "environment name sent to the task app")
    policy_name: Name | None = key(None, "policy name sent to the task app")
    max_turns: int = key(1, "most model calls of one episode", ge=1)
    episodes_per_batch: int = key(..., "episodes of one rollout batch", ge=1, le=10**6)
    batches_per_step: int = key(1, "rollout batches of one training step", ge=1, le=10**4)
    max_concurrent_rollouts: int = key(8, "episodes in flight at once", ge=1)
    env_config: Table = key({}, "sent to the task app as env.config")
    policy_config: Table = key({}, "sent to the task app as policy.config; its sampling keys count as [policy]'s")
    ops: Ops = key((), 'operations sent to the task app; empty: "agent", "env" alternating')
    timeout_s: float = key(600.0, "deadline of one episode in seconds", gt=0)
    max_attempts: int = key(3, "tries of an episode whose transport fails", ge=1)
    max_staleness: int = key(
        0, "training steps that a sampled token's weights may lag behind; 0: sampling and training alternate", ge=0
    )
    max_void: float = key(0.5, "stop the run when a larger fraction of a batch failed", ge=0, le=1)
    task_app_origin_rewards_only: bool = idle(True, "rewards come from the task app alone")
    rubric_rewards_only: bool = idle(False, "rewards come from the rubric alone")


class WeightSync(Section):
    """How new weights reach the sampler."""

    enable: bool = idle(True, "send new weights to the sampler")
    targets: Texts = idle(("policy",), "receivers")
    mode: str = idle("direct", "what is sent")
    direct: bool = idle(True, "send without a file in between")
    verify_every_k: int = key(0, "compare a checksum of all bytes at every k-th transfer to vLLM; 0: never", ge=0)
    weight_sync_interval: int = idle(1, "training steps between transfers", ge=1)


class Lora(Section):
    """Low-rank adapters, in the trainer modes lora and qlora."""

    r: int = key(16, "rank", ge=1)
    alpha: float = key(32.0, "strength: the adapter counts alpha / r", gt=0)
    rslora: bool = key(False, "the adapter counts alpha / sqrt(r) instead")
    dropout: float = idle(0.0, "log-probabilities are computed without dropout", ge=0, lt=1)
    target_modules: Targets = key((), 'PEFT names of the linear maps that get one; empty or "all-linear": all of them')
    quantization: Literal["nf4", "int8"] = key("nf4", "type of the frozen kernels in the mode qlora")


class Rewards(Section):
    """Rewards of single decisions."""

    step_rewards_enabled: bool = idle(False, "use them")
    step_rewards_mode: Literal["off", "decision_stepwise", "env_sparse", "indicator"] = idle("off", "where they come from")
    step_rewards_indicator_lambda: float = idle(0.0, "bonus of a decision that achieves something new", ge=0)
    step_rewards_beta: float = idle(0.0, "bonus per remaining turn of such a decision")
    step_rewards_strategy: str = idle("consistent", "how the task app counts achievements")
    step_rewards_weights: Table = idle({}, "weight per achievement")
    step_rewards_k_limits: Table = idle({}, "how often an achievement counts")
    event_rewards_kind: Literal["unique", "absolute", "binary", "continuous"] = idle("unique", "which achievements count")


class Training(Section):
    """Steps, batches and the learning rate."""

    num_epochs: int = key(1, "total steps = num_epochs * iterations_per_epoch", ge=1)
    iterations_per_epoch: int = key(..., "training steps of one epoch", ge=1)
    group_size: int = key(..., "episodes per problem; the group is the baseline of its members", ge=2)
    batch_size: int | None = key(None, "trajectories per optimizer minibatch; default: a quarter of the step's", ge=1)
    learning_rate: float = key(..., "peak learning rate", gt=0)
    log_interval: int = key(10, "print every n-th step; every step is written to metrics.jsonl", ge=1)
    packing: Literal["auto", "shared_prefix", "packed", "padded"] = key(
        "auto", "how trajectories are laid out in rows; auto: shared_prefix, or packed with linear attention"
    )
    row_length: int = key(0, "tokens per row; 0: serving.context_length", ge=0)
    rows_per_microbatch: int = key(1, "rows of one forward-backward pass, over all devices", ge=1)
    weight_sync_interval: Literal[1] = fixed(1, "training steps between weight transfers")
    weight_sync: WeightSync = key(WeightSync, "how new weights reach the sampler")
    lora: Lora = key(Lora, "low-rank adapters")
    rewards: Rewards = idle(Rewards, "rewards of single decisions")
    rollouts: Table = idle({}, "old name of [rollout]; not read")
    gradient_accumulation_steps: int = idle(1, "follows from rows_per_microbatch", ge=1)
    max_accumulated_minibatch: int | None = idle(None, "follows from rows_per_microbatch", ge=1)
    async_semaphore_max: int | None = idle(None, "see rollout.max_concurrent_rollouts", ge=1)
    ops: Ops = idle((), "see rollout.ops")
    max_completion_tokens: int | None = idle(None, "see policy.max_tokens", ge=1)
    reward_positive: float | None = idle(None, "reward of a right answer; the task app decides")
    reward_negative_no_tool: float | None = idle(None, "reward without a tool call; the task app decides")
    reward_negative_no_answer: float | None = idle(None, "reward without an answer; the task app decides")
    max_images_per_message: int | None = idle(None, "images", ge=0)
    supports_vision: bool = idle(False, "images")


class Evaluation(Section):
    """Episodes that are scored and never trained on."""

    instances: int | None = key(None, "problems per evaluation; default: one per seed, so none without seeds", ge=0, le=10**6)
    every_n_iters: int = key(0, "evaluate every n-th step and at the end; 0: at the end only", ge=0)
    seeds: Seeds = key((), "seeds of the problems; when fewer than instances, the integers that follow are added")
    samples: int = key(1, "episodes per problem", ge=1)
    split: Name = key("test", "data split sent to the task app")


class Data(Section):
    """Which problems are trained on."""

    split: Name = key("train", "data split sent to the task app")
    seed_start: int = key(0, "seed of the first problem; each next problem adds 1", ge=0)
    episodes_per_iteration: int | None = idle(None, "see rollout.episodes_per_batch", ge=1)
    evaluation_episodes: int | None = idle(None, "see evaluation.instances", ge=1)


class Optimizer(Section):
    """AdamW."""

    beta1: float = key(0.9, "decay of the first moment", ge=0, lt=1)
    beta2: float = key(0.99, "decay of the second moment", ge=0, lt=1)
    eps: float = key(1e-8, "added to the root of the second moment", gt=0)
    weight_decay: float = key(0.0, "decoupled weight decay", ge=0)
    max_grad_norm: float = key(1.0, "gradients are scaled down to this global norm", gt=0)
    warmup_steps: int = key(0, "optimizer steps of linear warm-up", ge=0)
    schedule: Literal["constant", "linear", "cosine"] = key("constant", "learning rate after the warm-up")


class Launch(Section):
    """vLLM servers that the run starts, watches and stops."""

    python: Name = key(".venv-vllm/bin/python", "interpreter that has vLLM")
    servers: int = key(1, "servers to start, each on its share of compute.topology.gpus_for_vllm", ge=1, le=64)
    extra_args: Texts = key((), "more arguments of vllm.entrypoints.openai.api_server")
    start_timeout_s: float = key(600.0, "seconds until a server must answer", gt=0)
    max_restarts: int = key(3, "times in ten minutes that a server which died is started again", ge=0)


class Serving(Section):
    """The sampler and its gateway."""

    engine: Literal["auto", "jax", "vllm"] = key("auto", "who samples: the embedded JAX sampler (auto), or vLLM servers")
    launch: Launch = key(Launch, "vLLM servers that the run starts")
    urls: Urls = key((), "vLLM servers that run already; empty: the run starts its own")
    token_env: EnvironmentVariable = key("GSPO_VLLM_TOKEN", "environment variable with the token of the servers in urls")
    transport: Literal["auto", "shm", "tcp", "nccl"] = key(
        "auto", "how weights reach vLLM; auto: shm for servers that the run starts, tcp for others"
    )
    dtype: Literal["auto", "bfloat16", "float32"] = key("auto", "type that vLLM computes in; auto: model.compute_dtype")
    rounding: Literal["stochastic", "nearest"] = key(
        "stochastic", "how float32 weights become bfloat16 for vLLM: right on average, or nearest, which hides small updates"
    )
    delta: bool = key(False, "send only the weights whose bits changed (tcp)")
    address: Name = key("127.0.0.1", "address at which vLLM servers reach this process (tcp)")
    sync_timeout_s: float = key(600.0, "deadline of one weight transfer to a server", gt=0)
    slots: int = key(64, "sequences decoded together", ge=1)
    context_length: int = key(1024, "most tokens of prompt and completion together", ge=2)
    host: Name = key("127.0.0.1", "address the gateway listens on")


class Mesh(Section):
    """Devices: the product of the four is how many are used."""

    replica: int = key(1, "copies of the whole state; rows are split over them", ge=1)
    fsdp: int = key(0, "devices over which rows and state are split; 0: what the other three leave", ge=0)
    tensor: int = key(1, "devices over which heads and features of every layer are split", ge=1)
    sequence: int = key(
        1, "devices over which the tokens of each row are split, for long rows; they split the state, too", ge=1
    )


class Run(Section):
    """The run directory."""

    name: DirectoryName = key("policy", "directory name; default: model.label")
    seed: int = key(0, "root of the key tree", ge=0, lt=2**32)
    dir: Name = key("runs", "parent directory of run directories")
    checkpoint_every: int = key(10, "training steps between checkpoints", ge=1)
    keep_last: int = key(2, "checkpoints kept", ge=1)
    log_rollouts: bool = key(True, "write every trajectory to rollouts/")


class RewardBlend(Section):
    """Weights of the parts of a reward."""

    env: float = idle(1.0, "weight of the task app's reward", ge=0)
    event: float = idle(0.0, "weight of the judge's event scores", ge=0)
    outcome: float = idle(0.0, "weight of the judge's outcome score", ge=0)


class JudgeOptions(Section):
    """The judge's model and what it scores."""

    provider: str | None = idle(None, "API of the judge")
    model: str | None = idle(None, "model of the judge")
    event: bool | None = idle(None, "score events")
    outcome: bool | None = idle(None, "score outcomes")
    rubric_id: str | None = idle(None, "a rubric the judge knows")
    rubric_overrides: Table = idle({}, "criteria per kind of score")
    timeout_s: float = idle(30.0, "deadline of one judgment", gt=0)
    max_concurrency: int = idle(10, "judgments in flight", ge=1)
    tracks: Texts = idle((), "kinds of scores")
    weights: dict[str, float] = idle({}, "weight per track")
    metadata: Table = idle({}, "passed to the judge")


class Judge(Section):
    """A model that scores episodes."""

    enabled: bool = idle(False, "use it")
    type: str | None = idle(None, "kind of judge")
    timeout_s: float | None = idle(None, "deadline of one judgment", gt=0)
    rubric: Table = idle({}, "criteria")
    reward_blend: RewardBlend = idle(RewardBlend, "weights of the parts of a reward")
    options: JudgeOptions = idle(JudgeOptions, "the judge's model and what it scores")


class Rubric(Section):
    """Criteria of a judge, older spelling."""

    enabled: bool = idle(False, "use them")
    weights: RewardBlend = idle(RewardBlend, "weights of the parts of a reward")
    model: str | None = idle(None, "model of the judge")
    api_base: Url | None = idle(None, "API of the judge")
    api_key_env: EnvironmentVariable | None = idle(None, "environment variable that holds its API key")
    event: Table | bool | None = idle(None, "criteria of events")
    outcome: Table | bool | None = idle(None, "criteria of outcomes")


class Config(Section):
    """A whole run. Functions receive the section they need, not this."""

    type: Literal["rl"] = fixed("rl", "kind of job")
    algorithm: Algorithm = key(Algorithm, "")
    guards: Guards = key(Guards, "")
    services: Services = key(Services, "")
    model: Model = key(..., "")
    policy: Policy = key(Policy, "")
    rollout: Rollout = key(..., "")
    training: Training = key(..., "")
    optimizer: Optimizer = key(Optimizer, "")
    evaluation: Evaluation = key(Evaluation, "")
    data: Data = key(Data, "")
    serving: Serving = key(Serving, "")
    mesh: Mesh = key(Mesh, "")
    run: Run = key(Run, "")
    compute: Compute = key(Compute, "")
    judge: Judge = key(Judge, "")
    rubric: Rubric = key(Rubric, "")
    tags: Table = key({}, "free notes, written to config.json", "recorded")
    vllm: Table = idle({}, "options of a vLLM server")
    reference: Table = idle({}, "reference model")
    backend: Table = idle({}, "hosted back end")
    smoke: Table = idle({}, "options of a smoke test")


def acts(field: FieldInfo) -> str:
    """`read`, `fixed`, `idle` or `recorded`: what this version does with a key."""
    extra = field.json_schema_extra
    return str(extra["acts"]) if isinstance(extra, dict) else "read"


def subsection(field: FieldInfo) -> type[Section] | None:
    """The section class of a field that is a table of its own, otherwise None."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def tables(root: type[Section] = Config, name: str = "") -> Iterator[tuple[str, type[Section]]]:
    """Every table under `root` with its dotted name, `root` first."""
    yield name, root
    for child, field in root.model_fields.items():
        if section := subsection(field):
            yield from tables(section, f"{name}.{child}".lstrip("."))


@cache
def keys(root: type[Section] = Config) -> Mapping[str, FieldInfo]:
    """Every key under `root` by dotted name, tables left out."""
    return MappingProxyType(
        {
            f"{table}.{name}".lstrip("."): field
            for table, section in tables(root)
            for name, field in section.model_fields.items()
            if subsection(field) is None
        }
    )
