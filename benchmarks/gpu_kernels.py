"""Attention and KV write on a GPU: the Mosaic kernels checked against float64, then timed.

    python benchmarks/gpu_kernels.py [--output FILE] [--seconds 300] [--check-seconds 90] [--workers 6] [--checks-only]
                                     [--only TEXT] [--no-tune]

Checks come first, in processes of their own since lowering takes their time, and say pass or fail a row; then the
default sizes, the targets before the rest, then the sizes one may tune. CALLS calls on
different layers or blocks run inside one jit, each after the one before, so that keys and values are never in the L2
cache; `us` is the device time of one call, all its kernels together, see `benchmarks.report`. TB/s count the keys and
values read, TFLOP/s the causal half of the products. `floor` is in the row's unit, at 4.6 TB/s (the fastest read of
this GPU) or 818 TFLOP/s (its fastest product); `peer` is FlashAttention 3 inside vLLM 0.25.1 on the same GPU. Rows are
written as they come; a row is void if anything was compiled while it was timed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import report  # noqa: E402
from benchmarks.report import CALLS, Report  # noqa: E402
from jaxrunner.checks import attention_specs as specs  # noqa: E402
from jaxrunner.checks.attention_judge import metadata_of as metadata_of_spec  # noqa: E402
from jaxrunner.checks.attention_oracle import attention as attention_oracle  # noqa: E402
from jaxrunner.pallas import triton_compat  # noqa: E402
from jaxrunner.pallas.attention_decode_mosaic import (  # noqa: E402
    decode_attention,
    decode_attention_with_rope,
)
from jaxrunner.pallas.attention_metadata import AttentionMetadata  # noqa: E402
from jaxrunner.pallas.attention_prefill_mosaic import ragged_attention  # noqa: E402
from jaxrunner.pallas.attention_triton import Sizes, attention_triton  # noqa: E402
from jaxrunner.pallas.attention_with_rope import attention_with_rope  # noqa: E402
from jaxrunner.pallas.kv_write import kv_write_xla  # noqa: E402
from jaxrunner.pallas.kv_write_mosaic import kv_write_mosaic  # noqa: E402
from jaxrunner.pallas.rope_kv_write import rope_kv_write_xla  # noqa: E402
from jaxrunner.pallas.rope_kv_write_mosaic import rope_kv_write_mosaic  # noqa: E402
from jaxrunner.state.kv_dtype import FLOAT8 as FLOAT8_E4M3  # noqa: E402
from jaxrunner.state.kv_dtype import to_bytes  # noqa: E402
from tests.oracle import attention as oracle  # noqa: E402

READ_TB_S, MATMUL_TFLOP_S = 4.6, 818.0
LAYERS, BLOCKS, BLOCK_SIZE, KV_HEADS, HEADS, HEAD_DIM = 4, 64 * 256 + 1, 16, 8, 32, 128
Shape = dict[str, int]
LLAMA: Shape = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "block_size": BLOCK_SIZE}


@dataclasses.dataclass(frozen=True)
class Case:
    """One batch: (query length, sequence length) of each request. unit: TB/s, TFLOP/s or us. peer: in that unit.
    float8: the cache is float8_e4m3fn, else bfloat16.
    """

    name: str
    requests: tuple[tuple[int, int], ...]
    unit: str
    peer: float | None = None
    shape: tuple[tuple[str, int], ...] = tuple(LLAMA.items())
    float8: bool = False

    @property
    def is_decode(self) -> bool:
        return all(query == 1 for query, _ in self.requests)

    @property
    def kv_bytes(self) -> int:
        shape = dict(self.shape)
        item = 1 if self.float8 else 2
        return sum(n for _, n in self.requests) * shape["num_kv_heads"] * shape["head_dim"] * 2 * item

    @property
    def flops(self) -> float:
        shape = dict(self.shape)
        pairs = sum(q * (n - q) + q * (q + 1) / 2 for q, n in self.requests)
        return 4.0 * shape["num_heads"] * shape["head_dim"] * pairs

    def value(self, us: float) -> float:
        return {"us": us, "TB/s": self.kv_bytes / us / 1e6, "TFLOP/s": self.flops / us / 1e6}[self.unit]

    @property
    def floor(self) -> float:
        us = max(self.kv_bytes / READ_TB_S / 1e6, self.flops / MATMUL_TFLOP_S / 1e6)
        return round(self.value(us), 3)


def decode_case(batch: int, ctx: int, unit: str, peer: float | None = None, model: str = "", **shape: int) -> Case:
    name = f"kernel/decode/b{batch}/ctx{ctx}" + (f"/{model}" if model else "")
    return Case(name, ((1, ctx),) * batch, unit, peer, tuple((LLAMA | shape).items()))


def prefill_case(name: str, requests: tuple[tuple[int, int], ...], peer: float | None = None, **shape: int) -> Case:
    return Case(f"kernel/{name}", requests, "TFLOP/s", peer, tuple((LLAMA | shape).items()))


DECODES = (
    decode_case(64, 4096, "TB/s", 4.29),
    decode_case(256, 1024, "TB/s", 3.91),
    decode_case(1, 8192, "us", 20.0),
    decode_case(1, 1024, "us", 13.4),
    decode_case(8, 1024, "us"),
    decode_case(64, 1024, "TB/s"),
)
PREFILLS = (
    prefill_case("prefill/1x4096", ((4096, 4096),), 566.0),
    prefill_case("prefill/8x512", ((512, 512),) * 8),
    prefill_case("prefill/4x2048", ((2048, 2048),) * 4, 502.0),
    Case("kernel/mixed/64+1x2048", ((1, 1024),) * 64 + ((2048, 2048),), "us"),
)
OTHER_MODELS = (
    decode_case(64, 4096, "TB/s", model="28-4x128", num_heads=28, num_kv_heads=4, block_size=32),
    decode_case(64, 4096, "TB/s", model="8-4x256", num_heads=8, num_kv_heads=4, head_dim=256),
    decode_case(64, 4096, "TB/s", model="64-8x64", num_heads=64, head_dim=64, block_size=32),
    decode_case(64, 4096, "TB/s", model="9-2x64", num_heads=18, num_kv_heads=2, head_dim=64, block_size=128),
    prefill_case("prefill/1x4096/8-4x256", ((4096, 4096),), num_heads=8, num_kv_heads=4, head_dim=256),
    prefill_case("prefill/1x4096/64-8x64", ((4096, 4096),), num_heads=64, head_dim=64, block_size=32),
)
FLOAT8 = tuple(
    dataclasses.replace(case, name=f"{case.name}/fp8", peer=None, float8=True)
    for case in (DECODES[0], DECODES[1], DECODES[3], PREFILLS[0])
)
DECODE_TUNING: tuple[tuple[Case, tuple[dict[str, int], ...]], ...] = (
    (DECODES[0], ({"num_splits": 1}, {"num_splits": 3}, {"num_splits": 4}, {"num_splits": 8}, {"stages": 3})),
    (DECODES[1], ({"num_splits": 2}, {"num_splits": 3}, {"tile_kv": 128}, {"stages": 3})),
    (DECODES[2], ({"num_splits": 8}, {"num_splits": 16}, {"num_splits": 24}, {"num_splits": 48})),
    (DECODES[4], ({"num_splits": 2}, {"num_splits": 4}, {"num_splits": 8})),
    (DECODES[3], ({"num_splits": 4}, {"num_splits": 8}, {"num_splits": 16, "min_tiles": 1})),
)
PREFILL_TUNING: tuple[tuple[Case, tuple[dict[str, Any], ...]], ...] = (
    (PREFILLS[0], ({"ping_pong": False}, {"tile_kv": 64, "stages": 3}, {"tile_kv": 64, "stages": 4})),
    (PREFILLS[1], ({"ping_pong": False},)),
)
TRITON_TUNING: tuple[tuple[Case, tuple[int, ...]], ...] = (
    (DECODES[0], (16, 64, 2, 4)),
    (DECODES[0], (16, 64, 4, 3)),
    (DECODES[0], (16, 128, 4, 3)),
    (DECODES[0], (16, 32, 1, 4)),
    (PREFILLS[0], (64, 64, 4, 3)),
    (PREFILLS[0], (64, 128, 4, 2)),
    (PREFILLS[0], (128, 64, 8, 2)),
    (PREFILLS[0], (128, 64, 8, 4)),
    (PREFILLS[0], (128, 64, 4, 3)),
    (PREFILLS[0], (128, 128, 8, 2)),
)


@functools.cache
def cache() -> jax.Array:
    """[LAYERS, 2, BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM] of random bfloat16, seen in other shapes by other models."""
    shape = (LAYERS, 2, BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    return jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16))(jax.random.key(0))


@functools.cache
def float8_cache() -> jax.Array:
    """The bytes of the same numbers in float8_e4m3fn."""
    return jax.jit(lambda blocks: to_bytes(blocks.astype(FLOAT8_E4M3)))(cache())


def metadata_of(case: Case) -> list[AttentionMetadata]:
    """Several, of disjoint blocks where there are enough, one for each call."""
    size = dict(case.shape)["block_size"]
    counts = [-(-n // size) for _, n in case.requests]
    num_blocks = cache().size // (LAYERS * 2 * size * dict(case.shape)["num_kv_heads"] * dict(case.shape)["head_dim"])
    ids = np.random.default_rng(0).permutation(np.arange(1, num_blocks))
    width = -(-max(counts) // 128) * 128
    batch = len(counts)
    starts = np.concatenate([[0], np.cumsum([q for q, _ in case.requests])]).astype(np.int32)
    result = []
    for variant in range(max(1, min(CALLS // LAYERS, len(ids) // sum(counts)))):
        table, taken = np.zeros((batch, width), np.int32), variant * sum(counts)
        for b, count in enumerate(counts):
            table[b, :count] = ids[taken : taken + count]
            taken += count
        result.append(
            AttentionMetadata(
                query_start_loc=jnp.asarray(starts),
                seq_lens=jnp.asarray([n for _, n in case.requests], jnp.int32),
                num_reqs=jnp.int32(batch),
                block_table=jnp.asarray(table),
                slot_mapping=jnp.asarray(last_slots(case, table)),
                query_len=1 if case.is_decode else None,
            )
        )
    return result


def last_slots(case: Case, table: np.ndarray) -> np.ndarray:
    """Of the last token of each request, for a decode; none for prompts, whose keys are there."""
    if not case.is_decode:
        return np.full(sum(tokens for tokens, _ in case.requests), -1, np.int32)
    size = dict(case.shape)["block_size"]
    return np.array(
        [row[(n - 1) // size] * size + (n - 1) % size for row, (_, n) in zip(table, case.requests, strict=True)]
    )


def triton_attention(*args: Any, sizes: tuple[int, ...] | None = None, **options: Any) -> jax.Array:
    """sizes: those of `attention_triton.Sizes`."""
    return attention_triton(*args, **options, sizes=None if sizes is None else Sizes(*sizes))


def time_attention(case: Case, tuned: dict[str, Any], name: str = "mosaic") -> dict[str, Any]:
    row = {"name": case.name, "value": None, "unit": case.unit, "floor": case.floor, "implementation": name}
    if name != "mosaic":
        row["name"] += f"/{name}"
    if case.peer is not None:
        row["peer"] = case.peer
    row |= {"default": not tuned, **tuned}
    shape = dict(case.shape)

    def run() -> dict[str, Any]:
        attend = decode_attention if case.is_decode else ragged_attention
        attend = triton_attention if name == "triton" else attend
        f = jax.jit(functools.partial(attend, scale=shape["head_dim"] ** -0.5, **tuned))
        tokens = sum(q for q, _ in case.requests)
        q = jax.random.normal(jax.random.key(1), (tokens, shape["num_heads"], shape["head_dim"]), jnp.bfloat16)

        scales = {"kv_scales": jnp.full((LAYERS, 2), 0.5, jnp.float32)} if case.float8 else {}

        @jax.jit
        def calls(q, blocks, metadata, scales):
            tail = (shape["block_size"], shape["num_kv_heads"], shape["head_dim"])
            blocks = blocks.reshape(LAYERS, 2, -1, *tail)
            outputs = []
            for i in range(CALLS):
                if outputs:
                    q, outputs[-1] = jax.lax.optimization_barrier((q, outputs[-1]))
                meta = metadata[i // LAYERS % len(metadata)]
                outputs.append(f(q, blocks, jnp.int32(i % LAYERS), meta, **scales))
            return outputs

        blocks = float8_cache() if case.float8 else cache()
        report.timed(row, calls, (q, blocks, metadata_of(case), scales), wall_runs=10)
        return row if "void" in row else row | {"value": round(case.value(row["us"]), 3)}

    return report.guarded(row, run)


def time_with_rope(case: Case) -> dict[str, Any]:
    """`attention_with_rope` of a decode as one kernel, calls one after the other through the donated cache."""
    row = {"name": f"{case.name}/with_rope", "value": None, "unit": case.unit, "floor": case.floor}

    def run() -> dict[str, Any]:
        batch, shape = len(case.requests), (LAYERS, 2, -1, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
        qkv = jax.random.normal(jax.random.key(1), (batch, HEADS + 2 * KV_HEADS, HEAD_DIM), jnp.bfloat16)
        rope = tuple(f(jnp.linspace(0, 9, batch)[:, None] * jnp.ones(HEAD_DIM // 2)) for f in (jnp.cos, jnp.sin))
        attend = functools.partial(decode_attention_with_rope, scale=HEAD_DIM**-0.5)

        def calls(blocks, qkv, metadata, rope):
            outputs, blocks = [], blocks.reshape(shape)
            counters = jax.new_ref(jnp.zeros(batch * HEADS, jnp.int32))
            for i in range(CALLS):
                meta = metadata[i // LAYERS % len(metadata)].replace(counters=counters)
                out, blocks = attend(qkv, blocks, jnp.int32(i % LAYERS), meta, rope)
                outputs.append(out)
            return blocks.reshape(cache().shape), outputs

        held, metadata = [jnp.copy(cache())], metadata_of(case)
        donated = jax.jit(calls, donate_argnums=0)

        def step():
            held[0], outputs = donated(held[0], qkv, metadata, rope)
            return held[0], outputs

        report.timed(row, step, (), wall_runs=10)
        return row if "void" in row else row | {"value": round(case.value(row["us"]), 3)}

    return report.guarded(row, run)


def slots_of(tokens: int, offset: int = 0) -> np.ndarray:
    slots = np.random.default_rng(3).permutation((BLOCKS - 1) * BLOCK_SIZE)[offset : offset + tokens]
    return (slots + BLOCK_SIZE).astype(np.int32)


def time_write(op: str, tokens: int, name: str, tuned: dict[str, Any], fresh: bool = False) -> dict[str, Any]:
    """`kv_write` or `rope_kv_write` of a step of `tokens`; the cache is donated from call to call.

    A token is a row of keys and a row of values: 4096 tokens are 8192 rows. Every call reads other operands, which have
    to come from memory; fresh: all read the same, which lie in the L2 cache as they do right after their projection.
    """
    heads = KV_HEADS if op == "kv_write" else HEADS + 2 * KV_HEADS
    moved = tokens * HEAD_DIM * 2 * (4 * KV_HEADS if op == "kv_write" else 2 * heads)
    row: dict[str, Any] = {
        "name": f"kernel/{op}/{tokens}" + ("/fresh" if fresh else ""),
        "value": None,
        "unit": "us",
        "floor": round(moved / 4.3e6, 2),
        "bytes": moved,
        "implementation": name,
        "default": not tuned,
        **tuned,
    }

    def run() -> dict[str, Any]:
        keys = jax.random.split(jax.random.key(2), 3)
        k, v = (jax.random.normal(key, (CALLS, tokens, KV_HEADS, HEAD_DIM), jnp.bfloat16) for key in keys[:2])
        qkv = None
        if op == "rope_kv_write":
            qkv = jax.random.normal(keys[2], (CALLS, tokens, heads, HEAD_DIM), jnp.bfloat16)
        angles = jnp.arange(tokens, dtype=jnp.float32)[:, None] * 10000.0 ** -(jnp.arange(HEAD_DIM // 2) / 64)
        write = {
            "kv_write": {"mosaic": kv_write_mosaic, "xla": kv_write_xla},
            "rope_kv_write": {"mosaic": rope_kv_write_mosaic, "xla": rope_kv_write_xla},
        }[op][name]
        slots = jnp.stack([jnp.asarray(slots_of(tokens, i * tokens)) for i in range(CALLS)])

        def calls(blocks, k, v, qkv, slots, rope):
            outputs = []
            for i in range(CALLS):
                layer, here = jnp.int32(i % LAYERS), 0 if fresh else i
                if op == "kv_write":
                    blocks = write(blocks, layer, k[here], v[here], slots[i], **tuned)
                else:
                    q, blocks = write(qkv[here], blocks, layer, slots[i], rope, **tuned)
                    outputs.append(q)
            return blocks, outputs

        held = [jnp.copy(cache())]
        # Operands are split outside: slicing them inside would be kernels of its own.
        args = [list(k), list(v), None if qkv is None else list(qkv), list(slots), (jnp.cos(angles), jnp.sin(angles))]
        donated = jax.jit(calls, donate_argnums=0)
        before = held[0].unsafe_buffer_pointer()

        def step():
            held[0], outputs = donated(held[0], *args)
            return held[0], outputs

        report.timed(row, step, (), wall_runs=10)
        row["in_place"] = held[0].unsafe_buffer_pointer() == before
        return row if "void" in row else row | {"value": row["us"]}

    return report.guarded(row, run)


def check_attention(spec: specs.AttentionSpec, tuned: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"name": f"check/{spec}", "value": None, "unit": "relative error", **tuned}

    def run() -> dict[str, Any]:
        arrays = spec.build(seed=5)
        expected = spec.expected(arrays)
        attend = decode_attention if spec.query_len is not None else ragged_attention
        f = jax.jit(functools.partial(attend, **spec.options, **tuned))
        q, blocks = jnp.asarray(arrays["q"]), jnp.asarray(arrays["blocks"])
        named = {name: jnp.asarray(arrays[name]) for name in ("sinks", "kv_scales") if arrays[name] is not None}
        result = np.asarray(f(q, blocks, jnp.int32(spec.layer), metadata_of_spec(spec, arrays), **named), np.float64)
        empty = np.linalg.norm(expected, axis=-1) == 0
        row["value"] = float(np.linalg.norm(result - expected) / np.linalg.norm(expected))
        row["pass"] = bool(row["value"] < 5e-3 and (result[empty] == 0).all())
        return row

    return report.guarded(row | {"pass": False}, run)


def check_write() -> dict[str, Any]:
    """Exact, in place, and nothing else touched."""
    row: dict[str, Any] = {"name": "check/kv_write", "value": None}

    def run() -> dict[str, Any]:
        rng = np.random.default_rng(0)
        bad = 0
        for kv_heads, head_dim in ((8, 128), (3, 64), (4, 80)):
            blocks = rng.standard_normal((2, 2, 40, 16, kv_heads, head_dim)).astype(np.float32)
            k, v = rng.standard_normal((2, 300, kv_heads, head_dim)).astype(np.float32)
            slots = rng.permutation(40 * 16)[:300].astype(np.int32)
            slots[::7] = -1
            blocks, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (blocks, k, v))
            expected = oracle.kv_write(blocks, 1, np.asarray(k), np.asarray(v), slots)
            for tokens in (1, 4):
                f = jax.jit(functools.partial(kv_write_mosaic, tokens_per_cta=tokens))
                bad += int((np.asarray(f(blocks, jnp.int32(1), k, v, jnp.asarray(slots))) != expected).sum())
        return row | {"value": bad, "unit": "wrong elements", "pass": bad == 0}

    return report.guarded(row | {"pass": False}, run)


def check_rope() -> dict[str, Any]:
    """Against the XLA composition, with and without norm, both grids."""
    row: dict[str, Any] = {"name": "check/rope_kv_write", "value": None}

    def run() -> dict[str, Any]:
        rng = np.random.default_rng(0)
        worst = 0.0
        for heads, kv_heads, head_dim, norm in ((32, 8, 128, True), (9, 3, 64, False), (28, 4, 128, False)):
            tokens = 70
            shape = (tokens, heads + 2 * kv_heads, head_dim)
            qkv = jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
            blocks = jnp.zeros((2, 2, 10, 16, kv_heads, head_dim), jnp.bfloat16)
            slots = rng.permutation(160)[:tokens].astype(np.int32)
            slots[3] = -1
            angles = rng.standard_normal((tokens, head_dim // 2)).astype(np.float32) * 10
            rope, weights = (jnp.cos(angles), jnp.sin(angles)), {}
            if norm:
                weights = {n: jnp.asarray(rng.standard_normal(head_dim), jnp.bfloat16) for n in ("q_norm", "k_norm")}
            args = (qkv, blocks, jnp.int32(1), jnp.asarray(slots), rope)
            expected = jax.jit(functools.partial(rope_kv_write_xla, **weights))(*args)
            for whole in (True, False):
                f = jax.jit(functools.partial(rope_kv_write_mosaic, whole_tokens=whole, **weights))
                for got, want in zip(f(*args), expected, strict=True):
                    got, want = (np.asarray(x).astype(np.float64) for x in (got, want))
                    worst = max(worst, float(np.linalg.norm(got - want) / np.linalg.norm(want)))
        return row | {"value": worst, "unit": "relative error", "pass": worst < 2e-3}

    return report.guarded(row | {"pass": False}, run)


def check_with_rope() -> dict[str, Any]:
    """Against the two ops of XLA, with shares of the keys and without: the result, and what is written, which XLA may
    round differently; nothing else is."""
    row: dict[str, Any] = {"name": "check/attention_with_rope", "value": None}

    def run() -> dict[str, Any]:
        worst, others = 0.0, 0
        for batch, ctx in ((3, 900), (64, 300)):
            case = decode_case(batch, ctx, "us")
            metadata, blocks = metadata_of(case)[0], jnp.copy(cache()[:2])
            qkv = jax.random.normal(jax.random.key(6), (batch, HEADS + 2 * KV_HEADS, HEAD_DIM), jnp.bfloat16)
            angles = jax.random.normal(jax.random.key(7), (batch, HEAD_DIM // 2)) * 10
            args = (qkv, blocks, jnp.int32(1), metadata, (jnp.cos(angles), jnp.sin(angles)))
            expected, got = (
                jax.jit(functools.partial(attention_with_rope, scale=HEAD_DIM**-0.5, implementation=name))(*args)
                for name in ("xla", "mosaic")
            )
            block, offset = (f(metadata.slot_mapping, BLOCK_SIZE) for f in (jnp.floor_divide, jnp.mod))
            written = [out[1][1, :, block, offset] for out in (got, expected)]
            for pair in ((got[0], expected[0]), written):
                a, b = (np.asarray(x).astype(np.float64) for x in pair)
                worst = max(worst, float(np.linalg.norm(a - b) / np.linalg.norm(b)))
            others += int((got[1].at[1, :, block, offset].set(0) != blocks.at[1, :, block, offset].set(0)).sum())
        passed = worst < 5e-3 and not others
        return row | {"value": worst, "unit": "relative error", "other_elements": others, "pass": passed}

    return report.guarded(row | {"pass": False}, run)


def check_large() -> dict[str, Any]:
    """More than 2^31 elements: the last layer's last blocks are written and attended to, nothing else is touched."""
    row: dict[str, Any] = {"name": "check/more than 2^31 elements", "value": None}

    def run() -> dict[str, Any]:
        num_blocks = 42000
        blocks = jnp.zeros((2, 2, num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM), jnp.bfloat16)
        tokens = 200
        k, v = jax.random.normal(jax.random.key(4), (2, tokens, KV_HEADS, HEAD_DIM), jnp.bfloat16)
        ids = num_blocks - 1 - np.arange(13) * 7
        slots = (ids[np.arange(tokens) // 16] * 16 + np.arange(tokens) % 16).astype(np.int32)
        blocks = jax.jit(kv_write_mosaic, donate_argnums=0)(blocks, jnp.int32(1), k, v, jnp.asarray(slots))
        there = blocks[1, :, slots // 16, slots % 16]  # the split indices come first: [tokens, 2, KVH, D]
        exact = bool((there[:, 0] == k).all() & (there[:, 1] == v).all())
        others = int(jnp.count_nonzero(blocks)) - int(jnp.count_nonzero(k) + jnp.count_nonzero(v))
        table = np.zeros((1, 128), np.int32)
        table[0, :13] = ids
        metadata = AttentionMetadata(
            query_start_loc=jnp.array([0, 1], jnp.int32),
            seq_lens=jnp.array([tokens], jnp.int32),
            num_reqs=jnp.int32(1),
            block_table=jnp.asarray(table),
            slot_mapping=jnp.full(1, -1, jnp.int32),
            query_len=1,
        )
        q = jax.random.normal(jax.random.key(5), (1, HEADS, HEAD_DIM), jnp.bfloat16)
        f = jax.jit(functools.partial(decode_attention, scale=HEAD_DIM**-0.5))
        small = np.zeros((1, 2, 13, 16, KV_HEADS, HEAD_DIM))
        for which, values in enumerate((k, v)):
            small[0, which].reshape(-1, KV_HEADS, HEAD_DIM)[:tokens] = np.asarray(values, np.float64)
        expected = attention_oracle(
            np.asarray(q, np.float64), small, 0, np.arange(13)[None], [tokens], [1], scale=HEAD_DIM**-0.5
        )
        result = np.asarray(f(q, blocks, jnp.int32(1), metadata)).astype(np.float64)
        error = float(np.linalg.norm(result - expected) / np.linalg.norm(expected))
        row["pass"] = exact and others == 0 and error < 5e-3
        return row | {"value": error, "unit": "relative error", "exact": exact, "other_elements": others}

    return report.guarded(row | {"pass": False}, run)


def checks() -> list[Callable[[], dict[str, Any]]]:
    """The most telling first: several tokens in a tile of rows."""
    float8 = [spec for spec in specs.FLOAT8 if spec.head_dim % 32 == 0]
    several = sorted([*specs.SMALL, *float8], key=lambda spec: spec.query_len == 1)
    jobs: list[Callable[[], dict[str, Any]]] = [functools.partial(check_attention, spec, {}) for spec in several]
    jobs += [check_write, check_rope, check_with_rope, check_large]
    split = [spec for spec in several if spec.query_len is not None]
    jobs += [functools.partial(check_attention, spec, {"num_splits": 5, "min_tiles": 1}) for spec in split]
    return jobs + [functools.partial(check_attention, specs.random_spec(seed), {}) for seed in range(12)]


def run_check(number: int) -> dict[str, Any]:
    return checks()[number]()


def run_checks(result: Report, seconds: float, workers: int) -> None:
    """In order; no further one is started after `seconds`."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # for the workers: they share the GPU
    limited, numbers = Report(result.path, {}, seconds=seconds), range(len(checks()))
    context = multiprocessing.get_context("spawn")
    waiting: set[concurrent.futures.Future[dict[str, Any]]] = set()

    def collect(when: str) -> None:
        nonlocal waiting
        done, waiting = concurrent.futures.wait(waiting, return_when=when)
        for future in done:
            result.add(future.result())

    try:
        with concurrent.futures.ProcessPoolExecutor(workers, context) as pool:
            for number in numbers:
                if len(waiting) >= workers:
                    collect(concurrent.futures.FIRST_COMPLETED)
                if not limited.left:
                    result.conditions["checks_left_out"] = len(numbers) - number
                    break
                waiting.add(pool.submit(run_check, number))
            collect(concurrent.futures.ALL_COMPLETED)
    except concurrent.futures.BrokenExecutor as error:  # such as a kernel that never ends and was killed
        result.add({"name": "check/all", "value": None, "pass": False, "error": f"a worker died: {error}"})


def timings(tune: bool) -> list[tuple[str, Callable[[], dict[str, Any]]]]:
    jobs: list[tuple[str, Callable[[], dict[str, Any]]]] = []

    def attention_jobs(cases, tuned=None):
        jobs.extend((case.name, functools.partial(time_attention, case, tuned or {})) for case in cases)

    def triton_jobs(cases, tuned=None):
        if triton_compat.unavailable_reason() is None:
            jobs.extend(
                (f"{case.name}/triton", functools.partial(time_attention, case, tuned or {}, "triton"))
                for case in cases
            )

    def write_job(op, tokens, name, fresh=False, **tuned):
        jobs.append((f"kernel/{op}/{tokens}", functools.partial(time_write, op, tokens, name, tuned, fresh)))

    attention_jobs(DECODES[:3])
    jobs.extend((f"{case.name}/with_rope", functools.partial(time_with_rope, case)) for case in DECODES)
    attention_jobs(PREFILLS[:1])
    write_job("kv_write", 8192, "mosaic")
    attention_jobs(FLOAT8)
    attention_jobs(DECODES[3:])
    attention_jobs(PREFILLS[1:])
    for tokens in (64, 4096):
        write_job("kv_write", tokens, "mosaic")
    write_job("kv_write", 4096, "mosaic", fresh=True)
    for tokens in (1, 64, 256, 8192):
        for name in ("mosaic", "xla"):
            write_job("rope_kv_write", tokens, name)
    write_job("kv_write", 8192, "xla")
    triton_jobs([DECODES[i] for i in (0, 1, 4, 5)] + list(PREFILLS))
    if tune:
        for case, sizes in TRITON_TUNING:
            triton_jobs([case], {"sizes": sizes})
        for case, variants in (*PREFILL_TUNING, *DECODE_TUNING):
            for tuned in variants:
                attention_jobs([case], tuned)
        for tokens in (2, 4):
            write_job("kv_write", 8192, "mosaic", tokens_per_cta=tokens)
        for tokens, whole in ((64, True), (256, True), (8192, False)):
            write_job("rope_kv_write", tokens, "mosaic", whole_tokens=whole)
        attention_jobs(OTHER_MODELS)
    return jobs


def show(rows: list[dict[str, Any]]) -> None:
    """How many checks passed and which failed, then the timed rows."""
    checks = [row for row in rows if row["name"].startswith("check/")]
    failed = [row for row in checks if not row.get("pass")]
    print(f"checks: {len(checks) - len(failed)} passed, {len(failed)} failed")
    report.show(failed)
    timed = [row for row in rows if row not in checks]
    report.show(timed, leave_out=("kernels", "first_call_s", "wall_us", "bytes", "default", "in_place"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "gpu_kernels.json")
    parser.add_argument("--seconds", type=float, default=300.0, help="start no further row after this long")
    parser.add_argument("--check-seconds", type=float, default=90.0, help="start no further check after this long")
    parser.add_argument("--workers", type=int, default=6, help="processes that check")
    parser.add_argument("--checks-only", action="store_true", help="time nothing")
    parser.add_argument("--only", default="", help="only rows with this in their name; no checks")
    parser.add_argument("--no-tune", action="store_true", help="only the default sizes")
    options = parser.parse_args()
    state = {"layers": LAYERS, "blocks": BLOCKS, "model": LLAMA, "dtype": "bfloat16"}
    data = {"state": state, "data": "random, blocks scattered"}
    result = Report(options.output, report.conditions(**report.KERNEL_TIMING, **data), seconds=options.seconds)
    if not options.only:
        run_checks(result, options.check_seconds, options.workers)
    show(result.rows)
    jobs = [job for name, job in timings(not options.no_tune) if options.only in name and not options.checks_only]
    for number, job in enumerate(jobs):
        if not result.left:
            result.conditions["rows_left_out"] = len(jobs) - number
            break
        result.add(job())
    result.write()
    print(f"\n{result.conditions['device']}, jax {jax.__version__}; {options.output}")
    show(result.rows)


if __name__ == "__main__":
    main()
