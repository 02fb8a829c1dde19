"""Known failure cases of this kind of software that no other test meets by name."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxrunner import DeviceRunner, SamplingParams
from jaxrunner.state.block_tables import table_width
from jaxrunner.state.runner_state import host_view
from tests.conftest import load_tiny
from tests.runner.plans import CONFIG, LADDER, both_runners, new, plan, run

PROMPT = [5, 9, 17, 33, 65, 129]


def seeded_tokens(runner, chunks: tuple[int, ...]) -> list[int]:
    params = SamplingParams(temperature=1.0, seed=11, ignore_eos=True)
    first, tokens = [new("a", PROMPT, [1, 2], params)], []
    for count in chunks:
        tokens += run(runner, plan({"a": count}, first))["a"]
        first = []
    for _ in range(5):
        tokens += run(runner, plan({"a": 1}))["a"]
    return tokens


@both_runners
@pytest.mark.parametrize("chunks", [(4, 2), (1, 1, 4), (5, 1)])
def test_k018_a_seed_gives_the_same_tokens_at_every_chunk_size(runner, chunks):
    whole = seeded_tokens(runner, (6,))
    runner.execute_model(plan({}, finished_req_ids={"a"}))
    assert seeded_tokens(runner, chunks) == whole
    assert len(set(whole)) > 1


def test_k030_a_table_has_room_for_the_context_and_the_lookahead(runner):
    """Width for 1024 tokens and one more; and a request that fills its table keeps every id."""
    assert table_width(1024, 16, 1) >= 65
    blocks = list(range(1, 13))
    run(runner, plan({"a": 32}, [new("a", [7] * 96, blocks)]))
    table = host_view(runner.state.tables.block_table[0])
    assert table[runner.rows["a"], :12].tolist() == blocks


def test_k123_nan_debugging_finds_the_operation_and_keeps_the_state():
    """The state is not donated then: an operation that made a NaN is named, not a buffer that is gone."""
    model, weights = load_tiny("llama")
    norm = np.array(weights["norm"])
    norm[3] = np.nan
    broken = weights | {"norm": jax.device_put(norm)}
    with jax.debug_nans(True):
        runner = DeviceRunner(model, weights, CONFIG, ladder=LADDER)
        run(runner, plan({"a": 3}, [new("a", PROMPT[:3], [1])]))
        before = host_view(runner.state.requests.counters)
        state, runner.weights = runner.state, broken
        with pytest.raises(FloatingPointError, match="invalid value") as info:
            runner.execute_model(plan({"a": 1}))
    assert any(entry.name == "rms_norm" for entry in info.traceback)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert (host_view(state.requests.counters) == before).all()
