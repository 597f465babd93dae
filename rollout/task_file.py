"""A Python file of the user's that defines `task` or `app` -> the object it defines."""

import importlib.util
import sys
from pathlib import Path

from fastapi import FastAPI

from rollout.task import Env, Task


class TaskFileError(ValueError):
    """A task file cannot be served; the message says why."""


def load_task_file(path: str | Path) -> Task | Env | FastAPI:
    """The module-level `task` (Task or Env), else `app` (FastAPI), of the Python file at `path`, which is executed.

    Raises TaskFileError when the file is missing, fails to import, or defines neither.
    """
    path = Path(path)
    if not path.is_file():
        raise TaskFileError(f"task file {path} does not exist; give the path of a Python file that defines `task` or `app`")
    spec = importlib.util.spec_from_file_location(f"task_file_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise TaskFileError(f"task file {path} is not a Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their own module up there
    try:
        spec.loader.exec_module(module)
    except Exception as exc:
        del sys.modules[spec.name]
        raise TaskFileError(f"task file {path} fails to import: {type(exc).__name__}: {exc}") from exc
    found = getattr(module, "task", None)
    if isinstance(found, Task | Env):
        return found
    app = getattr(module, "app", None)
    if isinstance(app, FastAPI):
        return app
    has = ", ".join(f"{name}: {type(value).__name__}" for name, value in (("task", found), ("app", app)) if value is not None)
    raise TaskFileError(
        f"task file {path} must define `task = Task(...)`, `task = Env(...)` or `app = FastAPI(...)`; it has {has or 'neither'}"
    )
