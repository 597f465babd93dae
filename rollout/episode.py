"""A rollout request, played against the policy, as a rollout reply. The bodies of POST /rollout; knows no server."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
from pydantic import BaseModel, ConfigDict, Field

from rollout.inference import chat_url, complete
from rollout.task import AppError, Choice, Env, Episode, Messages, play

DEFAULT_MAX_TURNS = 10


class _Wire(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")  # newer clients send keys that this app need not know


class _EnvRequest(_Wire):
    env_name: str | None = None
    seed: int
    config: dict[str, Any] | None = None


class _PolicyRequest(_Wire):
    policy_name: str | None = None
    config: dict[str, Any] | None = None


class _Safety(_Wire):
    max_time_s: float = Field(default=3600.0, gt=0)


class RolloutRequest(_Wire):
    """The fields this app reads of a rollout request of any version."""

    run_id: str | None = None
    trace_correlation_id: str | None = None
    env: _EnvRequest
    policy: _PolicyRequest
    safety: _Safety = _Safety()


async def play_request(http: httpx.AsyncClient, name: str, env: Env, body: RolloutRequest) -> dict[str, Any]:
    """The reply to one request: `env`, served as `name`, played within its limits. Raises AppError."""
    trace_id = body.trace_correlation_id or body.run_id
    if not trace_id:
        raise AppError(422, "missing_trace_id", "trace_correlation_id (or run_id) is required")
    policy, config = body.policy.config or {}, body.env.config or {}
    url, limit = chat_url(policy.get("inference_url")), body.safety.max_time_s
    split, max_turns = config.get("split", "train"), config.get("max_turns", DEFAULT_MAX_TURNS)
    if isinstance(max_turns, bool) or not isinstance(max_turns, int) or max_turns < 1:
        raise AppError(422, "invalid_max_turns", f"env.config.max_turns={max_turns!r} must be an integer >= 1")
    if env.splits is not None and split not in env.splits:
        raise AppError(422, "unknown_split", f"env.config.split={split!r} of {name} must be one of {sorted(env.splits)}")

    async def chat(messages: Messages, tools: Sequence[Mapping[str, Any]]) -> Choice:
        return await complete(http, url, policy, messages, tools, limit)

    try:
        async with asyncio.timeout(limit):
            episode = await play(env, chat, seed=body.env.seed, split=split, config=config, max_turns=max_turns)
    except TimeoutError as exc:
        raise AppError(504, "rollout_timeout", f"the episode took longer than safety.max_time_s={limit:g} s") from exc
    details = {"env_name": name, "seed": body.env.seed, "split": split, "truncated": episode.truncated}
    return _reply(episode, trace_id, _with_cid(url, trace_id), body.policy.policy_name or "policy", details)


def _reply(episode: Episode, trace_id: str, url: str, policy_id: str, details: Mapping[str, Any]) -> dict[str, Any]:
    """One finished episode in the union of the reply formats v1 to v5."""
    total, turns = sum(episode.turn_rewards), len(episode.choices)
    steps = [
        {
            "obs": {},
            "tool_calls": choice.message.get("tool_calls") or [],
            "reward": reward,
            "done": turn == turns and not episode.truncated,
            "truncated": turn == turns and episode.truncated,
            "info": {"meta": {"inference_url": url, "turn": turn}, "finish_reason": choice.finish_reason},
            "output": choice.message["content"],
        }
        for turn, (choice, reward) in enumerate(zip(episode.choices, episode.turn_rewards, strict=True), 1)
    ]
    trajectory = {
        "env_id": f"{details['env_name']}::{details['seed']}",
        "policy_id": policy_id,
        "steps": steps,
        "final": {"observation": {}, "reward": total},
        "length": turns,
        "inference_url": url,
    }
    outcome = {
        "outcome_reward": total,
        "event_rewards": list(episode.turn_rewards),
        "outcome_objectives": {**episode.objectives, "reward": total},
        "details": dict(details),
    }
    legacy = {"episode_returns": [total], "mean_return": total, "num_steps": turns, "num_episodes": 1, "outcome_score": total}
    return {
        "run_id": trace_id,
        "trace_correlation_id": trace_id,
        "trajectories": [trajectory],
        "metrics": {**legacy, **outcome},
        "reward_info": outcome,
        "branches": {},
        "aborted": False,
        "ops_executed": 2 * turns,
        "inference_url": url,
        "pipeline_metadata": {"inference_url": url, "trace_correlation_id": trace_id},
    }


def _with_cid(url: str, trace_id: str) -> str:
    parts = urlsplit(url)
    if "cid" in parse_qs(parts.query):
        return url
    return parts._replace(query="&".join(part for part in (parts.query, f"cid={trace_id}") if part)).geturl()
