"""The admit executable: whole rows, prompts and long tables go up here, so that a steady step never pays for them.

An entry names a row and rewrites all of it (every per-row field, the drafts, the number of blocks) or, with
`write_record` 0, leaves the record and only adds tokens or blocks. Releasing a request is an entry of zeros.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner.errors import InvariantError
from jaxrunner.state.block_writes import apply_block_writes, check_block_writes, no_block_writes
from jaxrunner.state.codec import Layout
from jaxrunner.state.fields import RECORD_WIDTH, REQUEST_FIELDS
from jaxrunner.state.request_arrays import ArraySets, from_words, num_words, to_words
from jaxrunner.state.request_lists import NO_WRITES
from jaxrunner.state.runner_state import RunnerState

ENTRIES_PER_CALL = 16
ARRAY_WORDS_PER_CALL = 8192
"""Words of request arrays that an admit executable takes up at most, unless one request alone has more."""


@dataclasses.dataclass
class AdmitEntry:
    """row: state row. record: i32[RECORD_WIDTH] or None to leave it. tokens: known ids from position 0 on.

    block_writes: i32[N, 4], see `jaxrunner.state.block_writes`. list_writes: i32[N, 2], see
    `jaxrunner.state.request_lists`; only with a record, which empties all lists of the row. arrays: name -> row of
    `state.extras`, see `jaxrunner.state.request_arrays`; only with a record, which zeroes all others.
    """

    row: int
    record: np.ndarray | None = None
    tokens: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    block_writes: np.ndarray = dataclasses.field(default_factory=no_block_writes)
    list_writes: np.ndarray = dataclasses.field(default_factory=lambda: NO_WRITES)
    arrays: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)


ARRAYS = "extras/"
"""Before the name of an array, that of its section."""


def release_entry(row: int) -> AdmitEntry:
    """The entry that empties a row."""
    return AdmitEntry(row, record=np.zeros(RECORD_WIDTH, np.int32))


def admit_layout(
    num_tokens: int,
    num_blocks: int,
    entries: int = ENTRIES_PER_CALL,
    *,
    num_list_writes: int = 0,
    custom: ArraySets = (),
) -> Layout:
    """Room for so many tokens, block writes and list writes of all entries together. custom: the state's, of whose
    arrays there is room for as many entries as `entries_with_arrays` says."""
    room = entries_with_arrays(custom)
    arrays = [(ARRAYS + name, (room, words)) for name, words in num_words(custom).items()]
    return Layout(
        (
            ("num_block_writes", ()),
            ("num_entries", ()),
            ("row", (entries,)),
            ("write_record", (entries,)),
            ("record", (entries, RECORD_WIDTH)),
            ("token_end", (entries,)),
            ("tokens", (num_tokens,)),
            ("block_writes", (num_blocks, 4)),
            ("num_list_writes", ()),
            ("list_writes", (num_list_writes, 3)),
            *([("array_row", (room,)), *arrays] if arrays else []),
        )
    )


def entries_with_arrays(custom: ArraySets) -> int:
    """Entries with request arrays that one call takes."""
    return max(1, min(ENTRIES_PER_CALL, ARRAY_WORDS_PER_CALL // max(1, sum(num_words(custom).values()))))


def pack_admit(layout: Layout, entries: list[AdmitEntry]) -> np.ndarray:
    """One upload for up to ENTRIES_PER_CALL entries. Raises CapacityError when something of them does not fit."""
    rewritten = [e.row for e in entries if e.record is not None]
    if len(set(rewritten)) != len(rewritten):
        raise InvariantError("two entries of one call rewrite the same row; their order would be undefined")
    if any((len(e.list_writes) or e.arrays) and e.record is None for e in entries):
        raise InvariantError("an entry writes lists or arrays without a record; the others of its row would stay")
    writes = np.concatenate([e.block_writes for e in entries] or [no_block_writes()])
    lists = [np.insert(e.list_writes, 0, e.row, axis=1) for e in entries if len(e.list_writes)]
    check_block_writes(writes)
    zero = np.zeros(RECORD_WIDTH, np.int32)
    with_arrays = [e for e in entries if e.arrays]
    names = dict.fromkeys(name for e in with_arrays for name in e.arrays)
    arrays = {ARRAYS + name: np.stack([to_words(e.arrays[name]) for e in with_arrays]) for name in names}
    return layout.pack(
        {
            "num_block_writes": len(writes),
            "num_entries": len(entries),
            "row": [e.row for e in entries],
            "write_record": [int(e.record is not None) for e in entries],
            "record": np.stack([zero if e.record is None else e.record for e in entries]),
            "token_end": np.cumsum([len(e.tokens) for e in entries]),
            "tokens": np.concatenate([e.tokens for e in entries]),
            "block_writes": writes,
            "num_list_writes": sum(map(len, lists)),
            "list_writes": np.concatenate(lists or [np.zeros((0, 3), np.int32)]),
            **({"array_row": [e.row for e in with_arrays], **arrays} if arrays else {}),
        }
    )


def apply_admit(state: RunnerState, packed: jax.Array, *, layout: Layout) -> RunnerState:
    """The state with the entries of `packed` (i32[layout.size]) applied. Pure; the runner donates `state`."""
    part = layout.unpack(packed)
    out_of_range = state.requests.num_rows
    num_entries, capacity = part["row"].shape[0], part["tokens"].shape[0]
    live = jnp.arange(num_entries) < part["num_entries"]
    rewritten = jnp.where(live & (part["write_record"] == 1), part["row"], out_of_range)
    width = len(REQUEST_FIELDS)

    requests, sampling, tables = state.requests, state.sampling, state.tables
    requests = requests.replace(counters=requests.counters.at[rewritten].set(part["record"][:, :width], mode="drop"))
    sampling = sampling.replace(params=sampling.params.at[rewritten].set(part["record"][:, width:], mode="drop"))
    if sampling.lists is not None:
        writes = part["list_writes"]
        written = jnp.where(jnp.arange(len(writes)) < part["num_list_writes"], writes[:, 0], out_of_range)
        lists = sampling.lists.at[rewritten].set(0, mode="drop")
        sampling = sampling.replace(lists=lists.at[written, writes[:, 1]].set(writes[:, 2], mode="drop"))
    tables = tables.replace(num_blocks=tables.num_blocks.at[rewritten].set(0, mode="drop"))
    if requests.draft_tokens is not None:
        requests = requests.replace(draft_tokens=requests.draft_tokens.at[rewritten].set(0, mode="drop"))

    index = jnp.arange(capacity, dtype=jnp.int32)
    ends = jnp.where(live, part["token_end"], jnp.iinfo(jnp.int32).max)
    entry = jnp.minimum(jnp.searchsorted(ends, index, side="right", method="compare_all"), num_entries - 1)
    start = jnp.where(entry > 0, part["token_end"][entry - 1], 0)
    total = part["token_end"][jnp.maximum(part["num_entries"] - 1, 0)]
    row = jnp.where((index < total) & (part["num_entries"] > 0), part["row"][entry], out_of_range)
    token_ids = requests.token_ids.at[row, index - start].set(part["tokens"], mode="drop")

    extras = {
        name: value.at[rewritten].set(jnp.zeros((), value.dtype), mode="drop") for name, value in state.extras.items()
    }
    if "array_row" in part:
        row = jnp.where(part["array_row"] > 0, part["array_row"], out_of_range)
        for section, words in part.items():
            if section.startswith(ARRAYS):
                old = extras[name := section.removeprefix(ARRAYS)]
                extras[name] = old.at[row].set(from_words(words, old.shape[1:], old.dtype), mode="drop")
    return state.replace(
        requests=requests.replace(token_ids=token_ids),
        sampling=sampling,
        tables=apply_block_writes(tables, part["block_writes"], part["num_block_writes"]),
        extras=extras,
    )
