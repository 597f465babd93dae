"""Folders that appear complete or not at all, and the files of a Hugging Face folder that are not weights."""

import contextlib
import ctypes
import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

_SIDE_FILES = (
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "tokenizer*",
    "video_preprocessor_config.json",
    "vocab.*",
)


@contextlib.contextmanager
def new_folder(out: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yields an empty sibling of `out` to fill; leaving the block flushes it to disk and renames it to `out`.

    An exception inside the block leaves `out` as it was and removes the sibling. With `overwrite`, old and new are exchanged
    in one system call on Linux; elsewhere the old folder is moved aside first.

    Raises:
        FileExistsError: `out` is a file, or holds something and `overwrite` is false (also when it came to be meanwhile).
    """
    out = out.expanduser().resolve()
    if out.exists() and not (out.is_dir() and (overwrite or not any(out.iterdir()))):
        raise FileExistsError(f"{out} exists; choose another folder or pass overwrite=True to replace a folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    work = out.parent / f".{out.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}"
    work.mkdir()
    try:
        yield work
        for path in (*work.rglob("*"), work):
            _sync(path)
        _publish(work, out, overwrite=overwrite)
        _sync(out.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)  # after an exchange it holds the old folder


def copy_side_files(source: Path, target: Path, dtype: str) -> None:
    """Copies config.json, with `dtype` as its weight type, tokenizer files, chat template and generation_config.json.

    Raises:
        FileNotFoundError: `source` has no config.json.
        json.JSONDecodeError: its config.json is not JSON.
    """
    config = json.loads((source / "config.json").read_bytes())
    config.pop("quantization_config", None)  # the exported weights are not quantized
    for section in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key in {"dtype", "torch_dtype"} & section.keys():
            section[key] = dtype
    if "torch_dtype" not in config:
        config["dtype"] = dtype
    (target / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    copy_tokenizer(source, target)


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copies tokenizer files, chat template and generation_config.json, those there are."""
    for pattern in _SIDE_FILES:
        for path in source.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, target / path.name)


def _publish(work: Path, out: Path, *, overwrite: bool) -> None:
    try:
        os.rename(work, out)  # onto nothing or an empty folder
        return
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        if not (overwrite and out.is_dir()):
            raise FileExistsError(f"{out} came to be while its content was written; choose another folder") from error
    if not _exchange(work, out):
        old = work.with_name(work.name + "-old")
        os.rename(out, old)
        os.rename(work, out)
        shutil.rmtree(old, ignore_errors=True)


def _exchange(a: Path, b: Path) -> bool:
    """Swaps two names in one step, renameat2(2) with RENAME_EXCHANGE; false where the system has no such call."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    at_fdcwd, rename_exchange = -100, 2
    return renameat2(at_fdcwd, os.fsencode(a), at_fdcwd, os.fsencode(b), rename_exchange) == 0


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
