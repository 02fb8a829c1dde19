"""Many decode steps in one compiled loop: `step` in a `lax.scan` or `lax.while_loop`, stopping rows on the device.

The loop adds no step of its own. In each turn the rows that still run become the batch of an ordinary uniform decode
and those that have stopped become its padding, so what holds for padding (see `jaxrunner.stages.step`) holds for them:
no KV is written, no counter moves, no random bit is taken from another row.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxrunner.compile.buckets import REPORTS, Bucket, Feature, Tier, lowest_tier
from jaxrunner.contract import NO_TOKEN
from jaxrunner.errors import AdmissionError, CapacityError
from jaxrunner.models.model import Model
from jaxrunner.pallas.implementation import Implementation, check
from jaxrunner.sampling.custom import CustomSampling
from jaxrunner.stages.inputs import step_layout
from jaxrunner.stages.step import step
from jaxrunner.state.alive import check_alive
from jaxrunner.state.requests import PARKING_ROW
from jaxrunner.state.runner_state import RunnerState, host_view

Kind = Literal["scan", "while"]
NO_STOP = -1
NO_LIMIT = 2**31 - 1
MOST_CAPABLE: Tier = lowest_tier(Feature.DRAW | Feature.FILTERS | Feature.CONSTRAINTS)
"""The tier that can do whatever any row asks for, but for reports beside the tokens, which the loop does not return."""


class StopReason(enum.IntEnum):
    """Why a row made no more tokens. STEPS: it made one in each step. NOT_DECODABLE: it is empty, or has more than one
    token to run (a prefill). NO_ID_LEFT: its constraints forbid every id, or its
    logits hold a NaN where `Reports.nan_check` makes it fail.
    """

    STEPS = 0
    STOP_TOKEN = 1
    MAX_TOKENS = 2
    MAX_MODEL_LEN = 3
    OUT_OF_BLOCKS = 4
    NOT_DECODABLE = 5
    NO_ID_LEFT = 6


def decode_loop(
    model: Model,
    weights: Any,
    state: RunnerState,
    rows: Sequence[int] | np.ndarray | jax.Array,
    *,
    steps: int,
    logits_processors: Any = (),
    sampler: Any = None,
    stop_token_ids: Sequence[int] | Sequence[Sequence[int]] | np.ndarray | jax.Array | None = None,
    max_tokens: int | Sequence[int] | np.ndarray | jax.Array | None = None,
    kind: Kind = "scan",
    bucket: Bucket | None = None,
    implementation: Implementation = None,
    return_reasons: bool = False,
) -> tuple[Any, ...]:
    """(state, tokens i32[B, steps], counts i32[B]) after up to `steps` decode steps of B rows.

    The tokens are those of `steps` single calls of `step` in the same bucket. Row b made counts[b] of them, the rest of
    tokens[b] is -1. A row stops after a stop id (which is its last token), after max_tokens, when it is max_model_len
    tokens long, or when its reserved blocks are full. With return_reasons a `StopReason` for each row, i32[B], follows.

    state: not donated; call this in your own `jax.jit` with the state donated and the KV cache is updated in place, by
    either kind (without donation there is one more copy of it). No compiler flag is needed; on a GPU the jit's
    `compiler_options=jaxrunner.compiler_options(bucket)` give it the matrix products that an engine's step has.
    rows: distinct state rows with one token to run, i.e. after their prefill; a list or a traced array. Their blocks
    are taken before: `state = jaxrunner.reserve(state, rows, steps)`.
    logits_processors, sampler: as in `step`. The rows that still run stand before those that have stopped, which are
    padding, so such a function knows a request by `context.rows`.
    stop_token_ids: ids for all rows, e.g. model.eos_token_ids, or a list for each row; as an array [S] or [B, S], -1
    for none. max_tokens: of this call, for all rows or each. bucket: the decode bucket to run in, by default the one of
    exactly B rows, at the tier its rows need, or in a trace, where that is not known, at one that covers all.

    kind "scan" always runs `steps` turns and is the one for gradients, vmap and scans of your own. "while" leaves when
    all rows have stopped; it has no reverse mode, and a vmap of it selects the whole KV in each turn: two more copies
    of it for each instance and about ten times the time.
    Several samples of one prompt: fork it and run the forks as rows, which shares the prompt's blocks:
    `state, rows = manual.fork(state, row, n, seeds=range(n), num_tokens=steps)`. A vmap over seeds works as well and
    gives the same tokens, but holds a KV cache for each of them (8 seeds, 8.4 MB of cache: 67 MB).

    Raises CapacityError, unless the state is traced, for a row with fewer blocks than it may need, naming the row;
    AdmissionError for a row that cannot decode. In a trace such a row makes fewer tokens or none, see the reasons.
    """
    check_alive(state)
    check(implementation)
    _check_static(steps, kind, bucket, len(rows))
    stop_ids = _stop_ids(stop_token_ids, len(rows))
    limit = NO_LIMIT if max_tokens is None else max_tokens
    needed = (state.requests.counters, state.tables.num_blocks, state.sampling, rows, limit)
    known = not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(needed))
    tier = MOST_CAPABLE
    if known:
        with jax.ensure_compile_time_eval():  # in a trace, too, these are constants
            _check_rows(state, np.asarray(rows), np.broadcast_to(np.minimum(limit, steps), (len(rows),)))
            tier = _tier(state, rows)
    bucket = bucket or Bucket("decode", len(rows), len(rows), 1, tier)
    traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((weights, state, rows, stop_ids, limit)))
    # In a trace there is no jit around it: a user's function may then close over anything that is being traced.
    run = _run if traced else _compiled_run
    frozen = tuple(implementation.items()) if isinstance(implementation, Mapping) else implementation
    result = run(
        model,
        weights,
        state,
        jnp.asarray(rows, jnp.int32),
        stop_ids,
        jnp.broadcast_to(jnp.asarray(limit, jnp.int32), (len(rows),)),
        steps=steps,
        custom=CustomSampling.of(logits_processors, sampler),
        kind=kind,
        bucket=bucket,
        implementation=frozen,
    )
    return result if return_reasons else result[:3]


class _Carry(NamedTuple):
    """What goes from turn to turn. counts: i32[B], tokens made. stopped, stuck: bool[B], a stop id was sampled, or no
    id was left to sample.
    """

    state: RunnerState
    counts: jax.Array
    stopped: jax.Array
    stuck: jax.Array


def _run(
    model, weights, state, rows, stop_ids, most, *, steps, custom, kind, bucket, implementation
) -> tuple[RunnerState, jax.Array, jax.Array, jax.Array]:
    implementation = dict(implementation) if isinstance(implementation, tuple) else implementation

    def turn(carry: _Carry) -> tuple[_Carry, jax.Array]:
        active = _reasons(carry, rows, most, steps) == StopReason.STEPS
        order = jnp.argsort(~active, stable=True)  # running rows first, in their order
        packed = _decode_upload(carry.state, bucket, rows[order], jnp.sum(active))
        options = {"logits_processors": custom.logits_processors, "sampler": custom.sampler}
        state, output = step(
            model, weights, carry.state, packed, bucket=bucket, implementation=implementation, **options
        )
        token = jnp.zeros_like(rows).at[order].set(output.sampled_token_ids[: len(rows), 0])
        made = active & (token != NO_TOKEN)
        is_stop = made & (token[:, None] == stop_ids).any(axis=1)
        return _Carry(state, carry.counts + made, carry.stopped | is_stop, carry.stuck | (active & ~made)), token

    start = _Carry(state, jnp.zeros_like(rows), jnp.zeros(rows.shape, bool), jnp.zeros(rows.shape, bool))
    if kind == "scan":
        end, tokens = lax.scan(lambda carry, _: turn(carry), start, length=steps)
        tokens = tokens.T
    else:
        end, tokens = _while(turn, start, rows, most, steps)
    return end.state, tokens, end.counts, _reasons(end, rows, most, steps)


_compiled_run = functools.partial(
    jax.jit, static_argnames=("model", "steps", "custom", "kind", "bucket", "implementation")
)(_run)


def _while(turn, start: _Carry, rows: jax.Array, most: jax.Array, steps: int) -> tuple[_Carry, jax.Array]:
    """`turn` until no row runs or `steps` turns are done."""
    first = (jnp.int32(0), start, jnp.full((len(rows), steps), NO_TOKEN, jnp.int32))

    def more(loop):
        i, carry, _ = loop
        return (i < steps) & (_reasons(carry, rows, most, steps) == StopReason.STEPS).any()

    def body(loop):
        i, carry, tokens = loop
        carry, token = turn(carry)
        return i + 1, carry, lax.dynamic_update_slice_in_dim(tokens, token[:, None], i, axis=1)

    _, end, tokens = lax.while_loop(more, body, first)
    return end, tokens


def _reasons(carry: _Carry, rows: jax.Array, most: jax.Array, steps: int) -> jax.Array:
    """i32[B]: STEPS for a row that can run another step (or needs none), else why not: the first reason that holds."""
    state, made = carry.state, carry.counts > 0
    exists = (rows > PARKING_ROW) & (rows < state.requests.num_rows)
    at = jnp.where(exists, rows, PARKING_ROW)
    total_len, computed = state.requests.total_len[at], state.requests.num_computed_tokens[at]
    room = _room(state)[at]
    cases = [
        (carry.stopped, StopReason.STOP_TOKEN),
        (carry.stuck, StopReason.NO_ID_LEFT),
        (~made & ~(exists & (total_len == computed + 1)), StopReason.NOT_DECODABLE),
        (carry.counts >= most, StopReason.MAX_TOKENS),
        (carry.counts >= steps, StopReason.STEPS),
        (total_len >= state.max_model_len, StopReason.MAX_MODEL_LEN),
        (computed >= room, StopReason.OUT_OF_BLOCKS),
    ]
    return jnp.select([case for case, _ in cases], [jnp.int32(r) for _, r in cases], jnp.int32(StopReason.STEPS))


def _room(state: RunnerState) -> jax.Array:
    """i32[R]: tokens that the blocks of each row hold, in the group that has the fewest."""
    sizes = jnp.asarray([g.block_size for g in state.tables.groups], jnp.int32)
    return jnp.min(state.tables.num_blocks * sizes, axis=1)


def _decode_upload(state: RunnerState, bucket: Bucket, rows: jax.Array, num_reqs: jax.Array) -> jax.Array:
    """The upload of `StepInput.pack` for a decode of the first `num_reqs` rows without new blocks, from the device."""
    values = {
        "num_reqs": num_reqs,
        "idx_mapping": jnp.pad(rows, (0, bucket.num_reqs - len(rows))),
        "query_start_loc": jnp.minimum(jnp.arange(bucket.num_reqs + 1), num_reqs),
    }
    return step_layout(bucket, state.tables.groups, state.num_draft_tokens).assemble(values)


def _tier(state: RunnerState, rows: Any) -> Tier:
    wanted = int(np.bitwise_or.reduce(host_view(state.sampling.features)[np.asarray(rows)]))
    return lowest_tier(wanted & ~REPORTS)


def _stop_ids(ids: Any, num_rows: int) -> jax.Array:
    """i32[B, S], padded with an id that is never sampled."""
    if ids is None:
        return jnp.zeros((num_rows, 0), jnp.int32)
    if isinstance(ids, list | tuple) and ids and isinstance(ids[0], list | tuple):
        if len(ids) != num_rows:
            raise AdmissionError(f"stop_token_ids for {len(ids)} rows, but {num_rows} rows are decoded")
        width = max(map(len, ids))
        ids = np.array([[*row, *[NO_STOP] * (width - len(row))] for row in ids], np.int32).reshape(num_rows, width)
    array = jnp.asarray(ids, jnp.int32)
    # -1 is also what a row that does not run "samples"; only running rows are compared.
    return jnp.broadcast_to(array, (num_rows, array.shape[-1]))


def _check_static(steps: int, kind: str, bucket: Bucket | None, num_rows: int) -> None:
    if steps < 1 or num_rows < 1:
        raise AdmissionError(f"{steps} steps of {num_rows} rows; both must be at least 1")
    if kind not in ("scan", "while"):
        raise AdmissionError(f"kind is {kind!r}; use 'scan' or 'while'")
    if bucket is not None and (bucket.kind != "decode" or bucket.query_len != 1 or bucket.num_reqs < num_rows):
        raise CapacityError(f"{bucket} is not a decode bucket with one token for each of {num_rows} rows")


def _check_rows(state: RunnerState, rows: np.ndarray, most: np.ndarray) -> None:
    """Raises for rows that cannot decode, or whose blocks end before `most` tokens (or max_model_len) are reached."""
    total_len = host_view(state.requests.total_len)
    computed = host_view(state.requests.num_computed_tokens)
    room = host_view(_room(state))
    if len(set(rows.tolist())) != len(rows):
        raise AdmissionError(f"a row is named twice: {rows.tolist()}")
    for row, tokens in zip(rows, most, strict=True):
        if not PARKING_ROW < row < len(total_len) or total_len[row] == 0:
            raise AdmissionError(f"row {row} holds no request; live rows are {np.flatnonzero(total_len).tolist()}")
        if (due := total_len[row] - computed[row]) != 1:
            raise AdmissionError(f"row {row} has {due} tokens to run: finish its prefill with `step` first")
        tokens = min(int(tokens), state.max_model_len - int(total_len[row]))
        if (have := int(room[row] - computed[row])) < tokens:
            raise CapacityError(
                f"row {row} has blocks for {max(have, 0)} more token(s), {tokens} may be decoded; before the loop: "
                f"state = jaxrunner.reserve(state, rows, {tokens})"
            )
