"""Flax <-> Hugging Face weights: identity bit for bit, every error of a bad folder, folders that appear whole or not at all."""

import json
import math
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from serving_bridge import folders
from serving_bridge.convert import Weight, WeightError, export_weights, load_weights, open_weights, save_folder
from serving_bridge.weights import leaf_axes, leaf_shape, tensor_names

MODELS = Path(__file__).parent / "data" / "models"
HEAD = Weight("lm_head/kernel", "lm_head.weight", "v d -> d v")
LLAMA = (
    Weight("embed/embedding", "model.embed_tokens.weight", "v d -> v d"),
    Weight("layers/attention_norm/scale", "model.layers.{l}.input_layernorm.weight", "d -> d"),
    Weight("layers/attention/query/kernel", "model.layers.{l}.self_attn.q_proj.weight", "(n h) d -> d n h"),
    Weight("layers/attention/key/kernel", "model.layers.{l}.self_attn.k_proj.weight", "(k h) d -> d k h"),
    Weight("layers/attention/value/kernel", "model.layers.{l}.self_attn.v_proj.weight", "(k h) d -> d k h"),
    Weight("layers/attention/out/kernel", "model.layers.{l}.self_attn.o_proj.weight", "d (n h) -> n h d"),
    Weight("layers/mlp_norm/scale", "model.layers.{l}.post_attention_layernorm.weight", "d -> d"),
    Weight("layers/mlp/gate/kernel", "model.layers.{l}.mlp.gate_proj.weight", "f d -> d f"),
    Weight("layers/mlp/up/kernel", "model.layers.{l}.mlp.up_proj.weight", "f d -> d f"),
    Weight("layers/mlp/down/kernel", "model.layers.{l}.mlp.down_proj.weight", "d f -> f d"),
    Weight("norm/scale", "model.norm.weight", "d -> d"),
)
SMALL = (
    Weight("embed", "embed.weight", "v d -> v d"),
    Weight("layers/query", "layers.{l}.q.weight", "(n h) d -> d n h"),
)
SMALL_SIZES = {"l": 3, "v": 5, "d": 4, "n": 2, "h": 3}


def llama_sizes(folder: Path) -> dict[str, int]:
    keys = {"l": "num_hidden_layers", "d": "hidden_size", "n": "num_attention_heads", "k": "num_key_value_heads"}
    keys |= {"h": "head_dim", "f": "intermediate_size", "v": "vocab_size"}
    config = json.loads((folder / "config.json").read_text())
    return {letter: config[key] for letter, key in keys.items()}


def small_tensors() -> dict[str, np.ndarray]:
    """Every element different, so that no two places can be confused."""
    names = {"embed.weight": (5, 4)} | {f"layers.{i}.q.weight": (6, 4) for i in range(3)}
    ends = np.cumsum([np.prod(shape) for shape in names.values()])
    return {
        name: np.arange(end - np.prod(shape), end, dtype=np.float32).reshape(shape)
        for (name, shape), end in zip(names.items(), ends, strict=True)
    }


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A small valid Hugging Face folder."""
    folder = tmp_path / "source"
    folder.mkdir()
    save_file(small_tensors(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"dtype": "float16", "text_config": {"torch_dtype": "float16"}, "x": "é"}))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "optimizer.bin"):
        (folder / name).write_text(f"content of {name}")
    return folder


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.parametrize(("model", "table"), [("llama", LLAMA), ("llama3_rope", (*LLAMA, HEAD))], ids=["tied", "untied"])
def test_wsy_09_wsy_10_identity_tied_and_untied(model: str, table: tuple[Weight, ...], tmp_path: Path):
    """A sync that drops or doubles the head of a tied model: load, save, load gives the same tensors under the same names."""
    folder = MODELS / model
    sizes = llama_sizes(folder)
    params = load_weights(folder, table, sizes)
    out = save_folder(tmp_path / "out", params, table, sizes, source_folder=folder, dtype="float32")
    before, after = load_file(folder / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(same_bits(before[name], after[name]) for name in before)
    exported = dict(export_weights(params, table, sizes))
    assert exported.keys() == before.keys()
    assert all(same_bits(before[name], exported[name]) and exported[name].flags.c_contiguous for name in before)


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[str, str, str], dict[str, int], tuple[int, ...], list[str]]:
    """A random row's fields, sizes, and the shape and names of its tensors, worked out here from the drawn groups."""
    sizes = {letter: draw(st.integers(1, 3)) for letter in "bdefhknv"}
    letters = draw(st.lists(st.sampled_from("dfhknv"), min_size=1, max_size=4, unique=True))

    def groups(order: list[str]) -> list[list[str]]:
        result = [[order[0]]]
        for letter in order[1:]:
            if draw(st.booleans()):
                result.append([letter])
            else:
                result[-1].append(letter)
        return result

    def text(side: list[list[str]]) -> str:
        return " ".join(f"({' '.join(group)})" if len(group) > 1 else group[0] for group in side)

    hf, flax = groups(letters), groups(draw(st.permutations(letters)))
    name = draw(st.sampled_from(["w", "x.{b}.w", "x.{e}.y.{b}.w"]))
    names = sorted({name.format(b=b, e=e) for b in range(sizes["b"]) for e in range(sizes["e"])})
    shape = tuple(math.prod(sizes[letter] for letter in group) for group in hf)
    return ("a/b", name, f"{text(hf)} -> {text(flax)}"), sizes, shape, names


