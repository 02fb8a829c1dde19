"""The oracles are loops over pairs, written from the papers' formulas in another form than the package's."""

import functools
import math

import jax
import numpy as np
import pytest

from jaxrunner import Bucket, admit, init_state, plan, step
from jaxrunner.errors import CheckpointError
from jaxrunner.models.model import LayerSpec, Model, RopeSpec
from jaxrunner.models.rope import inv_freq
from jaxrunner.models.weights import random_weights

D = 64
BUCKET = Bucket("mixed", 12, 1, 12)


def spec(rope_type, theta=10000.0, **parameters):
    return RopeSpec(theta, rope_type, tuple(sorted(parameters.items())))


def plain(theta=10000.0, head_dim=D):
    return [1.0 / math.pow(theta, 2 * i / head_dim) for i in range(head_dim // 2)]


def llama3(factor, low, high, original):
    out = []
    for f in plain():
        wavelength = 2 * math.pi / f
        if wavelength < original / high:
            out.append(f)
        elif wavelength > original / low:
            out.append(f / factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            out.append((1 - smooth) * f / factor + smooth * f)
    return out


def yarn(factor, original, beta_fast=32.0, beta_slow=1.0, truncate=True):
    def correction_dim(rotations):
        return (D * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(10000.0))

    low, high = correction_dim(beta_fast), correction_dim(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, D - 1)
    out = []
    for i, f in enumerate(plain()):
        ramp = min(max((i - low) / (high - low), 0.0), 1.0)
        out.append((f / factor) * ramp + f * (1 - ramp))
    return out


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512.0}


@pytest.mark.parametrize(
    ("rope", "expected", "factor"),
    [
        (spec("default"), plain(), 1.0),
        (spec("default", 600000.0), plain(600000.0), 1.0),
        (spec("linear", factor=8.0), [f / 8 for f in plain()], 1.0),
        (spec("llama3", **LLAMA3), llama3(8.0, 1.0, 4.0, 512.0), 1.0),
        (spec("yarn", factor=4.0, original_max_position_embeddings=32.0), yarn(4.0, 32.0), 0.1 * math.log(4) + 1),
        (
            spec("yarn", factor=4.0, original_max_position_embeddings=512.0, beta_fast=16.0, beta_slow=2.0, truncate=0),
            yarn(4.0, 512.0, 16.0, 2.0, truncate=False),
            0.1 * math.log(4) + 1,
        ),
        (spec("yarn", factor=4.0, original_max_position_embeddings=32.0, attention_factor=0.7), yarn(4.0, 32.0), 0.7),
        (
            spec("yarn", factor=40.0, original_max_position_embeddings=32.0, mscale=0.707, mscale_all_dim=1.0),
            yarn(40.0, 32.0),
            (0.0707 * math.log(40) + 1) / (0.1 * math.log(40) + 1),
        ),
    ],
)
def test_rules(rope, expected, factor):
    got, got_factor = inv_freq(rope, D, 2048)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, np.array(expected).astype(np.float32), strict=True)
    assert got_factor == pytest.approx(factor, rel=1e-12)


def test_yarn_keeps_short_and_divides_long_wavelengths():
    got, _ = inv_freq(spec("yarn", factor=4.0, original_max_position_embeddings=512.0), D, 2048)
    np.testing.assert_array_equal(got[0], np.float32(1.0))
    np.testing.assert_array_equal(got[-1], np.float32(plain()[-1] / 4))


def test_dynamic_has_one_base_for_the_whole_run():
    rope = spec("dynamic", factor=2.0, max_trained_positions=32.0)
    got, factor = inv_freq(rope, 16, 64)
    theta = 10000.0 * (2.0 * 64 / 32 - 1.0) ** (16 / 14)
    np.testing.assert_array_equal(got, np.array(plain(theta, 16)).astype(np.float32), strict=True)
    assert factor == 1.0
    unscaled, _ = inv_freq(spec("dynamic", factor=2.0), 16, 64)
    np.testing.assert_array_equal(unscaled, np.array(plain(head_dim=16)).astype(np.float32), strict=True)


@pytest.mark.parametrize("rope", [spec("default"), spec("linear", factor=2.0), spec("llama3", **LLAMA3)])
def test_k041_frequencies_have_no_length_that_a_raised_limit_could_outgrow(rope):
    short, long = inv_freq(rope, D, 4096)[0], inv_freq(rope, D, 6000)[0]
    assert short.shape == long.shape == (D // 2,)
    np.testing.assert_array_equal(short, long)


def longrope(**parameters):
    fields = {"original_max_position_embeddings": 8.0, "short_factor": (1.0,) * 8, "long_factor": (4.0,) * 8}
    return spec("longrope", **(fields | parameters))


@pytest.mark.parametrize(("context", "divisor"), [(8, 1.0), (9, 4.0), (None, 4.0)])
def test_longrope_has_one_set_of_factors_for_a_run(context, divisor):
    got, factor = inv_freq(longrope(), 16, 16, context)
    np.testing.assert_array_equal(got, np.array([f / divisor for f in plain(head_dim=16)]).astype(np.float32))
    assert factor == pytest.approx(math.sqrt(1 + math.log(2) / math.log(8)))


def test_longrope_attention_factors():
    assert inv_freq(longrope(attention_factor=1.5), 16, 16, 16)[1] == 1.5
    assert inv_freq(longrope(short_mscale=1.1, long_mscale=1.2), 16, 16, 16)[1] == 1.2
    assert inv_freq(longrope(short_mscale=1.1, long_mscale=1.2), 16, 16, 8)[1] == 1.1
    assert inv_freq(longrope(factor=4.0), 16, 16)[1] == pytest.approx(math.sqrt(1 + math.log(4) / math.log(8)))
    assert inv_freq(longrope(), 16, 8)[1] == 1.0
    with pytest.raises(CheckpointError, match="8 factors, a head of 32 needs 16"):
        inv_freq(longrope(), 32, 16)


def test_k098_a_request_that_grows_past_the_original_context_keeps_one_rotation():
    """Generated across position 8 with a cache, against each prefix run afresh, in a run of up to 16 positions."""
    model = Model("LlamaForCausalLM", 64, 32, 64, 2, 1, 16, (LayerSpec(), LayerSpec()), longrope())
    weights = random_weights(model)
    run = jax.jit(functools.partial(step, model, bucket=BUCKET))

    def start(tokens):
        state = init_state(model, max_requests=1, max_model_len=16, num_blocks=4, block_size=16)
        return admit(state, [tokens])

    def advance(state, row, count):
        state, output = run(weights, state, plan(state, {row: count}).pack(BUCKET))
        return state, int(output.sampled_token_ids[0, 0])

    tokens = [5, 9, 17, 33, 60, 2]
    state, (row,) = start(tokens)
    count = len(tokens)
    for _ in range(6):
        fresh, (fresh_row,) = start(tokens)
        fresh, expected = advance(fresh, fresh_row, len(tokens))
        state, token = advance(state, row, count)
        assert token == expected
        block = int(state.tables.block_table[0][row, 0])
        fresh_block = int(fresh.tables.block_table[0][fresh_row, 0])
        np.testing.assert_allclose(
            state.kv.blocks[0][:, :, block, : len(tokens)],
            fresh.kv.blocks[0][:, :, fresh_block, : len(tokens)],
            atol=1e-5,
        )
        tokens, count = [*tokens, token], 1
    assert len(tokens) == 12


def test_unknown_rule_is_named():
    with pytest.raises(CheckpointError, match="ntk"):
        inv_freq(spec("ntk"), D, 2048)
