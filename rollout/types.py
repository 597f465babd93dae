"""What a rollout produces: problems, turns, trajectories, groups. Frozen data; knows nothing about HTTP, JAX or text."""

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

FinishReason = Literal["stop", "length"]
Status = Literal["done", "cut", "void"]
type Experts = tuple[tuple[tuple[int, ...], ...], ...]
"""Which experts a mixture of them chose: by token, by layer that has experts, -1 where the token was not processed."""


@dataclass(frozen=True)
class Problem:
    """One problem, opaque to the trainer: the seed (and split, and env_config) the task app turns into an episode."""

    seed: int
    split: str = "train"
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SamplingParams:
    """How one completion is drawn.

    `temperature` 0 is greedy; `top_p` 1 and `top_k` 0 are off. `stop` strings and `stop_ids` end a completion (the stop id
    itself is sampled, recorded and trained). `key` is the path in the run's key tree, `(step, group, member, turn)` for
    training rollouts; equal keys and prompts give equal tokens.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    key: tuple[int, ...] = ()


@dataclass(frozen=True)
class Completion:
    """What an engine returns: sampled ids, their log-probabilities under the sampling distribution, a policy version each."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: FinishReason
    experts: Experts | None = None
    """Of the prompt's and the sampled tokens, if the engine records them; the last token was never processed."""


@dataclass(frozen=True)
class Turn:
    """One model call as the gateway recorded it: exact prompt ids and exact sampled ids, never re-tokenised."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: FinishReason
    messages: tuple[Mapping[str, Any], ...] = ()
    """A view for people: the request's messages and the reply. Never a source of ids."""
    experts: Experts | None = None
    """Expert choices at the tokens of prompt and completion, if the engine recorded them."""


@dataclass(frozen=True)
class Trajectory:
    """One episode. `reward` is None exactly when `status` is void: a failure is not a zero.

    `status`: done | cut (the episode ended at a limit; its reward is real) | void (infrastructure failure). `reason` says
    why for cut and void.
    """

    turns: tuple[Turn, ...]
    reward: float | None
    status: Status
    reason: str = ""
    turn_rewards: tuple[float, ...] | None = None
    trace_id: str = ""
    member: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Group:
    """One problem and its g trajectories, in member order."""

    problem: Problem
    trajectories: tuple[Trajectory, ...]


@runtime_checkable
class Sample(Protocol):
    """An engine, seen from outside: one coroutine. The JAX sampler, a vLLM fleet and a test's fake are interchangeable."""

    def __call__(self, prompt_ids: Sequence[int], params: SamplingParams) -> Awaitable[Completion]: ...


@runtime_checkable
class Recorder(Protocol):
    """What the runner needs of a gateway: a private URL per attempt, and the turns that were recorded behind it."""

    def open(self, sampling: SamplingParams) -> tuple[str, str]:
        """A new attempt: `(trace_id, inference_url)`. Its calls are sampled with `sampling`, the turn appended to its key."""
        ...

    def failure(self, trace_id: str) -> str | None:
        """Why the latest call of an open trace got no completion, or None. Such an attempt has no reward."""
        ...

    def overflow(self, trace_id: str) -> str | None:
        """Why an open trace got no further turn, its prompt having outgrown the context, or None. Such an attempt was cut."""
        ...

    def close(self, trace_id: str) -> tuple[Turn, ...]:
        """The turns recorded so far, in call order. Later calls of this trace are refused and discarded."""
        ...
