"""A task app's answer, of any known version, read into one reward. Trusts no version marker; knows nothing about HTTP."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

_LOOKED_FOR = (
    "metrics|reward_info.outcome_objectives.reward, .outcome_reward, .episode_returns, .mean_return, .total_reward, "
    ".outcome_score, .reward_mean, .episode_rewards, trajectories[0].episode_return, trajectories[0].steps[].reward, reward"
)
_COMPONENTS = ("outcome_reward", "mean_return", "total_reward", "outcome_score", "events_score", "reward_mean", "num_steps")


class ReplyError(Exception):
    """The reply cannot be trained on. `reason` is short and stable: not_an_object | no_reward | nan_reward | invalid_reward |
    several_episodes | correlation_mismatch."""

    def __init__(self, reason: str, message: str):
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Reply:
    """What one rollout earned. `reward` is None exactly when `aborted`; `turn_rewards`, if any, has one entry per model call.

    `raw` holds the other numbers of the reply (their scales differ between apps) for the log; `notes` says what was ignored.
    """

    reward: float | None
    turn_rewards: tuple[float, ...] | None = None
    raw: Mapping[str, float] = field(default_factory=dict)
    aborted: bool = False
    notes: tuple[str, ...] = ()


def parse_reply(body: object, trace_id: str, model_calls: int) -> Reply:
    """The `Reply` in a decoded JSON body. `model_calls` is the number of calls recorded for this trace.

    The first number present wins: outcome objectives, outcome reward, episode returns, ..., the sum of step rewards. null means
    absent; a bool, a string, NaN or infinity in such a place is an error, never skipped and never zero. Raises ReplyError.
    """
    if not isinstance(body, Mapping):
        raise ReplyError(
            "not_an_object",
            f"the reply to /rollout is a JSON {_kind(body)}, expected an object with 'metrics.outcome_reward'",
        )
    _check_correlation(body, trace_id)
    metrics = _metrics(body)
    raw = {name: number for name in _COMPONENTS if (number := _number_or_none(metrics.get(name))) is not None}
    for name, value in _mapping(metrics.get("outcome_objectives")).items():
        if (number := _number_or_none(value)) is not None:
            raw[f"objective_{name}"] = number
    if body.get("aborted") is True:
        return Reply(reward=None, raw=raw, aborted=True)
    reward = _reward(body, metrics)
    turn_rewards, notes = _turn_rewards(body, metrics, model_calls)
    return Reply(reward, turn_rewards, raw, notes=notes)


def error_of(body: object) -> tuple[str, str, bool | None]:
    """`(code, message, retryable)` of an error body in any known shape; empty strings and None for what it does not say."""
    body = _mapping(body)
    detail = body.get("detail", body)
    if isinstance(detail, Sequence) and not isinstance(detail, str) and detail and isinstance(detail[0], Mapping):
        where = ".".join(str(part) for part in detail[0].get("loc", ()))
        return "invalid_request", f"{where}: {detail[0].get('msg', '')}", None
    if isinstance(detail, str):
        return "", detail, None
    error = _mapping(detail).get("error", detail)
    if isinstance(error, str):
        return "", error, None
    error = _mapping(error)
    retryable = error.get("retryable")
    code = str(error.get("code") or error.get("type") or "")
    return code, str(error.get("message") or ""), retryable if isinstance(retryable, bool) else None


def _metrics(body: Mapping[str, Any]) -> dict[str, Any]:
    """metrics and reward_info (its later name) as one mapping, nulls dropped."""
    merged: dict[str, Any] = {}
    for section in ("reward_info", "metrics"):
        merged.update({name: value for name, value in _mapping(body.get(section)).items() if value is not None})
    return merged


def _reward(body: Mapping[str, Any], metrics: Mapping[str, Any]) -> float:
    for where, value in _candidates(body, metrics):
        if value is not None:
            return _number(value, where)
    raise ReplyError("no_reward", f"the reply to /rollout holds no reward; looked for {_LOOKED_FOR}")


def _candidates(body: Mapping[str, Any], metrics: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    yield "outcome_objectives.reward", _mapping(metrics.get("outcome_objectives")).get("reward")
    yield "outcome_reward", metrics.get("outcome_reward")
    trajectories = _objects(body.get("trajectories"))
    returns = _list(metrics.get("episode_returns"))
    episodes = max(len(trajectories), len(returns))
    if episodes > 1:
        raise ReplyError("several_episodes", f"the reply to /rollout holds {episodes} episodes, expected 1")
    yield "episode_returns[0]", returns[0] if returns else None
    for name in ("mean_return", "total_reward", "outcome_score", "reward_mean"):
        yield name, metrics.get(name)
    legacy = _list(metrics.get("episode_rewards"))
    yield "episode_rewards[0]", legacy[0] if legacy else None
    for trajectory in trajectories:
        yield "trajectories[0].episode_return", trajectory.get("episode_return")
        rewards = [_number(r, "steps[].reward") for r in _step_rewards(trajectory) if r is not None]
        yield "sum of steps[].reward", sum(rewards) if rewards else None
    yield "reward", body.get("reward")


def _turn_rewards(
    body: Mapping[str, Any], metrics: Mapping[str, Any], model_calls: int
) -> tuple[tuple[float, ...] | None, tuple[str, ...]]:
    """The first per-turn rewards with one finite number per recorded model call, and what was passed over."""
    trajectories = _objects(body.get("trajectories"))
    steps = trajectories[0] if len(trajectories) == 1 else {}
    events = _objects(_mapping(body.get("trace")).get("event_history"))
    sources = {
        "event_rewards": _list(metrics.get("event_rewards")),
        "steps[].reward": _step_rewards(steps),
        "decision_samples[].r_i": [sample.get("r_i") for sample in _objects(steps.get("decision_samples"))],
        "trace event rewards": [_mapping(event.get("metadata")).get("event_reward") for event in events],
    }
    notes = []
    for name, values in sources.items():
        if all(value is None for value in values):
            continue
        numbers = [_number_or_none(value) for value in values]
        finite = tuple(number for number in numbers if number is not None)
        if len(values) == len(finite) == model_calls:
            return finite, tuple(notes)
        notes.append(f"{name} ignored: {len(finite)} finite values of {len(values)} for {model_calls} model calls")
    return None, tuple(notes)


def _check_correlation(body: Mapping[str, Any], trace_id: str) -> None:
    trajectories = _objects(body.get("trajectories"))
    found = {
        "trace_correlation_id": body.get("trace_correlation_id"),
        "pipeline_metadata.trace_correlation_id": _mapping(body.get("pipeline_metadata")).get("trace_correlation_id"),
        "trajectories[0].inference_url": _trace_of(trajectories[0].get("inference_url")) if trajectories else None,
        "run_id": body.get("run_id"),
    }
    for where, value in found.items():
        if value:
            if value != trace_id:
                raise ReplyError("correlation_mismatch", f"the reply to /rollout is not for this rollout: {where} differs")
            return


def _trace_of(url: object) -> str | None:
    """The trace id in a URL's path or `?cid=`, also when a client appended a path behind the query."""
    if not isinstance(url, str):
        return None
    try:
        parts = urlsplit(url)
    except ValueError:
        return None
    in_path = [segment for segment in parts.path.split("/") if segment.startswith("trace_")]
    in_query = parse_qs(parts.query).get("cid", [""])[0].split("/")[0]
    return in_path[-1] if in_path else in_query or None


def _number(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ReplyError("invalid_reward", f"{where} in the reply is a JSON {_kind(value)}, expected a finite number")
    if (number := _number_or_none(value)) is None:
        raise ReplyError("nan_reward", f"{where} in the reply is {str(value)[:20]}, expected a finite number")
    return number


def _number_or_none(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _step_rewards(trajectory: Mapping[str, Any]) -> list[Any]:
    return [step.get("reward") for step in _objects(trajectory.get("steps"))]


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _objects(value: object) -> list[Mapping[str, Any]]:
    return [item for item in _list(value) if isinstance(item, Mapping)]


def _kind(value: object) -> str:
    names = {bool: "boolean", str: "string", list: "array", dict: "object", type(None): "null"}
    return names.get(type(value), "number")
