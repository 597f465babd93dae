"""One vLLM server over HTTP: token ids in, ids and log-probabilities out, and the routes that change its weights.

Talks to vLLM's `/inference/v1/generate`, which tells for every token the version of the weights that sampled it.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rollout.types import Completion, FinishReason, SamplingParams
from serving_bridge.vllm_http import ADMIN_S as ADMIN_S
from serving_bridge.vllm_http import Connection
from serving_bridge.vllm_http import ServerError as ServerError

FLOOR = -9999.0
"""What vLLM writes for a log-probability that is not a number."""
REFUSED = (400, 413, 422)
"""Statuses that another server would answer with as well."""


def request_seed(seed: int, key: Sequence[int]) -> int:
    """A 63-bit seed for one request: a hash of the run's seed and the request's place in the key tree."""
    text = json.dumps([seed, *key]).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1


class VllmClient(Connection):
    """A connection to the server at `url`. `model` is the name it serves, or that of an adapter.

    `publisher`: who publishes weights to it, the part of a version's name before the number (a `Stage`'s folder); versions of
    others count as -1. `seed`: the run's, from which each request gets its own. `concurrency`: requests in flight, of which
    connections are kept. `timeout_s`: deadline of one completion.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        token: str = "",
        publisher: str = "",
        seed: int = 0,
        concurrency: int = 64,
        timeout_s: float = 600.0,
    ):
        super().__init__(url, token, kept=concurrency)
        self.model, self._publisher, self._seed, self._timeout_s = model, publisher, seed, timeout_s

    async def sample(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """One completion, each token with the version that sampled it. Raises ServerError.

        Cancelled, it closes the connection, and vLLM stops generating.
        """
        body = {
            "model": self.model,
            "token_ids": list(prompt_ids),
            "sampling_params": sampling_body(params, request_seed(self._seed, params.key)),
        }
        what = f"{self.url}/inference/v1/generate"
        reply = await self.call("POST", "/inference/v1/generate", self._timeout_s, json=body)
        return read_completion(reply, what, self._publisher)

    async def probe(self, ids: Sequence[int], timeout_s: float | None = None) -> list[float]:
        """Log-probabilities `[t-1]` of `ids[1:]`, each given the ids before it, at temperature 1. Raises ServerError.

        `timeout_s`: its deadline; by default that of a completion.
        """
        params = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False, "ignore_eos": True}
        body = {"model": self.model, "token_ids": list(ids), "sampling_params": params}
        reply = await self.call("POST", "/inference/v1/generate", timeout_s or self._timeout_s, json=body)
        try:
            rows = reply["prompt_logprobs"][1:]
            found = [float(row[str(token)]["logprob"]) for row, token in zip(rows, ids[1:], strict=True)]
        except (KeyError, TypeError, ValueError) as error:
            raise self._error(f"{self.url}: no log-probabilities of a prompt in its reply ({error!r})", gone=False) from None
        return found

    async def weights(self, timeout_s: float | None = None) -> str:
        """What it calls the weights that it serves. Raises ServerError."""
        return str((await self.table("/weight_info", timeout_s)).get("weight_version"))

    async def version(self, timeout_s: float | None = None) -> int:
        """The version of the weights it serves; -1 for weights that nobody published. Raises ServerError."""
        return version_number(await self.weights(timeout_s), self._publisher)

    async def idle(self, timeout_s: float | None = None) -> bool:
        """Whether it is paused or asleep: it takes requests, and computes nothing. Raises ServerError."""
        return bool((await self.table("/is_sleeping", timeout_s)).get("is_sleeping"))

    async def slept(self) -> tuple[bool, bool]:
        """Whether its weights may be out of its memory now, and may have been since it started. Raises ServerError.

        vLLM says of a server that is only paused, too, that it is sleeping; its metrics know better, unless it was started
        with --disable-log-stats.
        """
        text = str(await self.get("/metrics"))
        awake = _metric(text, "vllm:engine_sleep_state", 'sleep_state="awake"')
        asleep = awake != 1.0 and await self.idle()  # the metrics need not wait for the engine's step
        return asleep, (_metric(text, "vllm:sleep_mode_operation_duration_seconds_count", 'operation="sleep"') or 0.0) > 0.0


def _metric(text: str, name: str, label: str) -> float | None:
    """The least value with this label; None where there is none."""
    found = re.findall(rf"^{re.escape(name)}\{{[^\n]*{re.escape(label)}[^\n]*\}} (\S+)$", text, re.MULTILINE)
    return min(map(float, found), default=None)


def sampling_body(params: SamplingParams, seed: int) -> dict[str, Any]:
    """vLLM's sampling parameters for what the embedded sampler does with `params`.

    The model's own end ids do not end a completion unless `stop_ids` names them, and stop strings are matched against text
    with special tokens, as there.
    """
    body: dict[str, Any] = {
        "n": 1, "logprobs": 0, "max_tokens": params.max_tokens, "temperature": params.temperature, "top_p": params.top_p,
        "top_k": params.top_k, "min_tokens": min(params.min_tokens, params.max_tokens), "stop_token_ids": list(params.stop_ids),
        "ignore_eos": True, "skip_special_tokens": False, "spaces_between_special_tokens": False,
        "detokenize": bool(params.stop),
    }  # fmt: skip
    if params.stop:
        body["stop"] = list(params.stop)
    if params.temperature > 0:
        body["seed"] = seed
    return body


def read_completion(reply: Any, what: str, publisher: str) -> Completion:
    """The completion in a reply of `/inference/v1/generate`. ServerError when it is not whole."""
    try:
        (choice,) = reply["choices"]
        reason = choice["finish_reason"]
        if reason not in ("stop", "length"):
            raise ServerError(f"{what}: the completion was ended by the server ({reason})", gone=True)
        ids = tuple(int(token) for token in choice["token_ids"])
        content = choice["logprobs"]["content"]
        logprobs, named = (
            tuple(float(entry["logprob"]) for entry in content),
            tuple(int(entry["token_id"]) for entry in content),
        )
        versions = _versions(choice["weight_versions"], len(ids), publisher)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        why = repr(error)[:300]
        raise ServerError(f"{what}: not a completion with log-probabilities and versions ({why})", gone=False) from None
    if named != ids or not ids:
        raise ServerError(f"{what}: {len(ids)} ids, and log-probabilities of {len(named)} that are not those", gone=False)
    if not all(math.isfinite(logprob) and logprob > FLOOR for logprob in logprobs):
        raise ServerError(f"{what}: a sampled token has a log-probability that is not a number", gone=False)
    found: FinishReason = reason
    return Completion(ids, logprobs, versions, found)


def version_number(name: object, publisher: str) -> int:
    """The number in `publisher.7`; -1 for any other name, such as a fresh server's `default`."""
    owner, _, number = str(name).rpartition(".")
    return int(number) if publisher and owner == publisher and number.isascii() and number.isdigit() else -1


def _versions(spans: Sequence[Mapping[str, Any]], count: int, publisher: str) -> tuple[int, ...]:
    versions: list[int] = []
    for span in spans:
        start, end = int(span["start"]), int(span["end"])
        if start != len(versions) or not start <= end <= count:
            raise ValueError(f"a version span from {start} to {end} after one to {len(versions)}, of {count} tokens")
        versions += [version_number(span["version"], publisher)] * (end - start)
    if len(versions) != count:
        raise ValueError(f"versions of {len(versions)} tokens, and {count} tokens")
    return tuple(versions)
