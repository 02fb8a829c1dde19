"""Custom functions by hand: through `step`, loops, forks and files, and gradients with respect to all they read."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import Bucket, SamplingParams, admit, decode_loop, init_state, load_state, manual, plan, release, reserve
from jaxrunner.errors import AdmissionError, CapacityError, CheckpointError
from jaxrunner.examples.entropy_stop import entropy, entropy_stop
from jaxrunner.examples.mirostat import mirostat
from jaxrunner.examples.watermark import green_ids, watermark, watermark_score
from jaxrunner.stages.step import step
from jaxrunner.state.audit import audit
from jaxrunner.state.runner_state import host_view
from jaxrunner.state.saving import save_state
from tests.conftest import load_tiny
from tests.sampling.custom import counted, nudge, picky
from tests.stages.harness import constant

PREFILL, DECODE = Bucket("mixed", 16, 4, 16, "constrained"), Bucket("decode", 4, 4, 1, "constrained")
FUNCTIONS = {"logits_processors": (counted, nudge), "sampler": picky}
PROMPTS = [[5, 9, 17], [1], [7, 7]]


@functools.cache
def tiny():
    """(model, weights) of the golden's first layer alone, which compiles fastest."""
    model, weights = load_tiny("llama")
    return model.replace(layers=model.layers[:1]), {**weights, "layers": weights["layers"][:1]}


def empty(functions=FUNCTIONS, **options):
    model, _ = tiny()
    sizes = {"max_requests": 4, "max_model_len": 64, "num_blocks": 40, "block_size": 8}
    return init_state(model, **{**sizes, **functions, **options})


@functools.cache
def executables():
    """(a prefill, a loop of 4 steps of three rows)."""
    model, weights = tiny()
    prefill = jax.jit(functools.partial(step, model, weights, bucket=PREFILL, **FUNCTIONS))
    options = {"steps": 4, "bucket": DECODE, **FUNCTIONS}
    return prefill, jax.jit(lambda state, rows: decode_loop(model, weights, state, rows, **options))


def asking(base, jump=None):
    """Counts from `base`; with `jump` also draws, and adds it to what was drawn."""
    own = {} if jump is None else {"picky": {"jump": jump}}
    temperature = 0.0 if jump is None else 0.5
    return SamplingParams(temperature=temperature, seed=1, extra_args={"counted": {"base": base}, **own})


def started():
    """Three requests after their prefill: (state, rows, first tokens)."""
    state, rows = admit(empty(), PROMPTS, [asking(100), asking(20, jump=1), asking(3)])
    inputs = plan(state, {row: len(ids) for row, ids in zip(rows, PROMPTS, strict=True)})
    assert inputs.tier == "constrained"
    state, output = executables()[0](state, inputs.pack(PREFILL))
    return reserve(state, rows, 12), rows, output.sampled_token_ids[:3, 0].tolist()


def test_arrays_of_a_request_go_with_its_row_through_steps_and_loops():
    state, rows, first = started()
    assert first == [100, 21, 3]
    state, tokens, _ = executables()[1](state, jnp.array(rows))
    assert tokens.tolist() == [[101, 102, 103, 104], [22, 23, 24, 25], [4, 5, 6, 7]]
    values = {name: host_view(value)[rows].tolist() for name, value in state.request_values.items()}
    assert values["counted.calls"] == [5, 5, 5]
    assert values["picky"] == [False, True, False]
    assert values["picky.sum"][1] == 5
    audit(state)
    assert not any(host_view(value)[rows[0]].any() for value in release(state, rows[:1]).extras.values())


def test_a_fork_has_a_count_of_its_own():
    """It goes on where its source was; what either does afterwards, the other does not see."""
    state, rows, _ = started()
    state, (copy,) = manual.fork(state, rows[0], num_tokens=12)
    loop = executables()[1]
    state, tokens, _ = loop(state, jnp.array([copy, rows[1], rows[2]]))
    assert tokens[0].tolist() == [101, 102, 103, 104]
    state, tokens, _ = loop(state, jnp.array([rows[0], rows[1], copy]))
    assert tokens.tolist() == [[101, 102, 103, 104], [26, 27, 28, 29], [105, 106, 107, 108]]
    calls = host_view(state.request_values["counted.calls"])
    assert calls[[rows[0], rows[1], copy, rows[2]]].tolist() == [5, 9, 9, 5]


