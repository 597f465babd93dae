"""A task app's side of a model call: an ordinary OpenAI chat request to the URL that it was handed."""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx

from rollout.replies import error_of
from rollout.task import AppError, Choice, Messages, PromptTooLong

CONNECT_TIMEOUT_S = 10.0
_SAMPLING = ("temperature", "top_p", "max_tokens", "max_completion_tokens")
_TOO_LONG = ("context_length_exceeded", "prompt_too_long", "overlong_prompt")


def chat_url(inference_url: object) -> str:
    """The URL to POST to: `/v1/chat/completions` appended unless it is there, the query kept. Raises AppError 422."""
    if not isinstance(inference_url, str) or not inference_url:
        raise AppError(422, "missing_inference_url", "policy.config.inference_url is required")
    try:
        parts = urlsplit(inference_url)
    except ValueError as exc:
        raise AppError(422, "invalid_inference_url", "policy.config.inference_url is not a URL") from exc
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise AppError(422, "invalid_inference_url", "policy.config.inference_url must be http(s)://host...")
    path = parts.path.rstrip("/")
    if not path.endswith("/chat/completions"):
        path += "/chat/completions" if path.endswith("/v1") else "/v1/chat/completions"
    return urlunsplit(parts._replace(path=path))


async def complete(
    http: httpx.AsyncClient,
    url: str,
    policy: Mapping[str, Any],
    messages: Messages,
    tools: Sequence[Mapping[str, Any]],
    timeout_s: float,
) -> Choice:
    """The policy's next message. Raises AppError 502 `inference_upstream_error`, or PromptTooLong.

    Messages name the host only: the path of an inference URL is its password.
    """
    body: dict[str, Any] = {"model": policy.get("model") or "policy", "messages": list(messages)}
    body.update({name: policy[name] for name in _SAMPLING if policy.get(name) is not None})
    if tools:
        body["tools"] = list(tools)
    host = urlsplit(url).netloc.rpartition("@")[2]
    timeouts = httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S)
    try:
        response = await http.post(url, json=body, timeout=timeouts)
    except httpx.RequestError as exc:
        raise _upstream(host, f"{type(exc).__name__}: {exc}") from exc
    try:
        answer = response.json()
    except ValueError:
        answer = None
    if not response.is_success:
        code, message, _ = error_of(answer)
        said = f"answered {response.status_code}: {code} {message}"[:300]
        if code in _TOO_LONG:
            raise PromptTooLong(f"the policy at {host} {said}")
        raise _upstream(host, said, retryable=response.status_code in (408, 429) or response.status_code >= 500)
    return _choice(answer, host)


def _choice(answer: object, host: str) -> Choice:
    try:
        choice = answer["choices"][0]  # type: ignore[index]
        message, finish_reason = dict(choice["message"]), str(choice.get("finish_reason") or "stop")
    except (TypeError, KeyError, IndexError, ValueError, AttributeError) as exc:
        raise _upstream(host, "answered without choices[0].message") from exc
    if not isinstance(message.setdefault("content", None), str | None):
        raise _upstream(host, "answered with a choices[0].message.content that is not a string")
    return Choice({"role": "assistant", **message}, finish_reason)


def _upstream(host: str, said: str, *, retryable: bool = True) -> AppError:
    return AppError(502, "inference_upstream_error", f"the policy at {host}: {said}", retryable=retryable)
