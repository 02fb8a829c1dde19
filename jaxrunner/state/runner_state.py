"""`RunnerState`: all that one step reads and rewrites, as one immutable pytree."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxrunner.errors import AdmissionError
from jaxrunner.models.model import Model
from jaxrunner.sampling.custom import CustomSampling
from jaxrunner.state.block_tables import BlockTables, KVGroup, table_width
from jaxrunner.state.fields import REQUEST_FIELDS, SAMPLING_FIELDS
from jaxrunner.state.kv_cache import KVCache
from jaxrunner.state.kv_dtype import kv_dtype
from jaxrunner.state.kv_scales import Scales, initial_scales
from jaxrunner.state.reports import DEFAULT_REPORTS, Reports
from jaxrunner.state.request_arrays import current, empty_extras
from jaxrunner.state.request_lists import DEFAULT_LIST_SIZES, ListSizes
from jaxrunner.state.requests import RequestState
from jaxrunner.state.sampling import SamplingState, ThinkingTokens

MAX_INT32 = 2**31 - 1


class RunnerState(struct.PyTreeNode):
    """requests, tables, sampling, kv: see their modules. extras: further per-row arrays by name, among them those of
    the user's logits processors and sampler (`jaxrunner.state.request_arrays`).

    A state is a value: keeping one and stepping from it again replays the step. Once a runner that donates has
    consumed it, it is gone (`DonatedStateError`).
    """

    requests: RequestState
    tables: BlockTables
    sampling: SamplingState
    kv: KVCache
    extras: dict[str, Any] = struct.field(default_factory=dict)

    @property
    def max_requests(self) -> int:
        """Requests it can hold: all rows but the parking row."""
        return self.requests.num_rows - 1

    @property
    def max_model_len(self) -> int:
        return self.requests.max_model_len

    @property
    def request_values(self) -> dict[str, jax.Array]:
        """Values of the arrays of the user's logits processors and sampler now, "owner.array" -> [R, *shape]."""
        requests = self.requests
        return current(self.extras, self.sampling.custom, jnp.arange(requests.num_rows), requests.total_len)

    @property
    def num_draft_tokens(self) -> int:
        drafts = self.requests.draft_tokens
        return 0 if drafts is None else drafts.shape[1]


def init_state(
    model: Model,
    *,
    max_requests: int,
    max_model_len: int,
    num_blocks: int | tuple[int, ...],
    block_size: int = 16,
    blocks_per_kv_block: int = 1,
    kv_cache_dtype: str | None = None,
    kv_scales: Scales | None = None,
    num_draft_tokens: int = 0,
    list_sizes: ListSizes = DEFAULT_LIST_SIZES,
    thinking: ThinkingTokens | None = None,
    reports: Reports = DEFAULT_REPORTS,
    logits_processors: Any = (),
    sampler: Any = None,
    groups: tuple[KVGroup, ...] | None = None,
) -> RunnerState:
    """An empty state.

    max_requests: requests that can be in it at a time (one more row is kept for padding).
    max_model_len: most tokens of a request, prompt and outputs together.
    num_blocks: kernel blocks of each group's cache, the null block included; one number for all groups or one each.
    block_size: tokens in a kernel block. blocks_per_kv_block: kernel blocks in a block of the allocator.
    kv_cache_dtype: dtype of the cache: "auto" (the model's, as None), "float32", "bfloat16", "float16", or "fp8"
    ("fp8_e4m3", "float8_e4m3fn"), which halves the memory of bfloat16.
    kv_scales: of an fp8 cache, [layers, 2], see `jaxrunner.state.kv_scales`; by default the checkpoint's, or else 1.
    num_draft_tokens: K, width of the draft table.
    list_sizes: how many stop ids, biases, allowed ids, ... a request may bring. thinking: how the model marks its
    thinking, for requests with a thinking budget. reports: what steps give beside tokens.
    logits_processors, sampler: functions of your own that will run over this state, see `jaxrunner.sampling.custom`;
    it holds the arrays that they declare.
    groups: how layers share block tables; by default one group for each distinct sliding window.

    Every leaf is an array of its own, so the whole state may be donated. Raises AdmissionError for sizes that cannot
    work, with the limit in the message.
    """
    check_sizes(model, max_requests, max_model_len, block_size, blocks_per_kv_block)
    groups = groups or default_groups(model, block_size=block_size, blocks_per_kv_block=blocks_per_kv_block)
    rows, custom = max_requests + 1, CustomSampling.of(logits_processors, sampler).declared
    widths = [table_width(max_model_len, g.block_size, num_draft_tokens + 1) for g in groups]
    return RunnerState(
        requests=RequestState(
            token_ids=jnp.zeros((rows, max_model_len), jnp.int32),
            counters=jnp.zeros((rows, len(REQUEST_FIELDS)), jnp.int32),
            draft_tokens=jnp.zeros((rows, num_draft_tokens), jnp.int32) if num_draft_tokens else None,
        ),
        tables=BlockTables(
            block_table=tuple(jnp.zeros((rows, w), jnp.int32) for w in widths),
            num_blocks=jnp.zeros((rows, len(groups)), jnp.int32),
            groups=groups,
        ),
        sampling=SamplingState(
            params=jnp.zeros((rows, len(SAMPLING_FIELDS)), jnp.int32),
            lists=jnp.zeros((rows, list_sizes.width), jnp.int32),
            sizes=list_sizes,
            thinking=thinking,
            reports=reports,
            custom=custom,
        ),
        kv=init_kv_cache(model, groups, num_blocks, kv_cache_dtype=kv_cache_dtype, kv_scales=kv_scales),
        extras=empty_extras(custom, rows),
    )


