"""Checkpoints come in and go out bitwise."""

import json
import runpy
import sys
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpt import mesh as mesh_lib
from jaxpt.convert import gguf_tokenizer
from jaxpt.convert.export import export
from jaxpt.convert.families.family import Layout
from jaxpt.convert.families.llama import FAMILY
from jaxpt.convert.load import load, open_checkpoint
from jaxpt.data.tokenizer import Tokenizer
from jaxpt.models import params as params_lib
from tests import tiny_checkpoints as tiny

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "convert.py"
KINDS = gguf.GGMLQuantizationType


def assert_equal(got, expected):
    expected = dict(params_lib.paths(expected))
    got = dict(params_lib.paths(got))
    assert got.keys() == expected.keys()
    for name, leaf in got.items():
        np.testing.assert_array_equal(leaf, expected[name], err_msg=name)


def test_layouts_move_values_and_move_them_back():
    sizes = {"H": 2, "p": 2, "r": 2, "D": 3}
    layout = Layout("Hpr D -> D H rp")
    array = np.arange(24).reshape(8, 3)
    target = layout.to_target(array, sizes)
    assert target.shape == (3, 2, 4)
    # Head 1 begins at row 4; its pair (row 4, row 5) goes to places 0 and 2.
    assert target[0, 1].tolist() == [array[4, 0], array[6, 0], array[5, 0], array[7, 0]]
    np.testing.assert_array_equal(layout.to_source(target, sizes), array)
    with pytest.raises(ValueError, match="other letters"):
        Layout("HK D -> H K")


@pytest.mark.parametrize("write", [tiny.write_hugging_face, tiny.write_shards])
def test_hugging_face_folder(tmp_path, params, tensors, write):
    folder = write(tmp_path / "m", tensors, tiny.hugging_face_config(tiny.CONFIG))
    config, loaded = load(folder, tiny.one_device())
    assert config == tiny.CONFIG
    assert_equal(loaded, params)


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16])
def test_narrow_floats(tmp_path, tensors, dtype):
    narrow = {name: tensor.astype(dtype) for name, tensor in tensors.items()}
    folder = tiny.write_hugging_face(
        tmp_path / "m", narrow, tiny.hugging_face_config(tiny.CONFIG)
    )
    _, loaded = load(folder, tiny.one_device())
    embedding = narrow["model.embed_tokens.weight"].astype(np.float32)
    np.testing.assert_array_equal(loaded["embed_tokens"], embedding)
    _, loaded = load(folder, tiny.one_device(), dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded)} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize(
    "kind",
    [KINDS.F32, KINDS.F16, KINDS.BF16, KINDS.Q8_0, KINDS.Q4_0, KINDS.Q4_1, KINDS.Q5_1],
)
def test_gguf(tmp_path, gguf_tensors, kind):
    path = tiny.write_gguf(
        tmp_path / "m.gguf", gguf_tensors, tiny.CONFIG, quantization=kind
    )
    config, loaded = load(path, tiny.one_device())
    assert config == tiny.CONFIG
    stored = {
        name: (
            gguf.dequantize(gguf.quantize(tensor, kind), kind)
            if tensor.ndim > 1
            else tensor
        )
        for name, tensor in gguf_tensors.items()
    }
    folder = tiny.write_hugging_face(
        tmp_path / "m", undo_gguf(stored), tiny.hugging_face_config(tiny.CONFIG)
    )
    assert_equal(loaded, load(folder, tiny.one_device())[1])


def undo_gguf(tensors):
    """llama.cpp's tensors with the names and the row order of Hugging Face."""
    names = tiny.hugging_face_tensors(tiny.random_params(tiny.CONFIG))
    rows = {
        name: np.repeat(np.arange(len(tensor))[:, None], 2, 1) + np.zeros((1, 2))
        for name, tensor in names.items()
    }
    order = tiny.gguf_tensors(rows, tiny.CONFIG)  # where each row came from
    undone = {}
    for name, gguf_name in zip(names, order, strict=True):
        undone[name] = np.empty_like(tensors[gguf_name])
        undone[name][order[gguf_name][:, 0].astype(int)] = tensors[gguf_name]
    return undone


def test_gguf_without_output_is_tied_and_float32_is_bitwise(tmp_path):
    params = tiny.random_params(tiny.TIED)
    tensors = tiny.gguf_tensors(tiny.hugging_face_tensors(params), tiny.TIED)
    path = tiny.write_gguf(tmp_path / "m.gguf", tensors, tiny.TIED)
    config, loaded = load(path, tiny.one_device())
    assert config == tiny.TIED
    assert_equal(loaded, params)


