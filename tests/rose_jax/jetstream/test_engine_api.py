"""The engine_api adapter generates what the engine does, driven the way JetStream's Driver drives it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from rose_jax.jetstream.engine_api import DecodeState, DriverConfig, Qwen3Engine
from rose_jax.jetstream.head_engine_api import HeadQwen3Engine
from tests.rose_jax.jetstream import driver_process
from tests.rose_jax.jetstream.serving_data import MODEL, forward_logprobs, params, prompt

CONFIG = DriverConfig(max_slots=3, max_context_tokens=64, temperature=0.0)


def padded(token_ids: tuple[int, ...]) -> np.ndarray:
    return np.pad(np.array(token_ids, np.int32), (0, 32 - len(token_ids)))


def greedy(token_ids: tuple[int, ...], count: int) -> list[int]:
    ids = list(token_ids)
    for _ in range(count):
        ids.append(int(forward_logprobs(ids)[-1].argmax()))
    return ids[len(token_ids) :]


def generate(engine: Qwen3Engine, weights: tuple, state: DecodeState, count: int) -> tuple[DecodeState, np.ndarray]:
    """[count, slots, 3] results."""
    results = []
    for _ in range(count):
        state, result = engine.generate(weights, state)
        results.append(result.convert_to_numpy().data)
    return state, np.stack(results)


def test_inserted_prompts_generate_greedy_tokens_each_in_its_slot() -> None:
    engine = Qwen3Engine(CONFIG, MODEL)
    weights, state = engine.load_params(params()), engine.init_decode_state()
    prompts = {2: prompt(20), 0: prompt(1, seed=1)}
    for slot, ids in prompts.items():
        state = engine.insert(engine.prefill(params=weights, padded_tokens=padded(ids), true_length=len(ids)), state, slot=slot)
    state, results = generate(engine, weights, state, 5)
    for slot, ids in prompts.items():
        assert results[:, slot, 0].tolist() == greedy(ids, 5)
        assert results[:, slot, 2].tolist() == [1, 2, 3, 4, 5]
    assert results[:, :, 1].tolist() == [[1, 0, 1]] * 5


def test_extract_and_insert_elsewhere_goes_on_from_the_same_state() -> None:
    engine = Qwen3Engine(CONFIG, MODEL)
    weights, state = engine.load_params(params()), engine.init_decode_state()
    ids = prompt(17)
    state = engine.insert(engine.prefill(params=weights, padded_tokens=padded(ids), true_length=17), state, slot=0)
    state, first = generate(engine, weights, state, 3)
    taken = engine.extract(state, 0)
    state = engine.insert(engine.prefill(params=weights, padded_tokens=padded(prompt(9)), true_length=9), state, slot=0)
    state = engine.insert(taken, state, slot=1)
    _, second = generate(engine, weights, state, 3)
    assert [*first[:, 0, 0], *second[:, 1, 0]] == greedy(ids, 6)


def test_a_prompt_in_two_parts_equals_the_whole() -> None:
    engine = Qwen3Engine(CONFIG, MODEL)
    weights, state = engine.load_params(params()), engine.init_decode_state()
    ids = prompt(27)
    first = engine.prefill(params=weights, padded_tokens=padded(ids[:15]), true_length=15)
    whole = engine.prefill(params=weights, existing_prefix=first, padded_tokens=padded(ids[15:]), true_length=12)
    _, results = generate(engine, weights, engine.insert(whole, state, slot=1), 4)
    assert results[:, 1, 0].tolist() == greedy(ids, 4)


def test_a_slot_without_room_is_no_longer_valid() -> None:
    engine = Qwen3Engine(DriverConfig(max_slots=1, max_context_tokens=32, temperature=0.0), MODEL)
    weights, state = engine.load_params(params()), engine.init_decode_state()
    state = engine.insert(engine.prefill(params=weights, padded_tokens=padded(prompt(30)), true_length=30), state, slot=0)
    _, results = generate(engine, weights, state, 5)
    assert results[:, 0, 1].tolist() == [1, 1, 1, 0, 0]


def test_the_newer_signature_returns_the_first_token_with_the_prefix() -> None:
    engine = HeadQwen3Engine(CONFIG, MODEL)
    weights, state = engine.load_params(params()), engine.init_decode_state()
    ids = prompt(20)
    prefix, first = engine.prefill(params=weights, padded_tokens=padded(ids), true_length=20)
    state = engine.insert(prefix, state, slot=1)
    state, results = generate(engine, weights, state, 3)
    assert [int(first.data[0, 0]), *results[:, 1, 0].tolist()] == greedy(ids, 4)
    assert results[:, 1, 2].tolist() == [2, 3, 4]
    _, sampled = engine.generate(weights, state, lambda logits: jnp.full(logits.shape[0], 7, jnp.int32))
    assert sampled.data[:, 0].tolist() == [7, 7, 7]


def test_contexts_that_jetstream_cannot_pad_to_are_refused() -> None:
    with pytest.raises(ValueError, match="power of two"):
        DriverConfig(max_slots=1, max_context_tokens=100)


def test_the_properties_a_driver_reads() -> None:
    engine = Qwen3Engine(CONFIG, MODEL, tokenizer_parameters="words")
    assert (engine.max_concurrent_decodes, engine.samples_per_slot, engine.max_prefill_length) == (3, 1, 64)
    assert engine.get_tokenizer() == "words"
    assert engine.mesh.size == 1
    assert engine.colocated_cpus is None
    with pytest.raises(ValueError, match="tokenizer="):
        engine.build_tokenizer(None)


@pytest.mark.slow
def test_the_stock_driver_serves_the_adapter() -> None:
    if importlib.util.find_spec("jetstream") is None:
        pytest.skip("google-jetstream is not installed: see requirements/serve-cpu.txt")
    command = [sys.executable, "-m", "tests.rose_jax.jetstream.driver_process"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert finished.returncode == 0, finished.stderr
    answer = json.loads(finished.stdout.splitlines()[-1])
    assert answer["missing"] == []
    assert answer["tokens"] == [greedy(token_ids, driver_process.NUM_TOKENS) for token_ids in driver_process.PROMPTS]
