"""Greedy continuations of the tiny llama by the NumPy step, one prompt alone, remembered."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np

from tests.oracle import step as oracle

DIRECTORY = Path(__file__).resolve().parents[1] / "golden" / "tiny" / "llama"
BLOCK_SIZE, MAX_LEN, LEAST_MARGIN = 8, 96, 0.01


@functools.cache
def _model() -> tuple[dict, dict]:
    return oracle.read_config(DIRECTORY), oracle.read_weights(DIRECTORY)


@functools.cache
def continuation(prompt: tuple[int, ...], count: int) -> list[int]:
    """Up to `count` greedy ids after `prompt`; it ends before the first one that float32 could decide otherwise."""
    config, weights = _model()
    width = MAX_LEN // BLOCK_SIZE
    kv = np.full((config["layers"], 2, width + 1, BLOCK_SIZE, config["kv_heads"], config["head_dim"]), np.nan)
    state = {
        "token_ids": [[*prompt, *[0] * (MAX_LEN - len(prompt))]],
        "prefill_len": [len(prompt)],
        "total_len": [len(prompt)],
        "num_computed": [0],
        "last_sampled": [0],
        "temperature": [0.0],
        "seed": [0],
        "tables": [[list(range(1, width + 1))]],
        "groups": [list(range(config["layers"]))],
        "block_size": [BLOCK_SIZE],
        "kv": [kv],
    }
    tokens: list[int] = []
    run = len(prompt)
    while len(tokens) < count:
        state, [result] = oracle.step(config, weights, state, [(0, run)])
        if result["margin"] < LEAST_MARGIN:
            break
        tokens.append(result["sampled"])
        run = 1
    return tokens