def test_params_are_placed_in_their_shards(tmp_path, params, tensors):
    if len(jax.devices()) < 2:
        pytest.skip(f"needs 2 devices, this process has {len(jax.devices())}")
    mesh = mesh_lib.make_mesh(mesh_lib.MeshConfig(tensor=2), jax.devices()[:2])
    folder = tiny.write_hugging_face(
        tmp_path / "m", tensors, tiny.hugging_face_config(tiny.CONFIG)
    )
    _, loaded = load(folder, mesh)
    assert_equal(loaded, params)
    q_proj = loaded["layers"]["q_proj"]
    assert {shard.data.shape for shard in q_proj.addressable_shards} == {(3, 64, 2, 8)}


@pytest.mark.parametrize("config", [tiny.CONFIG, tiny.TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("shard_bytes", [2**30, 50_000], ids=["one file", "shards"])
def test_export_comes_back_bitwise(tmp_path, tokenizer, config, shard_bytes):
    params = tiny.random_params(config)
    folder = tmp_path / "exported"
    num_bytes = export(
        folder,
        family=FAMILY,
        config=config,
        leaves=params_lib.paths(params),
        tokenizer=tokenizer,
        shard_bytes=shard_bytes,
    )
    assert num_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert (folder / "model.safetensors").exists() == (shard_bytes == 2**30)
    loaded_config, loaded = load(folder, tiny.one_device())
    assert loaded_config == config
    assert_equal(loaded, params)
    assert Tokenizer.load(folder).encode("the cat") == tokenizer.encode("the cat")
    assert json.loads((folder / "generation_config.json").read_text()) == {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
    }
    assert list(tmp_path.iterdir()) == [folder]


def test_newer_spelling_of_rope_theta(tmp_path, tensors):
    config = tiny.hugging_face_config(tiny.CONFIG)
    theta = config.pop("rope_theta")
    config["rope_parameters"] = {"rope_theta": theta, "rope_type": "default"}
    folder = tiny.write_hugging_face(tmp_path / "m", tensors, config)
    assert open_checkpoint(folder).config == tiny.CONFIG


def test_tokenizer_of_a_gguf(tmp_path, gguf_tensors, tokenizer):
    path = tiny.write_gguf(
        tmp_path / "m.gguf", gguf_tensors, tiny.CONFIG, tokenizer=tokenizer
    )
    loaded = gguf_tokenizer.from_gguf(path)
    for text in ("the cat sat  12", "é<eos>", " on\n\n the  mat"):
        assert loaded.encode(text) == tokenizer.encode(text)
        asked = loaded.encode(text, allow_special=True)
        assert asked == tokenizer.encode(text, allow_special=True)
    messages = [{"role": "user", "content": "the cat <eos>"}]
    assert loaded.encode_chat(messages) == tokenizer.encode_chat(messages)
    assert (loaded.pad_id, loaded.bos_id, loaded.eos_id) == (0, 1, 2)


def test_words_of_llama_3(tmp_path, gguf_tensors, tokenizer):
    path = tmp_path / "m.gguf"
    options = {"tokenizer": tokenizer, "tokenizer_pre": "llama-bpe"}
    tiny.write_gguf(path, gguf_tensors, tiny.CONFIG, **options)
    cut = gguf_tokenizer.from_gguf(path).backend.pre_tokenizer.pre_tokenize_str
    words = [word for word, _ in cut("I'LL pay $12345!!\n\n(or  not)")]
    assert " ".join(words) == "I 'LL Ġpay Ġ$ 123 45 !!ĊĊ (or Ġ Ġnot )"


def test_script(tmp_path, monkeypatch, capsys, gguf_tensors, tokenizer, params):
    path = tiny.write_gguf(
        tmp_path / "m.gguf", gguf_tensors, tiny.CONFIG, tokenizer=tokenizer
    )
    target = tmp_path / "converted"
    arguments = ["convert.py", "--source", str(path), "--target", str(target)]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for code, message in (
        (0, "30 tensors of the llama family: "),
        (2, "error: "),
    ):
        with pytest.raises(SystemExit) as exit_info:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        assert exit_info.value.code == code
        output = capsys.readouterr()
        assert message in output.out + output.err
    assert_equal(load(target, tiny.one_device())[1], params)