@settings(max_examples=60, deadline=None)
@given(case=cases(), dtype=st.sampled_from([np.float32, ml_dtypes.bfloat16]), seed=st.integers(0, 2**32 - 1))
def test_identity_of_any_layout(
    case: tuple[tuple[str, str, str], dict[str, int], tuple[int, ...], list[str]], dtype: Any, seed: int
):
    (path, name, layout), sizes, shape, names = case
    row = Weight(path, name, layout)
    rng = np.random.default_rng(seed)
    size = math.prod(shape) * np.dtype(dtype).itemsize
    tensors = {name: np.frombuffer(rng.bytes(size), dtype).reshape(shape) for name in names}
    with tempfile.TemporaryDirectory() as folder:
        save_file(tensors, Path(folder) / "model.safetensors")
        params = load_weights(folder, [row], sizes, dtype)
    assert params["a"]["b"].shape == leaf_shape(row, sizes)
    exported = dict(export_weights(params, [row], sizes))
    assert list(exported) == [name for _, name in tensor_names(row, sizes)]
    assert all(same_bits(tensors[name], exported[name]) for name in names)


@settings(max_examples=60, deadline=None)
@given(case=cases(), data=st.data())
def test_any_part_of_any_layout_is_cut_out_of_the_whole(
    case: tuple[tuple[str, str, str], dict[str, int], tuple[int, ...], list[str]], data: st.DataObject
):
    """What one device of a mesh reads."""
    (path, name, layout), sizes, shape, names = case
    row, size = Weight(path, name, layout), math.prod(shape)
    tensors = {name: np.arange(i * size, (i + 1) * size, dtype=np.float32).reshape(shape) for i, name in enumerate(names)}
    with tempfile.TemporaryDirectory() as folder:
        save_file(tensors, Path(folder) / "model.safetensors")
        leaf = open_weights(folder, [row], sizes)["a/b"]
        starts = [data.draw(st.integers(0, n - 1)) for n in leaf.shape]
        index = tuple(slice(i, data.draw(st.integers(i + 1, n))) for i, n in zip(starts, leaf.shape, strict=True))
        whole, part = leaf.read(), leaf.read(index)
        begun = leaf.read(index[:1])
    assert same_bits(part, np.ascontiguousarray(whole[index]))
    assert same_bits(begun, np.ascontiguousarray(whole[index[:1]]))


def test_stacked_layout_places_every_element(source: Path):
    """The leaf's element [l, d, n, h] is row n·h_size + h of layer l's matrix."""
    query = load_weights(source, SMALL, SMALL_SIZES)["layers"]["query"]
    tensors = small_tensors()
    assert query.shape == (3, 4, 2, 3)
    for layer, d, n, h in np.ndindex(3, 4, 2, 3):
        assert query[layer, d, n, h] == tensors[f"layers.{layer}.q.weight"][n * 3 + h, d]
    assert leaf_axes(SMALL[1]) == ("l", "d", "n", "h")


