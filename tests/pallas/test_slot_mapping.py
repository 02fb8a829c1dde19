"""`slot_mapping`: every implementation against literal numbers and the NumPy oracle, bit for bit."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.errors import ImplementationError
from jaxrunner.pallas import compat
from jaxrunner.pallas.slot_mapping import context_parallel_seq_lens, slot_mapping
from tests.oracle import slot_mapping as oracle
from tests.pallas import specs

UNAVAILABLE = compat.unavailable_reason()
needs_mosaic = pytest.mark.skipif(UNAVAILABLE is not None, reason=f"Mosaic GPU: {UNAVAILABLE}")
RANDOM = (
    specs.random_slot_mapping(1, 1, 4, block_size=16),
    specs.random_slot_mapping(64, 1000, 64, seed=1, block_size=16, blocks_per_kv_block=2),
    specs.random_slot_mapping(
        257, 8192, 64, seed=2, block_size=6, blocks_per_kv_block=4, cp_world_size=3, cp_rank=2, cp_interleave=8
    ),
)
every_spec = pytest.mark.parametrize("spec", specs.SLOT_MAPPING + RANDOM, ids=str)


def run(spec: specs.SlotMappingSpec, implementation: str) -> np.ndarray:
    f = jax.jit(functools.partial(slot_mapping, implementation=implementation, **spec.static))
    return np.asarray(f(*map(jnp.asarray, spec.build())))


def expected(spec: specs.SlotMappingSpec) -> np.ndarray:
    return oracle.slot_mapping(*spec.build(), **spec.static)


@pytest.mark.parametrize("spec", specs.SLOT_MAPPING, ids=str)
def test_the_oracle_gives_the_literal_numbers(spec):
    np.testing.assert_array_equal(expected(spec), spec.expected)


@every_spec
def test_xla(spec):
    np.testing.assert_array_equal(run(spec, "xla"), expected(spec))


@needs_mosaic
@pytest.mark.parametrize("spec", [s for s in specs.SLOT_MAPPING if s.interpret], ids=str)
def test_mosaic_interpreted(spec):
    from jaxrunner.pallas.slot_mapping_mosaic import slot_mapping_mosaic

    static = {"blocks_per_kv_block": 1, "cp_world_size": 1, "cp_rank": 0, "cp_interleave": 1} | spec.static
    with compat.interpreting():
        slots = np.asarray(slot_mapping_mosaic(*map(jnp.asarray, spec.build()), tokens_per_cta=4, **static))
    np.testing.assert_array_equal(slots, spec.expected)


@needs_mosaic
def test_mosaic_by_name_interpreted():
    with compat.interpreting(detect_races=True):
        slots = run(specs.SLOT_MAPPING[0], "mosaic")
    np.testing.assert_array_equal(slots, specs.SLOT_MAPPING[0].expected)


@needs_mosaic
@pytest.mark.parametrize("num_tokens", [1, 256, 8192])
def test_mosaic_lowers_to_one_kernel(num_tokens):
    f = functools.partial(slot_mapping, block_size=16, blocks_per_kv_block=2, implementation="mosaic")
    text = compat.lower_for_cuda(f, *(jax.ShapeDtypeStruct(s, jnp.int32) for s in [(257,), (num_tokens,), (256, 512)]))
    assert text.as_text().count(f"custom_call @{compat.CUSTOM_CALL}") == 1


@pytest.mark.gpu
@every_spec
def test_mosaic_on_the_gpu(spec):
    slots = run(spec, "mosaic")
    np.testing.assert_array_equal(slots, expected(spec))
    np.testing.assert_array_equal(slots, run(spec, "xla"))


def test_mosaic_is_refused_by_name_with_the_reason():
    if UNAVAILABLE is None and jax.default_backend() == "gpu":
        pytest.skip("it runs here")
    with pytest.raises(ImplementationError, match=r"needs jax 0\.11" if UNAVAILABLE else "the backend is 'cpu'"):
        run(specs.SLOT_MAPPING[0], "mosaic")


@pytest.mark.parametrize("implementation", ["xla", "mosaic"])
def test_a_group_without_slots(implementation):
    args = map(jnp.asarray, specs.SLOT_MAPPING[0].build())
    slots = slot_mapping(*args, block_size=8, mode="none", implementation=implementation)
    np.testing.assert_array_equal(slots, np.full(8, -1))


@pytest.mark.parametrize(
    ("static", "message"),
    [
        ({"cp_rank": 1}, "rank 1 is outside a world of 1"),
        ({"cp_rank": -1}, "rank -1 is outside"),
        ({"cp_interleave": 3}, "cp_interleave 3 must divide the block of 8"),
        ({"cp_interleave": 0}, "cp_interleave 0 must divide"),
    ],
)
def test_impossible_arguments(static, message):
    with pytest.raises(ValueError, match=message):
        slot_mapping(*map(jnp.asarray, specs.SLOT_MAPPING[0].build()), block_size=8, **static)


def test_every_token_has_one_owner_and_every_slot_one_token():
    """Context parallelism with an interleave wider than a kernel block."""
    positions = tuple(range(64))
    static = {"block_size": 2, "blocks_per_kv_block": 2, "cp_world_size": 4, "cp_interleave": 4}
    owners = []
    for rank in range(4):
        spec = specs.SlotMappingSpec("", (0, 64), positions, (tuple(range(1, 9)),), static | {"cp_rank": rank})
        slots = run(spec, "xla")
        assert len(set(slots[slots >= 0])) == (slots >= 0).sum() == 16
        owners.append(slots >= 0)
    np.testing.assert_array_equal(np.sum(owners, axis=0), np.ones(64))


def test_context_parallel_seq_lens_oracle_6():
    seq_lens = jnp.array([0, 1, 7, 8, 17], jnp.int32)
    per_rank = [
        context_parallel_seq_lens(seq_lens, cp_world_size=4, cp_rank=rank, cp_interleave=2) for rank in range(4)
    ]
    expected_lens = [[0, 0, 0, 0], [1, 0, 0, 0], [2, 2, 2, 1], [2, 2, 2, 2], [5, 4, 4, 4]]
    np.testing.assert_array_equal(np.stack(per_rank, axis=1), expected_lens)
