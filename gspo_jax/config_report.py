"""What a config says: as JSON, as a fingerprint, as the reference in docs/config.md, and which of its keys have no effect."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from datetime import date, time
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from gspo_jax.sections import Config, Rewards, Section, acts, keys, masked, tables


class Spelling(NamedTuple):
    """Another accepted name of a key or table. Two different values are an error unless `yields`: then the new name wins."""

    old: str
    new: str
    deprecated: bool = True
    yields: bool = True


SPELLINGS = (
    Spelling("topology", "compute.topology"),
    Spelling("lora", "training.lora"),
    *(Spelling(f"training.{name}", f"training.rewards.{name}") for name in Rewards.model_fields),
    Spelling("verifier", "judge", deprecated=False),
    Spelling("services.verifier_url", "services.judge_url", deprecated=False, yields=False),
    Spelling("policy.model_name", "model.base", deprecated=False, yields=False),
    Spelling("policy.source", "model.source", deprecated=False, yields=False),
    Spelling("policy.trainer_mode", "model.trainer_mode", deprecated=False, yields=False),
    Spelling("policy.label", "model.label", deprecated=False, yields=False),
    Spelling("rollout.group_size", "training.group_size", deprecated=False, yields=False),
    Spelling("training.max_turns", "rollout.max_turns", deprecated=False, yields=False),
    Spelling("data.evaluation_split", "evaluation.split", deprecated=False, yields=False),
)

_NOT_NUMBERS = (
    "type",
    "services.task_url",  # an address; the same task may move
    "services.api_key_env",
    "services.headers",
    "services.timeout_s",
    *(f"serving.{name}" for name in ["urls", "token_env", "transport", "delta", "address", "sync_timeout_s", "launch"]),
    "compute.topology",
    "mesh",  # the same update but for the order of its sums
    "training.weight_sync",
    "model.label",
    "rollout.max_concurrent_rollouts",
    "rollout.timeout_s",
    "rollout.max_attempts",
    "rollout.max_void",
    "training.num_epochs",
    "training.iterations_per_epoch",
    "training.log_interval",
    "algorithm.refill_short",  # stops a run, never changes it; so do the guards
    "guards",
    "evaluation",  # reads the policy, never changes it
    "serving.host",
    "run.name",
    "run.dir",
    "run.checkpoint_every",
    "run.keep_last",
    "run.log_rollouts",
)


def episodes(config: Config) -> int:
    """Episodes (trajectories) of one training step."""
    return config.rollout.episodes_per_batch * config.rollout.batches_per_step


def groups(config: Config) -> int:
    """Groups, and so problems, of one training step."""
    return episodes(config) // config.training.group_size


def minibatches(config: Config) -> int:
    """Optimizer steps of one training step; the paper's four where `training.batch_size` is not set and four divides."""
    total, size = episodes(config), config.training.batch_size
    return total // size if size else next(n for n in (4, 3, 2, 1) if total % n == 0)


def minibatch_size(config: Config) -> int:
    """Trajectories of one optimizer step."""
    return episodes(config) // minibatches(config)


def total_steps(config: Config) -> int:
    """Training steps of the whole run."""
    return config.training.num_epochs * config.training.iterations_per_epoch


def resolved(config: Config) -> dict[str, Any]:
    """The config as nested JSON values with every default filled in and secrets masked."""
    plain = _plain(config)
    plain["training"]["batch_size"] = minibatch_size(config)
    return plain


def _plain(value: Any, name: str = "") -> Any:
    if isinstance(value, Section):
        return {child: _plain(getattr(value, child), f"{name}.{child}") for child in type(value).model_fields}
    return _json(masked(value, name))


def _json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    return value.isoformat() if isinstance(value, date | time) else value


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for child, item in value.items():
            yield from _flat(item, f"{name}.{child}".lstrip("."))
    else:
        yield name, value


