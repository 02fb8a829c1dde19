"""`score` against the golden logits of tiny models, and its refusals."""

import numpy as np
import pytest

from jaxrunner.compile.counter import CompileCounter
from jaxrunner.errors import AdmissionError
from jaxrunner.scoring import score
from tests.conftest import GOLDEN, load_tiny


def golden(name):
    with np.load(GOLDEN / "tiny" / name / "golden.npz") as file:
        return [(file[f"input_ids_{i}"].ravel().tolist(), file[f"logits_{i}"].reshape(-1, 256)) for i in range(3)]


@pytest.mark.parametrize("chunk", [1, 7, 128])
def test_logits_equal_the_goldens_whatever_the_chunk(chunk):
    model, weights = load_tiny("llama")
    cases = golden("llama")
    for logits, (_, expected) in zip(score(model, weights, [ids for ids, _ in cases], chunk=chunk), cases, strict=True):
        assert logits.dtype == np.float32
        np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=1e-4)


def test_sliding_windows_are_scored_too():
    model, weights = load_tiny("mistral")
    cases = golden("mistral")
    for logits, (_, expected) in zip(score(model, weights, [ids for ids, _ in cases], chunk=16), cases, strict=True):
        np.testing.assert_allclose(logits, expected, atol=3e-4, rtol=1e-4)


def test_a_sequence_may_fill_every_position_of_the_model(tiny_llama):
    model, weights = tiny_llama
    ids = np.random.default_rng(0).integers(0, model.vocab_size, model.max_position_embeddings).tolist()
    (whole,) = score(model, weights, [ids], chunk=50)
    (prefix,) = score(model, weights, [ids[:70]], chunk=50)
    assert whole.shape == (model.max_position_embeddings, model.vocab_size)
    np.testing.assert_allclose(whole[:70], prefix, atol=1e-4)


def test_sequences_do_not_see_each_other(tiny_llama):
    model, weights = tiny_llama
    first, second = score(model, weights, [[5, 6, 7], [8, 9]])
    np.testing.assert_array_equal(score(model, weights, [[8, 9], [5, 6, 7]])[0], second)
    np.testing.assert_array_equal(score(model, weights, [[5, 6, 7], [8, 9]])[0], first)


def test_one_call_compiles_the_step_once(tiny_llama):
    model, weights = tiny_llama
    lengths = (3, 40, 90, 64, 17)
    score(model, weights, [[1] * n for n in lengths], chunk=32)
    with CompileCounter() as counter:
        score(model, weights, [[2] * n for n in reversed(lengths)], chunk=32)
    assert counter.count == 0


def test_no_sequences_give_no_arrays(tiny_llama):
    assert score(*tiny_llama, []) == []


@pytest.mark.parametrize(
    ("sequences", "options", "message"),
    [
        ([[1], []], {}, "sequence 1 is empty"),
        ([[1, 256]], {}, "token id 256 at position 1 of the sequence 0"),
        ([[-1]], {}, "token id -1"),
        ([[1.5]], {}, "integer token ids"),
        ([[1], [1] * 129], {}, "sequence 1 has 129 tokens; at most 128"),
        ([[1] * 9], {"max_model_len": 8}, "at most 8"),
        ([[1]], {"max_model_len": 129}, "positions are 1..128"),
        ([[1]], {"max_model_len": 0}, "max_model_len is 0"),
        ([[1]], {"chunk": 0}, "chunk is 0"),
    ],
)
def test_refusals_name_the_sequence(tiny_llama, sequences, options, message):
    with pytest.raises(AdmissionError, match=message):
        score(*tiny_llama, sequences, **options)
