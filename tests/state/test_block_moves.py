"""Zeroing and copying of whole KV blocks against a NumPy loop; nothing else changes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import init_state
from jaxrunner.errors import AdmissionError
from jaxrunner.models.model import LayerSpec, Model
from jaxrunner.state.block_moves import MOVES_PER_CALL, apply_moves, pack_moves

MODEL = Model("LlamaForCausalLM", 64, 16, 32, 2, 1, 8, (LayerSpec(), LayerSpec(window=4), LayerSpec()))
NUM_BLOCKS = 300


@pytest.fixture(scope="module")
def run():
    return jax.jit(apply_moves)


def random_state(seed: int):
    state = init_state(MODEL, max_requests=2, max_model_len=32, num_blocks=NUM_BLOCKS, block_size=4)
    rng = np.random.default_rng(seed)
    blocks = tuple(jnp.asarray(rng.normal(size=b.shape), b.dtype) for b in state.kv.blocks)
    return state.replace(kv=state.kv.replace(blocks=blocks))


@pytest.mark.parametrize(("num_zero", "num_copy"), [(0, 0), (1, 0), (0, 1), (5, 3), (100, 70)])
def test_moves_equal_a_loop(run, num_zero, num_copy):
    state = random_state(num_zero)
    ids = np.random.default_rng(1).permutation(np.arange(1, NUM_BLOCKS))
    zero, dst = ids[:num_zero].tolist(), ids[num_zero : num_zero + num_copy].tolist()
    src = ids[-num_copy:].tolist() if num_copy else []
    expected = [np.array(b) for b in state.kv.blocks]
    for cache in expected:
        cache[:, :, zero] = 0
        for s, d in zip(src, dst, strict=True):
            cache[:, :, d] = cache[:, :, s]
    uploads = pack_moves(zero, list(zip(src, dst, strict=True)))
    assert len(uploads) == -(-num_zero // MOVES_PER_CALL) + -(-num_copy // MOVES_PER_CALL)
    for upload in uploads:
        state = run(state, upload)
    assert len(state.kv.blocks) == 2
    for cache, want in zip(state.kv.blocks, expected, strict=True):
        np.testing.assert_array_equal(cache, want)


def test_a_copy_of_a_zeroed_block_copies_zeros(run):
    state = random_state(3)
    for upload in pack_moves([5], [(5, 6)]):
        state = run(state, upload)
    assert not np.asarray(state.kv.blocks[0][:, :, 5:7]).any()


def test_nan_is_zeroed(run):
    state = random_state(4)
    poisoned = tuple(b.at[:, :, 7].set(jnp.nan) for b in state.kv.blocks)
    state = state.replace(kv=state.kv.replace(blocks=poisoned))
    for upload in pack_moves([7], []):
        state = run(state, upload)
    assert not any(np.isnan(np.asarray(b)).any() for b in state.kv.blocks)


def test_entries_whose_order_would_matter_are_refused():
    with pytest.raises(AdmissionError, match="twice"):
        pack_moves([3], [(2, 3)])
    with pytest.raises(AdmissionError, match="twice"):
        pack_moves([], [(1, 3), (2, 3)])
    with pytest.raises(AdmissionError, match="KV block 2 is the source"):
        pack_moves([], [(1, 2), (2, 3)])
