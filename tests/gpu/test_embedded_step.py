"""On a GPU: `step` in a user's own jit, without a flag or an option, copies neither a weight nor the KV cache."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import pytest

import jaxrunner
from jaxrunner import Bucket
from jaxrunner.compile.hlo import made_arrays, mosaic_kernels
from jaxrunner.models.model import LayerSpec, Model
from jaxrunner.models.weights import abstract_weights
from jaxrunner.stages.inputs import step_layout

pytestmark = pytest.mark.gpu
LLAMA3_8B = Model(
    "LlamaForCausalLM", 128256, 4096, 14336, 32, 8, 128, (LayerSpec(),) * 3,
    max_position_embeddings=8192, dtype="bfloat16",
)  # fmt: skip
"""Real widths, few layers."""
BUCKETS = (Bucket("decode", 1, 1), Bucket("decode", 64, 64), Bucket("mixed", 512, 8, 512))


def compile_embedded(model: Model, bucket: Bucket) -> tuple[jax.stages.Compiled, jaxrunner.RunnerState]:
    """The compiled step of a user who calls `jaxrunner.step` in a function of their own, and its abstract state."""

    @functools.partial(jax.jit, donate_argnames="state")
    def mine(weights, state, upload):
        state, output = jaxrunner.step(model, weights, state, upload, bucket=bucket)
        return state, output.sampled_token_ids

    sizes = dict(max_requests=bucket.num_reqs, max_model_len=8192, num_blocks=3001)
    state = jax.eval_shape(functools.partial(jaxrunner.init_state, model, **sizes))
    upload = jax.ShapeDtypeStruct((step_layout(bucket, state.tables.groups, 0).size,), jnp.int32)
    return mine.lower(abstract_weights(model), state, upload).compile(), state


def sizes_of(model: Model, state: jaxrunner.RunnerState) -> set[int]:
    """Elements of each matrix, of one layer's share of a stacked one, of the cache, and of a layer's share of it."""
    matrices = [w.shape for w in jax.tree.leaves(abstract_weights(model)) if math.prod(w.shape) > 2**20]
    sizes = {math.prod(shape) for shape in matrices} | {math.prod(shape[1:]) for shape in matrices if len(shape) == 3}
    for blocks in state.kv.blocks:
        sizes |= {math.prod(blocks.shape[i:]) for i in range(3)}
    return sizes


@pytest.mark.parametrize("layout", ["layers", "stacked"])
@pytest.mark.parametrize("bucket", BUCKETS, ids=str)
def test_no_copy_of_a_weight_or_of_the_cache(layout, bucket):
    model = LLAMA3_8B.replace(layout=layout)
    compiled, state = compile_embedded(model, bucket)
    text = compiled.as_text()
    made = made_arrays(text, sizes_of(model, state))
    assert not made, "\n".join(instruction.line[:200] for instruction in made)
    held = mosaic_kernels(text)
    assert held["rope_kv_write"] > 0
    assert held["input_prep_kernel"] == 1
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(b.size * b.dtype.itemsize for b in state.kv.blocks)
    assert memory.temp_size_in_bytes < 120 * 2**20


def test_a_copy_would_be_seen():
    """The same search over a step whose state is not donated: XLA then copies the cache before it is written."""
    model, bucket = LLAMA3_8B, BUCKETS[1]

    @jax.jit
    def kept(weights, state, upload):
        return jaxrunner.step(model, weights, state, upload, bucket=bucket)[0]

    _, state = compile_embedded(model, bucket)
    upload = jax.ShapeDtypeStruct((step_layout(bucket, state.tables.groups, 0).size,), jnp.int32)
    text = kept.lower(abstract_weights(model), state, upload).compile().as_text()
    assert made_arrays(text, [math.prod(state.kv.blocks[0].shape)])
