"""Named arguments of the ops, shared by tests and benchmarks.

Oracle numbers are those of "Appendix B" in the tests' docstrings: literal values computed by hand from vLLM's formulas.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jaxrunner.state.fields import REQUEST_COLUMN

GARBAGE = np.int32(2**31 - 5)
Ints = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class InputPrepSpec:
    """One batch. The first four fields are per live request, the sizes after them padded.

    blocks: block ids of each request in every group, by default random. poison: garbage in all padded entries.
    tokens_per_cta, interpret: how the kernel is interpreted on a CPU, if it is small enough for that.
    expected: literal outputs, by name; live entries only.
    """

    name: str
    query_lens: Ints
    computed: Ints
    prefill_len: Ints | None = None
    num_drafts: Ints | None = None
    batch: int = 4
    num_tokens: int = 8
    rows: int = 8
    max_len: int = 64
    block_sizes: Ints = (16,)
    widths: Ints = (128,)
    num_draft_tokens: int = 0
    blocks: tuple[Ints, ...] | None = None
    drafts: tuple[Ints, ...] | None = None
    last_sampled: Ints | None = None
    poison: bool = False
    tokens_per_cta: int = 4
    interpret: bool = False
    expected: dict[str, list[int]] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    @property
    def static(self) -> dict[str, Any]:
        return {"num_tokens": self.num_tokens, "block_sizes": self.block_sizes}

    def build(self, seed: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(positional arguments of `input_prep`, arguments of the oracle), NumPy arrays of random content."""
        rng = np.random.default_rng(seed)
        live = len(self.query_lens)

        def randint(low: int, high: int, *shape: int) -> np.ndarray:
            return rng.integers(low, high, shape, dtype=np.int32)

        rows = rng.permutation(np.arange(1, self.rows))[:live].astype(np.int32)
        token_ids = randint(0, 150_000, self.rows, self.max_len)
        counters = randint(0, self.max_len, self.rows, len(REQUEST_COLUMN))
        counters[0], token_ids[0] = 0, 0
        seq_lens = np.add(self.computed, self.query_lens)
        counters[rows, REQUEST_COLUMN["num_computed_tokens"]] = self.computed
        counters[rows, REQUEST_COLUMN["prefill_len"]] = self.prefill_len or np.maximum(np.subtract(seq_lens, 1), 1)
        counters[rows, REQUEST_COLUMN["last_sampled_token"]] = self.last_sampled or randint(0, 150_000, live)
        draft_tokens = None
        if self.num_draft_tokens:
            draft_tokens = randint(0, 150_000, self.rows, self.num_draft_tokens)
            for row, drafts in zip(rows, self.drafts or (), strict=False):
                draft_tokens[row, : len(drafts)] = drafts
        tables, counts = [], randint(0, 9, self.rows, len(self.widths))
        for g, (size, width) in enumerate(zip(self.block_sizes, self.widths, strict=True)):
            tables.append(randint(1, 9000, self.rows, width))
            counts[rows, g] = -(-seq_lens // size)
            for row, blocks in zip(rows, self.blocks or (), strict=False):
                tables[g][row, : len(blocks)] = blocks
        counts[0] = 0

        bounds = np.concatenate([[0], np.cumsum(self.query_lens)]).astype(np.int32)
        fill = {"rows": GARBAGE, "bounds": -7, "drafts": GARBAGE} if self.poison else None
        padding = self.batch - live
        drafts = np.array(self.num_drafts or (0,) * live, np.int32)
        args = (
            _pad(rows, padding, fill["rows"] if fill else 0),
            _pad(bounds, padding, fill["bounds"] if fill else bounds[-1]),
            np.int32(live),
            counters,
            token_ids,
            tuple(tables),
            counts,
            draft_tokens,
            _pad(drafts, padding, fill["drafts"] if fill else 0) if self.num_draft_tokens else None,
        )
        oracle = {
            "rows": rows,
            "query_lens": self.query_lens,
            "computed": counters[:, REQUEST_COLUMN["num_computed_tokens"]],
            "prefill_len": counters[:, REQUEST_COLUMN["prefill_len"]],
            "last_sampled": counters[:, REQUEST_COLUMN["last_sampled_token"]],
            "token_ids": token_ids,
            "tables": tables,
            "num_blocks": counts,
            "draft_tokens": draft_tokens,
            "num_draft_tokens": drafts if self.num_draft_tokens else None,
            "batch": self.batch,
            **self.static,
        }
        return args, oracle


def _pad(values: np.ndarray, count: int, fill: Any) -> np.ndarray:
    return np.concatenate([values, np.full(count, fill, np.int32)]).astype(np.int32)


def decode(batch: int, *, live: int | None = None, name: str | None = None, **changes: Any) -> InputPrepSpec:
    """One token for each request, at mixed lengths up to 8191, batch and tokens padded to `batch`."""
    live = batch if live is None else live
    lengths = tuple(int(n) for n in np.random.default_rng(batch).integers(1, 8191, live))
    return InputPrepSpec(
        name or f"decode/b{batch}", (1,) * live, lengths, batch=batch, num_tokens=batch, **(MODEL | changes)
    )


def prefill(requests: int, tokens: int, *, computed: int = 0, **changes: Any) -> InputPrepSpec:
    """First chunks of long prompts."""
    return InputPrepSpec(
        f"prefill/{requests}x{tokens}",
        (tokens,) * requests,
        (computed,) * requests,
        prefill_len=(computed + tokens,) * requests,
        batch=requests,
        num_tokens=requests * tokens,
        **(MODEL | changes),
    )


def mixed(decodes: int, chunk: int) -> InputPrepSpec:
    """Decodes and then a chunk of a prompt whose first 300 tokens are computed; tokens padded to a multiple of 64."""
    return InputPrepSpec(
        f"mixed/{decodes}+1x{chunk}",
        (1,) * decodes + (chunk,),
        (700,) * decodes + (300,),
        prefill_len=(600,) * decodes + (300 + chunk,),
        batch=decodes + 8,
        num_tokens=-(-(decodes + chunk) // 64) * 64,
        **MODEL,
    )


MODEL: dict[str, Any] = {"rows": 1025, "max_len": 8192, "widths": (512,)}
"""Sizes of a server's state: 1024 requests of up to 8192 tokens in blocks of 16."""

WORKED_EXAMPLE = InputPrepSpec(
    "worked example (oracle 1)",
    query_lens=(2, 0, 1, 3),
    computed=(5, 0, 12, 1),
    prefill_len=(20, 20, 20, 20),
    block_sizes=(8,),
    blocks=((2, 3), (4, 5), (6, 7), (8, 9)),
    interpret=True,
    expected={
        "positions": [5, 6, 12, 1, 2, 3],
        "slot_mapping": [21, 22, 60, 65, 66, 67],
        "seq_lens": [7, 0, 13, 4],
        "logits_indices": [1, 1, 2, 5],
    },
)

INPUT_PREP: tuple[InputPrepSpec, ...] = (
    WORKED_EXAMPLE,
    InputPrepSpec(
        "decode batch (oracle 2)",
        (1, 1, 1, 1),
        (1000, 512, 37, 2047),
        max_len=2048,
        num_tokens=4,
        tokens_per_cta=1,
        last_sampled=(11, 12, 13, 14),
        interpret=True,
        expected={
            "positions": [1000, 512, 37, 2047],
            "seq_lens": [1001, 513, 38, 2048],
            "logits_indices": [0, 1, 2, 3],
            "input_ids": [11, 12, 13, 14],
        },
    ),
    InputPrepSpec(
        "first chunk (oracle 15)",
        (512,),
        (0,),
        prefill_len=(600,),
        max_len=600,
        num_tokens=512,
        batch=1,
        expected={"seq_lens": [512], "logits_indices": [511], "positions": list(range(512))},
    ),
    InputPrepSpec(
        "last chunk (oracle 15)",
        (88,),
        (512,),
        prefill_len=(600,),
        max_len=600,
        num_tokens=96,
        batch=1,
        expected={"seq_lens": [600], "logits_indices": [87], "positions": list(range(512, 600))},
    ),
    InputPrepSpec(
        "prompt tail with drafts listed (oracle 16)",
        (3,),
        (5,),
        prefill_len=(8,),
        num_drafts=(2,),
        num_draft_tokens=2,
        batch=2,
        interpret=True,
        expected={"seq_lens": [8], "logits_indices": [0, 1, 2]},
    ),
    InputPrepSpec(
        "two drafts (oracle 17)",
        (3,),
        (10,),
        prefill_len=(8,),
        num_drafts=(2,),
        num_draft_tokens=2,
        last_sampled=(77,),
        drafts=((5, 6),),
        batch=2,
        interpret=True,
        expected={
            "input_ids": [77, 5, 6],
            "positions": [10, 11, 12],
            "seq_lens": [13],
            "logits_indices": [0, 1, 2],
        },
    ),
    InputPrepSpec(
        "drafts, none, some, prefill",
        (4, 1, 2, 5),
        (9, 20, 30, 0),
        prefill_len=(6, 20, 11, 40),
        num_drafts=(3, 0, 1, 0),
        num_draft_tokens=3,
        batch=5,
        num_tokens=16,
        poison=True,
        interpret=True,
    ),
    InputPrepSpec(
        "two groups, poison",
        (2, 0, 1, 5),
        (30, 3, 12, 1),
        batch=6,
        num_tokens=12,
        block_sizes=(8, 4),
        widths=(128, 256),
        poison=True,
        interpret=True,
    ),
    InputPrepSpec("no live request", (), (), batch=2, num_tokens=4, poison=True, interpret=True),
    InputPrepSpec("all rows empty", (0, 0), (3, 9), batch=3, num_tokens=4, poison=True, interpret=True),
    InputPrepSpec("one token", (1,), (63,), batch=1, num_tokens=1, poison=True, interpret=True),
    InputPrepSpec(
        "windows inside chunks, at their ends and in padding",
        (3, 130, 1, 140),
        (9, 37, 250, 0),
        prefill_len=(9, 512, 250, 512),
        batch=6,
        num_tokens=530,
        max_len=512,
        block_sizes=(16, 4),
        widths=(128, 128),
        poison=True,
        tokens_per_cta=32,
        interpret=True,
    ),
    InputPrepSpec(
        "chunk at the end of the history",
        (257,),
        (127,),
        prefill_len=(384,),
        batch=1,
        num_tokens=257,
        max_len=383,
        rows=2,
        tokens_per_cta=32,
        block_sizes=(5,),
        interpret=True,
    ),
    decode(64, live=50, name="decode/b64, 50 live", poison=True),
    decode(256, name="decode/b256"),
    prefill(1, 8192),
    prefill(8, 1024, computed=77),
    mixed(64, 2048),
    InputPrepSpec(
        "empty rows between",
        tuple(n for k in range(40) for n in (0, k, 0, 0, 1)),
        tuple(range(200)),
        batch=256,
        num_tokens=1024,
        num_draft_tokens=2,
        num_drafts=(0, 0, 0, 0, 0) * 40,
        poison=True,
        **(MODEL | {"block_sizes": (16, 32), "widths": (640, 2176)}),
    ),
)


@dataclasses.dataclass(frozen=True)
class SlotMappingSpec:
    """Arguments of `slot_mapping`; expected: the literal slots, the -1 of padding included."""

    name: str
    query_start_loc: Ints
    positions: Ints
    block_table: tuple[Ints, ...]
    static: dict[str, int]
    expected: Ints | None = None
    interpret: bool = True

    def __str__(self) -> str:
        return self.name

    def build(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return tuple(np.array(a, np.int32) for a in (self.query_start_loc, self.positions, self.block_table))


def _one_request(name: str, positions: Ints, table: Ints, expected: Ints, **static: int) -> SlotMappingSpec:
    return SlotMappingSpec(name, (0, len(positions)), positions, (table,), static, expected)


_ = -1
SLOT_MAPPING: tuple[SlotMappingSpec, ...] = (
    SlotMappingSpec(
        "worked example (oracle 1), padded",
        (0, 2, 2, 3, 6),
        (5, 6, 12, 1, 2, 3, 99, -3),
        ((2, 3), (4, 5), (6, 7), (8, 9)),
        {"block_size": 8},
        (21, 22, 60, 65, 66, 67, _, _),
    ),
    _one_request(
        "blocks per allocator block (oracle 3)",
        (0, 15, 16, 31, 32, 47, 63),
        (6, 7, 14, 15),
        (96, 111, 112, 127, 224, 239, 255),
        block_size=16,
        blocks_per_kv_block=2,
    ),
    *(
        _one_request(
            f"context parallel (oracle 4), interleave {interleave}, rank {rank}",
            tuple(range(12)),
            (3, 7),
            expected,
            block_size=4,
            cp_world_size=2,
            cp_rank=rank,
            cp_interleave=interleave,
        )
        for interleave, rank, expected in (
            (1, 0, (12, _, 13, _, 14, _, 15, _, 28, _, 29, _)),
            (1, 1, (_, 12, _, 13, _, 14, _, 15, _, 28, _, 29)),
            (2, 0, (12, 13, _, _, 14, 15, _, _, 28, 29, _, _)),
            (2, 1, (_, _, 12, 13, _, _, 14, 15, _, _, 28, 29)),
        )
    ),
    *(
        _one_request(
            f"interleave over kernel blocks (oracle 5), rank {rank}",
            tuple(range(16)),
            (6, 7, 14, 15),
            expected,
            block_size=2,
            blocks_per_kv_block=2,
            cp_world_size=2,
            cp_rank=rank,
            cp_interleave=4,
        )
        for rank, expected in (
            (0, (12, 13, 14, 15, _, _, _, _, 28, 29, 30, 31, _, _, _, _)),
            (1, (_, _, _, _, 12, 13, 14, 15, _, _, _, _, 28, 29, 30, 31)),
        )
    ),
    SlotMappingSpec("position past the table", (0, 2), (15, 16), ((3, 7),), {"block_size": 8}, (63, 0)),
    SlotMappingSpec("nothing live", (0, 0, 0), (4, 5, 6), ((3, 7), (1, 2)), {"block_size": 8}, (_, _, _)),
)


def random_slot_mapping(batch: int, num_tokens: int, width: int, seed: int = 0, **static: int) -> SlotMappingSpec:
    """Random lengths with empty requests and padding, for sizes beyond the interpreter."""
    rng = np.random.default_rng(seed)
    bounds = np.sort(rng.integers(0, num_tokens * 7 // 8 + 1, batch + 1)).astype(np.int32)
    bounds[0] = 0
    span = width // static.get("blocks_per_kv_block", 1) * static.get("blocks_per_kv_block", 1)
    limit = span * static["block_size"] * static.get("cp_world_size", 1)
    return SlotMappingSpec(
        f"random/b{batch}/t{num_tokens}",
        tuple(bounds.tolist()),
        tuple(rng.integers(0, limit, num_tokens).tolist()),
        tuple(map(tuple, rng.integers(1, 9000, (batch, width)).tolist())),
        static,
        interpret=False,
    )
