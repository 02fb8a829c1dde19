"""A float8 KV cache from the options to the tokens: what every part that touches the cache makes of it."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import LLM, SamplingParams, admit, fork_request, init_state, plan, reserve, set_kv_scales
from jaxrunner.compile.buckets import Bucket
from jaxrunner.compile.counter import CompileCounter
from jaxrunner.engine.memory import blocks_that_fit
from jaxrunner.engine.sizes import kv_block_bytes, runner_config
from jaxrunner.errors import AdmissionError, CheckpointError, NotBuiltError
from jaxrunner.models.loading import load
from jaxrunner.recorder import FlightRecorder, replay
from jaxrunner.runner.config import RunnerConfig, empty_state
from jaxrunner.runner.device_runner import DeviceRunner, default_ladder
from jaxrunner.scoring import score
from jaxrunner.stages.decode_loop import decode_loop
from jaxrunner.state.block_moves import apply_moves, pack_moves
from tests.conftest import GOLDEN, load_tiny
from tests.models.checkpoints import config_of, read_bf16_as_float32, write_directory
from tests.runner import plans
from tests.stages import harness

TINY = str(GOLDEN / "tiny" / "llama")
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [list(range(3, 40)), [5, 9, 200, 31], [*range(3, 40), 7, 7]]
SIZES = {"max_num_seqs": 4, "max_model_len": 96, "max_num_batched_tokens": 32, "block_size": 8}


@functools.cache
def llm(kv_cache_dtype: str) -> LLM:
    return LLM(TINY, kv_cache_dtype=kv_cache_dtype, num_blocks=60, **SIZES)


def generated(engine: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in engine.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3", "float8_e4m3fn"])
def test_every_name_stores_float8(name):
    """As bytes, like vLLM."""
    model, _ = load_tiny("llama")
    state = init_state(model, max_requests=2, max_model_len=32, num_blocks=4, kv_cache_dtype=name)
    assert {b.dtype for b in state.kv.blocks} == {jnp.dtype(jnp.uint8)}
    assert [s.shape for s in state.kv.scales] == [(model.num_layers, 2)]


@pytest.mark.parametrize("name", [None, "auto", "bfloat16"])
def test_other_caches_have_no_scales(name):
    model, _ = load_tiny("llama")
    state = init_state(model, max_requests=2, max_model_len=32, num_blocks=4, kv_cache_dtype=name)
    assert state.kv.blocks[0].dtype == (name if name == "bfloat16" else model.dtype)
    assert state.kv.scales == ()
    with pytest.raises(AdmissionError, match="has no scales"):
        set_kv_scales(state, np.ones((model.num_layers, 2)))
    with pytest.raises(AdmissionError, match="kv_scales are for a float8 cache"):
        init_state(model, max_requests=2, max_model_len=32, num_blocks=4, kv_scales=[[1, 1]] * model.num_layers)


@pytest.mark.parametrize("name", ["fp8_e5m2", "float8_e5m2", "fp8_inc", "int8", "nvfp4", "FP8", 8])
def test_other_names_are_refused_by_name(name):
    model, _ = load_tiny("llama")
    with pytest.raises(NotBuiltError, match=f"kv_cache_dtype {name!r} is not built; use one of auto, .*fp8"):
        init_state(model, max_requests=2, max_model_len=32, num_blocks=4, kv_cache_dtype=name)
    with pytest.raises(NotBuiltError, match="kv_cache_dtype"):
        RunnerConfig(2, 32, 32, 4, kv_cache_dtype=name)
    with pytest.raises(NotBuiltError, match="kv_cache_dtype"):
        LLM(TINY, kv_cache_dtype=name)


@pytest.mark.parametrize(
    ("scales", "said"),
    [
        ([[1.0, 1.0]], r"shape \[1, 2\]"),
        (lambda n: [[1.0]] * n, "needs"),
        (lambda n: [[1.0, 0.0]] * n, "values of layer 0 is 0.0"),
        (lambda n: [[1.0, 1.0]] * (n - 1) + [[-2.0, 1.0]], r"keys of layer \d is -2.0"),
        (lambda n: [[float("nan"), 1.0]] * n, "nan"),
        (lambda n: [[1e38, 1.0]] * n, "between"),
        (lambda n: "abc", "must be numbers"),
    ],
)
def test_scales_that_cannot_be_used_are_refused(scales, said):
    model, _ = load_tiny("llama")
    given = scales(model.num_layers) if callable(scales) else scales
    with pytest.raises(AdmissionError, match=said):
        init_state(model, max_requests=1, max_model_len=8, num_blocks=4, kv_cache_dtype="fp8", kv_scales=given)


def test_tokens_are_those_of_the_scores_over_the_same_cache():
    """The engine's chunks, decodes and cached prefixes see what one long chunk sees; and that is close to float32."""
    model, weights = load_tiny("llama")
    tokens = generated(llm("fp8"))
    sequences = [prompt + out for prompt, out in zip(PROMPTS, tokens, strict=True)]
    scores = score(model, weights, sequences, kv_cache_dtype="fp8")
    exact = score(model, weights, sequences)
    for prompt, out, got, want in zip(PROMPTS, tokens, scores, exact, strict=True):
        assert 1e-4 < np.linalg.norm(got - want) / np.linalg.norm(want) < 0.1
        for i, token in enumerate(out):
            row = got[len(prompt) - 1 + i]
            assert row[token] >= row.max() - 1e-3 * np.abs(row).max()
            wide = want[len(prompt) - 1 + i]
            assert wide[token] >= wide.max() - 0.1 * np.abs(wide).max()


