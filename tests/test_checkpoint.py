"""Checkpoints: whole or passed over, on any mesh, the newest kept."""

import logging

import jax
import numpy as np
import optax
import pytest

from jaxpt.checkpoint import Checkpoints
from jaxpt.models import params as params_lib
from jaxpt.rl.update import init_state
from tests.conftest import init, make_mesh, model_config


def state_on(mesh, seed=0):
    return init_state(init(model_config(), mesh, seed), optax.adam(1e-3))


def abstract(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def equal(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def test_restored_bit_for_bit_and_onto_another_mesh(tmp_path):
    state = state_on(make_mesh())
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, state, {"step": 3, "figures": {"a": 0.5}})
    other = state_on(make_mesh(data=2, expert=2, tensor=2), seed=1)
    restored, progress = checkpoints.restore(lambda progress: abstract(other))
    equal(restored, state)
    assert progress == {"step": 3, "figures": {"a": 0.5}}
    leaf = restored.params["layers"]["gate_proj"]
    assert leaf.sharding == other.params["layers"]["gate_proj"].sharding
    assert params_lib.content_hash(restored.params) == params_lib.content_hash(state.params)
    checkpoints.close()


def test_nothing_to_restore(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.restore(lambda progress: None) is None
    checkpoints.close()


def test_a_checkpoint_cut_short_is_passed_over(tmp_path, caplog):
    mesh = make_mesh()
    first, second = state_on(mesh, 1), state_on(mesh, 2)
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, first, {"step": 1})
    checkpoints.save(2, second, {"step": 2})
    for file in (tmp_path / "2").rglob("*"):
        if file.is_file() and file.stat().st_size > 64:
            with file.open("r+b") as opened:
                opened.truncate(file.stat().st_size // 2)
    checkpoints.close()
    checkpoints = Checkpoints(tmp_path, keep=2)
    with caplog.at_level(logging.WARNING):
        restored, progress = checkpoints.restore(lambda progress: abstract(first))
    assert progress == {"step": 1} and "Checkpoint 2" in caplog.text
    equal(restored, first)
    checkpoints.save(2, second, {"step": 2})  # its number is free again
    assert checkpoints.restore(lambda progress: abstract(first))[1] == {"step": 2}
    checkpoints.close()


def test_the_newest_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    state = state_on(make_mesh())
    for number in range(1, 5):
        checkpoints.save(number, state, {"step": number})
    checkpoints.close()
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["3", "4"]


def test_keeping_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match="keep=0"):
        Checkpoints(tmp_path, keep=0)
