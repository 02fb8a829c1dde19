"""Named arguments of attention, shared by its tests, `jaxrunner check-attention` and the benchmarks."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np

from jaxrunner.checks.attention_oracle import attention as oracle

Ints = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """One batch: query_lens and seq_lens are per live request (seq_lens include the step's own tokens).

    query_len: of a uniform decode, else None. batch, num_tokens: sizes after padding, by default without any.
    adversarial: NaN in every key and value that no query sees, and garbage behind the padding of tables and queries.
    kv_scales: of keys and values: the cache is bytes of float8_e4m3fn, and its other layers have other scales.
    interpret: small enough to be interpreted on a CPU.
    """

    name: str
    query_lens: Ints
    seq_lens: Ints
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    query_len: int | None = None
    batch: int | None = None
    num_tokens: int | None = None
    width: int = 128
    num_layers: int = 2
    layer: int = 1
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    dtype: str = "bfloat16"
    kv_scales: tuple[float, float] | None = None
    adversarial: bool = True
    interpret: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def options(self) -> dict[str, Any]:
        return {"scale": self.head_dim**-0.5, "window": self.window, "soft_cap": self.soft_cap}

    @property
    def tokens(self) -> int:
        return self.num_tokens or sum(self.query_lens)

    def build(self, seed: int = 0) -> dict[str, Any]:
        """q, blocks, block_table, seq_lens, query_start_loc, and sinks and kv_scales (None without)."""
        rng = np.random.default_rng(seed)
        dtype = np.dtype(getattr(ml_dtypes, self.dtype, None) or self.dtype)
        live, batch = len(self.query_lens), self.batch or len(self.query_lens)
        blocks_of = [-(-n // self.block_size) for n in self.seq_lens]
        num_blocks = 1 + sum(blocks_of) + 3
        ids = rng.permutation(np.arange(1, num_blocks))
        table = np.zeros((batch, self.width), np.int32)
        seq_lens = np.zeros(batch, np.int32)
        seq_lens[:live] = self.seq_lens
        shape = (self.num_layers, 2, num_blocks, self.block_size, self.num_kv_heads, self.head_dim)
        blocks = rng.standard_normal(shape).astype(np.float32)
        seen = np.zeros(shape[2:4], bool)
        taken = 0
        for b, count in enumerate(blocks_of):
            table[b, :count] = ids[taken : taken + count]
            taken += count
            first = 0
            if self.window is not None:
                first = max(0, self.seq_lens[b] - self.query_lens[b] - self.window + 1) // self.block_size
                first *= self.block_size  # a window frees whole blocks only
            for position in range(first, self.seq_lens[b]):
                seen[table[b, position // self.block_size], position % self.block_size] = True
        q = rng.standard_normal((self.tokens, self.num_heads, self.head_dim)).astype(np.float32)
        if self.adversarial:
            blocks[self.layer][:, ~seen] = np.nan
            q[sum(self.query_lens) :] = np.nan
        starts = np.full(batch + 1, sum(self.query_lens), np.int32)
        starts[: live + 1] = np.concatenate([[0], np.cumsum(self.query_lens)])
        if self.query_len is not None:
            starts = (np.arange(batch + 1) * self.query_len).astype(np.int32)
        scales = None
        if self.kv_scales is not None:
            scales = np.array(self.kv_scales) * (np.arange(self.num_layers)[:, None] - self.layer + 1.0)
            scales = np.where(scales > 0, scales, 3.0).astype(np.float32)
            blocks /= scales[:, :, None, None, None, None]
            blocks = np.clip(blocks, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        return {
            "q": q.astype(dtype),
            "blocks": blocks if scales is not None else blocks.astype(dtype),
            "kv_scales": scales,
            "block_table": table,
            "seq_lens": seq_lens,
            "query_start_loc": starts,
            "sinks": rng.standard_normal(self.num_heads).astype(np.float32) if self.sinks else None,
        }

    def values(self, arrays: dict[str, np.ndarray]) -> np.ndarray:
        """What the cache stands for, float64 where it is scaled."""
        scales = arrays["kv_scales"]
        if scales is None:
            return arrays["blocks"]
        stored = arrays["blocks"].view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        return stored * scales.astype(np.float64)[:, :, None, None, None, None]

    def expected(self, arrays: dict[str, Any]) -> np.ndarray:
        return oracle(
            arrays["q"],
            self.values(arrays),
            self.layer,
            arrays["block_table"],
            arrays["seq_lens"],
            self.query_lens,
            sinks=arrays["sinks"],
            **self.options,
        )


FP8: dict[str, Any] = {"kv_scales": (0.37, 2.5)}


def decode(name: str, seq_lens: Ints, query_len: int = 1, **changes: Any) -> AttentionSpec:
    """query_len queries for each request."""
    lens = (query_len,) * len(seq_lens)
    return AttentionSpec(name, lens, seq_lens, query_len=query_len, **changes)


def ragged(name: str, requests: tuple[Ints, ...], **changes: Any) -> AttentionSpec:
    """requests: (query length, sequence length) of each."""
    query_lens, seq_lens = zip(*requests, strict=True)
    return AttentionSpec(name, query_lens, seq_lens, **changes)


MIXED = ((1, 70), (0, 0), (37, 37), (5, 150), (1, 1), (0, 33), (20, 90))

SMALL: tuple[AttentionSpec, ...] = (
    decode("decode", (70, 1, 16, 129), num_heads=4, num_kv_heads=1, interpret=True),
    decode("decode padded", (70, 300), batch=4, num_tokens=4, num_heads=8, num_kv_heads=2),
    decode("decode empty row", (0, 90), num_heads=2, num_kv_heads=1),
    decode("decode window", (200, 30), window=40, num_heads=4, num_kv_heads=1, interpret=True),
    decode("decode drafts", (70, 150), 3, num_heads=3, num_kv_heads=1, interpret=True),
    decode("decode drafts window", (70, 300), 4, num_heads=4, num_kv_heads=2, window=50),
    decode("decode cap and sinks", (90, 0), num_heads=2, num_kv_heads=1, soft_cap=5.0, sinks=True, interpret=True),
    decode("decode mha 128", (65, 300), num_heads=2, num_kv_heads=2, head_dim=128),
    decode("decode head 96", (40, 100), num_heads=2, num_kv_heads=1, head_dim=96, interpret=True),
    decode("decode head 80", (40, 100), num_heads=4, num_kv_heads=4, head_dim=80),
    decode("decode head 256", (40, 200), num_heads=8, num_kv_heads=4, head_dim=256, block_size=32),
    decode("decode block 128", (40, 300), num_heads=4, num_kv_heads=1, head_dim=128, block_size=128),
    decode("decode group 16", (40, 300), num_heads=32, num_kv_heads=2, head_dim=128, block_size=48),
    decode("decode group 71", (40, 130), num_heads=71, num_kv_heads=1),
    decode("decode drafts group 16", (40, 300), 6, num_heads=16, num_kv_heads=1, head_dim=128),
    decode("decode float16", (40, 300), num_heads=8, num_kv_heads=2, head_dim=128, dtype="float16"),
    ragged("ragged", MIXED, num_heads=4, num_kv_heads=1, head_dim=64),
    ragged("ragged tiny", ((1, 20), (0, 0), (9, 30)), num_heads=4, num_kv_heads=1, num_tokens=16, interpret=True),
    ragged("ragged padded", MIXED, batch=12, num_tokens=96, num_heads=4, num_kv_heads=2),
    ragged("ragged window", MIXED, window=25, num_heads=4, num_kv_heads=1),
    ragged("ragged tiny window", ((6, 200),), window=30, num_heads=4, num_kv_heads=1, interpret=True),
    ragged("ragged cap and sinks", ((10, 40),), soft_cap=5.0, sinks=True, num_heads=3, num_kv_heads=1, interpret=True),
    ragged("ragged mha 128", MIXED, num_heads=2, num_kv_heads=2, head_dim=128),
    ragged("ragged group 7", MIXED, num_heads=28, num_kv_heads=4, head_dim=128),
    ragged("ragged head 96", MIXED, num_heads=2, num_kv_heads=1, head_dim=96, block_size=32),
    ragged("ragged head 80", MIXED, num_heads=2, num_kv_heads=2, head_dim=80),
    ragged("ragged head 256", MIXED, num_heads=4, num_kv_heads=2, head_dim=256, block_size=64),
    ragged("ragged group 16", MIXED, num_heads=16, num_kv_heads=1, head_dim=128, block_size=128),
    ragged("ragged one chunk", ((200, 200),), num_heads=4, num_kv_heads=2, head_dim=64, batch=2, num_tokens=256),
)
"""Every option and edge at sizes that a CPU checks in a moment."""


FLOAT8: tuple[AttentionSpec, ...] = (
    decode("fp8 decode", (70, 1, 16, 129), num_heads=4, num_kv_heads=1, interpret=True, **FP8),
    decode("fp8 decode padded", (70, 300), batch=4, num_tokens=4, num_heads=8, num_kv_heads=2, head_dim=128, **FP8),
    decode("fp8 decode drafts window", (70, 150), 3, num_heads=4, num_kv_heads=2, window=50, **FP8),
    decode("fp8 decode cap and sinks", (90, 0), num_heads=2, num_kv_heads=1, soft_cap=5.0, sinks=True, **FP8),
    decode("fp8 decode head 96", (40, 100), num_heads=2, num_kv_heads=1, head_dim=96, interpret=True, **FP8),
    decode("fp8 decode head 80", (40, 100), num_heads=4, num_kv_heads=4, head_dim=80, **FP8),
    decode("fp8 decode head 256", (40, 200), num_heads=8, num_kv_heads=4, head_dim=256, block_size=32, **FP8),
    decode("fp8 decode float16", (40, 300), num_heads=8, num_kv_heads=2, head_dim=128, dtype="float16", **FP8),
    decode("fp8 decode block 48", (40, 300), num_heads=32, num_kv_heads=2, head_dim=128, block_size=48, **FP8),
    ragged("fp8 ragged", MIXED, num_heads=4, num_kv_heads=1, head_dim=64, **FP8),
    ragged("fp8 ragged tiny", ((1, 20), (0, 0), (9, 30)), num_heads=4, num_kv_heads=1, interpret=True, **FP8),
    ragged("fp8 ragged padded", MIXED, batch=12, num_tokens=96, num_heads=4, num_kv_heads=2, head_dim=128, **FP8),
    ragged("fp8 ragged window", MIXED, window=25, num_heads=4, num_kv_heads=1, **FP8),
    ragged("fp8 ragged cap and sinks", ((10, 40),), soft_cap=5.0, sinks=True, num_heads=3, num_kv_heads=1, **FP8),
    ragged("fp8 ragged head 96", MIXED, num_heads=2, num_kv_heads=1, head_dim=96, block_size=32, **FP8),
    ragged("fp8 ragged head 80", MIXED, num_heads=2, num_kv_heads=2, head_dim=80, **FP8),
    ragged("fp8 ragged head 256", MIXED, num_heads=4, num_kv_heads=2, head_dim=256, block_size=64, **FP8),
    ragged("fp8 ragged float16", MIXED, num_heads=28, num_kv_heads=4, head_dim=128, dtype="float16", **FP8),
)
"""The same over a float8 cache with scales."""


def random_spec(seed: int) -> AttentionSpec:
    """Decodes, drafts and chunks of prompts at larger sizes, with random heads and options."""
    rng = np.random.default_rng(seed)
    kv_heads, group = int(rng.choice([1, 2, 4])), int(rng.choice([1, 2, 3, 4, 5, 7, 8, 16]))
    requests = []
    for _ in range(int(rng.integers(1, 20))):
        kind = rng.choice(["empty", "decode", "short", "long"], p=[0.1, 0.4, 0.3, 0.2])
        bounds = {"empty": (0, 1), "decode": (1, 2), "short": (2, 40), "long": (40, 400)}[str(kind)]
        length = int(rng.integers(*bounds))
        requests.append((length, length + int(rng.integers(0, 1200))))
    live = sum(length for length, _ in requests)
    return ragged(
        f"random {seed}",
        tuple(requests),
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=int(rng.choice([64, 96, 128, 256])),
        block_size=int(rng.choice([16, 32, 64])),
        batch=len(requests) + int(rng.integers(0, 5)),
        num_tokens=max(live, 1) + int(rng.integers(0, 200)),
        window=[None, int(rng.integers(1, 500))][seed % 2],
        soft_cap=[None, 10.0][seed % 3 == 2],
        sinks=seed % 4 == 3,
    )