def test_a_cached_prefix_gives_the_same_tokens():
    engine = llm("fp8")
    first = generated(engine)
    assert generated(engine) == first
    engine.scheduler.weights_changed()  # forgets every prefix
    assert generated(engine) == first


def test_other_scales_compile_nothing_and_change_the_result():
    """Powers of two move no rounding, but for the smallest values; a scale that saturates everything does."""
    engine = llm("fp8")
    first = generated(engine)
    num_layers = engine.model.num_layers

    def with_scales(scale):
        engine.scheduler.weights_changed()
        engine.runner.state = set_kv_scales(engine.runner.state, np.full((num_layers, 2), scale, np.float32))
        return generated(engine)

    try:
        with CompileCounter() as counter:
            half = with_scales(0.5)
            wrong = with_scales(1e-4)
        assert counter.count == 0
    finally:
        engine.runner.state = set_kv_scales(engine.runner.state, np.ones((num_layers, 2)))
        engine.scheduler.weights_changed()
    assert half == first
    assert wrong != first


def test_scales_reach_the_state_of_an_engine():
    model, _ = load_tiny("llama")
    scales = tuple((0.5 + i, 2.0) for i in range(model.num_layers))
    config = runner_config(model, kv_cache_dtype="fp8", kv_scales=scales, num_blocks=20, max_model_len=64)
    np.testing.assert_array_equal(empty_state(model, config).kv.scales[0], np.float32(scales))


def test_half_the_bytes_hold_twice_the_blocks(monkeypatch):
    model, weights = load_tiny("llama")
    assert kv_block_bytes(model, 16, "fp8") * 4 == kv_block_bytes(model, 16) == kv_block_bytes(model, 16, "auto")
    monkeypatch.setattr("jaxrunner.engine.memory.largest_temporary", lambda programs, cache: 0)
    blocks = {}
    for name in ("bfloat16", "fp8"):
        config = RunnerConfig(64, 128, 64, 4, kv_cache_dtype=name)
        blocks[name] = blocks_that_fit(model, weights, config, default_ladder(model, config), 2**21)
    assert abs(blocks["fp8"] - 2 * blocks["bfloat16"]) <= 1


@functools.cache
def prefilled():
    """(model, weights, state, row): a prompt in blocks of 8, its tail block half full, two groups."""
    model, weights = harness.tiny("llama", (None, 8, None))
    scales = [[0.5, 0.25]] * model.num_layers
    sizes = dict(max_requests=3, max_model_len=64, num_blocks=30, block_size=8)
    state = init_state(model, kv_cache_dtype="fp8", kv_scales=scales, **sizes)
    state, (row,) = admit(state, [list(range(5, 25))])
    state, _ = harness.run(model, weights, state, plan(state, {row: 20}), Bucket("mixed", 32, 3, 32))
    return model, weights, state, row


def byte_view(state):
    return [np.array(b) for b in state.kv.blocks]


