"""Adapters that are loaded in place, once.

vLLM keeps `load_inplace` with the adapter and honors it again at every step: it reads the file each time, and for a request
that was in flight over a reload it reads the old file, so that the old adapter comes back under the new version's name.
"""

import copy


def load_once():
    """From here on only a request to load an adapter loads it; steps use what is loaded. Again is harmless."""
    from vllm.lora import worker_manager  # pyright: ignore[reportMissingImports]

    for name in ("WorkerLoRAManager", "LRUCacheWorkerLoRAManager"):
        manager = getattr(worker_manager, name)
        apply = vars(manager).get("_apply_adapters")
        if apply is not None and not hasattr(apply, "loads_once"):
            manager._apply_adapters = _without_reload(apply)


def _without_reload(apply):
    def _apply_adapters(self, lora_requests):
        return apply(self, {_loaded(request) for request in lora_requests})

    _apply_adapters.loads_once = True
    return _apply_adapters


def _loaded(request):
    if not request or not request.load_inplace:
        return request
    found = copy.copy(request)
    found.load_inplace = False
    return found
