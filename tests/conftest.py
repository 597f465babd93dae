"""The whole suite runs on eight virtual CPU devices and never reaches for a hub."""

import os
import signal

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"

import jax
from hypothesis import settings

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# A shell that starts this in the background ignores Ctrl-C for it, and the processes that the tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Examples are bounded by number, not by wall clock: a shared machine may stop for longer than any deadline.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")


def pytest_collection_modifyitems(items):
    """Files that start real servers first: they take longest, and with a file per process the last one would run alone."""
    items.sort(key=lambda item: item.path.name not in ("test_vllm_train.py", "test_vllm_engine.py"))
