"""The oracles are loops over pairs, written from the papers' formulas in another form than the package's."""

import math

import numpy as np
import pytest

from jaxrunner.errors import CheckpointError
from jaxrunner.models.model import RopeSpec
from jaxrunner.models.rope import inv_freq

D = 64


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


def test_unknown_rule_is_named():
    with pytest.raises(CheckpointError, match="longrope"):
        inv_freq(spec("longrope"), D, 2048)
