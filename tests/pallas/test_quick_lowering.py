"""`compat.quick_lowering`: kernels come out as JAX lowers them by itself, and JAX is left as it was."""

from __future__ import annotations

import contextlib
import functools
import re
import threading

import jax
import jax.numpy as jnp
import pytest

from jaxrunner import SamplingParams
from jaxrunner.compile.compiler import Compiler
from jaxrunner.compile.lowering_process import exported
from jaxrunner.pallas import compat
from jaxrunner.pallas.attention import attention
from jaxrunner.pallas.attention_metadata import AttentionMetadata
from jaxrunner.pallas.target import Target, tracing_for
from jaxrunner.sampling.sampler import sample_tokens
from tests.compile.test_compiler import programs_of
from tests.compile.test_warm_up import ADMIT
from tests.sampling.rows import sampling_state

UNAVAILABLE = compat.unavailable_reason()
pytestmark = pytest.mark.skipif(UNAVAILABLE is not None, reason=f"Mosaic GPU: {UNAVAILABLE}")


@pytest.fixture
def kernels(monkeypatch):
    """(f, its arguments, quick) -> the texts of f's kernels after Python's part of their lowering."""
    from jax.experimental.mosaic.gpu import core

    lower, texts = core.lower_mgpu_module, []

    def lower_and_keep(module, *args, **kwargs):
        lower(module, *args, **kwargs)
        texts.append(re.sub(r"dump_basename = \"\w+\"", "", str(module)))  # it has a number

    def lowered(f, avals, quick):
        texts.clear()
        with monkeypatch.context() as patch:
            patch.setattr(core, "lower_mgpu_module", lower_and_keep)
            if not quick:
                patch.setattr(compat, "quick_lowering", contextlib.nullcontext)
            compat.lower_for_cuda(lambda *args: f(*args), *avals)  # a new function: JAX keeps what it has lowered
        return list(texts)

    return lowered


def attended(query_len):
    """Attention with a window and sinks, and its arguments."""

    def f(q, blocks, layer, metadata, sinks):
        metadata = AttentionMetadata(*metadata, query_len=query_len)
        return attention(q, blocks, layer, metadata, scale=0.125, window=64, sinks=sinks, implementation="mosaic")

    def i32(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    q, blocks = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in [(64, 16, 64), (2, 2, 9, 16, 1, 64)])
    metadata = (i32(65), i32(64), i32(), i32(64, 8), i32(64))
    return f, [q, blocks, i32(), metadata, jax.ShapeDtypeStruct((16,), jnp.float32)]


def sampled():
    """Vectors in strided layouts, and shared memory that no layout cast speaks of."""
    state = sampling_state([SamplingParams()])
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    options = {"tier": "filtered", "implementation": "mosaic"}
    logits, position = jax.ShapeDtypeStruct((1, 512), jnp.bfloat16), jax.ShapeDtypeStruct((1,), jnp.int32)
    return lambda *args: sample_tokens(*args, **options).token_ids, [logits, state, position]


def contradicting():
    """Two layouts of one value, of which only the second can become the other."""

    def body(source, first, second):
        value = compat.load(source, optimized=False)
        first[...] = compat.with_layout(value, compat.tile_layout()).astype(jnp.float32)
        second[...] = compat.with_layout(value, compat.plgpu.Layout.WGMMA_UPCAST_2X).astype(jnp.float32)

    source, out = (jax.ShapeDtypeStruct((64, 64), dtype) for dtype in (jnp.bfloat16, jnp.float32))
    return lambda source: compat.kernel(body, out_type=[out, out])(source), [source]


@pytest.mark.parametrize(
    ("case", "count"),
    [
        (functools.partial(attended, None), 1),
        (functools.partial(attended, 1), 1),
        (sampled, 2),
        (contradicting, 1),
    ],
    ids=["prefill", "decode", "filters and draw", "contradicting casts"],
)
def test_kernels_come_out_the_same(kernels, case, count):
    f, avals = case()
    quick, slow = (kernels(f, avals, quick) for quick in (True, False))
    assert len(quick) == count
    assert quick == slow


def changed():
    """What `quick_lowering` changes in JAX, as it is now."""
    return [getattr(owner, name) for owner, name, _ in compat._quicker_functions()]


def test_jax_is_changed_until_the_last_thread_is_done():
    before, inside, go_on = changed(), threading.Event(), threading.Event()

    def lower():
        with compat.quick_lowering():
            inside.set()
            go_on.wait()

    with compat.quick_lowering():
        thread = threading.Thread(target=lower)
        thread.start()
        inside.wait()
    assert not {*map(id, changed())} & {*map(id, before)}
    go_on.set()
    thread.join()
    assert changed() == before
    with pytest.raises(KeyError), compat.quick_lowering():
        raise KeyError
    assert changed() == before


def test_another_jax_is_left_as_it_is(monkeypatch):
    from jax.experimental.mosaic.gpu import constraints, layout_inference

    find = layout_inference.find_assignments_for
    monkeypatch.delattr(constraints, "saturate_divides_constraints_for_equal_vars")
    with compat.quick_lowering():
        assert layout_inference.find_assignments_for is find


@pytest.mark.parametrize("lower", [exported, lambda programs, program: Compiler(programs).lower(program)])
@pytest.mark.parametrize(("platform", "count"), [("gpu", 1), ("cpu", 0)])
def test_programs_for_a_gpu_are_lowered_so(monkeypatch, lower, platform, count):
    entered = []

    @contextlib.contextmanager
    def quick_lowering():
        entered.append(platform)
        yield

    monkeypatch.setattr(compat, "quick_lowering", quick_lowering)
    with tracing_for(Target(platform, "9.0" if count else "", None)):
        lower(programs_of(), ADMIT)
    assert len(entered) == count