def test_a_saved_state_goes_on_with_its_arrays(tmp_path):
    state, rows, _ = started()
    save_state(tmp_path / "s", state)
    model, _ = tiny()
    for like in (model, empty()):
        loaded = load_state(tmp_path / "s", like)
        assert loaded.sampling.custom == state.sampling.custom
        _, tokens, _ = executables()[1](loaded, jnp.array(rows))
        assert tokens[0].tolist() == [101, 102, 103, 104]
    for functions in ({}, {**FUNCTIONS, "sampler": None}):
        with pytest.raises(CheckpointError, match=r"arrays|picky"):
            load_state(tmp_path / "s", empty(functions))
    other = [nudge, counted]
    with pytest.raises(CheckpointError, match="request arrays"):
        load_state(tmp_path / "s", empty({"logits_processors": other, "sampler": picky}))


def test_what_a_state_was_not_made_for_is_refused():
    state, _ = admit(empty({}), [[1]])
    model, weights = tiny()
    packed = plan(state, {1: 1}).pack(PREFILL)
    with pytest.raises(AdmissionError, match="no arrays of counted"):
        step(model, weights, state, packed, bucket=PREFILL, logits_processors=counted)
    with pytest.raises(AdmissionError, match=r"row 2.*'counted'"):
        admit(state, [[1]], asking(3))
    with pytest.raises(AdmissionError, match="arrays of counted, for which requests may ask"):
        step(model, weights, empty(), packed, bucket=PREFILL)
    with pytest.raises(CapacityError, match="4 free"):
        admit(empty(), [[1]] * 5, asking(3))


def test_a_function_that_serves_every_request_needs_no_declaration_and_no_tier():
    model, weights = tiny()
    state, (row,) = admit(empty({}), [[5, 9]])
    inputs = plan(state, {row: 2})
    assert inputs.tier == "greedy"
    bucket = PREFILL.replace(tier="greedy")
    _, output = jax.jit(
        lambda state, packed: step(
            model, weights, state, packed, bucket=bucket, logits_processors=lambda x, _: -x, return_scores=True
        )
    )(state, inputs.pack(bucket))
    assert int(output.sampled_token_ids[0, 0]) == int(np.argmax(output.scores[0]))
    assert output.sampled_token_ids[1:, 0].tolist() == [-1, -1, -1]


@functools.cache
def likelihood():
    """(arguments, f, its gradient): the log-likelihood of an id after a prompt, as the sampler sees it, of a request
    with a temperature, top_k and `nudge`. Arguments: the weights, what that reads, a factor that another closes over.
    """
    model, weights = tiny()
    own = {"nudge": {"scale": 0.01, "bias": [1.0, 0.5, 2.0]}}
    params = SamplingParams(temperature=0.8, top_k=200, extra_args=own)

    def functions(factor):
        return {"logits_processors": (nudge, lambda logits, context: logits * factor)}

    state, (row,) = admit(empty(functions(1.0)), [[5, 9, 200, 31]], params)
    packed, bucket = plan(state, {row: 4}).pack(PREFILL), PREFILL

    def scores(weights, arrays, factor):
        extras = state.extras | {name: state.extras[name].at[row].set(row_of) for name, row_of in arrays.items()}
        options = {"bucket": bucket, "return_scores": True, "implementation": {"attention": "reference"}}
        _, output = step(model, weights, state.replace(extras=extras), packed, **options, **functions(factor))
        return output.scores[0]

    arrays = {name: state.extras[name][row] for name in ("nudge.scale", "nudge.bias")}
    arguments = weights, arrays, jnp.float32(1.1)
    one = int(np.argsort(jax.jit(scores)(*arguments))[-5])

    def value(*arguments):
        return jax.nn.log_softmax(scores(*arguments))[one]

    return arguments, jax.jit(value), jax.jit(jax.grad(value, argnums=(0, 1, 2)))


def test_gradients_go_through_processors_filters_and_the_whole_step():
    """With respect to a request's arrays, what a processor closes over, and along a random direction of all weights."""
    (weights, arrays, factor), value, grad = likelihood()
    by_weight, by_array, by_factor = grad(weights, arrays, factor)

    def quotient(change, size):
        return (value(*change(size)) - value(*change(-size))) / (2 * size)

    found = quotient(lambda h: (weights, arrays, factor + h), 1e-2)
    np.testing.assert_allclose(by_factor, found, rtol=2e-2)
    for name, slope in by_array.items():
        direction = np.ones_like(slope)
        found = quotient(lambda h, n=name, d=direction: (weights, arrays | {n: arrays[n] + h * d}, factor), 1e-3)
        assert abs(found) > 0.1
        np.testing.assert_allclose(np.vdot(slope, direction), found, rtol=2e-2)
    leaves, tree = jax.tree.flatten(by_weight)
    size = np.sqrt(sum(np.vdot(g, g) for g in leaves))
    assert size > 0.1
    unit = jax.tree.unflatten(tree, [g / size for g in leaves])
    found = quotient(lambda h: (jax.tree.map(lambda w, d: w + h * d, weights, unit), arrays, factor), 1e-2)
    np.testing.assert_allclose(size, found, rtol=5e-2)


