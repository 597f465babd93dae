"""Checkpoints of multimodal models in every spelling, untrained tensors that pass through, and host memory of both ways."""

import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from helpers_families import DATA
from safetensors.numpy import load_file, save_file

from gspo_jax.policy import describe_policy, load_policy, save_policy
from serving_bridge import trees
from serving_bridge.convert import WeightError, save_folder
from serving_bridge.shards import INDEX, folder_tensors
from serving_bridge.weights import leaf_shape

SPELLINGS = {
    "text": ("model.", "lm_head."),
    "multimodal": ("model.language_model.", "lm_head."),
    "older": ("language_model.model.", "language_model.lm_head."),
}
TOWERS = {
    "gemma3": ("vision_tower.vision_model.post_layernorm.weight", "model.multi_modal_projector.mm_input_projection_weight"),
    "qwen3_5": ("model.visual.blocks.0.attn.qkv.weight", "mtp.layers.0.mlp.up_proj.weight"),
}
OTHER_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def multimodal(name: str, spelling: str, path: Path, *, tied: bool = True, shards: bool = False) -> Path:
    """The golden checkpoint as the language model of a multimodal one, with a tower of odd types."""
    config = json.loads((DATA / name / "config.json").read_text())
    config["tie_word_embeddings"] = tied
    outer = {"model_type": name, "text_config": config, "vision_config": {"hidden_size": 4, "dtype": "float32"}}
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(outer | {"tie_word_embeddings": tied}))
    for file in OTHER_FILES:
        (path / file).write_text(file)
    body, head = SPELLINGS[spelling]
    tensors = {body + k.removeprefix("model."): v for k, v in load_file(DATA / name / "model.safetensors").items()
               if k.startswith("model.")}  # fmt: skip
    if not tied:
        tensors[head + "weight"] = -tensors[body + "embed_tokens.weight"]
    tower = (np.arange(6, dtype=np.float16).reshape(2, 3), np.array([-3, 7], np.int64))
    tensors |= dict(zip(TOWERS[name], tower, strict=True))
    tensors["model.vision_tower.x" if name == "gemma3" else "visual.x"] = np.array([1.5, -0.0], ml_dtypes.bfloat16)
    if not shards:
        save_file(tensors, path / "model.safetensors")
        return path
    names = sorted(tensors)
    files = {name: f"model-{i % 3 + 1:05d}-of-00003.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({k: tensors[k] for k in names if files[k] == file}, path / file)
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return path


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("name", TOWERS)
def test_every_spelling_loads_and_comes_back_with_its_tower(tmp_path: Path, name: str, spelling: str):
    """Trained tensors rounded to the export's type; the others bit for bit in theirs, and again from the export."""
    tied, shards = spelling != "older", spelling == "multimodal"
    source = multimodal(name, spelling, tmp_path / "source", tied=tied, shards=shards)
    policy, params = load_policy(source)
    _, golden = load_policy(DATA / name)
    golden.pop("head", None)
    for path, leaf in trees.leaves(golden):
        np.testing.assert_array_equal(trees.get(params, path), leaf)
    if not tied:
        np.testing.assert_array_equal(params["head"], -params["embedding"])
    save_policy(policy, params, tmp_path / "first")
    again, loaded = load_policy(tmp_path / "first")
    save_folder(tmp_path / "second", loaded, again.table, again.config.sizes(), source_folder=again.folder,
                keep=again.config.untrained, max_shard_bytes=60_000)  # fmt: skip
    expected = tensors_of(source)
    assert (tmp_path / "second" / INDEX).exists()
    for out in (tmp_path / "first", tmp_path / "second"):
        found = tensors_of(out)
        assert found.keys() == expected.keys() == folder_tensors(out) == folder_tensors(source)
        for key, tensor in expected.items():
            kept = key in TOWERS[name] or key.endswith(".x")
            whole = tensor if kept else tensor.astype(ml_dtypes.bfloat16)
            assert found[key].dtype == whole.dtype, key
            assert found[key].tobytes() == whole.tobytes(), key
        assert json.loads((out / "config.json").read_text())["vision_config"]["hidden_size"] == 4
        assert [(out / file).read_text() for file in OTHER_FILES] == list(OTHER_FILES)


def test_tensor_of_nobody_is_still_an_error(tmp_path: Path):
    source = multimodal("gemma3", "older", tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    save_file(tensors | {"language_model.model.layers.0.extra.weight": np.zeros(2, np.float32)}, source / "model.safetensors")
    with pytest.raises(WeightError, match=r"unused \(1\): language_model.model.layers.0.extra.weight"):
        load_policy(source)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_head_beside_a_tied_embedding_must_be_the_embedding(tmp_path: Path, spelling: str):
    """transformers would use the head that is there, against the config."""
    source = multimodal("gemma3", spelling, tmp_path / "source")
    body, head = SPELLINGS[spelling]
    tensors = load_file(source / "model.safetensors")
    embedding = tensors[f"{body}embed_tokens.weight"]
    save_file(tensors | {f"{head}weight": embedding}, source / "model.safetensors")
    assert "head" not in load_policy(source)[1]
    other = embedding.copy()
    other[5, 5] += 1
    save_file(tensors | {f"{head}weight": other}, source / "model.safetensors")
    with pytest.raises(WeightError, match=f"{head}weight differs from {body}embed_tokens.weight, but tie_word_embeddings=true"):
        load_policy(source)


def test_folder_without_weights_has_the_spelling_of_text(tmp_path: Path):
    (tmp_path / "config.json").write_bytes((DATA / "gemma3" / "config.json").read_bytes())
    policy = describe_policy(tmp_path, compute_dtype="float32", remat="none")
    assert policy.table[0].name == "model.embed_tokens.weight"


MEMORY = """
import sys
from pathlib import Path
import jax
from gspo_jax.policy import load_policy, save_policy
from serving_bridge.convert import save_folder

def resident():
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return [int(lines[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM")]

def peak(work):
    "Bytes above the level before, and the result."
    open("/proc/self/clear_refs", "w").write("5")
    before, out = resident()[0], work()
    return resident()[1] - before, out

source, out = Path(sys.argv[1]), Path(sys.argv[2])
warm = load_policy(sys.argv[3])
save_policy(*warm, out / "warm")
del warm
loading, (policy, params) = peak(lambda: load_policy(source))
result = sum(x.nbytes for x in jax.tree.leaves(params))
saving, _ = peak(lambda: save_folder(out / "big", params, policy.table, policy.config.sizes(), source_folder=source,
                                     max_shard_bytes=int(sys.argv[4])))
print(loading, result, saving)
"""


def test_loading_and_exporting_stream_tensor_by_tensor(tmp_path: Path):
    """Peak memory of a child process: loading needs the result and a shard, exporting a shard, each within 1.3.

    200 MB of bfloat16 in eight shards, whose layers are spread over all of them.
    """
    config = json.loads((DATA / "llama" / "config.json").read_text()) | {
        "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 7, "num_attention_heads": 8,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 8192,
    }  # fmt: skip
    source = tmp_path / "big"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    policy = describe_policy(source, compute_dtype="float32", remat="none")
    sizes, limit, params = policy.config.sizes(), 26 * 2**20, {}
    for row in policy.table:
        trees.put(params, row.path, np.ones(leaf_shape(row, sizes), ml_dtypes.bfloat16))
    save_folder(tmp_path / "source", params, policy.table, sizes, source_folder=source, max_shard_bytes=limit)
    shards = [path.stat().st_size for path in (tmp_path / "source").glob("*.safetensors")]
    assert len(shards) > 6
    assert 180e6 < sum(shards) < 260e6
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path / "source"), str(tmp_path / "out"), str(DATA / "llama"), str(limit)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    loading, result, saving = map(int, done.stdout.split())
    print(loading / 1e6, result / 1e6, saving / 1e6, max(shards) / 1e6)
    assert result == pytest.approx(2 * sum(shards), rel=0.01)
    assert loading < 1.3 * (result + max(shards))
    assert saving < 1.3 * 2 * max(shards)
