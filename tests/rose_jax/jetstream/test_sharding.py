"""Parameters and cache cut over a tensor axis give the results of one device."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from common.config import MeshConfig
from common.serving.engine import StaleCache, StepLimits
from rose_jax.mesh import make_mesh
from tests.rose_jax.jetstream.serving_data import SMALL, check_against_forward, make_engine, make_request, params, prompt, serve


def test_two_devices_serve_what_one_does() -> None:
    mesh = make_mesh(MeshConfig(fsdp=1, tensor=2))
    engine = make_engine(dataclasses.replace(SMALL, stale_cache=StaleCache.DROP), mesh=mesh)
    requests = [make_request(f"r{idx}", prompt(5 + 9 * idx, seed=idx), trajectory_id=idx, max_tokens=6) for idx in range(5)]
    with_options = make_request("options", prompt(12, seed=7), trajectory_id=7, top_p=0.8, num_top_logprobs=3)
    single = serve(make_engine(SMALL), [*requests, with_options])
    completions = serve(engine, [*requests, with_options])
    ahead = serve(engine, requests, StepLimits(max_tokens=1024, tokens_per_sequence=8))
    assert completions["options"].token_ids == single["options"].token_ids
    for request in requests:
        for completion in (completions[request.request_id], ahead[request.request_id]):
            assert completion.token_ids == single[request.request_id].token_ids
            check_against_forward(request, completion)
    chunk = engine._runner._caches[0][0]
    assert chunk.sharding.num_devices == 2
    assert chunk.addressable_shards[0].data.shape[2] == chunk.shape[2] // 2
    assert any(not leaf.sharding.is_fully_replicated for leaf in engine._runner._params)
    host_weights = jax.tree.map(np.asarray, params(1))
    engine.commit(host_weights, version=1)
    check_against_forward(requests[1], serve(engine, [requests[1]])["r1"], seed=1)


def test_sharded_invariant_mode_is_bit_for_bit_the_same_alone_and_in_company() -> None:
    mesh = make_mesh(MeshConfig(fsdp=1, tensor=2))
    config = dataclasses.replace(SMALL, invariant=True)
    request = make_request("a", prompt(19), max_tokens=10)
    others = [make_request(f"o{idx}", prompt(7 * idx + 3, seed=idx), max_tokens=4) for idx in range(5)]
    alone = serve(make_engine(config, mesh=mesh), [request])["a"]
    crowded = serve(make_engine(config, mesh=mesh), [*others, request])["a"]
    assert (crowded.token_ids, crowded.behavior_logprobs) == (alone.token_ids, alone.behavior_logprobs)


def test_heads_that_the_mesh_cannot_cut_are_refused() -> None:
    with pytest.raises(ValueError, match="num_kv_heads=2 is not divisible"):
        make_engine(SMALL, mesh=make_mesh(MeshConfig(fsdp=1, tensor=4)))
