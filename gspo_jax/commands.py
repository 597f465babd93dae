"""What every command shares: exit codes that tell the truth, one message for a user's error, and how a model is named."""

import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gspo_jax import checkpoint, peft, runlog
from gspo_jax.checkpoint import CheckpointError
from gspo_jax.config import Config, ConfigError, parse_config
from gspo_jax.evaluate import EvaluationError
from gspo_jax.host import keep_freed_memory
from gspo_jax.policy import Policy, load_policy
from gspo_jax.pretrained import ModelNotFoundError
from gspo_jax.runlog import RunError
from gspo_jax.signal import SignalError
from gspo_jax.start import Start, check_frozen, load_start
from gspo_jax.train import TrainingError
from gspo_jax.types import Params
from rollout.client import TaskAppError
from rollout.task_file import TaskFileError
from serving_bridge.chat import ChatError
from serving_bridge.convert import WeightError
from serving_bridge.fleet import FleetError
from serving_bridge.vllm_client import ServerError
from serving_bridge.vllm_server import ServerDied

WRONG_INPUT = (ConfigError, RunError, ModelNotFoundError, WeightError, ChatError, TaskFileError)
SERVERS = (FleetError, ServerDied, ServerError)
FAILED = (TrainingError, SignalError, CheckpointError, TaskAppError, EvaluationError, *SERVERS, OSError)


def run_command(work: Callable[[], None]) -> int:
    """Run `work`: 0 done, 1 failed, 2 wrong input, 130 Ctrl-C, 143 terminated. Anything unforeseen keeps its traceback."""
    terminated = False

    def terminate(*_: object) -> None:
        nonlocal terminated
        terminated = True
        raise KeyboardInterrupt

    keep_freed_memory()
    previous = signal.signal(signal.SIGTERM, terminate)
    try:
        work()
    except WRONG_INPUT as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except FAILED as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        print(("terminated" if terminated else "interrupted") + str(error), file=sys.stderr)
        return 143 if terminated else 130
    finally:
        signal.signal(signal.SIGTERM, previous)
    return 0


def recorded_config(run_dir: Path) -> Config:
    """The resolved config a run was started with (masked header values stay masked)."""
    plain = runlog.read_run(run_dir)["config"]
    return parse_config(_without_nulls(plain), source=str(run_dir / "config.json"))[0]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return value


def is_run(path: str | Path) -> bool:
    """Whether a path is a run directory rather than a model folder."""
    return (Path(path).expanduser() / "checkpoints").is_dir()


def load_run_or_model(name: str, *, compute_dtype: str | None = None) -> tuple[Policy, Params]:
    """A run directory's policy (its best checkpoint by held-out reward, else its newest), a PEFT folder's with the adapter in
    its place, or any model `load_policy` takes."""
    start, params = load_start_or_model(name, compute_dtype=compute_dtype)
    return start.policy, start.whole(params, start.frozen)


def load_start_or_model(name: str, *, compute_dtype: str | None = None) -> tuple[Start, Params]:
    """What `load_run_or_model` takes, an adapter kept apart from the weights beneath it: `(start, what is trained)`.

    `compute_dtype`: unless given that of the run, or float32.
    """
    path = Path(name).expanduser()
    if is_run(name):
        return load_run(path, compute_dtype=compute_dtype)
    dtype = compute_dtype or "float32"
    if not peft.is_adapter(path):
        policy, params = load_policy(name, compute_dtype=dtype)
        return Start(policy, {}), params
    base, folder = peft.base_model(path)
    policy, frozen = load_policy(folder, compute_dtype=dtype)
    adapter, trained = peft.load_adapter(path, policy.table, policy.config.sizes())
    return Start(policy, {}, frozen, adapter, base, fresh=False), trained


def load_run(run_dir: Path, *, compute_dtype: str | None = None, best: bool = True) -> tuple[Start, Params]:
    """What a run started from, and the trained parameters of its best (or newest) checkpoint."""
    config = recorded_config(run_dir)
    recorded = config.model.compute_dtype
    if compute_dtype is not None:
        config = config.model_copy(update={"model": config.model.model_copy(update={"compute_dtype": compute_dtype})})
    start = load_start(config)
    if compute_dtype in (None, recorded):
        check_frozen(start, run_dir)
    directory = run_dir / "checkpoints"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = (checkpoint.best(directory) if best else None) or checkpoint.latest(directory)
    for warning in caught:
        print(f"note: {warning.message}", file=sys.stderr)
    if step is None:
        raise RunError(f"{run_dir} holds no complete checkpoint yet")
    print(f"checkpoint {step} of {run_dir}", file=sys.stderr)
    return start, checkpoint.restore_params(directory, step, start.params)
