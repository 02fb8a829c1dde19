"""On a GPU, the default model: greedy ids equal to the goldens in float32; logits near them in bfloat16, by kernels."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jaxrunner import LLM, SamplingParams
from jaxrunner.models.default_model import NAME, cache_directory
from jaxrunner.models.loading import load
from tests.conftest import GOLDEN
from tests.gpu.teacher_forced import teacher_forced

FILE = cache_directory() / NAME
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.smollm2,
    pytest.mark.skipif(not FILE.is_file(), reason=f"the default model is not in the cache ({FILE})"),
]
PROMPTS = json.loads((GOLDEN / "smollm2" / "prompts.json").read_text())
FORCED = 16
"""Golden tokens run after each prompt in bfloat16."""


def expected(name: str) -> dict[str, dict]:
    return {p["name"]: p for p in json.loads((GOLDEN / "smollm2" / f"{name}.json").read_text())["prompts"]}


def test_greedy_ids_in_float32_equal_the_goldens():
    """All prompts in one batch; a difference is excused only from the first stored margin below 0.01 on."""
    llm = LLM(max_model_len=1024, max_num_seqs=len(PROMPTS), max_num_batched_tokens=256, num_blocks=400)
    outputs = llm.generate([p["ids"] for p in PROMPTS], SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True))
    goldens, compared = expected("f32"), 0
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        golden, ids = goldens[prompt["name"]], output.outputs[0].token_ids
        end = golden["first_margin_below_0.01"]
        end = len(ids) if end is None else end
        assert ids[:end] == golden["greedy"][:end], prompt["name"]
        compared += end
    assert compared > 300
    llm.runner.audit()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def errors_in_bfloat16(implementation) -> np.ndarray:
    """|log-probability - golden| of the 20 best ids at every golden position; prompts in chunks, then decodes."""
    model, weights, _ = load(dtype="bfloat16")
    goldens = expected("bf16w")
    sequences = [p["ids"] + goldens[p["name"]]["greedy"][:FORCED] for p in PROMPTS]
    all_logits = teacher_forced(model, weights, sequences, chunk=16, implementation=implementation)
    errors = []
    for prompt, logits in zip(PROMPTS, all_logits, strict=True):
        logprobs = log_softmax(logits[len(prompt["ids"]) - 1 :])
        for row, top in zip(logprobs[:FORCED], goldens[prompt["name"]]["top20"], strict=False):
            errors.append(np.abs(row[top["ids"]] - np.array(top["logprobs"])))
    assert len(errors) > 100
    return np.stack(errors)


def test_logits_in_bfloat16_are_near_the_goldens_and_as_near_as_with_xla():
    """bfloat16 weights; the goldens computed with them in float32."""
    ours, xla = errors_in_bfloat16(None), errors_in_bfloat16("xla")
    assert np.median(ours) < 0.05
    assert ours.max() < 1.0
    assert np.sqrt((ours**2).mean()) < 1.2 * np.sqrt((xla**2).mean()) + 0.005
