"""The config of a run: a TOML file and `section.key=value` overrides become one frozen, checked `Config`.

`python -m gspo_jax.config` prints the reference of all keys (docs/config.md).
"""

import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from gspo_jax.config_checks import across, exclusive, hints, lookup, mistakes, not_finite
from gspo_jax.config_objective import contradictions, remarks
from gspo_jax.config_report import (
    SPELLINGS,
    difference,
    episodes,
    fingerprint,
    groups,
    minibatch_size,
    minibatches,
    outbound_hosts,
    reference,
    resolved,
    total_steps,
    unused_keys,
)
from gspo_jax.sections import Config, is_secret, keys, masked

__all__ = [
    "Config",
    "ConfigError",
    "difference",
    "episodes",
    "evaluation_seeds",
    "fingerprint",
    "groups",
    "load_config",
    "minibatch_size",
    "minibatches",
    "model_id",
    "outbound_hosts",
    "parse_config",
    "reference",
    "require_task",
    "resolved",
    "row_length",
    "total_steps",
    "unused_keys",
]

_ALTERNATIVES = (("services.task_url", "services.task_app"), ("model.base", "model.source"))
_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "repetition_penalty", "stop_sequences")


class ConfigError(ValueError):
    """A config that cannot be run. `problems` has one line for each thing to fix; `source` says where they were found."""

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.source, self.problems = source, tuple(problems)
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        super().__init__("\n".join([f"{source}: {count}", *(f"  {problem}" for problem in problems)]))


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Config, list[str]]:
    """`(config, warnings)` of a TOML file; `overrides` are `section.key=value`. `ConfigError` lists all problems at once."""
    try:
        data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(str(path), ["no such file; give the path of a TOML config"]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), [f"cannot be read as UTF-8 text: {error}"]) from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(str(path), [f"not valid TOML: {error}"]) from None
    return parse_config(data, overrides, str(path))


def parse_config(data: Mapping[str, Any], overrides: Sequence[str] = (), source: str = "config") -> tuple[Config, list[str]]:
    """`(config, warnings)` of a nested mapping, like `load_config`; `data` is left as it is."""
    problems: list[str] = []
    warnings: list[str] = []
    written: dict[str, str] = {}
    raw, changes = _copy(data), _overrides(overrides, problems)
    for layer in (raw, changes):
        _respell(layer, problems, warnings, written)
    for pair in _ALTERNATIVES:
        chosen = [name for name in pair if lookup(changes, name) is not None]
        if len(chosen) == 1:
            _pop(raw, pair[pair[0] == chosen[0]])
    _merge(raw, changes)
    _derive(raw, warnings)
    config, lines, wrong = _validated(raw)
    problems += [*lines, *not_finite(raw), *exclusive(raw), *across(_values(raw, wrong))]
    rest = config or _rest(raw, wrong)
    problems += contradictions(rest) if rest else ()
    if config is None or problems:
        raise ConfigError(source, [_attributed(line, written) for line in dict.fromkeys(problems)])
    return config, list(dict.fromkeys([*warnings, *hints(config), *remarks(config)]))


def _validated(raw: Mapping[str, Any]) -> tuple[Config | None, list[str], set[str]]:
    """The config, or None with a line per mistake and the keys they are about."""
    try:
        return Config.model_validate(raw), [], set()
    except ValidationError as error:
        return None, *mistakes(error, raw)


def _values(raw: Mapping[str, Any], wrong: set[str]) -> dict[str, Any]:
    """The value or default of every key; None for those that are wrong by themselves or have neither."""
    values = {}
    for name, field in keys().items():
        bad = any(name == one or name.startswith(f"{one}.") for one in wrong)
        value, default = lookup(raw, name), None if field.is_required() else field.default
        values[name] = None if bad else default if value is None else value
    return values


def _attributed(line: str, written: Mapping[str, str]) -> str:
    """A problem, with the spelling that the file used where it was another."""
    name = line.partition(":")[0]
    return f"{line} (written {written[name]})" if name in written else line


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _copy(item) for name, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list | tuple) else value


def _put(raw: dict, name: str, value: Any) -> None:
    """Sets a dotted name; a parent that is not a table stays, for the type check to name."""
    *parents, last = name.split(".")
    for part in parents:
        raw = raw.setdefault(part, {})
        if not isinstance(raw, dict):
            return
    raw[last] = value


def _pop(raw: dict, name: str) -> None:
    parent, _, last = name.rpartition(".")
    table = lookup(raw, parent) if parent else raw
    if isinstance(table, dict):
        table.pop(last, None)