def default_groups(model: Model, *, block_size: int = 16, blocks_per_kv_block: int = 1) -> tuple[KVGroup, ...]:
    """One group for each distinct sliding window."""
    return tuple(
        KVGroup(layers, model.layers[layers[0]].window, block_size, blocks_per_kv_block) for layers in model.kv_groups
    )


def init_kv_cache(
    model: Model,
    groups: tuple[KVGroup, ...],
    num_blocks: int | tuple[int, ...],
    *,
    kv_cache_dtype: str | None = None,
    kv_scales: Scales | None = None,
) -> KVCache:
    """An empty cache. The arguments are those of `init_state`, and so are the errors."""
    counts = (num_blocks,) * len(groups) if isinstance(num_blocks, int) else tuple(num_blocks)
    if len(counts) != len(groups):
        raise AdmissionError(f"num_blocks has {len(counts)} entries but this model has {len(groups)} KV-cache groups")
    for count, group in zip(counts, groups, strict=True):
        _check_blocks(count, group)
    dtype = kv_dtype(kv_cache_dtype, model.dtype)
    return KVCache(
        blocks=tuple(
            jnp.zeros((len(g.layers), 2, n, g.block_size, model.num_kv_heads, model.head_dim), dtype)
            for n, g in zip(counts, groups, strict=True)
        ),
        scales=initial_scales(dtype, kv_scales, model.kv_scales, model.num_layers, groups),
    )


def check_sizes(model: Model, max_requests: int, max_model_len: int, block_size: int, per_kv_block: int) -> None:
    """Raises AdmissionError for sizes that no state can have."""
    if max_requests < 1:
        raise AdmissionError(f"max_requests is {max_requests}; at least 1 is needed")
    if not 1 <= max_model_len <= model.max_position_embeddings:
        raise AdmissionError(
            f"max_model_len is {max_model_len}; this model's positions end at {model.max_position_embeddings}. "
            "Ask for less, or load the model with a larger max_position_embeddings and a rope scaling that covers it."
        )
    if block_size < 1 or per_kv_block < 1:
        raise AdmissionError(f"block_size {block_size} and blocks_per_kv_block {per_kv_block} must be at least 1")


def _check_blocks(num_blocks: int, group: KVGroup) -> None:
    limit = MAX_INT32 // group.block_size
    if not 2 <= num_blocks <= limit:
        raise AdmissionError(
            f"num_blocks is {num_blocks}; with block_size {group.block_size} it must lie in 2..{limit}: block 0 is the "
            "null block, and a slot number has 32 bits. Use larger blocks to address more tokens."
        )


def host_view(array: Any) -> np.ndarray:
    """A host copy of a small state array. A copy, since a live view of a leaf would silently stop its donation."""
    return np.array(array)
