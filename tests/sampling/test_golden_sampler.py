"""The sampler on real logits against transformers' processors in vLLM's order: equal supports, equal probabilities."""

from __future__ import annotations

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import SamplingParams
from jaxrunner.sampling.constraints import constrain
from jaxrunner.sampling.filters import apply_filters
from jaxrunner.sampling.temperature import scale
from tests.conftest import GOLDEN
from tests.sampling.rows import compiled, history_of, sampling_state

DATA = dict(np.load(GOLDEN / "smollm2" / "sampler.npz"))
PROMPTS = ("chat_list", "raw_story", "raw_numbers")
NAMES = sorted({key.split("/")[1] for key in DATA if "/" in key})
PROMPT_IDS = json.loads((GOLDEN / "smollm2" / "prompts.json").read_text())
ATOL, WIDTH = 3e-5, 80


def parameters(name: str) -> SamplingParams:
    """min_p0.02_top_k20_top_p0.9_temp1.2 -> the parameters."""
    found = dict(re.findall(r"(rep|min_p|top_k|top_p|temp)([\d.]+)", name))
    return SamplingParams(
        temperature=float(found.get("temp", 1.0)),
        top_k=int(found.get("top_k", 0)),
        top_p=float(found.get("top_p", 1.0)),
        min_p=float(found.get("min_p", 0.0)),
        repetition_penalty=float(found.get("rep", 1.0)),
        seed=len(name),
    )


STATE = sampling_state([parameters(name) for name in NAMES])


@jax.jit
def filtered(logits, position, history):
    logits, _ = constrain(logits, STATE, position, history)
    return apply_filters(scale(logits, STATE.temperature), STATE)


@functools.cache
def probabilities(prompt: str) -> np.ndarray:
    """f64[len(NAMES), V]: every setting of a prompt in one batch."""
    logits = jnp.tile(jnp.asarray(DATA[f"logits_{prompt}"]), (len(NAMES), 1))
    tokens = next(p["ids"] for p in PROMPT_IDS if p["name"] == prompt)
    history = history_of([tokens] * len(NAMES), len(tokens), WIDTH)
    scaled = filtered(logits, jnp.full(len(NAMES), len(tokens)), history)
    weights = np.exp(np.asarray(scaled, np.float64))
    return weights / weights.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_supports_and_probabilities_equal_the_golden(prompt, name):
    row = probabilities(prompt)[NAMES.index(name)]
    if f"{prompt}/{name}/ids" in DATA:
        ids = DATA[f"{prompt}/{name}/ids"]
        assert np.flatnonzero(row).tolist() == sorted(ids.tolist())
        np.testing.assert_allclose(row[ids], DATA[f"{prompt}/{name}/probs"], atol=ATOL)
    else:
        assert (row > 0).all()
        ids = DATA[f"{prompt}/{name}/top200_ids"]
        np.testing.assert_allclose(row[ids], DATA[f"{prompt}/{name}/top200_probs"], atol=ATOL)


def test_every_setting_is_compared():
    assert len(NAMES) == 17
    assert sum("rep" in name for name in NAMES) == 2
    assert sum("top_p" in name for name in NAMES) >= 6


def test_draws_stay_in_the_support():
    run = compiled("filtered")
    logits = jnp.tile(jnp.asarray(DATA["logits_chat_list"]), (len(NAMES), 1))
    seen = np.stack([run(logits, STATE, jnp.full(len(NAMES), position)) for position in range(12)])
    for column, name in enumerate(NAMES):
        if "rep" in name:  # these have a history
            continue
        ids = DATA.get(f"chat_list/{name}/ids")
        assert ids is None or set(seen[:, column]) <= set(ids.tolist()), name
    assert len({tuple(column) for column in seen.T}) > 5
