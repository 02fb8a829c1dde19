"""Reading compiled text: kernels by name, and arrays that are made anew."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrunner.compile.hlo import implementations, instructions, made_arrays, mosaic_kernels

TEXT = """HloModule jit_step, is_scheduled=true

%fused_computation.1 (param_0.1: bf16[64,32]) -> bf16[32,64] {
  %param_0.1 = bf16[64,32]{1,0} parameter(0)
  %convert.9 = f32[64,32]{1,0} convert(%param_0.1)
  ROOT %transpose.3 = bf16[32,64]{1,0} transpose(%param_0.1), dimensions={1,0}
}

%body (arg: (s32[], bf16[2,9,16,64])) -> (s32[], bf16[2,9,16,64]) {
  %arg = (s32[], /*index=1*/bf16[2,9,16,64]{3,2,1,0}) parameter(0)
  %get-tuple-element.2 = bf16[2,9,16,64]{3,2,1,0} get-tuple-element(%arg), index=1
  %mosaic_gpu_v2.7 = (bf16[5,64]{1,0}, bf16[18,16,64]{2,1,0}) custom-call(%get-tuple-element.2), \
custom_call_target="mosaic_gpu_v2", output_to_operand_aliasing={{1}: (0, {})}, \
metadata={op_name="jit(step)/while/body/jit(_layer)/rope_kv_write/mpmd_map"}
  ROOT %tuple.4 = (s32[], bf16[2,9,16,64]{3,2,1,0}) tuple(%c, %bitcast.1)
}

ENTRY %main.42 (w.1: bf16[64,32], cache.1: bf16[2,9,16,64]) -> bf16[32,64] {
  %w.1 = bf16[64,32]{1,0} parameter(0)
  %cache.1 = bf16[2,9,16,64]{3,2,1,0} parameter(1)
  %mosaic_gpu_v2.1 = s32[5]{0} custom-call(%x), custom_call_target="mosaic_gpu_v2", \
metadata={op_name="jit(step)/input_prep_kernel/mpmd_map" stack_frame_id=3}
  %while.1 = (s32[], bf16[2,9,16,64]{3,2,1,0}) while(%tuple.9), condition=%cond, body=%body
  %transpose_fusion = bf16[32,64]{1,0} fusion(%w.1), kind=kLoop, calls=%fused_computation.1
  %copy-start = (bf16[64,32]{1,0}, bf16[64,32]{1,0:S(5)}, u32[]) copy-start(%w.1)
  %copy.8 = bf16[2,9,16,64]{3,1,2,0} copy(%cache.1)
  ROOT %small = bf16[5,64]{1,0} fusion(%w.1), kind=kCustom, calls=%fused_computation.1
}
"""


def test_kernels_are_counted_by_name():
    assert mosaic_kernels(TEXT) == {"input_prep_kernel": 1, "rope_kv_write": 1}
    found = {"input_prep": "mosaic", "rope_kv_write": "mosaic", "attention": "xla", "commit": "xla"}
    assert implementations(TEXT) == found
    triton = TEXT + '  %call.1 = bf16[5,64]{1,0} custom-call(%x), custom_call_target="triton_kernel_call_ffi"\n'
    assert implementations(triton)["attention"] == "triton"


def test_what_is_made_anew_is_found_and_what_is_done_in_place_is_not():
    weight, cache = 64 * 32, 2 * 9 * 16 * 64
    assert [i.name for i in made_arrays(TEXT, [weight])] == ["transpose_fusion", "copy-start"]
    assert [i.name for i in made_arrays(TEXT, [cache])] == ["copy.8"]
    assert made_arrays(TEXT, [7]) == []


def test_fused_computations_are_left_out():
    assert not {"convert.9", "transpose.3"} & {i.name for i in instructions(TEXT)}


def test_a_real_program():
    def f(x, y):
        return jnp.sin(x.T) @ y, x.astype(jnp.bfloat16)

    x, y = jnp.ones((96, 37)), jnp.ones((96, 5))
    text = jax.jit(f).lower(x, y).compile().as_text()
    made = made_arrays(text, [96 * 37])
    assert any(("bf16", (96, 37)) in i.arrays for i in made), [i.line for i in made]
    assert not mosaic_kernels(text)
