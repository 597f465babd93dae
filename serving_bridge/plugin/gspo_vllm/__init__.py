"""The part of gspo-jax that runs inside vLLM: a weight-transfer engine, and a token for the admin routes.

A package of its own because vLLM's interpreter is not the trainer's: it needs torch and vLLM, nothing else.
"""

registered = False
"""Whether this process has the engine and loads adapters once."""


def register() -> None:
    """Called by vLLM in each of its processes, through the entry point `vllm.general_plugins`; may be called again."""
    from vllm.distributed.weight_transfer.factory import (  # pyright: ignore[reportMissingImports]
        WeightTransferEngineFactory as Factory,
    )

    from .adapters import load_once

    global registered
    load_once()
    if "gspo" not in Factory._registry:
        Factory.register_engine("gspo", "gspo_vllm.engines", "Engine")
    registered = True