@pytest.mark.parametrize("kept", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_every_float_type_loads_exactly_as_float32(kept: Any, tmp_path: Path):
    values = np.array([[1.0, -0.5, 65280.0], [2**-14, 0.0, 3.0]])  # exact in all three types
    save_file({"w": values.astype(kept)}, tmp_path / "model.safetensors")
    leaf = load_weights(tmp_path, [Weight("w", "w", "f d -> d f")], {"f": 2, "d": 3})["w"]
    assert leaf.dtype == np.float32
    assert np.array_equal(leaf, values.T)


def test_export_rounds_to_nearest_even(tmp_path: Path, source: Path):
    """bfloat16 has 7 fraction bits: 1 + 2^-8 and 1 + 3·2^-8 are ties, and go to the neighbor whose last bit is 0."""
    row, sizes = Weight("w", "w", "d -> d"), {"d": 3}
    values = np.array([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20], np.float32)
    out = save_folder(tmp_path / "out", {"w": values}, [row], sizes, source_folder=source)
    saved = load_file(out / "model.safetensors")["w"]
    assert saved.dtype == ml_dtypes.bfloat16
    assert saved.astype(np.float32).tolist() == [1.0, 1 + 2**-6, 1 + 2**-7]


def test_put_gets_each_finished_leaf_once(source: Path):
    plain = load_weights(source, SMALL, SMALL_SIZES)
    seen: dict[str, np.ndarray] = {}

    def put(path: str, array: np.ndarray) -> str:
        assert path not in seen
        seen[path] = array
        return f"placed {path}"

    placed = load_weights(source, SMALL, SMALL_SIZES, put=put)
    assert placed == {"embed": "placed embed", "layers": {"query": "placed layers/query"}}
    assert np.array_equal(seen["layers/query"], plain["layers"]["query"])


def write(source: Path, tensors: Mapping[str, np.ndarray]) -> None:
    save_file(dict(tensors), source / "model.safetensors")


def test_missing_unused_and_misshaped_are_all_listed_at_once(source: Path):
    tensors = small_tensors()
    del tensors["layers.1.q.weight"]
    tensors["embed.weight"] = tensors["embed.weight"].T.copy()
    tensors["layers.2.q.weight"] = np.zeros((6, 4), np.int32)
    tensors |= {f"extra.{i:02d}": np.zeros(1, np.float32) for i in range(12)}
    write(source, tensors)
    with pytest.raises(WeightError) as caught:
        load_weights(source, SMALL, SMALL_SIZES)
    message = str(caught.value)
    assert str(source) in message
    assert "missing (1): layers.1.q.weight (6, 4)" in message
    assert "embed.weight: expected (5, 4), found (4, 5)" in message
    assert "layers.2.q.weight: expected one of F64, F32, F16, BF16, found I32" in message
    assert "unused (12): extra.00" in message
    assert "extra.09, and 2 more" in message
    assert "extra.10" not in message


def test_ignored_names_may_be_left_out_but_never_excuse_a_row(source: Path):
    tensors = small_tensors() | {"layers.0.rotary_emb.inv_freq": np.zeros(2, np.float32), "lm_head.weight": np.zeros(1)}
    write(source, tensors)
    load_weights(source, SMALL, SMALL_SIZES, ignore=["*.rotary_emb.inv_freq", "lm_head.weight"])
    with pytest.raises(WeightError, match=r"unused \(1\): lm_head.weight"):
        load_weights(source, SMALL, SMALL_SIZES, ignore=["*.rotary_emb.inv_freq"])
    del tensors["embed.weight"]
    write(source, tensors)
    with pytest.raises(WeightError, match=r"missing \(1\): embed.weight"):
        load_weights(source, SMALL, SMALL_SIZES, ignore=["*"])


@pytest.mark.parametrize("damage", ["data cut", "header cut", "empty", "header garbled", "longer"])
def test_ckp_15_corrupt_file_is_named(damage: str, source: Path):
    """Zero-byte and cut files looked like checkpoints."""
    file = source / "model.safetensors"
    data = file.read_bytes()
    broken = {"data cut": data[:-4], "header cut": data[:20], "empty": b"", "longer": data + b"1234"}
    file.write_bytes(broken.get(damage, data[:8] + b"x" + data[9:]))
    with pytest.raises(WeightError, match=r"model.safetensors is corrupt or cut short"):
        load_weights(source, SMALL, SMALL_SIZES)


def test_no_weights_and_missing_shards_are_named(source: Path, tmp_path: Path):
    params = load_weights(source, SMALL, SMALL_SIZES)
    out = save_folder(tmp_path / "out", params, SMALL, SMALL_SIZES, source_folder=source, max_shard_bytes=50)
    shards = sorted(out.glob("model-*.safetensors"))
    assert len(shards) == 4
    for shard in shards[1:3]:
        shard.unlink()
    with pytest.raises(WeightError, match=f"missing \\(2\\): {shards[1].name}, {shards[2].name}"):
        load_weights(out, SMALL, SMALL_SIZES)
    shutil.copyfile(shards[0], shards[1])
    shutil.copyfile(shards[0], shards[2])
    with pytest.raises(WeightError, match=r"embed\.weight is in two files"):
        load_weights(out, SMALL, SMALL_SIZES)
    (source / "model.safetensors").unlink()
    with pytest.raises(WeightError, match=f"{source}: no weights; expected model.safetensors"):
        load_weights(source, SMALL, SMALL_SIZES)


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": {"embed.weight": "../model.safetensors"}}'])
def test_bad_index_is_an_error(index: str, source: Path):
    (source / "model.safetensors").rename(source.parent / "model.safetensors")
    (source / "model.safetensors.index.json").write_text(index)
    with pytest.raises(WeightError, match=r"model\.safetensors\.index\.json"):
        load_weights(source, SMALL, SMALL_SIZES)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (Weight("a", "a", "d d"), "must be 'hugging face axes -> flax axes'"),
        (Weight("a", "a", "d f -> d"), "same letters"),
        (Weight("a", "a", "d d -> d d"), "same letters"),
        (Weight("a", "a", "z -> z"), "no size for axis 'z'"),
        (Weight("a", "a.{z}", "d -> d"), "no size for axis 'z'"),
        (Weight("embed", "b", "d -> d"), "twice: embed"),
        (Weight("b", "embed.weight", "d -> d"), r"twice: embed\.weight"),
    ],
)
def test_bad_table_is_an_error(row: Weight, message: str, source: Path):
    with pytest.raises(WeightError, match=message):
        load_weights(source, [SMALL[0], row], SMALL_SIZES | {"f": 2})


