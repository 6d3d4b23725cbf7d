"""Checkpoint folders: exchanged with transformers in both directions, and every way in which one can be broken."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.numpy import load_file, save_file
from transformers import Qwen3Config as HfConfig
from transformers import Qwen3ForCausalLM

from common.config import MeshConfig
from common.errors import CheckpointError
from rose_jax.export import load_checkpoint, load_config, named_tensors, params_from_named, save_checkpoint
from rose_jax.hf_folder import CONFIG_FILE, INDEX_FILE, SINGLE_FILE
from rose_jax.mesh import make_mesh
from rose_jax.models.checkpoint_table import tensor_entries
from rose_jax.models.qwen3 import Qwen3Config, create_model

GATE = "model.layers.1.mlp.gate_proj.weight"
NORM = "model.layers.1.self_attn.q_norm.weight"  # small: shares its file with others
EMBEDDING = "model.embed_tokens.weight"


def make_config(*, tied: bool) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=48,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=40,
        tie_word_embeddings=tied,
        eos_token_id=(3, 5),
        pad_token_id=0,
    )


@functools.cache
def new_params(tied: bool) -> nnx.State:
    return nnx.state(create_model(make_config(tied=tied), seed=1))


def save_new(folder: Path, *, tied: bool = False, **options: object) -> tuple[Qwen3Config, nnx.State]:
    config, params = make_config(tied=tied), new_params(tied)
    save_checkpoint(folder, params, config, **{"dtype": "float32", **options})
    return config, params


def edit_json(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_tensors(path: Path, edit: Callable[[dict], object]) -> None:
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def assert_same(left: nnx.State, right: nnx.State) -> None:
    jax.tree.map(np.testing.assert_array_equal, left, right)
    assert jax.tree.structure(left) == jax.tree.structure(right)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("max_shard_bytes", [2**30, 10_000])
def test_loading_what_was_saved_gives_the_same_bits(tmp_path: Path, tied: bool, max_shard_bytes: int) -> None:
    config, params = save_new(tmp_path / "model", tied=tied, max_shard_bytes=max_shard_bytes)
    loaded_config, loaded = load_checkpoint(tmp_path / "model")
    assert loaded_config == config
    assert_same(loaded, params)
    files = sorted(path.name for path in (tmp_path / "model").iterdir())
    assert (SINGLE_FILE in files) == (max_shard_bytes == 2**30)
    assert (INDEX_FILE in files) == (max_shard_bytes == 10_000)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("max_shard_bytes", [2**30, 10_000])
def test_transformers_loads_our_folder_with_nothing_missing_or_left_over(tmp_path: Path, tied: bool, max_shard_bytes: int) -> None:
    _, params = save_new(tmp_path / "model", tied=tied, max_shard_bytes=max_shard_bytes)
    model, report = Qwen3ForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")), report
    assert model.dtype == torch.float32
    assert model.config.rope_parameters["rope_theta"] == 1_000_000.0
    assert model.config.eos_token_id == [3, 5]
    theirs = model.state_dict()
    for name, tensor in named_tensors(params):
        np.testing.assert_array_equal(theirs[name].numpy(), tensor, err_msg=name)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard_size", ["1GB", "10KB"])
def test_we_load_what_transformers_saved(tmp_path: Path, tied: bool, shard_size: str) -> None:
    fields = make_config(tied=tied).to_hf()
    model = Qwen3ForCausalLM(HfConfig(**{name: value for name, value in fields.items() if name != "architectures"}))
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / INDEX_FILE).exists() == (shard_size == "10KB")
    config, params = load_checkpoint(tmp_path)
    assert config == make_config(tied=tied)
    theirs = model.state_dict()
    for name, tensor in named_tensors(params):
        np.testing.assert_array_equal(theirs[name].numpy(), tensor, err_msg=name)


def test_bfloat16_is_rounded_on_save_and_exact_on_load(tmp_path: Path) -> None:
    _, params = save_new(tmp_path / "model", dtype="bfloat16")
    stored = load_file(tmp_path / "model" / SINGLE_FILE)
    assert all(array.dtype == ml_dtypes.bfloat16 for array in stored.values())
    assert json.loads((tmp_path / "model" / CONFIG_FILE).read_text())["dtype"] == "bfloat16"
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params)
    assert_same(load_checkpoint(tmp_path / "model")[1], rounded)
    _, as_bfloat16 = load_checkpoint(tmp_path / "model", dtype=jnp.bfloat16)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(as_bfloat16))


def test_each_tensor_is_placed_in_its_shards(tmp_path: Path) -> None:
    _, params = save_new(tmp_path / "model")
    mesh = make_mesh(MeshConfig(fsdp=4, tensor=2))
    _, loaded = load_checkpoint(tmp_path / "model", mesh=mesh)
    assert_same(loaded, params)
    gate = dict(named_tensors(loaded))[GATE]
    assert {shard.data.shape for shard in gate.addressable_shards} == {(20, 8)}
    save_checkpoint(tmp_path / "again", loaded, make_config(tied=False), dtype="float32")
    assert_same(load_checkpoint(tmp_path / "again")[1], params)


@pytest.mark.parametrize("tied", [True, False])
def test_names_and_parameters_are_inverses(tied: bool) -> None:
    config, params = make_config(tied=tied), new_params(tied)
    named = dict(named_tensors(params))
    assert named.keys() == {entry.hf_name for entry in tensor_entries(config)}
    assert_same(params_from_named(config, named), params)
    named.pop(GATE)
    with pytest.raises(CheckpointError, match=rf"missing 1 of .*{GATE}"):
        params_from_named(config, named)


def test_a_save_that_fails_leaves_nothing_and_the_old_folder_whole(tmp_path: Path) -> None:
    config, params = save_new(tmp_path / "model")

    def fail(folder: Path) -> None:
        (folder / "tokenizer.json").write_text("half")
        raise OSError("disk full")

    other = jax.tree.map(lambda x: x + 1, params)
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(tmp_path / "model", other, config, dtype="float32", save_tokenizer=fail, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert_same(load_checkpoint(tmp_path / "model")[1], params)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        save_checkpoint(tmp_path / "model", other, config, dtype="float32")
    save_checkpoint(tmp_path / "model", other, config, dtype="float32", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert_same(load_checkpoint(tmp_path / "model")[1], other)


def test_the_tokenizer_is_written_into_the_folder(tmp_path: Path) -> None:
    save_new(tmp_path / "model", save_tokenizer=lambda folder: (folder / "tokenizer.json").write_text("{}"))
    assert (tmp_path / "model" / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "llama"}, "model_type='llama' is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}}, "rope scaling .*yarn"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope scaling .*linear"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling .*yarn"),
        ({"rope_parameters": None, "rope_theta": None}, "lacks rope_theta"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config=.*awq"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"num_attention_heads": 3}, "num_heads=3 is not divisible by num_kv_heads=2"),
        ({"vocab_size": "many"}, "vocab_size='many'"),
    ],
)
def test_a_config_that_asks_for_something_else_is_refused(tmp_path: Path, fields: dict, message: str) -> None:
    save_new(tmp_path / "model")
    edit_json(tmp_path / "model" / CONFIG_FILE, **fields)
    with pytest.raises(CheckpointError, match=f"{CONFIG_FILE}.*{message}"):
        load_checkpoint(tmp_path / "model")


def test_rope_theta_is_read_from_old_and_new_fields(tmp_path: Path) -> None:
    save_new(tmp_path / "model")
    path = tmp_path / "model" / CONFIG_FILE
    edit_json(path, rope_parameters=None, rope_theta=5000)
    assert load_config(tmp_path / "model").rope_theta == 5000.0
    edit_json(path, rope_parameters={"rope_type": "default", "rope_theta": 7000.0}, rope_theta=None)
    assert load_config(tmp_path / "model").rope_theta == 7000.0


def damage_missing_folder(folder: Path) -> str:
    shutil.rmtree(folder)
    return f"{folder} is missing"


def damage_missing_config(folder: Path) -> str:
    (folder / CONFIG_FILE).unlink()
    return f"{CONFIG_FILE} is missing"


def damage_unreadable_config(folder: Path) -> str:
    (folder / CONFIG_FILE).write_text("{")
    return f"{CONFIG_FILE} is unreadable"


def damage_missing_weights(folder: Path) -> str:
    (folder / SINGLE_FILE).unlink()
    return f"neither {SINGLE_FILE} nor {INDEX_FILE}"


def damage_truncated_data(folder: Path) -> str:
    data = (folder / SINGLE_FILE).read_bytes()
    (folder / SINGLE_FILE).write_bytes(data[:-100])
    return rf"{SINGLE_FILE} \({len(data) - 100} bytes\) is unreadable or truncated"


def damage_truncated_header(folder: Path) -> str:
    (folder / SINGLE_FILE).write_bytes((folder / SINGLE_FILE).read_bytes()[:50])
    return f"{SINGLE_FILE}.*unreadable or truncated"


def damage_empty_file(folder: Path) -> str:
    (folder / SINGLE_FILE).write_bytes(b"")
    return rf"{SINGLE_FILE} \(0 bytes\) is unreadable or truncated"


def damage_wrong_shape(folder: Path) -> str:
    edit_tensors(folder / SINGLE_FILE, lambda tensors: tensors.update({GATE: np.zeros((40, 31), np.float32)}))
    return rf"{SINGLE_FILE}: {GATE} has shape \(40, 31\), but {CONFIG_FILE} asks for \(40, 32\)"


def damage_transposed(folder: Path) -> str:
    edit_tensors(folder / SINGLE_FILE, lambda tensors: tensors.update({GATE: tensors[GATE].T.copy()}))
    return rf"{GATE} has shape \(32, 40\), but {CONFIG_FILE} asks for \(40, 32\)"


def damage_missing_tensor(folder: Path) -> str:
    edit_tensors(folder / SINGLE_FILE, lambda tensors: tensors.pop(GATE))
    return f"missing 1 of .* tensors: {GATE}"


def damage_unexpected_tensor(folder: Path) -> str:
    edit_tensors(folder / SINGLE_FILE, lambda tensors: tensors.update({"model.layers.2.surplus": np.zeros(3, np.float32)}))
    return "1 tensors that this model does not have: model.layers.2.surplus"


def damage_wrong_dtype(folder: Path) -> str:
    edit_tensors(folder / SINGLE_FILE, lambda tensors: tensors.update({GATE: np.zeros((40, 32), np.int8)}))
    return f"{SINGLE_FILE}: {GATE} has dtype I8"


@pytest.mark.parametrize("damage", [value for name, value in list(globals().items()) if name.startswith("damage_")])
def test_a_damaged_folder_is_refused_by_name(tmp_path: Path, damage: Callable[[Path], str]) -> None:
    save_new(tmp_path / "model")
    message = damage(tmp_path / "model")
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path / "model")


def test_an_untied_config_without_a_head_is_refused(tmp_path: Path) -> None:
    save_new(tmp_path / "model", tied=True)
    edit_json(tmp_path / "model" / CONFIG_FILE, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"missing 1 of .*lm_head\.weight"):
        load_checkpoint(tmp_path / "model")


def test_a_tied_config_with_another_head_is_refused_and_with_the_same_head_is_read(tmp_path: Path) -> None:
    _, params = save_new(tmp_path / "model", tied=True)
    path = tmp_path / "model" / SINGLE_FILE
    edit_tensors(path, lambda tensors: tensors.update({"lm_head.weight": tensors[EMBEDDING].copy()}))
    assert_same(load_checkpoint(tmp_path / "model")[1], params)
    edit_tensors(path, lambda tensors: tensors.update({"lm_head.weight": tensors[EMBEDDING] + 1}))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight \(48, 32\) differs from .*tie_word_embeddings=true"):
        load_checkpoint(tmp_path / "model")


def test_old_rotary_buffers_are_ignored(tmp_path: Path) -> None:
    _, params = save_new(tmp_path / "model")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(tmp_path / "model" / SINGLE_FILE, lambda tensors: tensors.update({name: np.zeros(8, np.float32)}))
    assert_same(load_checkpoint(tmp_path / "model")[1], params)


def spoil_missing_shard(folder: Path, index: dict) -> str:
    name = index["weight_map"][GATE]
    (folder / name).unlink()
    return f"{name} is missing"


def spoil_wrong_file(folder: Path, index: dict) -> str:
    index["weight_map"][GATE] = index["weight_map"][EMBEDDING]
    return f"{INDEX_FILE} says that {GATE} is in {index['weight_map'][EMBEDDING]}, but that file lacks it"


def spoil_forgot_tensor(folder: Path, index: dict) -> str:
    return f"{index['weight_map'].pop(NORM)} holds tensors that {INDEX_FILE} does not place there: {NORM}"


def spoil_leaves_folder(folder: Path, index: dict) -> str:
    index["weight_map"][GATE] = "../other.safetensors"
    return f"{INDEX_FILE} places {GATE} in '../other.safetensors', which is no file name"


def spoil_empty(folder: Path, index: dict) -> str:
    index.clear()
    return f"{INDEX_FILE} has no weight_map"


@pytest.mark.parametrize("damage", [value for name, value in list(globals().items()) if name.startswith("spoil_")])
def test_a_damaged_index_is_refused_by_name(tmp_path: Path, damage: Callable[[Path, dict], str]) -> None:
    save_new(tmp_path / "model", max_shard_bytes=10_000)
    path = tmp_path / "model" / INDEX_FILE
    index = json.loads(path.read_text())
    message = damage(tmp_path / "model", index)
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path / "model")


def test_saving_other_parameters_than_the_config_says_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"parameters to save: missing .*lm_head\.weight"):
        save_checkpoint(tmp_path / "model", new_params(True), make_config(tied=False), dtype="float32")
    assert not list(tmp_path.iterdir())