def numbers(plain: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a `resolved` config that determines the numbers of a run, by dotted key.

    Names, places, deadlines and the horizon are left out, the last only while the learning rate does not depend on it.
    """
    out = (*_NOT_NUMBERS, *(name for name, field in keys().items() if acts(field) in ("idle", "recorded")))
    flat = {n: value for n, value in _flat(plain) if not any(n == o or n.startswith(f"{o}.") for o in out)}
    if flat.get("optimizer.schedule") != "constant":
        training = plain.get("training", {})
        flat["total_steps"] = training.get("num_epochs", 1) * training.get("iterations_per_epoch", 1)
    return flat


def fingerprint(config: Config) -> str:
    """sha256 (hex) of the keys that determine the numbers of a run; equal for a resumed or extended run."""
    return hashlib.sha256(json.dumps(numbers(resolved(config)), sort_keys=True).encode()).hexdigest()


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """One `key: old -> new` line per key in which two `resolved` configs would give different numbers."""
    before, after = numbers(old), numbers(new)
    return [
        f"{name}: {json.dumps(before[name]) if name in before else 'absent'}"
        f" -> {json.dumps(after[name]) if name in after else 'absent'}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name, ...) != after.get(name, ...)
    ]


def unused_keys(config: Config) -> list[str]:
    """Dotted names of the keys that were set although this version does not act on them."""
    return [name for name, _ in _flat(_explicit(config)) if acts(_field(name)) == "idle"]


def _explicit(section: Section) -> dict[str, Any]:
    values = ((name, getattr(section, name)) for name in type(section).model_fields if name in section.model_fields_set)
    return {name: _explicit(value) if isinstance(value, Section) else value for name, value in values}


def _field(name: str) -> FieldInfo:
    """The field of a dotted name, or of the free table that holds it."""
    fields = {**{table: FieldInfo() for table, _ in tables()}, **keys()}
    while name not in fields:
        name = name.rpartition(".")[0]
    return fields[name]


def outbound_hosts(config: Config) -> list[str]:
    """Every address outside this machine's own processes that a run with this config talks to, credentials masked."""
    servers = config.serving.urls if config.serving.engine == "vllm" else ()
    return [masked(url) for url in (config.services.task_url, *servers) if url]


# Reference


def describe(field: FieldInfo) -> str:
    """Type and range of a key in words: `number > 0`, `"a" or "b"`, `array of string`."""
    signs = (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
    limits = [f"{sign} {getattr(m, name):g}" for m in field.metadata for name, sign in signs if hasattr(m, name)]
    return " ".join([_words(field.annotation), ", ".join(limits)]).strip()


def _words(kind: Any) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " or ".join(json.dumps(value) for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join(_words(one) for one in arguments if one is not type(None))
    if origin is Annotated:
        return _words(arguments[0])
    if origin is tuple:
        return f"array of {_words(arguments[0])}"
    return {str: "string", int: "integer", float: "number", bool: "boolean"}.get(kind, "table")


def reference() -> str:
    """The Markdown reference of all sections, keys, types, defaults and other spellings (docs/config.md)."""
    parts = [
        "# Config reference\n\nPrinted by `python -m gspo_jax.config`. Keys marked (no effect) are accepted so that existing "
        "files load; a run prints which of them its file sets. Every other unknown key is an error.\n"
    ]
    for name, section in tables():
        rows = [_row(key, field) for key, field in keys(section).items() if "." not in key]
        if rows:
            title = f"`[{name}]`" if name else "Top level"
            parts.append(f"## {title}\n\n{section.__doc__}\n\n{_table('key type default description', rows)}\n")
    rules = [
        (f"`{old}`", f"`{new}`", "deprecated" if deprecated else "", "new name wins" if yields else "error")
        for old, new, deprecated, yields in SPELLINGS
    ]
    parts.append(f"## Other spellings\n\n{_table('written means status different', rules)}\n")
    return "\n".join(parts)


def _row(name: str, field: FieldInfo) -> tuple[str, ...]:
    default = "required" if field.is_required() else "" if field.default is None else f"`{json.dumps(_json(field.default))}`"
    text = f"{field.description}{' (no effect)' if acts(field) == 'idle' else ''}"
    return f"`{name}`", describe(field), default, text


def _table(header: str, rows: list[tuple[str, ...]]) -> str:
    titles = header.split()
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