SCORES = np.float32(np.random.default_rng(3).normal(size=256) * 1.5)
EXAMPLES = {"logits_processors": (watermark, entropy_stop), "sampler": mirostat}


@functools.cache
def rollout():
    model, weights = constant(*tiny(), SCORES)
    options = {"steps": 48, "bucket": DECODE, **EXAMPLES}
    return jax.jit(lambda state, rows: decode_loop(model, weights, state, rows, **options))


def sampled(name, asked):
    """48 tokens of four requests over a model whose logits are always SCORES, and the state after them.

    asked: what each gives the example called `name`, None for nothing.
    """
    params = [
        SamplingParams(seed=i, extra_args=None if values is None else {name: values}) for i, values in enumerate(asked)
    ]
    state, rows = admit(empty(EXAMPLES), [[9]] * len(params), params)
    state, tokens, _ = rollout()(reserve(state, rows, 48), jnp.array(rows))
    return np.asarray(tokens), state, rows


def test_the_watermark_is_found_with_its_key_and_only_there():
    key = {"key": 2**32 - 7, "gain": 4.0, "fraction": 0.25}
    tokens, *_ = sampled("watermark", [None, key, key, key])
    score = functools.partial(watermark_score, vocab_size=256, fraction=0.25)
    assert all(score([9, *row], 2**32 - 7) > 5 for row in tokens[1:])
    assert abs(score([9, *tokens[0]], 2**32 - 7)) < 3
    assert abs(score([9, *tokens[1]], 12)) < 3
    with pytest.raises(ValueError, match="at least two"):
        score([9], 1)


def test_green_ids_are_a_fixed_part_of_the_vocabulary():
    ids = [np.asarray(green_ids(jnp.uint32(k), t, 0.3, vocab_size=2000)) for k, t in ((1, 5), (1, 5), (1, 6), (2, 5))]
    assert (ids[0] == ids[1]).all()
    assert all(abs(x.mean() - 0.3) < 0.05 for x in ids)
    assert all((ids[0] != other).mean() > 0.3 for other in ids[2:])


def test_entropy_is_that_of_the_definition():
    logits = np.float32([SCORES[:4], [0, 0, 0, 0], [3, -np.inf, -np.inf, -np.inf]])
    p = np.exp(logits[0]) / np.exp(logits[0]).sum()
    np.testing.assert_allclose(entropy(jnp.asarray(logits)), [-(p * np.log(p)).sum(), np.log(4), 0], rtol=1e-5)
    assert np.isfinite(jax.grad(lambda x: entropy(x).sum())(jnp.asarray(logits))).all()


def test_a_request_stops_where_the_running_mean_of_its_entropy_says():
    """The entropy is constant: above the threshold a request stops with the last token of its window, else never."""
    here = float(entropy(jnp.asarray([SCORES]))[0])
    bounds = [{"threshold": here - 0.1, "window": 6}, {"threshold": here + 0.1, "window": 6}, {"threshold": 0.0}]
    stop_id = int(SCORES.argmin())
    tokens, state, rows = sampled("entropy_stop", [*({"stop_id": stop_id, **b} for b in bounds), None])
    first = [row.tolist().index(stop_id) if stop_id in row else None for row in tokens]
    assert first == [5, None, 7, None]
    means = host_view(state.request_values["entropy_stop.mean"])[rows]
    np.testing.assert_allclose(means, [here, here, here, 0], rtol=1e-5)


def test_mirostat_brings_the_surprise_to_its_target():
    tokens, *_ = sampled("mirostat", [{"target": bits} for bits in (1.5, 3.0, 4.5)] + [None])
    surprise = -np.asarray(jax.nn.log_softmax(jnp.asarray(SCORES))) / np.log(2)
    means = [surprise[row].mean() for row in tokens]
    assert means[0] < means[1] < means[2] < means[3]
