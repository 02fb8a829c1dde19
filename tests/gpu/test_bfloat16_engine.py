"""On a GPU, in bfloat16: the step with all kernels against the step in XLA, and the kernels in its compiled text."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrunner
from jaxrunner import Bucket
from jaxrunner.models.model import LayerSpec, Model
from jaxrunner.models.weights import random_weights

pytestmark = pytest.mark.gpu
PROMPTS = (5, 70, 1, 33)


def model_of(head_dim: int, heads: int, kv_heads: int, windows: tuple[int | None, ...]) -> Model:
    return Model(
        "LlamaForCausalLM", 512, 256, 512, heads, kv_heads, head_dim,
        tuple(LayerSpec(window=w) for w in windows), max_position_embeddings=512, dtype="bfloat16",
    )  # fmt: skip


MODELS = {
    "llama 4 to 1": model_of(128, 8, 2, (None, None)),
    "smollm2 3 to 1": model_of(64, 9, 3, (None, None)),
    "windows": model_of(64, 4, 4, (None, 40)),
}


def hidden_of(model: Model, implementation, dtype: str = "bfloat16", cache: str = "auto") -> list[np.ndarray]:
    """Hidden states of ragged prefill chunks, a mixed batch of decodes and a chunk, and uniform decodes."""
    weights = jax.tree.map(lambda w: w.astype(dtype), random_weights(model, seed=1))
    model = model.replace(dtype=dtype)
    rng = np.random.default_rng(0)
    sizes = dict(max_requests=5, max_model_len=256, num_blocks=64)
    state = jaxrunner.init_state(model, kv_cache_dtype=cache, **sizes)
    prompts = [rng.integers(1, 500, n).tolist() for n in PROMPTS]
    state, rows = jaxrunner.admit(state, prompts)
    mixed, decode = Bucket("mixed", 64, 5, 64), Bucket("decode", 5, 5)
    run = jax.jit(
        functools.partial(jaxrunner.step, return_hidden=True, implementation=implementation),
        static_argnames=("model", "bucket"),
        donate_argnames="state",
    )
    results = []
    plans = [({0: 5, 1: 40, 2: 1, 3: 10}, mixed), ({0: 1, 1: 30, 2: 1, 3: 23}, mixed)] + [
        (dict.fromkeys(range(4), 1), decode)
    ] * 3
    for counts, bucket in plans:
        inputs = jaxrunner.plan(state, {rows[i]: n for i, n in counts.items()})
        state, output = run(model, weights, state, jnp.asarray(inputs.pack(bucket)), bucket=bucket)
        results.append(np.asarray(output.hidden, np.float32)[: inputs.num_tokens])
        # Both sides go on from the same tokens: an argmax of random weights is a coin toss.
        forced = state.requests.counters.at[jnp.array(rows), 4].set(7)
        state = state.replace(requests=state.requests.replace(counters=forced))
    return results


def rms(x: np.ndarray) -> float:
    return float(np.sqrt((x.astype(np.float64) ** 2).mean()))


@pytest.mark.parametrize("name", MODELS)
def test_the_kernels_are_as_close_to_float32_as_xla_is(name):
    """With equal weights: the bfloat16 step with all kernels errs no more than the bfloat16 step in XLA does."""
    truth = hidden_of(MODELS[name], "xla", "float32")
    ours, xla = hidden_of(MODELS[name], "mosaic"), hidden_of(MODELS[name], "xla")
    for mine, theirs, exact in zip(ours, xla, truth, strict=True):
        assert rms(mine - exact) < 1.2 * rms(theirs - exact) + 1e-3 * rms(exact)
        assert rms(mine - exact) < 0.03 * rms(exact)


@pytest.mark.parametrize("name", MODELS)
def test_so_they_are_over_a_float8_cache(name):
    """Keys that differ by a rounding of bfloat16 may differ by one of float8 where they are stored."""
    truth = hidden_of(MODELS[name], "xla", "float32", "fp8")
    ours, xla = (hidden_of(MODELS[name], choice, cache="fp8") for choice in ("mosaic", "xla"))
    for mine, theirs, exact in zip(ours, xla, truth, strict=True):
        assert rms(mine - exact) < 1.3 * rms(theirs - exact) + 2e-3 * rms(exact)
        assert rms(mine - exact) < 0.1 * rms(exact)


@pytest.mark.parametrize("bucket", [Bucket("mixed", 64, 5, 64), Bucket("decode", 5, 5)], ids=str)
def test_the_automatic_step_holds_every_kernel_and_copies_no_cache(bucket):
    model = MODELS["llama 4 to 1"]
    weights = random_weights(model, seed=1)
    state = jaxrunner.init_state(model, max_requests=5, max_model_len=256, num_blocks=512)
    state, rows = jaxrunner.admit(state, [[3]])
    upload = jnp.asarray(jaxrunner.plan(state, {rows[0]: 1}).pack(bucket))
    run = jax.jit(jaxrunner.step, static_argnames=("model", "bucket"), donate_argnames="state")
    compiled = run.lower(model, weights, state, upload, bucket=bucket).compile()
    text = compiled.as_text()
    # Input preparation once; rotation with KV write, and attention, once a layer.
    assert text.count('custom_call_target="mosaic_gpu') >= 1 + 2 * model.num_layers
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= state.kv.nbytes
    assert memory.temp_size_in_bytes < state.kv.nbytes / 4
