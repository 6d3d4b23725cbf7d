"""Laws of addresses: boxes partition a tensor, buckets partition the runs, and everything is arithmetic."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.transfer.boxes import Box, strided
from common.transfer.changes import copy_run
from common.transfer.errors import MalformedUpdateError
from common.transfer.layout_wire import parse_layout
from common.transfer.shards import BUCKET_BYTES, WeightLayout, build_layout


@settings(max_examples=80, deadline=None)
@given(
    shape=st.lists(st.integers(1, 40), min_size=0, max_size=4),
    axes=st.permutations(range(4)),
    num_axes=st.integers(0, 2),
    min_run_bytes=st.sampled_from([1, 64, 1000]),
)
def test_runs_partition_every_tensor(shape: list[int], axes: list[int], num_axes: int, min_run_bytes: int) -> None:
    cut = [axis for axis in axes if axis < len(shape)][:num_axes]
    layout = build_layout({"w": (tuple(shape), "int8")}, axes_of=lambda *_: cut, min_run_bytes=min_run_bytes, max_run_bytes=4000)
    tensor = layout.tensors[0]
    seen = np.zeros(tensor.num_elements, np.int64)
    for run in range(tensor.num_runs):
        for box in tensor.run(run):
            where = strided(tensor.shape, box)
            flat = where.to_flat(np.arange(box.num_elements))
            expected = np.arange(tensor.num_elements).reshape(tensor.shape)[box.slices].reshape(-1)
            np.testing.assert_array_equal(flat, expected)
            seen[flat] += 1
    assert (seen == 1).all()


def test_sixteenths_of_either_axis_are_made_of_whole_runs() -> None:
    specs = {
        "model.layers.0.mlp.up_proj.weight": ((12288, 4096), "bfloat16"),
        "model.layers.0.mlp.down_proj.weight": ((4096, 12288), "bfloat16"),
    }
    up, down = build_layout(specs).tensors
    assert up.box_extent == (768, 4096)
    assert down.box_extent == (4096, 768)


def test_small_tensors_stay_whole_and_huge_parts_are_cut_again() -> None:
    specs = {
        "norm": ((4096,), "bfloat16"),
        "embed": ((151936, 4096), "bfloat16"),
        "prime": ((50257, 1600), "float32"),
        "flat": ((1, 1 << 30), "int8"),
    }
    norm, embed, prime, flat = build_layout(specs).tensors
    assert norm.num_runs == 1
    assert (151936 // 16) % embed.box_extent[0] == 0
    for tensor in (embed, prime, flat):
        assert max(np.prod(tensor.box(i).extent) for i in (0, tensor.num_boxes - 1)) * 4 <= 64 << 20


def test_two_cut_axes_give_runs_of_whole_slabs() -> None:
    tensor = build_layout({"w": ((4096, 4096), "bfloat16")}, axes_of=lambda *_: (1, 0)).tensors[0]
    assert tensor.boxes_per_run == 16
    assert tensor.num_runs == 16
    slab = tensor.run(3)
    assert sum(box.num_elements for box in slab) == 4096 * 256
    assert all(box.start[1] == 3 * 256 for box in slab)


def test_more_than_2_to_the_32_elements_by_arithmetic() -> None:
    tensor = build_layout({"experts": ((512, 7168, 4096), "bfloat16")}).tensors[0]
    assert tensor.num_elements > 1 << 33
    last = strided(tensor.shape, tensor.run(tensor.num_runs - 1)[-1])
    size = tensor.run(tensor.num_runs - 1)[-1].num_elements
    assert int(last.to_flat(np.array([size - 1]))[0]) == tensor.num_elements - 1
    inner = strided((1 << 20, 1 << 20), Box((0, 1 << 19), (1 << 20, 1 << 19)))
    assert int(inner.to_flat(np.array([(1 << 39) - 1], np.uint64))[0]) == (1 << 40) - 1


def qwen_like() -> WeightLayout:
    specs: dict[str, tuple[tuple[int, ...], str]] = {"model.embed_tokens.weight": ((151936, 1024), "bfloat16")}
    for layer in range(28):
        specs[f"model.layers.{layer}.input_layernorm.weight"] = ((1024,), "bfloat16")
        specs[f"model.layers.{layer}.self_attn.o_proj.weight"] = ((1024, 2048), "bfloat16")
        specs[f"model.layers.{layer}.mlp.up_proj.weight"] = ((3072, 1024), "bfloat16")
    return build_layout(specs, tied={"lm_head.weight": "model.embed_tokens.weight"})


def test_buckets_hold_at_most_64_mb_and_every_run_once() -> None:
    layout = qwen_like()
    assert [run for bucket in layout.buckets for run in bucket.runs] == list(range(layout.num_runs))
    assert sum(bucket.dense_bytes for bucket in layout.buckets) == layout.dense_bytes
    assert all(bucket.dense_bytes <= BUCKET_BYTES for bucket in layout.buckets)
    for run in (0, layout.num_runs // 2, layout.num_runs - 1):
        tensor_idx, run_idx = layout.locate(run)
        assert layout.first_runs[tensor_idx] + run_idx == run


def test_a_layout_travels_as_json() -> None:
    layout = qwen_like()
    assert parse_layout(layout.json_bytes) == layout
    assert parse_layout(layout.json_bytes).digest == layout.digest
    assert layout.by_name["lm_head.weight"] is layout.by_name["model.embed_tokens.weight"]


@pytest.mark.parametrize(
    "row",
    [
        '["w","bfloat16",[4],[4],[0],1]',
        '["w","object",[4],[4],[0],1,[]]',
        '["w","bfloat16",[4],[0],[0],1,[]]',
        '["w","bfloat16",[4],[5],[0],1,[]]',
        '["w","bfloat16",[4],[4],[1],1,[]]',
        '["w","bfloat16",[-4],[4],[0],1,[]]',
        '["w","bfloat16",[4.0],[4],[0],1,[]]',
        '["w","bfloat16",[281474976710655,281474976710655],[1,1],[0,1],1,[]]',
        '["w","int8",[281474976710655],[1],[0],1,[]]',
        '["w","int8",[281474976710655],[281474976710655],[0],1,[]]',
        '["w","int8",[4],[4],[0],0,[]]',
        '["w","int8",[4],[4],[0],1,["w"]]',
        '["","int8",[4],[4],[0],1,[]]',
        '[{},"int8",[4],[4],[0],1,[]]',
        '["w",["int8"],[4],[4],[0],1,[]]',
        "[" * 100_000,
    ],
)
def test_layouts_that_nobody_builds_are_refused(row: str) -> None:
    with pytest.raises(MalformedUpdateError):
        parse_layout(f"[{row}]".encode())


def test_ties_must_name_a_tensor() -> None:
    with pytest.raises(ValueError, match="tied name"):
        build_layout({"a": ((2,), "int8")}, tied={"b": "c"})
    with pytest.raises(ValueError, match="tied name"):
        build_layout({"a": ((2,), "int8"), "b": ((2,), "int8")}, tied={"b": "a"})
    with pytest.raises(ValueError, match="float64"):
        build_layout({"a": ((2,), "float64")})


@pytest.mark.parametrize("name", ["up_proj.weight", "down_proj.weight"])
def test_copying_every_run_copies_the_tensor_and_one_run_only_itself(name: str) -> None:
    tensor = build_layout({name: ((64, 96), "float16")}, min_run_bytes=64, max_run_bytes=4000).tensors[0]
    source, target = np.arange(1, tensor.num_elements + 1, dtype=np.uint16), np.zeros(tensor.num_elements, np.uint16)
    assert tensor.num_runs > 1
    copy_run(tensor, 0, source, target)
    assert np.count_nonzero(target) == sum(box.num_elements for box in tensor.run(0))
    for run in range(1, tensor.num_runs):
        copy_run(tensor, run, source, target)
    np.testing.assert_array_equal(target, source)
