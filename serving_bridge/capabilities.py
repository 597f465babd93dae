"""What stands against training with a vLLM server, found before the first step instead of in the reward curve."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from serving_bridge.vllm_client import ServerError, VllmClient

CHUNKED_CPU = (
    "it prefills in chunks on a CPU, where the first request with a seed ends its engine (CPU Generator does not use offset); "
    "start it with --no-enable-chunked-prefill --max-num-batched-tokens {tokens}"
)


@dataclass(frozen=True)
class Needs:
    """What a run asks of a server. `backend` "": adapters alone are sent, of rank `lora_rank`; 0: none."""

    context_length: int
    dtype: str
    backend: str
    lora_rank: int = 0


async def problems(client: VllmClient, needs: Needs) -> list[str]:
    """Each in one sentence that says what to change; empty when the server will do. Raises ServerError."""
    try:
        info = await client.get("/server_info", config_format="json")
    except ServerError as error:
        if error.status == 401:
            return ["it refuses the token: serving.token_env must name the variable that holds its GSPO_VLLM_TOKEN"]
        if error.status == 404:
            return ["it has no admin routes: start it with VLLM_SERVER_DEV_MODE=1 in its environment"]
        raise
    config = info.get("vllm_config") if isinstance(info, dict) else None
    if not isinstance(config, dict):
        return ["its /server_info is not that of vLLM 0.32 or newer; upgrade it"]
    routes = await _routes(client)
    found = [*_semantics(config, needs), *_weights(config, needs, routes)]
    if not await _has_plugin(client):
        found.append(
            "it lacks the plugin gspo_vllm, which guards its routes, takes weights and loads adapters once; install "
            "serving_bridge/plugin in its environment and start it with --middleware gspo_vllm.guard.AdminToken"
        )
    return found


async def _has_plugin(client: VllmClient) -> bool:
    try:
        await client.get("/gspo_vllm")
    except ServerError as error:
        if error.status == 404:
            return False
        raise
    return True


async def _routes(client: VllmClient) -> set[str]:
    found = await client.get("/openapi.json")
    return set(found.get("paths", {})) if isinstance(found, dict) else set()


def _semantics(config: Mapping[str, Any], needs: Needs) -> Iterator[str]:
    """Whatever makes its samples or their log-probabilities differ from the embedded sampler's."""
    model, scheduler = _table(config, "model_config"), _table(config, "scheduler_config")
    if model.get("logprobs_mode") != "processed_logprobs":
        yield (
            f"its log-probabilities are {model.get('logprobs_mode')}, without temperature and masks; start it with "
            "--logprobs-mode processed_logprobs"
        )
    length = _number(model, "max_model_len")
    if length < needs.context_length:
        yield f"it takes {length} tokens; start it with --max-model-len {needs.context_length}, or lower serving.context_length"
    if (dtype := str(model.get("dtype")).removeprefix("torch.")) != needs.dtype:
        yield f"it computes in {dtype}; start it with --dtype {needs.dtype}, or set serving.dtype"
    if model.get("quantization"):
        yield f"its weights are quantized ({model['quantization']}), which new weights are not; start it without --quantization"
    if config.get("speculative_config"):
        yield "it decodes speculatively, and its draft model would keep old weights; start it without --speculative-config"
    if model.get("override_generation_config"):
        yield "it changes sampling parameters (--override-generation-config); start it without"
    if model.get("logits_processors"):
        yield "it changes logits with processors of its own (--logits-processors); start it without"
    if "cpu" in str(_table(config, "device_config").get("device")) and scheduler.get("enable_chunked_prefill"):
        yield CHUNKED_CPU.format(tokens=max(needs.context_length, 8192))


def _weights(config: Mapping[str, Any], needs: Needs, routes: set[str]) -> Iterator[str]:
    """Whatever keeps new weights from reaching it."""
    if "/inference/v1/generate" not in routes:
        yield "it has no /inference/v1/generate; start it with --enable-scale-out"
    if "/update_weights" not in routes:
        yield "it has no /update_weights; start it with VLLM_SERVER_DEV_MODE=1 in its environment"
    backend = _table(config, "weight_transfer_config").get("backend")
    if needs.backend and backend != needs.backend:
        option = f'--weight-transfer-config \'{{"backend": "{needs.backend}"}}\''
        yield f"its weight transfer is {backend or 'off'}; start it with {option}"
    if needs.lora_rank:
        most = _number(_table(config, "lora_config"), "max_lora_rank")
        if most < needs.lora_rank:
            yield (
                f"it takes adapters up to rank {most}, training.lora.r is {needs.lora_rank}; start it with --enable-lora "
                f"--max-lora-rank {needs.lora_rank} or more"
            )
        if "/v1/load_lora_adapter" not in routes:
            yield "it loads no adapters while it runs; set VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment"
        if _table(config, "model_config").get("enable_sleep_mode"):
            yield "asleep it loses weights that are not sent with an adapter; start it without --enable-sleep-mode"


def _table(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name)
    return found if isinstance(found, dict) else {}


def _number(table: Mapping[str, Any], name: str) -> int:
    found = table.get(name)
    return found if isinstance(found, int) else 0
