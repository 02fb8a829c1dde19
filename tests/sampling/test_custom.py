"""Custom logits processors and samplers: what they are told, where they stand, what is refused and what is guarded."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import (
    LogitsProcessor,
    RequestArray,
    Sampler,
    SamplingContext,
    SamplingParams,
    ThinkingTokens,
    init_state,
)
from jaxrunner.errors import AdmissionError, ImplementationError, InvariantError
from jaxrunner.sampling.custom import CustomRun, CustomSampling
from jaxrunner.sampling.sampler import sample_tokens
from jaxrunner.state.admission import AdmitEntry, admit_layout, apply_admit, pack_admit
from jaxrunner.state.fields import RECORD_WIDTH
from jaxrunner.state.request_arrays import (
    DTYPES,
    GENERATIONS,
    check_extra_args,
    current,
    empty_extras,
    from_words,
    request_rows,
    to_words,
    with_updates,
)
from tests.conftest import load_tiny
from tests.sampling.custom import counted, nudge, picky
from tests.sampling.rows import history_of, sampling_state

VOCAB = 6
SETS = CustomSampling.of((counted, nudge), picky).declared


def run(logits, params, tokens, custom, *, prompt_len=1, tier="constrained", samples=True, thinking=None):
    """What `sample_tokens` gives for rows that were just admitted."""
    history = history_of(tokens, prompt_len)
    position = jnp.array([len(ids) for ids in tokens], jnp.int32)
    state = sampling_state([SamplingParams(**p) for p in params], thinking=thinking)
    context = SamplingContext(history, history.rows, position, jnp.full(len(tokens), samples), state.seed)
    rows = [request_rows(SamplingParams(**p), custom.declared, len(t)) for p, t in zip(params, tokens, strict=True)]
    extras = {name: jnp.stack([jnp.asarray(row[name]) for row in rows]) for name in rows[0]}
    values = current(extras, custom.declared, jnp.arange(len(tokens)), position)
    bound = CustomRun(custom, context, values)
    return sample_tokens(jnp.asarray(logits), state, position, tier=tier, history=history, custom=bound)


def test_the_context_is_what_it_says():
    tokens = [[5, 4, 3], [1], [2, 0, 1, 5, 3]]
    seen = {}

    def look(logits, context):
        seen.update(tokens=context.tokens(), last=context.last(2), rows=context.rows, position=context.position)
        seen.update(prompt_len=context.prompt_len, samples=context.samples)
        seen.update({f"keys{n}": jax.random.key_data(context.keys(n)) for n in range(3)})
        return logits

    run(np.zeros((3, VOCAB), np.float32), [{"seed": 3}] * 3, tokens, CustomSampling.of(look), prompt_len=[2, 1, 3])
    assert seen["tokens"].tolist() == [[*ids, *[-1] * (12 - len(ids))] for ids in tokens]
    assert seen["last"].tolist() == [[4, 3], [-1, 1], [5, 3]]
    assert seen["rows"].tolist() == [1, 2, 3]
    assert seen["position"].tolist() == [3, 1, 5]
    assert seen["prompt_len"].tolist() == [2, 1, 3]
    assert seen["samples"].tolist() == [True] * 3
    assert len({seen[f"keys{n}"][row].tobytes() for n in range(3) for row in range(3)}) == 9


def test_a_processor_stands_between_bad_words_and_the_thinking_budget():
    """It sees what is forbidden, cannot bring it back, and a spent budget has the last word."""
    seen = {}

    def raise_all(logits, context):
        seen["logits"] = logits
        return jnp.full_like(logits, 7.0).at[:, 2].set(9.0)

    params = [
        {"temperature": 0.0, "bad_words_token_ids": [[2]], "logit_bias": {1: 3.0}},
        {"temperature": 0.0, "thinking_token_budget": 0},
    ]
    marks = ThinkingTokens(start=(4,), end=(5,))
    out = run(np.zeros((2, VOCAB), np.float32), params, [[0], [4]], CustomSampling.of(raise_all), thinking=marks)
    assert seen["logits"].tolist() == [[0, 3, -np.inf, 0, 0, 0], [0] * 6]
    assert out.token_ids.tolist() == [0, 5]
    assert np.isneginf(np.asarray(out.scores)[0]).tolist() == [False, False, True, False, False, False]


def test_rows_that_do_not_ask_keep_every_bit():
    logits = np.float32(np.random.default_rng(0).normal(size=(3, VOCAB)))
    params = [{"extra_args": {"nudge": {"bias": [1.0, 2.0, 1.0]}}}, {}, {"extra_args": {"nudge": {}}}]
    out = run(logits, [{"temperature": 0.0, **p} for p in params], [[1]] * 3, CustomSampling.of(nudge))
    slope = np.float32([[0.25 * 4], [0], [0.25 * 1.5]])
    np.testing.assert_array_equal(out.scores, logits + slope * np.arange(VOCAB, dtype=np.float32))


@pytest.mark.parametrize("tier", ["greedy", "random", "filtered", "constrained", "full"])
def test_what_serves_every_request_runs_in_every_tier(tier):
    force = CustomSampling.of(lambda x, _: x.at[:, 3].set(1e6), lambda scores, *_: jnp.full(len(scores), 3, jnp.int32))
    params = [{"temperature": 0.0 if tier == "greedy" else 1.0}]
    out = run(np.zeros((1, VOCAB), np.float32), params, [[1]], force, tier=tier)
    assert (out.token_ids.tolist(), out.no_id_left.tolist()) == ([3], [False])


def test_processors_apply_in_their_order_and_hand_on_what_they_made():
    double, add = (lambda x, _: x * 2), (lambda x, _: x + 1)
    for order, expected in (((double, add), 7.0), ((add, double), 8.0)):
        out = run(np.full((1, VOCAB), 3.0, np.float32), [{"temperature": 0.0}], [[1]], CustomSampling.of(order))
        assert np.asarray(out.scores).tolist() == [[expected] * VOCAB]


def test_a_row_that_a_processor_leaves_without_an_id_is_an_error_in_every_tier():
    forbid = CustomSampling.of(lambda x, context: jnp.where((context.prompt_len == 1)[:, None], -jnp.inf, x))
    for tier in ("greedy", "constrained"):
        params = [{"temperature": 0.0}] * 2
        out = run(np.zeros((2, VOCAB), np.float32), params, [[1], [1, 2]], forbid, prompt_len=[1, 2], tier=tier)
        assert out.no_id_left.tolist() == [True, False]


def test_a_sampler_replaces_the_draw_of_those_who_ask():
    """Row 0 does not ask; row 1 draws as ever; 2 and 3 leave the vocabulary; 4 takes a dropped id; 5 is greedy."""
    logits = np.tile(np.float32([0, 9, 0, 0, 0, 0]), (6, 1))
    asked = [None, 0, 100, -100, 1, 100]
    params = [{"temperature": 0.1, "seed": i, "top_k": 1} for i in range(6)]
    for request, jump in zip(params, asked, strict=True):
        request |= {} if jump is None else {"extra_args": {"picky": {"jump": jump}}}
    params[5]["temperature"] = 0.0
    out = run(logits, params, [[1]] * 6, CustomSampling.of(sampler=picky))
    assert out.no_id_left.tolist() == [False, False, True, True, True, False]
    assert out.token_ids.tolist()[:2] == [1, 1]
    assert out.token_ids.tolist()[5] == 1
    assert out.updates["picky.sum"].tolist()[1:] == asked[1:]


def test_a_sampler_gets_the_keys_of_the_built_in_draw():
    logits = np.float32(np.random.default_rng(0).normal(size=(64, VOCAB)))
    params = [{"seed": i, "top_p": 0.8} for i in range(64)]
    plain = run(logits, params, [[1]] * 64, CustomSampling())
    asking = [{**p, "extra_args": {"picky": {}}} for p in params]
    own = run(logits, asking, [[1]] * 64, CustomSampling.of(sampler=picky))
    assert own.token_ids.tolist() == plain.token_ids.tolist()
    assert len(set(own.token_ids.tolist())) > 2
    np.testing.assert_array_equal(own.scores, plain.scores)


def test_a_replayed_token_comes_after_the_sampler():
    params = [{"extra_args": {"picky": {"jump": 100}}, "replay_token_ids": [4]}]
    out = run(np.zeros((1, VOCAB), np.float32), params, [[1]], CustomSampling.of(sampler=picky))
    assert (out.token_ids.tolist(), out.no_id_left.tolist()) == ([4], [False])


@pytest.mark.parametrize(
    ("extra_args", "message"),
    [
        ({"nothing": {}}, "'nothing'.*counted, nudge, picky"),
        ({"nudge": {"strength": 1.0}}, r"'nudge'.*'strength'.*\['scale', 'bias'\]"),
        ({"nudge": {"bias": [1.0, 2.0]}}, r"'nudge'.*'bias'.*shape \(2,\); expected \(3,\)"),
        ({"nudge": {"scale": [1.0]}}, r"'nudge'.*'scale'.*shape \(1,\)"),
        ({"nudge": {"scale": "high"}}, "'nudge'.*'scale'.*expected float32"),
        ({"nudge": {"scale": True}}, "'nudge'.*'scale'.*bool; expected float32"),
        ({"nudge": {"scale": 1e39}}, r"'nudge'.*'scale'.*1e\+39.*float32"),
        ({"nudge": {"scale": 1j}}, "'nudge'.*'scale'.*complex"),
        ({"counted": {"base": 1.0}}, "'counted'.*'base'.*float64; expected int32"),
        ({"counted": {"base": 2**31}}, "'counted'.*'base'.*2147483648.*int32"),
        ({"counted": {}}, "counted needs 'base'.*extra_args"),
    ],
)
def test_extra_args_that_nobody_declared_are_refused_by_name(extra_args, message):
    with pytest.raises(AdmissionError, match=f"row 7.*{message}"):
        check_extra_args(SamplingParams(extra_args=extra_args), SETS, "row 7")


def test_extra_args_must_be_arrays_by_name_and_are_copied():
    for value in ([1], {"nudge": 3.0}, {"nudge": {"bias": [[1.0], [1.0, 2.0]]}}):
        with pytest.raises(AdmissionError, match="extra_args"):
            SamplingParams(extra_args=value)
    mine = np.ones(3)
    params = SamplingParams(extra_args={"nudge": {"bias": mine}})
    mine[:] = 5
    assert params.extra_args["nudge"]["bias"].tolist() == [1, 1, 1]
    assert params.tier == "constrained"
    assert SamplingParams(extra_args={}) == SamplingParams()
    with pytest.raises(AdmissionError, match=r"there is none.*logits_processors"):
        check_extra_args(params, ())


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_travel_as_words(dtype):
    """Both ends of each type, and the row of a new request: the default, or the newest of its generations."""
    info = jnp.finfo if jnp.issubdtype(dtype, np.floating) else jnp.iinfo
    ends = [False, True] if dtype == "bool" else [info(dtype).min, info(dtype).max]
    row = np.array(ends).astype(jnp.dtype(dtype))
    back = from_words(jnp.asarray(np.stack([to_words(row)] * 2)), (2, 1), jnp.dtype(dtype))
    assert (back.dtype, back.shape) == (jnp.dtype(dtype), (2, 2, 1))
    assert np.asarray(back)[1, :, 0].tobytes() == row.tobytes()
    default = True if dtype == "bool" else 3
    owner = LogitsProcessor(lambda x, _: x, "mine", (RequestArray("a", (2,), dtype, default, updated=True),))
    row = request_rows(SamplingParams(extra_args={"mine": {}}), (owner.declared,), 7)["mine.a"]
    assert row.shape == (GENERATIONS, 2)
    assert row[7 % GENERATIONS].tolist() == [default] * 2
    assert not row[8 % GENERATIONS].any()


def test_updates_reach_rows_that_sampled_and_the_value_before_stays():
    extras = empty_extras((counted.declared,), 4)
    rows, out_of_range = jnp.array([2, 4]), 4
    assert int(rows[1]) == out_of_range
    after = with_updates(extras, {"counted.calls": jnp.array([5, 6], jnp.int32)}, rows, jnp.array([3, 3]))
    after = with_updates(after, {"counted.calls": jnp.array([7, 6], jnp.int32)}, rows, jnp.array([4, 4]))
    assert after["counted.calls"].tolist() == [[0, 0], [0, 0], [7, 5], [0, 0]]
    for length, value in ((3, 5), (4, 7)):
        found = current(after, (counted.declared,), jnp.array([2]), jnp.array([length]))
        assert found["counted.calls"].tolist() == [value]


def test_unused_places_of_an_upload_write_no_array():
    """One request of two that fit: the other place holds junk words and row 0, the parking row."""
    sets = (nudge.declared,)
    arrays = request_rows(SamplingParams(extra_args={"nudge": {"bias": [1.0, 2.0, 3.0]}}), sets, 5)
    layout = admit_layout(4, 4, custom=sets)
    record = np.ones(RECORD_WIDTH, np.int32)
    packed = pack_admit(layout, [AdmitEntry(2, record, arrays=arrays), AdmitEntry(3, record)]).copy()
    layout.unpack(packed)["extras/nudge.bias"][1:] = 77
    model, _ = load_tiny("llama")
    state = init_state(model, max_requests=4, max_model_len=16, num_blocks=8, logits_processors=nudge)
    state = apply_admit(state, packed, layout=layout)
    assert state.extras["nudge.bias"].tolist() == [[0] * 3, [0] * 3, [1, 2, 3], [0] * 3, [0] * 3]
    assert state.extras["nudge"].tolist() == [False, False, True, False, False]
    with pytest.raises(InvariantError, match="without a record"):
        pack_admit(layout, [AdmitEntry(2, arrays=arrays)])


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: RequestArray("a b"), AdmissionError, "'a b'.*identifier"),
        (lambda: RequestArray("a", dtype="float64"), AdmissionError, "'a' is float64; use one of"),
        (lambda: RequestArray("a", (0,)), AdmissionError, "shape"),
        (lambda: RequestArray("a", dtype="int8", default=128), AdmissionError, "default of request array 'a'.*128"),
        (lambda: LogitsProcessor(lambda x, _: x), AdmissionError, r"<lambda>.*name="),
        (lambda: LogitsProcessor(nudge.fn, "n", (RequestArray("a"),) * 2), AdmissionError, "twice"),
        (lambda: LogitsProcessor(3, "n"), ImplementationError, "LogitsProcessor is a function, not 3"),
        (lambda: CustomSampling.of(lambda logits: logits), ImplementationError, r"\(logits, context\)"),
        (lambda: CustomSampling.of((), lambda scores, context: 0), ImplementationError, r"\(scores, context, keys\)"),
        (lambda: empty_extras((nudge.declared,) * 2, 3), AdmissionError, "same name"),
    ],
)
def test_declarations_that_cannot_be_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("custom", "message"),
    [
        (CustomSampling.of(lambda x, _: x[:, :2]), r"<lambda> gave float32\[1, 2\]; expected float32\[1, 6\]"),
        (CustomSampling.of(lambda x, _: x.astype(jnp.bfloat16)), "gave bfloat16"),
        (CustomSampling.of(lambda x, _: None), "gave NoneType"),
        (CustomSampling.of(lambda x, _: (x, {"y": 1})), r"updates 'y'.*updated=True"),
        (CustomSampling.of(sampler=lambda x, *_: x[:, 0]), r"Sampler <lambda> gave float32\[1\]; expected int32\[1\]"),
        (
            CustomSampling.of(LogitsProcessor(lambda x, _: (x, {"calls": 0.5}), "c", counted.arrays[1:], True)),
            r"c gave 'calls' as float32\[\]; expected int32\[1\]",
        ),
    ],
)
def test_results_of_another_kind_are_refused_while_tracing(custom, message):
    with pytest.raises(ImplementationError, match=message):
        run(np.zeros((1, VOCAB), np.float32), [{}], [[1]], custom)


def test_a_state_and_a_step_must_be_made_for_the_same_functions():
    with pytest.raises(AdmissionError, match="no arrays of nudge"):
        CustomSampling.of(nudge).check_state((counted.declared,))
    with pytest.raises(AdmissionError, match="arrays of counted"):
        CustomSampling.of(nudge).check_state((counted.declared, nudge.declared))
    CustomSampling.of((nudge, lambda x, _: x)).check_state((nudge.declared,))
    assert CustomSampling.of(nudge, picky).names == ["nudge", "sampler picky"]
    assert isinstance(CustomSampling.of(sampler=picky.fn).sampler, Sampler)
