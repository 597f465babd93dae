"""What a task is: a prompt and a reward, or an environment of several turns; and how one episode of it is played."""

import inspect
import math
import numbers
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from rollout.types import Problem

Message = Mapping[str, Any]
Messages = Sequence[Message]


class AppError(Exception):
    """An answer of a task app that is not a rollout: HTTP status, a stable code, a message, whether trying again can help."""

    def __init__(self, status: int, code: str, message: str, *, retryable: bool | None = None):
        super().__init__(message)
        self.status, self.code = status, code
        self.retryable = status >= 500 if retryable is None else retryable


class PromptTooLong(AppError):
    """The conversation no longer fits the model. At the first turn an error, later the end of the episode."""

    def __init__(self, message: str):
        super().__init__(400, "prompt_too_long", message)


@dataclass(frozen=True)
class Choice:
    """One reply of the policy: the assistant message in OpenAI form (content, perhaps tool_calls), and why it ended."""

    message: Message
    finish_reason: str


@dataclass(frozen=True)
class Task:
    """A one-turn task: `prompt(problem)` is a string or messages, `reward(text, problem)` a finite number. Both may be async.

    `problem(seed, split)` makes the object that both receive; without it they receive a `Problem`. Equal seeds must give equal
    problems. `splits` gives the number of problems per split; None accepts any split name. A sync function runs in the event
    loop: make a slow reward async. A reward of None or NaN is an error, never 0. To report other numbers beside it, return
    `{"reward": 0.7, "correct": 1.0}`: they reach the trainer as metrics `objective_correct`, ...
    """

    prompt: Callable[[Any], Any]
    reward: Callable[[str, Any], Any]
    _: KW_ONLY
    name: str = "task"
    splits: Mapping[str, int] | None = None
    system: str | None = None
    problem: Callable[[int, str], Any] | None = None


@dataclass(frozen=True)
class Env:
    """A task of several turns, as two pure functions that may be async.

    `reset(seed, split, config) -> (state, messages)` and `step(state, message) -> (state, new_messages, reward, done)`, where
    `message` is the assistant message (`content`, perhaps `tool_calls`) and `reward` a finite number for that turn, or a
    mapping as for `Task`; the episode's reward, and every other number, is the sum over turns. `tools` are offered to the
    policy in OpenAI form.
    """

    reset: Callable[[int, str, Mapping[str, Any]], Any]
    step: Callable[[Any, Message], Any]
    _: KW_ONLY
    name: str = "env"
    splits: Mapping[str, int] | None = None
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class Episode:
    """What was played: one reply and one reward per turn. `truncated`: it ended at a limit, not because it was done.

    `objectives` are the other numbers the task gave, summed over turns.
    """

    choices: tuple[Choice, ...]
    turn_rewards: tuple[float, ...]
    truncated: bool
    objectives: Mapping[str, float] = field(default_factory=dict)


Chat = Callable[[Messages, Sequence[Mapping[str, Any]]], Awaitable[Choice]]


def as_env(task: Task) -> Env:
    """The task as an environment whose first step is its last."""

    async def reset(seed: int, split: str, config: Mapping[str, Any]) -> tuple[Any, list[Any]]:
        problem = Problem(seed, split, config) if task.problem is None else await _call("problem", task.problem, seed, split)
        prompt = await _call("prompt", task.prompt, problem)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        return problem, [{"role": "system", "content": task.system}, *messages] if task.system is not None else messages

    async def step(problem: Any, message: Message) -> tuple[Any, list[Any], object, bool]:
        return problem, [], await _call("reward", task.reward, message.get("content") or "", problem), True

    return Env(reset, step, name=task.name, splits=task.splits)


async def play(env: Env, chat: Chat, *, seed: int, split: str, config: Mapping[str, Any], max_turns: int) -> Episode:
    """One episode of at most `max_turns` calls of `chat(messages, tools)`. Raises AppError."""
    state, opening = _unpack("reset", await _call("reset", env.reset, seed, split, config), 2)
    history = list(opening)
    choices: list[Choice] = []
    rewards: list[float] = []
    objectives: dict[str, float] = {}
    done = False
    while not done and len(choices) < max_turns:
        try:
            choice = await chat(history, env.tools)
        except PromptTooLong:
            if not choices:
                raise
            break
        state, new, reward, done = _unpack("step", await _call("step", env.step, state, choice.message), 4)
        choices.append(choice)
        values = reward if isinstance(reward, Mapping) else {"reward": reward}
        rewards.append(_finite(values.get("reward")))
        for name, value in values.items():
            objectives[str(name)] = objectives.get(str(name), 0.0) + _finite(value, str(name))
        history += [choice.message, *new]
    objectives.pop("reward", None)
    return Episode(tuple(choices), tuple(rewards), truncated=not done, objectives=objectives)


async def _call(what: str, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        value = function(*arguments)
        return await value if inspect.isawaitable(value) else value
    except AppError:
        raise
    except Exception as exc:  # the author's code may raise anything; it must not become a reward
        raise AppError(500, f"{what}_failed", f"{what}() raised {type(exc).__name__}: {exc}") from exc


def _unpack(what: str, value: Any, count: int) -> tuple[Any, ...]:
    if not isinstance(value, tuple) or len(value) != count:
        raise AppError(
            500, f"{what}_invalid", f"{what}() must return a tuple of {count}, got {type(value).__name__}", retryable=False
        )
    return value


def _finite(reward: object, name: str = "reward") -> float:
    if reward is None:
        raise AppError(500, "reward_missing", f"the {name} is None; a failure is not a zero, so this rollout has no reward")
    if isinstance(reward, bool) or not isinstance(reward, numbers.Real):
        raise AppError(500, "reward_invalid", f"the {name} is a {type(reward).__name__}, not a number", retryable=False)
    if not math.isfinite(number := float(reward)):
        raise AppError(500, "reward_not_finite", f"the {name} is {number}, expected a finite number", retryable=False)
    return number