def test_export_of_a_tree_that_does_not_fit_is_an_error(source: Path):
    params = load_weights(source, SMALL, SMALL_SIZES)
    params["layers"]["query"] = params["layers"]["query"][:2]
    params["adapter"] = {"a": np.zeros(1)}
    del params["embed"]
    with pytest.raises(WeightError) as caught:
        export_weights(params, SMALL, SMALL_SIZES)
    assert "missing (1): embed (5, 4)" in str(caught.value)
    assert "unused (1): adapter/a" in str(caught.value)
    assert "layers/query: expected (3, 4, 2, 3), found (2, 4, 2, 3)" in str(caught.value)


def test_saved_folder_is_complete(source: Path, tmp_path: Path):
    params = load_weights(source, SMALL, SMALL_SIZES)
    out = save_folder(tmp_path / "a" / "out", params, SMALL, SMALL_SIZES, source_folder=source)
    assert sorted(path.name for path in out.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    config = json.loads((out / "config.json").read_text())
    assert config == {"dtype": "bfloat16", "text_config": {"torch_dtype": "bfloat16"}, "x": "é"}
    with safe_open(out / "model.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_shards_hold_what_the_index_says(source: Path, tmp_path: Path):
    """Tensors of 80, 96, 96 and 96 bytes: 180 bytes hold the first two, then one, then one."""
    params = load_weights(source, SMALL, SMALL_SIZES)
    arguments = {"source_folder": source, "dtype": "float32", "max_shard_bytes": 180}
    out = save_folder(tmp_path / "out", params, SMALL, SMALL_SIZES, **arguments)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 80 + 3 * 96}
    names = [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
    assert sorted(path.name for path in out.glob("*.safetensors")) == names
    assert index["weight_map"] == {name: file for file in names for name in load_file(out / file)}
    again = load_weights(out, SMALL, SMALL_SIZES)
    assert same_bits(again["layers"]["query"], params["layers"]["query"])


class Leaf:
    """An array that does something at the moment it is brought to the host."""

    def __init__(self, array: np.ndarray, act: Callable[[], None]):
        self.array, self.act, self.shape = array, act, array.shape

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self.act()
        return self.array


def interrupt() -> None:
    raise KeyboardInterrupt


def test_ckp_15_interrupted_save_leaves_nothing_or_the_old_folder(source: Path, tmp_path: Path):
    """Ctrl-C during a save destroyed the last good data."""
    params = load_weights(source, SMALL, SMALL_SIZES)
    broken = {**params, "layers": {"query": Leaf(params["layers"]["query"], interrupt)}}
    out = tmp_path / "runs" / "out"
    with pytest.raises(KeyboardInterrupt):
        save_folder(out, broken, SMALL, SMALL_SIZES, source_folder=source)
    assert list(out.parent.iterdir()) == []
    save_folder(out, params, SMALL, SMALL_SIZES, source_folder=source)
    with pytest.raises(KeyboardInterrupt):
        save_folder(out, broken, SMALL, SMALL_SIZES, source_folder=source, overwrite=True)
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert np.array_equal(load_weights(out, SMALL, SMALL_SIZES)["embed"], params["embed"])


@pytest.mark.parametrize("exchange", [True, False], ids=["one call", "two renames"])
def test_existing_folder_is_kept_unless_overwrite(exchange: bool, source: Path, tmp_path: Path, monkeypatch: Any):
    if not exchange:
        monkeypatch.setattr(folders, "_exchange", lambda a, b: False)
    params = load_weights(source, SMALL, SMALL_SIZES)
    out = tmp_path / "runs" / "out"
    out.mkdir(parents=True)
    save_folder(out, params, SMALL, SMALL_SIZES, source_folder=source)  # an empty folder is no obstacle
    (out / "mine.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        save_folder(out, params, SMALL, SMALL_SIZES, source_folder=source)
    assert (out / "mine.txt").read_text() == "mine"
    params["embed"] = params["embed"] * 2
    save_folder(out, params, SMALL, SMALL_SIZES, source_folder=out, overwrite=True)
    assert not (out / "mine.txt").exists()
    assert np.array_equal(load_weights(out, SMALL, SMALL_SIZES)["embed"], params["embed"])
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(FileExistsError):
        save_folder(file, params, SMALL, SMALL_SIZES, source_folder=source, overwrite=True)
    assert file.read_text() == "mine"


def test_folder_that_came_to_be_meanwhile_is_kept(source: Path, tmp_path: Path):
    params = load_weights(source, SMALL, SMALL_SIZES)
    out = tmp_path / "runs" / "out"

    def somebody_else() -> None:
        out.mkdir(parents=True)
        (out / "theirs.txt").write_text("theirs")

    params["embed"] = Leaf(params["embed"], somebody_else)
    with pytest.raises(FileExistsError, match="came to be"):
        save_folder(out, params, SMALL, SMALL_SIZES, source_folder=source)
    assert [path.name for path in out.parent.rglob("*")] == ["out", "theirs.txt"]


def test_source_without_config_is_an_error(source: Path, tmp_path: Path):
    params = load_weights(source, SMALL, SMALL_SIZES)
    (source / "config.json").unlink()
    with pytest.raises(WeightError, match=r"config\.json"):
        save_folder(tmp_path / "out", params, SMALL, SMALL_SIZES, source_folder=source)
    assert not (tmp_path / "out").exists()


SAVE_FOREVER = """
import itertools, sys
import numpy as np
from serving_bridge.convert import Weight, save_folder
row = Weight("w", "w.{l}", "d f -> f d")
for version in itertools.count(1):
    params = {"w": np.full((8, 64, 64), version, np.float32)}
    save_folder(sys.argv[1], params, [row], {"l": 8, "d": 64, "f": 64}, source_folder=sys.argv[2],
                dtype="float32", max_shard_bytes=40000, overwrite=True)
    print(version, flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux exchanges two folders in one call")
def test_ckp_15_kill_at_any_point_leaves_a_whole_folder(source: Path, tmp_path: Path):
    """The old directory was removed first and the new one written in place: a kill left neither."""
    out = tmp_path / "runs" / "out"
    for kill in range(6):
        child = subprocess.Popen([sys.executable, "-c", SAVE_FOREVER, str(out), str(source)], stdout=subprocess.PIPE)
        with child:
            assert child.stdout is not None
            child.stdout.readline()
            time.sleep(0.007 * kill)
            child.send_signal(signal.SIGKILL)
        weights = load_weights(out, [Weight("w", "w.{l}", "d f -> f d")], {"l": 8, "d": 64, "f": 64})["w"]
        assert weights.min() == weights.max() >= 1
