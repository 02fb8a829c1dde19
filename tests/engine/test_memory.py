"""KV sizing from measured memory: free and not total bytes, temporaries and the rest of the state taken off first."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import jax
import pytest

from jaxrunner import Ladder, RunnerConfig
from jaxrunner.compile.compiler import Compiler
from jaxrunner.compile.programs import Program, ProgramSet
from jaxrunner.device_memory import free_device_bytes
from jaxrunner.engine import memory
from jaxrunner.engine.scheduler import Scheduler
from jaxrunner.errors import CapacityError
from jaxrunner.models.model import LayerSpec, Model
from jaxrunner.models.weights import abstract_weights
from jaxrunner.runner.config import empty_state

MODEL = Model("LlamaForCausalLM", 640, 32, 64, 2, 1, 16, (LayerSpec(), LayerSpec()), max_position_embeddings=4096)
CONFIG = RunnerConfig(max_num_seqs=4, max_model_len=128, max_num_batched_tokens=32, num_blocks=9, block_size=8)
LADDER = Ladder((4,), (32,), (4,))
BLOCK_BYTES = 2 * 2 * 8 * 1 * 16 * 4


def test_k110_only_what_is_free_counts():
    device = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 80, "bytes_in_use": 10})
    assert free_device_bytes(device) == 70
    assert free_device_bytes(SimpleNamespace(memory_stats=lambda: None)) is None
    assert free_device_bytes(SimpleNamespace(memory_stats=dict)) is None


def test_blocks_plus_everything_else_fit_and_one_more_block_would_not(monkeypatch):
    monkeypatch.setattr(memory, "largest_temporary", lambda programs, cache: 3_000_000)
    monkeypatch.setattr(memory, "MARGIN", 0.0)
    state = jax.eval_shape(lambda: empty_state(MODEL, CONFIG))
    rest = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.replace(kv=None)))
    free = 3_000_000 + rest + 40 * BLOCK_BYTES + 5
    assert memory.blocks_that_fit(MODEL, abstract_weights(MODEL), CONFIG, LADDER, free) == 40
    assert memory.blocks_that_fit(MODEL, abstract_weights(MODEL), CONFIG, LADDER, free - 6) == 39


def test_what_a_host_runner_brings_with_each_step_counts(monkeypatch):
    """Lists of all rows, and the tokens of all requests twice: 4 requests of 128 tokens are 4 KiB."""
    monkeypatch.setattr(memory, "largest_temporary", lambda programs, cache: 0)
    monkeypatch.setattr(memory, "MARGIN", 0.0)
    config = dataclasses.replace(CONFIG, runner="host")
    outcome, lists, tokens = 4 * 2 * 4, 4 * CONFIG.list_sizes.width * 4, 2 * 4 * 128 * 4
    free = outcome + lists + tokens + 40 * BLOCK_BYTES
    assert memory.blocks_that_fit(MODEL, abstract_weights(MODEL), config, LADDER, free) == 40
    assert memory.blocks_that_fit(MODEL, abstract_weights(MODEL), config, LADDER, free - 1) == 39


def test_no_more_blocks_than_all_sequences_can_use(monkeypatch):
    monkeypatch.setattr(memory, "largest_temporary", lambda programs, cache: 0)
    assert memory.blocks_that_fit(MODEL, abstract_weights(MODEL), CONFIG, LADDER, 10**12) == 17 * 4


def test_too_little_memory_says_what_was_missing(monkeypatch):
    monkeypatch.setattr(memory, "largest_temporary", lambda programs, cache: 0)
    with pytest.raises(CapacityError, match="max_model_len=128 needs 17"):
        memory.blocks_that_fit(MODEL, abstract_weights(MODEL), CONFIG, LADDER, 40_000)


def test_k109_the_most_expensive_sampler_path_is_measured():
    state = jax.eval_shape(lambda: empty_state(MODEL, CONFIG))
    programs = ProgramSet(MODEL, abstract_weights(MODEL), state, LADDER)
    worst = memory.largest_temporary(programs)
    for tier in LADDER.tiers:
        entry = Compiler(programs).make(Program("finish", size=4, tier=tier))
        assert worst >= entry.temp_bytes + entry.output_bytes
    assert worst >= 4 * MODEL.vocab_size * 4


def test_k111_scheduler_and_arrays_count_the_same_blocks(monkeypatch):
    """A head of 96 takes 96 numbers in the cache, on the host's side as on the device's: nothing is padded to 128."""
    monkeypatch.setattr(memory, "largest_temporary", lambda programs, cache: 0)
    monkeypatch.setattr(memory, "MARGIN", 0.0)
    model = MODEL.replace(head_dim=96)
    state = jax.eval_shape(lambda: empty_state(model, CONFIG))
    rest = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.replace(kv=None)))
    count = memory.blocks_that_fit(model, abstract_weights(model), CONFIG, LADDER, rest + 60 * 6 * BLOCK_BYTES)
    assert count == 60
    config = dataclasses.replace(CONFIG, num_blocks=count)
    (blocks,) = jax.eval_shape(lambda: empty_state(model, config)).kv.blocks
    assert blocks.shape[2] == count
    assert blocks.size * blocks.dtype.itemsize == 60 * 6 * BLOCK_BYTES
    assert Scheduler(config, 1).pool.num_usable == count - 1
