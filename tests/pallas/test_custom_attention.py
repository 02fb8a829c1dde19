"""A user's own attention in every place that takes an implementation, and what is refused."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrunner
from jaxrunner import LLM, Bucket, DeviceRunner, Ladder, RunnerConfig, SamplingParams
from jaxrunner.errors import ImplementationError
from jaxrunner.pallas.attention import attention_xla
from jaxrunner.pallas.custom_attention import described, from_described, name_of
from jaxrunner.pallas.implementation import choice_table, resolve
from jaxrunner.recorder import FlightRecorder, replay
from tests.conftest import GOLDEN, load_tiny
from tests.pallas import user_attentions as users
from tests.runner.plans import new, plan, run

TINY = str(GOLDEN / "tiny" / "llama")
PROMPT = [3, 14, 15, 9, 26]
CALLS: list[int | None] = []


def counted(q, blocks, layer, metadata, **options):
    """Notes the query length of each trace."""
    CALLS.append(metadata.query_len)
    return users.dense(q, blocks, layer, metadata, **options)


def counted_anew():
    """The same as a new function, which no earlier test has compiled."""
    return functools.wraps(counted)(lambda *args, **options: counted(*args, **options))


@dataclasses.dataclass(frozen=True)
class Configured:
    """An attention with a setting, as a hashable object."""

    ahead: int

    def __call__(self, *args, **options):
        return users.dense(*args, ahead=self.ahead, **options)


@pytest.fixture(autouse=True)
def _forget_calls():
    CALLS.clear()


@pytest.mark.parametrize("mapping", [False, True])
def test_the_engine_gives_the_same_tokens(mapping):
    implementation = {"attention": counted_anew()} if mapping else counted_anew()
    sizes = dict(max_model_len=64, max_num_seqs=2, max_num_batched_tokens=16, num_blocks=24)
    params = SamplingParams(temperature=0, max_tokens=6)
    expected = LLM(TINY, implementation="xla", **sizes).generate([PROMPT], params)[0].outputs[0].token_ids
    llm = LLM(TINY, implementation=implementation, **sizes)
    assert llm.generate([PROMPT], params)[0].outputs[0].token_ids == expected
    assert {None, 1} <= set(CALLS)  # the ragged prefill and the decode
    assert str(llm.runner.table).endswith(f"; attention by {name_of(counted)}")


@pytest.mark.parametrize("kind", ["scan", "while"])
def test_step_and_decode_loop_give_the_same_tokens(kind):
    model, weights = load_tiny("llama")

    def tokens(implementation):
        state = jaxrunner.init_state(model, max_requests=3, max_model_len=64, num_blocks=24)
        state, rows = jaxrunner.admit(state, [PROMPT])
        inputs = jaxrunner.plan(state, {rows[0]: len(PROMPT)})
        bucket = Bucket("mixed", 8, 1, 8)
        state, output = jaxrunner.step(model, weights, state, inputs, bucket=bucket, implementation=implementation)
        state = jaxrunner.reserve(state, rows, 5)
        state, rest, _ = jaxrunner.decode_loop(
            model, weights, state, rows, steps=5, kind=kind, implementation=implementation
        )
        return [int(output.sampled_token_ids[0, 0]), *np.asarray(rest[0]).tolist()]

    assert tokens({"attention": counted_anew()}) == tokens("xla")
    assert {None, 1} <= set(CALLS)
    assert tokens(Configured(0)) == tokens("xla")


def test_a_wrong_attention_is_not_replaced_by_a_right_one():
    """Its fault shows in the hidden states, so it was what ran."""
    model, weights = load_tiny("llama")
    state = jaxrunner.init_state(model, max_requests=3, max_model_len=64, num_blocks=24)
    state, rows = jaxrunner.admit(state, [PROMPT])
    inputs = jaxrunner.plan(state, {rows[0]: len(PROMPT)})
    hidden = [
        jaxrunner.step(
            model, weights, state, inputs, bucket=Bucket("mixed", 8, 1, 8), implementation=f, return_hidden=True
        )[1].hidden[: len(PROMPT)]
        for f in ("xla", Configured(0), Configured(1))
    ]
    np.testing.assert_allclose(hidden[1], hidden[0], atol=1e-4)
    assert np.abs(hidden[2] - hidden[0]).max() > 1e-2


def test_a_runner_records_its_name_and_a_replay_finds_it(tmp_path):
    model, weights = load_tiny("llama")
    config = RunnerConfig(2, 64, 16, 24, 8, implementation={"attention": counted, "kv_write": "xla"})
    ladder = Ladder(decode=(2,), mixed=(16,), finish=(2,), tiers=("greedy",))
    runner = DeviceRunner(model, weights, config, ladder=ladder)
    with FlightRecorder(runner, tmp_path / "r"):
        run(runner, plan({"a": 5}, [new("a", PROMPT, [1, 2])]))
        run(runner, plan({"a": 1}))
    assert name_of(counted) in (tmp_path / "r" / "segment-000000" / "calls.jsonl").read_text()
    CALLS.clear()
    jax.clear_caches()
    assert replay(tmp_path / "r", model, weights).exact
    assert CALLS


def test_names():
    assert name_of(users.off_by_one) == "tests.pallas.user_attentions:dense"
    assert name_of(Configured(1)) == f"{__name__}:Configured"
    assert described({"attention": counted, "kv_write": "xla"}) == {"attention": name_of(counted), "kv_write": "xla"}
    for value in (None, "xla", {"kv_write": "xla"}, counted, {"attention": counted}):
        assert from_described(described(value)) == value

    def local(*args, **options): ...

    with pytest.raises(ImplementationError, match="has no function"):
        from_described(described(local))


def test_a_function_leaves_the_other_ops_at_their_automatic_choice():
    for op in ("input_prep", "kv_write", "rope_kv_write", "slot_mapping"):
        assert resolve(op, counted) == resolve(op, None)
        assert resolve(op, {"attention": counted}) == resolve(op, None)


class Unhashable:
    __hash__ = None

    def __call__(self, *args, **options):
        return attention_xla(*args, **options)


@pytest.mark.parametrize(
    ("implementation", "message"),
    [
        ({"kv_write": counted}, "only attention takes a function"),
        ({"atention": counted}, "no op is called"),
        (Unhashable(), "must be hashable"),
        ({"attention": users.without_sinks}, "unexpected keyword argument 'sinks'"),
        (users.wrong_shape, r"gave float32\[8, 16\], not the shape and type of q"),
    ],
)
def test_what_is_refused(implementation, message):
    model, weights = load_tiny("llama")
    state = jaxrunner.init_state(model, max_requests=3, max_model_len=64, num_blocks=24)
    state, rows = jaxrunner.admit(state, [PROMPT])
    inputs = jaxrunner.plan(state, {rows[0]: len(PROMPT)})
    with pytest.raises(ImplementationError, match=message):
        jaxrunner.step(model, weights, state, inputs, bucket=Bucket("mixed", 8, 1, 8), implementation=implementation)


def test_an_unhashable_function_is_refused_by_the_loop_as_well():
    model, weights = load_tiny("llama")
    state = jaxrunner.init_state(model, max_requests=3, max_model_len=64, num_blocks=24)
    with pytest.raises(ImplementationError, match="must be hashable"):
        jaxrunner.decode_loop(model, weights, state, jnp.array([1]), steps=2, implementation=Unhashable())


def test_the_table_of_choices_names_every_implementation():
    assert "triton" in choice_table()
    assert "8.0 or newer, not 9.0" in choice_table()
