"""`audit`: passes on states that steps make, and names each invariant that is broken."""

from __future__ import annotations

import copy
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import audit, init_state
from jaxrunner.errors import InvariantError
from tests.stages import harness

SAMPLED, PREFILL, FREE = 3, 5, 6


@functools.cache
def _sound():
    """A host description with one row that has sampled and one in prefill, over two groups."""
    model, _ = harness.tiny("llama", (8, None, 8))
    host = harness.empty_host(model, rows=7, max_model_len=48, num_blocks=20)
    rows = {SAMPLED: (4, 6, 21, 20), PREFILL: (17, 17, 17, 5)}
    for row, (prompt, prefill, total, computed) in rows.items():
        host.prompt_len[row], host.prefill_len[row] = prompt, prefill
        host.total_len[row], host.num_computed_tokens[row] = total, computed
    for g, first in enumerate((1, 11)):
        host.num_blocks[SAMPLED, g], host.num_blocks[PREFILL, g] = 2, 1
        host.block_table[g][SAMPLED, :2] = first, first + 1
        host.block_table[g][PREFILL, 0] = first + 2
    return host


def sound():
    return copy.deepcopy(_sound())


def test_a_sound_state_passes():
    audit(harness.to_state(sound()))


def set_to(field, row, value):
    def change(host):
        getattr(host, field)[row] = value

    return change


def set_table(g, row, column, block):
    def change(host):
        host.block_table[g][row, column] = block

    return change


BROKEN = {
    "parking counters": (set_to("num_computed_tokens", 0, 1), r"parking row of requests\.counters"),
    "parking tokens": (set_to("token_ids", 0, 1), r"parking row of requests\.token_ids"),
    "parking sampling": (set_to("params", (0, 2), 1), r"parking row of sampling\.params"),
    "parking table": (set_table(1, 0, 3, 7), r"parking row of tables\.block_table\[1\]"),
    "parking blocks": (set_to("num_blocks", (0, 1), 1), r"parking row of tables\.num_blocks"),
    "prompt longer than prefill": (set_to("prompt_len", SAMPLED, 7), "row 3 are out of order"),
    "prefill longer than total": (set_to("prefill_len", PREFILL, 18), "row 5 are out of order"),
    "no prompt": (set_to("prompt_len", PREFILL, 0), "row 5 are out of order"),
    "computed reaches total": (set_to("num_computed_tokens", PREFILL, 17), "row 5 are out of order"),
    "computed below zero": (set_to("num_computed_tokens", PREFILL, -1), "row 5 are out of order"),
    "past the context": (set_to("total_len", PREFILL, 50), "row 5 are out of order"),
    "a token without KV": (set_to("num_computed_tokens", SAMPLED, 19), "row 3 has sampled.*total_len must be"),
    "too few blocks": (set_to("num_blocks", (SAMPLED, 1), 1), "row 3 computed 20 tokens with 1 blocks"),
    "the null block": (set_table(0, SAMPLED, 1, 0), r"group 0 holds a block outside 1\.\.19"),
    "past the pool": (set_table(1, PREFILL, 0, 20), r"group 1 holds a block outside 1\.\.19"),
    "two rows": (set_table(1, PREFILL, 0, 12), "block of group 1 belongs to two"),
    "twice in a row": (set_table(0, SAMPLED, 0, 2), "block of group 0 belongs to two"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_each_broken_invariant_is_named(name):
    change, message = BROKEN[name]
    host = sound()
    change(host)
    with pytest.raises(InvariantError, match=message):
        audit(harness.to_state(host))


def test_shared_blocks_are_allowed_when_asked_for():
    """A block that is full in both rows, at the same column and behind equal tokens."""
    host = sound()
    set_table(1, PREFILL, 0, 11)(host)
    set_to("num_computed_tokens", PREFILL, 16)(host)
    state = harness.to_state(host)
    audit(state, shared_blocks=True)
    with pytest.raises(InvariantError, match="block of group 1 belongs to two"):
        audit(state)


WRONGLY_SHARED = {
    "not full": ({}, r"block 11 of group 1, shared by rows \[3, 5\], ends at token 16, but row 5 computed 5: not full"),
    "other tokens": ({"computed": 16, "token": 9}, r"block 11 of group 1, .* holds tokens 0\.\.15 of rows"),
    "another column": ({"computed": 16, "block": 12}, r"block 12 of group 1, .* is at columns \[1, 0\]"),
    "twice in a row": ({"computed": 16, "block": 13, "column": 1}, r"block 13 .* at columns \[0, 1\]"),
}


@pytest.mark.parametrize("name", WRONGLY_SHARED)
def test_blocks_that_may_not_be_shared(name):
    """Row 3 holds blocks 11 and 12 of group 1, row 5 block 13."""
    change, message = WRONGLY_SHARED[name]
    host = sound()
    host.num_computed_tokens[PREFILL] = change.get("computed", 5)
    host.token_ids[PREFILL, 15] = change.get("token", 0)
    column = change.get("column", 0)
    host.num_blocks[PREFILL, 1] = column + 1
    set_table(1, PREFILL, column, change.get("block", 11))(host)
    with pytest.raises(InvariantError, match=message):
        audit(harness.to_state(host), shared_blocks=True)


def test_columns_that_are_not_in_use_are_not_looked_at():
    host = sound()
    host.block_table[0][SAMPLED, 2:] = -5
    host.block_table[1][FREE] = 1
    audit(harness.to_state(host))


@pytest.mark.parametrize("name", ["drafts", "extra"])
def test_the_parking_row_of_optional_arrays_is_checked(name):
    model, _ = harness.tiny("llama")
    state = init_state(model, max_requests=3, max_model_len=32, num_blocks=4, num_draft_tokens=2)
    state = state.replace(extras={"extra": jnp.zeros((4, 2), jnp.float32)})
    audit(state)
    if name == "drafts":
        drafts = state.requests.draft_tokens.at[0, 1].set(3)
        state = state.replace(requests=state.requests.replace(draft_tokens=drafts))
    else:
        state = state.replace(extras={"extra": jnp.asarray(np.eye(4, 2, dtype=np.float32))})
    with pytest.raises(InvariantError, match="parking row of .*" + name.removesuffix("s")):
        audit(state)
