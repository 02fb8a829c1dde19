"""What a layer does between its two projections: norm and rotation of q and k, KV write, attention.

As one kernel where every request has one new token, else as the two ops that it is composed of.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxtyping import Array, Float, Float32, Int32, Num

from jaxrunner.pallas.attention import attention, chosen_attention
from jaxrunner.pallas.attention_metadata import AttentionMetadata
from jaxrunner.pallas.implementation import Implementation, resolve
from jaxrunner.pallas.rope_kv_write import chosen_rope_kv_write, queries_of, rope_kv_write

OP = "attention_with_rope"


def attention_with_rope(
    qkv: Float[Array, "T N D"],
    blocks: Num[Array, "L 2 B P KVH D"],
    layer: Int32[Array, ""],
    metadata: AttentionMetadata,
    rope: tuple[Float32[Array, "T F"], Float32[Array, "T F"]] | None,
    *,
    q_norm: Float[Array, "D"] | None = None,
    k_norm: Float[Array, "D"] | None = None,
    eps: float = 1e-6,
    scale: float,
    window: int | None = None,
    kv_scales: Float32[Array, "L 2"] | None = None,
    implementation: Implementation = None,
) -> tuple[Float[Array, "T H D"], Num[Array, "L 2 B P KVH D"]]:
    """(the result of attention, the cache with the step's keys and values written).

    qkv, rope, q_norm, k_norm, eps: as in `rope_kv_write`, by metadata.slot_mapping; scale, window: as in `attention`.
    In a decode the token of a request is its last, at seq_lens - 1. The cache is written in place when donated.

    implementation: of this op, of `rope_kv_write` or of `attention`; one that is named for the latter two is used.

    Raises ImplementationError where a named implementation cannot run or take this case.
    """
    norms: dict[str, Any] = {"q_norm": q_norm, "k_norm": k_norm, "eps": eps}
    if _chosen(qkv, blocks, metadata, scale, kv_scales, implementation) == "mosaic":
        from jaxrunner.pallas.attention_decode_mosaic import decode_attention_with_rope

        return decode_attention_with_rope(qkv, blocks, layer, metadata, rope, **norms, scale=scale, window=window)
    q, blocks = rope_kv_write(
        qkv,
        blocks,
        layer,
        metadata.slot_mapping,
        rope,
        **norms,
        kv_scales=kv_scales,
        implementation=implementation,
    )
    options: dict[str, Any] = {"scale": scale, "window": window, "kv_scales": kv_scales}
    return attention(q, blocks, layer, metadata, **options, implementation=implementation), blocks


def _chosen(qkv, blocks, metadata, scale, kv_scales, implementation: Implementation) -> str:
    """Of this op: the kernel where both others would be kernels and it takes the call."""
    named = isinstance(implementation, Mapping) and OP in implementation
    reason = None
    if kv_scales is not None:
        reason = "it needs a cache without scales"
    elif not named:
        parts = (
            chosen_rope_kv_write(qkv, blocks, implementation),
            chosen_attention(queries_of(qkv, blocks), blocks, scale, None, implementation),
        )
        reason = None if parts == ("mosaic", "mosaic") else "one of its parts is not Mosaic's"
    if reason is None:
        from jaxrunner.pallas.attention_decode_mosaic import reason_against_rope

        reason = reason_against_rope(qkv, blocks, metadata)
    if reason and not named:
        return "xla"
    return resolve(OP, implementation, {"mosaic": reason})
