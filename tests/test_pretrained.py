"""Model names to local folders: the order of the sources, a hub that is silent, and the GGUF file of an installed package."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from huggingface_hub import constants
from safetensors.numpy import load_file

from gspo_jax import pretrained
from gspo_jax.pretrained import ModelNotFoundError, NotHere, from_cache, from_hub, from_package, resolve_model

GOLDEN = Path(__file__).parent / "data" / "models" / "llama"
SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"


def never(base: str) -> Path:
    raise AssertionError(f"asked for {base}")


def test_local_folder_comes_first(tmp_path: Path, monkeypatch: Any):
    monkeypatch.chdir(GOLDEN.parent.parent)
    assert resolve_model("models/llama", sources=(("hub", never),)) == Path("models/llama")
    with pytest.raises(ModelNotFoundError, match=r"without config\.json"):
        resolve_model(str(tmp_path), sources=(("hub", never),))


@pytest.mark.parametrize("base", ["./none", "../none", "/none/x", "~/none-such", "."])
def test_local_looking_path_is_never_asked_for_elsewhere(base: str, tmp_path: Path, monkeypatch: Any):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError, match=r"model\.base = "):
        resolve_model(base, sources=(("hub", never),))


@pytest.mark.parametrize("base", ["", "name", "a/b/c", "org/../x", "org/..", "org/na me", "org/x\n", "-o/x", "org/x;y", "ö/x"])
def test_ids_are_checked_before_any_source(base: str):
    with pytest.raises(ModelNotFoundError, match="neither an existing folder nor a Hugging Face id"):
        resolve_model(base, sources=(("hub", never),))


def test_sources_are_asked_in_order_and_all_told_in_the_error(tmp_path: Path):
    asked = []

    def absent(name: str) -> tuple[str, pretrained.Source]:
        def source(base: str) -> Path:
            asked.append((name, base))
            raise NotHere(f"{name} lacks it")

        return name, source

    sources = (absent("first"), absent("second"), ("third", lambda base: tmp_path), ("fourth", never))
    assert resolve_model("org/model", sources=sources) == tmp_path
    assert asked == [("first", "org/model"), ("second", "org/model")]
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_model("org/model", sources=sources[:2])
    for part in ("model.base = 'org/model'", "first: first lacks it", "second: second lacks it", "hf download org/model"):
        assert part in str(caught.value)


def test_default_order_is_cache_hub_package(tmp_path: Path, monkeypatch: Any):
    asked: list[str] = []

    def absent(name: str) -> pretrained.Source:
        def source(base: str) -> Path:
            asked.append(name)
            raise NotHere("no")

        return source

    for name in ("from_cache", "from_hub", "from_package"):
        monkeypatch.setattr(pretrained, name, absent(name))
    with pytest.raises(ModelNotFoundError, match=r"pip install 'gspo-jax\[quickstart\]'"):
        resolve_model(SMOLLM2)
    assert asked == ["from_cache", "from_hub", "from_package"]


def test_cache_counts_only_when_complete(tmp_path: Path, monkeypatch: Any):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(NotHere):
        from_cache("org/model")
    repo = tmp_path / "models--org--model"
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    (snapshot / "config.json").write_text("{}")
    with pytest.raises(NotHere):
        from_cache("org/model")
    (snapshot / "model.safetensors").write_bytes(b"")
    assert from_cache("org/model") == snapshot


def test_offline_hub_is_not_asked(monkeypatch: Any):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(NotHere, match="HF_HUB_OFFLINE"):
        from_hub("org/model")


def test_silent_hub_is_passed_over_in_time(monkeypatch: Any):
    """A hub that accepts the connection and never answers must not hold the run."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{listener.getsockname()[1]}")
        monkeypatch.setattr(pretrained, "HUB_PROBE_SECONDS", 0.3)
        start = time.monotonic()
        with pytest.raises(NotHere):
            from_hub("org/model")
        assert time.monotonic() - start < 5


def test_call_that_heeds_no_timeout_is_left_behind():
    release = threading.Event()
    try:
        with pytest.raises(NotHere, match=r"no answer within 0\.05 s"):
            pretrained._within(0.05, lambda: release.wait(30))
    finally:
        release.set()


@pytest.fixture
def refusing_hub() -> Iterator[tuple[str, list[str]]]:
    """A hub on loopback that answers 404 to everything, and the paths it was asked for."""
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            del format, args

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://user:s3cret@127.0.0.1:{server.server_port}", paths
        server.shutdown()
        thread.join()