def test_blocks_are_zeroed_and_copied_by_their_bits():
    *_, state, _ = prefilled()
    noise = tuple(
        jnp.asarray(np.random.default_rng(i).integers(0, 256, b.shape, np.uint8)) for i, b in enumerate(state.kv.blocks)
    )
    state = state.replace(kv=state.kv.replace(blocks=noise))
    zero, copies = [3, 9, 4], [(1, 7), (2, 12)]
    expected = byte_view(state)
    for cache in expected:
        cache[:, :, zero] = 0
        for src, dst in copies:
            cache[:, :, dst] = cache[:, :, src]
    for packed in pack_moves(zero, copies):
        state = jax.jit(apply_moves)(state, packed)
    for got, want in zip(byte_view(state), expected, strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_fork_continues_as_its_source():
    """The tail is copied bit for bit, so both rows sample the same from then on."""
    model, weights, state, row = prefilled()
    state = fork_request(state, row, 2)
    state = reserve(state, [row, 2], 6)
    state, tokens = decode_loop(model, weights, state, [row, 2], steps=6)[:2]
    tokens = np.asarray(tokens)
    np.testing.assert_array_equal(tokens[0], tokens[1])
    assert state.kv.scales[0].shape[1] == 2


def test_decode_loop_equals_single_steps():
    model, weights, state, row = prefilled()
    loop_state, tokens = decode_loop(model, weights, reserve(state, [row], 5), [row], steps=5)[:2]
    single = []
    for _ in range(5):
        state, output = harness.run(model, weights, state, plan(state, {row: 1}), Bucket("decode", 1, 1, 1))
        single.append(int(output.sampled_token_ids[0, 0]))
    assert np.asarray(tokens)[0].tolist() == single
    for got, want in zip(byte_view(loop_state), byte_view(state), strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_recording_replays_bit_for_bit(tmp_path):
    model, weights = load_tiny("llama")
    scales = ((0.5, 0.3),) * model.num_layers
    config = dataclasses.replace(plans.CONFIG, kv_cache_dtype="fp8", kv_scales=scales)
    runner = DeviceRunner(model, weights, config, ladder=plans.LADDER)
    with FlightRecorder(runner, tmp_path / "r"):
        plans.run(runner, plans.plan({"a": 5}, [plans.new("a", [1, 2, 3, 4, 5], [1, 2])]))
        for _ in range(3):
            plans.run(runner, plans.plan({"a": 1}))
        runner.execute_model(plans.plan({}, finished_req_ids={"a"}))
    report = replay(tmp_path / "r", model, weights)
    assert report.exact, report
    assert report.outputs == 4


# Checkpoints.

SPELLINGS = {
    "self_attn.{}_scale": "plain",
    "self_attn.attn.{}_scale": "vLLM's own",
    "self_attn.{0}_proj.{0}_scale": "compressed-tensors",
    "self_attn.{}_proj.output_scale": "older",
}


def checkpoint(directory, scales):
    tensors = read_bf16_as_float32(GOLDEN / "tiny" / "llama" / "model.safetensors")
    return str(write_directory(directory, config_of("llama"), tensors | scales))


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_checkpoint_brings_its_scales(tmp_path, spelling):
    model, _ = load_tiny("llama")
    wanted = np.float32([[0.5 + i, 0.25] for i in range(model.num_layers)])
    tensors = {
        f"model.layers.{i}.{spelling.format(which)}": np.float32([wanted[i, j]] if i else wanted[i, j])
        for i in range(model.num_layers)
        for j, which in enumerate("kv")
    }
    tensors["model.layers.0.self_attn.q_scale"] = np.float32(3.0)  # queries stay unquantised
    made, _, _ = load(checkpoint(tmp_path, tensors))
    sizes = dict(max_requests=1, max_model_len=8, num_blocks=4)
    state = init_state(made, kv_cache_dtype="fp8", **sizes)
    np.testing.assert_array_equal(state.kv.scales[0], wanted)
    assert init_state(made, **sizes).kv.scales == ()
    own = np.full_like(wanted, 7.0)
    np.testing.assert_array_equal(init_state(made, kv_cache_dtype="fp8", kv_scales=own, **sizes).kv.scales[0], own)


def test_one_scale_for_both_and_layers_without_any(tmp_path):
    tensors = {"model.layers.1.self_attn.kv_scale": np.float32(0.5), "model.layers.0.self_attn.v_scale": np.float32(-1)}
    made, _, _ = load(checkpoint(tmp_path, tensors))
    assert made.kv_scales[:2] == ((1.0, 1.0), (0.5, 0.5))
    assert load_tiny("llama")[0].kv_scales == ()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.layers.99.self_attn.k_scale", np.float32(1)),
        ("model.layers.0.self_attn.k_scale", np.ones(2, np.float32)),
        ("model.layers.0.self_attn.k_scale", np.float32(0)),
        ("model.layers.0.self_attn.v_scale", np.float32("nan")),
        ("model.layers.0.mlp.k_scale", np.float32(1)),
    ],
)
def test_scales_that_mean_nothing_are_named(tmp_path, name, value):
    with pytest.raises(CheckpointError, match=name):
        load(checkpoint(tmp_path, {name: value}))
