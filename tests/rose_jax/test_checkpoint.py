"""A checkpoint restores what was saved, on any mesh; one that is not whole is named and passed over, never read."""

import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from common.config import Config, MeshConfig
from common.errors import CheckpointError
from rose_jax import checkpoint
from rose_jax.batching import demonstration_batch
from rose_jax.checkpoint import Checkpoints, config_fingerprint
from rose_jax.learner import Learner
from rose_jax.mesh import make_mesh
from rose_jax.update import Phase, abstract_state
from tests.rose_jax.training_data import MODEL_CONFIG, new_learner, scored_batch, small_config, trajectory

FINGERPRINT = {"model.hidden_size": 32, "seed": 0}


def _open(folder: Path, *, keep: int = 2, fingerprint: dict[str, int] | None = None) -> Checkpoints:
    return Checkpoints(folder / "checkpoints", keep=keep, fingerprint=FINGERPRINT if fingerprint is None else fingerprint)


def _arrays(value: float) -> dict[str, object]:
    return {"params": {"layers": [{"w": jnp.full((8, 8), value)}, {"w": jnp.full((4,), value, jnp.bfloat16)}]}}


def _shapes(arrays: object) -> object:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), arrays)


def _save(checkpoints: Checkpoints, *steps: int) -> None:
    for step in steps:
        checkpoints.save(step, arrays=_arrays(step), progress={"version": step, "loss": 0.1 * step, "phase": None})


def _assert_restores(folder: Path, step: int) -> None:
    restored = _open(folder).restore_latest(_shapes(_arrays(0)))
    assert restored is not None
    assert restored.step == step
    assert restored.progress == {"version": step, "loss": 0.1 * step, "phase": None}
    _assert_equal(restored.arrays, _arrays(step))


def _assert_equal(left: object, right: object) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for ours, theirs in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


def _largest_file(folder: Path) -> Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def test_a_folder_without_checkpoints_restores_nothing(tmp_path: Path) -> None:
    assert _open(tmp_path).restore_latest(_shapes(_arrays(0))) is None


def test_what_was_saved_comes_back_and_only_the_newest_are_kept(tmp_path: Path) -> None:
    checkpoints = _open(tmp_path, keep=2)
    _save(checkpoints, 1, 5, 6, 9)
    assert checkpoints.steps == [6, 9]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["6", "9", "seals"]
    _assert_restores(tmp_path, 9)


def _truncate(step: Path) -> None:
    path = _largest_file(step)
    os.truncate(path, path.stat().st_size // 2)


def _flip_a_bit(step: Path) -> None:
    path = _largest_file(step)
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 2] ^= 1
    path.write_bytes(contents)


def _spoil_seal(step: Path) -> None:
    (step.parent / "seals" / f"{step.name}.json").write_text("{}")