def test_hub_without_the_model_is_asked_once_and_its_address_kept_quiet(refusing_hub: Any, monkeypatch: Any):
    endpoint, paths = refusing_hub
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    with pytest.raises(ModelNotFoundError, match="hub: not reachable or no such model") as caught:
        resolve_model("org/model", sources=(("hub", from_hub),))
    assert paths == ["/api/models/org/model"]
    assert "s3cret" not in str(caught.value)


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """The row order of llama.cpp's converter: `permute` of its conversion script."""
    rows = weight.shape[0]
    return weight.reshape(heads, 2, rows // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def byte_tokens() -> list[str]:
    """The 256 printable stand-ins of byte-level BPE, by byte: printable Latin-1 for itself, the others from 256 upwards."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def write_gguf(path: Path) -> None:
    """The golden Llama model as llama.cpp would write it, with a byte tokenizer and the merges `h i` and `1 2`."""
    from gguf import GGUFWriter

    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_tokens(), "hi", "12"]
    tokens += [f"unused{i}" for i in range(320 - len(tokens))]
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(3)
    writer.add_context_length(512)
    writer.add_embedding_length(48)
    writer.add_feed_forward_length(96)
    writer.add_head_count(6)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["h i", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")
    parts = {
        **{f"self_attn.{a}_proj": f"attn_{a}" for a in "qkv"},
        "self_attn.o_proj": "attn_output",
        **{f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for name, weight in load_file(GOLDEN / "model.safetensors").items():
        if name == "model.embed_tokens.weight":
            gguf_name = "token_embd.weight"
        elif name == "model.norm.weight":
            gguf_name = "output_norm.weight"
        else:
            _, _, layer, *part, _ = name.split(".")
            gguf_name = f"blk.{layer}.{parts['.'.join(part)]}.weight"
        heads = {"attn_q": 6, "attn_k": 2}.get(gguf_name.split(".")[-2])
        writer.add_tensor(gguf_name, weight if heads is None else permuted(weight, heads))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: Any) -> Path:
    """An installed package that carries `org/tiny` as GGUF and fails when imported; the user cache is empty."""
    pytest.importorskip("gguf")
    folder = tmp_path / "site" / "tiny_carrier"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('heavy dependencies')")
    write_gguf(folder / "tiny.gguf")
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.setitem(pretrained.PACKAGED, "org/tiny", "tiny_carrier")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def test_packaged_model_equals_its_original(package: Path, tmp_path: Path):
    from transformers import AutoConfig, AutoTokenizer

    folder = from_package("org/tiny")
    assert folder.parent == tmp_path / "cache" / "gspo-jax" / "models"
    original, converted = load_file(GOLDEN / "model.safetensors"), load_file(folder / "model.safetensors")
    assert original.keys() == converted.keys()
    for name, weight in original.items():
        assert converted[name].tobytes() == weight.astype(ml_dtypes.bfloat16).tobytes(), name
    config, golden = AutoConfig.from_pretrained(folder), AutoConfig.from_pretrained(GOLDEN)
    differing = {"dtype", "pad_token_id", "_name_or_path", "transformers_version"}
    fields, expected = config.to_dict(), golden.to_dict()
    assert {key for key in fields.keys() | expected.keys() if fields.get(key) != expected.get(key)} <= differing
    assert json.loads((folder / "generation_config.json").read_text()) == {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }

    tokenizer = AutoTokenizer.from_pretrained(folder)
    bytes_start = 3
    assert tokenizer("hi")["input_ids"] == [bytes_start + 256]
    assert tokenizer("12")["input_ids"] == [bytes_start + ord("1"), bytes_start + ord("2")]  # digits stay apart, merge or not
    assert tokenizer("<|im_end|>")["input_ids"] == [2]
    text = "naïve 日本\n\n 12 don't"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], return_dict=False)
    assert chat == [1, bytes_start + 256, 2]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (2, 2, 1)


def test_packaged_model_is_converted_once(package: Path):
    folder = from_package("org/tiny")
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert from_package("org/tiny") == folder
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_two_conversions_at_once_agree(package: Path):
    barrier, results = threading.Barrier(2), []

    def convert() -> None:
        barrier.wait(10)
        results.append(from_package("org/tiny"))

    threads = [threading.Thread(target=convert) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 2
    assert results[0] == results[1]
    assert list(results[0].parent.iterdir()) == [results[0]]
    assert (results[0] / "model.safetensors").is_file()


def test_ckp_15_failed_conversion_leaves_no_folder(package: Path, tmp_path: Path):
    """A half-written folder looked like a model."""
    file = package / "tiny.gguf"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=r"tiny\.gguf is not a whole GGUF file"):
        from_package("org/tiny")
    assert not any((tmp_path / "cache" / "gspo-jax" / "models").iterdir())


def test_absent_package_and_file_are_told(package: Path):
    (package / "tiny.gguf").unlink()
    with pytest.raises(NotHere, match=r"tiny_carrier has 0 \.gguf files"):
        from_package("org/tiny")
    with pytest.raises(NotHere, match="no package carries it"):
        from_package("org/other")


@pytest.mark.slow
def test_real_package_has_the_published_shape(tmp_path: Path, monkeypatch: Any):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    try:
        folder = from_package(SMOLLM2)
    except NotHere as reason:
        pytest.skip(str(reason))
    weights = load_file(folder / "model.safetensors")
    assert len(weights) == 2 + 30 * 9
    assert weights["model.embed_tokens.weight"].shape == (49152, 576)
    assert weights["model.layers.29.self_attn.k_proj.weight"].shape == (3 * 64, 576)
    config = json.loads((folder / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert config["rms_norm_eps"] == 1e-5
