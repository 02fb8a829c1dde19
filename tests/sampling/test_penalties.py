"""Occurrences of ids in a history: counted in one word each, whatever its length."""

from __future__ import annotations

from collections import Counter

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.sampling.history import History
from jaxrunner.sampling.penalties import SHORT, occurrences

VOCAB = 5


@pytest.mark.parametrize("width", [40, SHORT - 1, SHORT, SHORT + 1])
def test_prompt_and_output_are_counted_apart_up_to_the_last_token(width):
    rng = np.random.default_rng(width)
    tokens = rng.integers(0, VOCAB, (3, width))
    tokens[1], tokens[2] = 3, 3
    tokens[0, 1] = -1  # a token that has not arrived
    prompt_len, length = np.array([width // 3, width, 0]), np.array([width - 2, width, width])
    history = History(jnp.asarray(tokens, jnp.int32), jnp.arange(3), jnp.asarray(prompt_len, jnp.int32))
    words, unit = occurrences(history, jnp.asarray(length, jnp.int32), VOCAB)
    for row, counted in enumerate(np.asarray(words)):
        own = tokens[row].tolist()
        prompt, output = (Counter(part) for part in (own[: prompt_len[row]], own[prompt_len[row] : length[row]]))
        assert [int(word) % unit for word in counted] == [output[i] for i in range(VOCAB)]
        assert [int(word) >= unit for word in counted] == [prompt[i] > 0 for i in range(VOCAB)]