def _rest(raw: Mapping[str, Any], wrong: set[str]) -> Config | None:
    """The config without the keys that are wrong by themselves, to look at the others; None when it cannot be without them."""
    rest = _copy(raw)
    for name in wrong:
        _pop(rest, name)
    try:
        return Config.model_validate(rest)
    except ValidationError:
        return None


def _merge(raw: dict, changes: Mapping[str, Any]) -> dict:
    """Writes `changes` into `raw`, table by table, so that siblings stay. A table never replaces a value that is none."""
    for name, value in changes.items():
        if isinstance(value, dict) and name in raw:
            if isinstance(raw[name], dict):
                _merge(raw[name], value)
        else:
            raw[name] = value
    return raw


def _overrides(overrides: Sequence[str], problems: list[str]) -> dict:
    """The tables that `section.key=value` arguments describe. A value is TOML; a bare word is a string."""
    changes: dict = {}
    for text in overrides:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not all(part.strip() for part in name.split(".")):
            problems.append(f"override {'***' if is_secret(text) else repr(text)}: write section.key=value")
            continue
        try:
            parsed = tomllib.loads(f"value = {value}")
        except (tomllib.TOMLDecodeError, RecursionError):
            parsed = {"value": value}
            if not value or value[0] in "[{\"'":
                problems.append(f"{name}: the override's value is not valid TOML; quote it for the shell: '{name}=...'")
                continue
        if len(parsed) != 1 or "\n" in value:
            problems.append(f"{name}: the override's value must be one TOML value on one line")
        branch: dict = {}
        _put(branch, name, parsed["value"])
        _merge(changes, branch)
    return changes


def _respell(raw: dict, problems: list[str], warnings: list[str], written: dict[str, str]) -> None:
    """Moves other spellings to the names of `Config`; `written` remembers them for error messages."""
    for old, new, deprecated, yields in SPELLINGS:
        value, current = lookup(raw, old), lookup(raw, new)
        if value is None:
            if current is not None:
                written.pop(new, None)
            continue
        _pop(raw, old)
        if deprecated:
            warnings.append(f"{old}: deprecated; write {new}")
        if current is None:
            _put(raw, new, value)
            written[new] = old
        elif isinstance(value, dict) and isinstance(current, dict):
            _put(raw, new, _merge(value, current))
        elif value != current and not yields:
            problems.append(f"{old}: {masked(value, old)!r} contradicts {new} = {masked(current, new)!r}; keep {new} only")
    for name in _SAMPLING:
        value, current = lookup(raw, f"rollout.policy_config.{name}"), lookup(raw, f"policy.{name}")
        if value is not None and current is None:
            _put(raw, f"policy.{name}", value)
            written[f"policy.{name}"] = f"rollout.policy_config.{name}"
        elif value != current and value is not None:
            warnings.append(f"rollout.policy_config.{name}: {value!r} gives way to policy.{name} = {current!r}")


def _derive(raw: dict, warnings: list[str]) -> None:
    """Fills in what follows from other keys, so that the checked config shows what will be used."""
    for table in ("model", "rollout", "training"):
        raw.setdefault(table, {})
    for name in _SAMPLING:
        if lookup(raw, f"rollout.policy_config.{name}") is not None:
            _put(raw, f"rollout.policy_config.{name}", lookup(raw, f"policy.{name}"))
    label = lookup(raw, "model.label")
    if isinstance(label, str) and lookup(raw, "run.name") is None:
        _put(raw, "run.name", re.sub(r"[^A-Za-z0-9._-]+", "-", label).strip("-._") or "policy")
    if lookup(raw, "model.trainer_mode") is None:
        warnings.append('model.trainer_mode: not set, so "lora"; write trainer_mode = "lora", or "full" to train all weights')


# Answers


def require_task(config: Config) -> str:
    """The URL or the task app that plays the episodes; `ConfigError` when the config names neither."""
    if task := config.services.task_url or config.services.task_app:
        return task
    raise ConfigError("config", ['services.task_url: missing; name a task: task_url = "http://..." or task_app = "arithmetic"'])


def model_id(config: Config) -> str:
    """What to load the policy from."""
    return config.model.base or config.model.source or ""


def row_length(config: Config) -> int:
    """Tokens per row of a batch."""
    return config.training.row_length or config.serving.context_length


def evaluation_seeds(config: Config) -> tuple[int, ...]:
    """The seeds of the problems that are evaluated, `evaluation.instances` of them; empty: no evaluation."""
    seeds, count = config.evaluation.seeds, config.evaluation.instances
    if count is None:
        return seeds
    start = max(seeds, default=-1) + 1
    return (*seeds, *range(start, start + count - len(seeds)))[:count]


if __name__ == "__main__":
    sys.stdout.write(reference())