DAMAGES = {
    "truncated file": (_truncate, "bytes, not"),
    "flipped bit": (_flip_a_bit, "has other contents"),
    "lost data file": (lambda step: _largest_file(step).unlink(), "is missing"),
    "lost metadata": (lambda step: (step / "_CHECKPOINT_METADATA").unlink(), "_CHECKPOINT_METADATA is missing"),
    "lost item": (lambda step: shutil.rmtree(step / "params"), "is missing"),
    "lost folder": (shutil.rmtree, "is missing"),
    "unreadable seal": (_spoil_seal, "seal .* is unreadable"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_older_one_used(damage: str, tmp_path: Path, caplog) -> None:
    _save(_open(tmp_path), 1, 2)
    inflict, message = DAMAGES[damage]
    folder = tmp_path / "checkpoints" / "2"
    inflict(folder)
    caplog.set_level(logging.WARNING)
    _assert_restores(tmp_path, 1)
    [warning] = [record.getMessage() for record in caplog.records if record.name == "rose_jax.checkpoint"]
    assert f"skipping checkpoint {folder}: " in warning
    assert re.search(message, warning)


def test_every_file_of_a_checkpoint_is_guarded(tmp_path: Path) -> None:
    _save(_open(tmp_path), 1, 2)
    folder = tmp_path / "checkpoints" / "2"
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        contents = path.read_bytes()
        path.unlink()
        restored = _open(tmp_path).restore_latest(_shapes(_arrays(0)))
        assert restored is not None
        assert restored.step == 1, path
        path.write_bytes(contents)
    _assert_restores(tmp_path, 2)


def test_when_no_checkpoint_is_whole_the_run_does_not_start_over(tmp_path: Path) -> None:
    _save(_open(tmp_path), 1, 2)
    for step in ("1", "2"):
        _truncate(tmp_path / "checkpoints" / step)
    with pytest.raises(CheckpointError, match=r"none of the 2 checkpoints in .*checkpoints is whole.*another --workdir"):
        _open(tmp_path).restore_latest(_shapes(_arrays(0)))


def test_a_damaged_checkpoint_is_replaced_when_the_run_gets_there_again(tmp_path: Path) -> None:
    _save(_open(tmp_path), 1, 2, 3)
    _truncate(tmp_path / "checkpoints" / "3")
    checkpoints = _open(tmp_path)
    checkpoints.restore_latest(_shapes(_arrays(0)))
    assert checkpoints.steps == [2]
    _save(checkpoints, 3, 4)
    assert checkpoints.steps == [3, 4]
    _assert_restores(tmp_path, 4)


class _Death(BaseException):
    """Stands for the end of the process at this point."""


@pytest.mark.parametrize("place", ["_write_seal", "_delete_old"])
def test_death_at_the_end_of_a_save_leaves_a_whole_checkpoint(place: str, tmp_path: Path, monkeypatch, caplog) -> None:
    _save(_open(tmp_path, keep=1), 1)

    def die(*_: object) -> None:
        raise _Death

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint if place == "_write_seal" else Checkpoints, place, die)
        with pytest.raises(_Death):
            _save(_open(tmp_path, keep=1), 2)
    caplog.set_level(logging.WARNING)
    _assert_restores(tmp_path, 1 if place == "_write_seal" else 2)
    is_named = f"skipping checkpoint {tmp_path / 'checkpoints' / '2'}: its save was not finished" in caplog.text
    assert is_named == (place == "_write_seal")
    checkpoints = _open(tmp_path, keep=1)
    checkpoints.restore_latest(_shapes(_arrays(0)))
    _save(checkpoints, *([2, 3] if place == "_write_seal" else [3]))
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["3", "seals"]


def test_death_in_the_very_first_save_starts_anew_and_says_so(tmp_path: Path, monkeypatch, caplog) -> None:
    def die(*_: object) -> None:
        raise _Death

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_write_seal", die)
        with pytest.raises(_Death):
            _save(_open(tmp_path), 1)
    caplog.set_level(logging.WARNING)
    assert _open(tmp_path).restore_latest(_shapes(_arrays(0))) is None
    assert "its save was not finished" in caplog.text


def test_leftovers_of_a_save_are_named_and_removed(tmp_path: Path, caplog) -> None:
    _save(_open(tmp_path), 1)
    leftover = tmp_path / "checkpoints" / "2.orbax-checkpoint-tmp"
    (leftover / "params").mkdir(parents=True)
    caplog.set_level(logging.WARNING)
    _assert_restores(tmp_path, 1)
    assert f"skipping {leftover}" in caplog.text
    assert not leftover.exists()


def test_another_configuration_is_refused_with_both_values_and_the_fix(tmp_path: Path) -> None:
    _save(_open(tmp_path), 1)
    other = _open(tmp_path, fingerprint=FINGERPRINT | {"model.hidden_size": 64})
    message = r"model.hidden_size=32 in the checkpoint, 64 now\. .*start anew in another --workdir"
    with pytest.raises(ValueError, match=message):
        other.restore_latest(_shapes(_arrays(0)))


def test_the_fingerprint_survives_json_and_ignores_what_may_change(tmp_path: Path) -> None:
    def opened(config: Config) -> Checkpoints:
        return Checkpoints(tmp_path / "checkpoints", keep=2, fingerprint=config_fingerprint(config, MODEL_CONFIG))

    _save(opened(Config()), 1)
    changed = Config(num_versions=7)
    changed.optim.lr, changed.mesh.fsdp, changed.model.remat, changed.eval.interval = 1.0, 8, True, 3
    assert opened(changed).restore_latest(_shapes(_arrays(0))) is not None
    changed.seed = 5
    with pytest.raises(ValueError, match="seed=0 in the checkpoint, 5 now"):
        opened(changed).restore_latest(_shapes(_arrays(0)))


@pytest.mark.parametrize(("fsdp", "tensor"), [(1, 8), (2, 4), (4, 2), (1, 1)])
def test_a_learner_restores_across_mesh_shapes(fsdp: int, tensor: int, tmp_path: Path) -> None:
    saved = _filled_state(MeshConfig(fsdp=4, tensor=2))
    _open(tmp_path).save(1, arrays={"state": saved}, progress={})
    target = abstract_state(small_config(), MODEL_CONFIG, make_mesh(MeshConfig(fsdp=fsdp, tensor=tensor)))
    restored = _open(tmp_path).restore_latest({"state": target})
    assert restored is not None
    _assert_equal(restored.arrays["state"], saved)
    for leaf, wanted in zip(jax.tree.leaves(restored.arrays["state"]), jax.tree.leaves(target), strict=True):
        assert leaf.sharding == wanted.sharding


def _filled_state(mesh: MeshConfig) -> object:
    """A learner's whole state with random values, laid out on a mesh."""
    rng = np.random.default_rng(0)
    shapes = abstract_state(small_config(), MODEL_CONFIG, make_mesh(mesh))

    def fill(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.device_put((100 * rng.normal(size=leaf.shape)).astype(leaf.dtype), leaf.sharding)

    return jax.tree.map(fill, shapes)


def _advance(learner: Learner) -> None:
    """One piece of work: two warm-up updates, the first of which is the best, then learner steps."""
    if learner.phase is Phase.WARMUP and learner.num_warmup_updates < 2:
        learner.supervised_update(demonstration_batch([trajectory(30, seed=learner.num_warmup_updates)]))
        learner.keep_if_best(float(learner.num_warmup_updates))
        return
    if learner.phase is Phase.WARMUP:
        learner.start_reinforcement()
    learner.update(scored_batch(learner.version))


def test_a_resumed_learner_goes_on_bit_for_bit_like_an_uninterrupted_one(tmp_path: Path) -> None:
    config = small_config(kl_coef=0.1)
    config.warmup.num_updates = 2
    learner, resumed = new_learner(config), new_learner(config)
    resumed._updates = learner._updates  # spares a second compilation
    checkpoints = _open(tmp_path)
    for _ in range(4):
        checkpoints.save(learner.step, arrays=learner.arrays(), progress=learner.progress())
        _advance(learner)
        restored = _open(tmp_path).restore_latest(resumed.abstract_arrays())
        assert restored is not None
        resumed.load(restored.arrays, restored.progress)
        _advance(resumed)
        assert resumed.arrays().keys() == learner.arrays().keys()
        _assert_equal(resumed.arrays(), learner.arrays())
        assert resumed.progress() == learner.progress()
    assert (learner.num_warmup_updates, learner.version) == (2, 2)


@pytest.mark.slow
def test_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    folder = tmp_path / "checkpoints"
    reached = 0
    for _ in range(6):
        command = [sys.executable, "-m", "tests.rose_jax.checkpoint_process", "save_forever", str(folder)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        reached = int(process.stdout.readline())
        time.sleep(float(rng.uniform(0, 0.3)))
        process.send_signal(signal.SIGKILL)
        printed = process.communicate()[0].split()
        reached = int(printed[-1]) if printed else reached
        shapes = {name: {"x": jax.ShapeDtypeStruct((64, 64), jnp.float32)} for name in ("params", "opt_state")}
        restored = Checkpoints(folder, keep=2, fingerprint={}).restore_latest(shapes)
        assert restored is not None
        assert restored.step in (reached, reached + 1)  # one more when it died between the seal and the word about it
        for tree in restored.arrays.values():
            np.testing.assert_array_equal(np.asarray(tree["x"]), np.full((64, 64), restored.step, np.float32))


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.mark.slow
def test_two_processes_of_four_devices_restore_train_and_save(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    learner = new_learner(small_config(), fsdp=4, tensor=2)
    learner.update(scored_batch(seed=0))
    checkpoints = Checkpoints(folder, keep=2, fingerprint={})
    checkpoints.save(learner.step, arrays=learner.arrays(), progress=learner.progress())
    port = str(_free_port())
    module = "tests.rose_jax.checkpoint_process"
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, "train_one_step", str(folder), str(process_id), port],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for process_id in range(2)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    restored = Checkpoints(folder, keep=2, fingerprint={}).restore_latest(learner.abstract_arrays())
    assert restored is not None
    assert restored.step == 2
    learner.update(scored_batch(seed=1))
    for ours, theirs in zip(jax.tree.leaves(restored.arrays["params"]), jax.tree.leaves(learner.params), strict=True):
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=0, atol=1e-5)
