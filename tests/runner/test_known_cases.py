"""Known failure cases of this kind of software that no other test meets by name."""

from __future__ import annotations

import pytest

from jaxrunner import SamplingParams
from jaxrunner.state.block_tables import table_width
from jaxrunner.state.runner_state import host_view
from tests.runner.plans import new, plan, run

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
