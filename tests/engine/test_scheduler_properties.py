"""Random lives of requests: whatever is added, aborted, preempted or late, every request gets its continuation."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrunner import SamplingParams
from jaxrunner.engine.request import Request
from tests.engine.driver import Engine
from tests.oracle.runner import continuation

ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 3), st.integers(1, 30), st.integers(1, 20), st.integers(-1, 1)),
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.tuples(st.just("resubmit"), st.integers(0, 30), st.integers(1, 20)),
        st.tuples(st.just("replace"), st.integers(0, 30), st.integers(1, 20)),
        st.tuples(st.just("steps"), st.integers(1, 6)),
    ),
    min_size=1,
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(
    actions=ACTIONS,
    depth=st.integers(0, 2),
    num_blocks=st.sampled_from([14, 20, 60]),
    budget=st.sampled_from([4, 9, 32]),
    prefix_caching=st.booleans(),
)
def test_random_lives(actions, depth, num_blocks, budget, prefix_caching):
    engine = Engine(depth=depth, max_num_seqs=4, budget=budget, num_blocks=num_blocks, prefix_caching=prefix_caching)
    alive: dict[str, Request] = {}
    count = 0

    def prompt_of(family: int, length: int) -> list[int]:
        return [family] * length  # prompts of one family share prefixes

    for action in actions:
        names = sorted(alive)
        if action[0] == "add":
            _, family, length, max_tokens, priority = action
            alive[f"r{count}"] = engine.add(f"r{count}", prompt_of(family, length), max_tokens, priority=priority)
            count += 1
        elif action[0] == "steps":
            for _ in range(action[1]):
                engine.step()
        elif names:
            name = names[action[1] % len(names)]
            unfinished = alive[name].finish_reason is None
            if action[0] == "abort":
                engine.scheduler.abort(name)
                del alive[name]
            elif action[0] == "resubmit":
                engine.scheduler.abort(name)
                alive[name] = engine.add(name, prompt_of(7, action[2]), 5)
            elif unfinished:
                request = Request(name, prompt_of(6, action[2]), SamplingParams(temperature=0.0, max_tokens=4))
                engine.scheduler.replace(request)
                alive[name] = request
    engine.run()
    for request in alive.values():
        expected = continuation(request.prompt_token_ids, request.max_tokens(64))
        assert request.output_token_ids == expected, request.request_id
