"""`scale_and_filter`: the kernel leaves the ids that XLA's filters leave."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import SamplingParams
from jaxrunner.errors import ImplementationError
from jaxrunner.pallas import compat, row_chunks
from jaxrunner.sampling.filters import best_id, chunk_maxima, scale_and_filter
from tests.oracle import sampler as oracle
from tests.sampling.rows import sampling_state

UNAVAILABLE = compat.unavailable_reason()
needs_mosaic = pytest.mark.skipif(UNAVAILABLE is not None, reason=f"Mosaic GPU: {UNAVAILABLE}")
ASKED: tuple[dict[str, float], ...] = (
    {"top_k": 50},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"top_k": 20, "top_p": 0.9},
    {"top_k": 1200, "top_p": 0.8, "min_p": 0.01},
    {},
    {"top_k": 1, "top_p": 0.5},
    {"top_k": 3, "top_p": 0.3, "min_p": 0.2},
    {"top_p": 0.9999},
    {"top_k": 400, "min_p": 1.0, "top_p": 0.5},
    {"top_k": 900},
    {"top_p": 1e-6},
)
VOCAB = 1284
"""Two chunks and a part of one that overlaps the second."""
SLACK = 3e-4
"""Of a mass: rounding to integers whose sum is 2^29 at least, and an exp of the kernel's own."""


def logits_of(kind: str, rows: int, vocab: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(rows, vocab)) * 3
    if kind == "ties":
        logits = np.round(logits * 2) / 2
    if kind == "forbidden":
        logits[rng.random((rows, vocab)) < 0.7] = -np.inf
    if kind == "flat":
        logits[:] = 1.5
    if kind == "wide":
        logits *= 1e4
    if kind == "one lane":
        logits[:, 5 :: row_chunks.CHUNK] += 50  # more than it keeps
    return np.float32(logits)


def with_kernel(logits, state):
    return scale_and_filter(logits, state, chunk_maxima(logits, implementation="mosaic"))[0]


def run(implementation: str, logits: np.ndarray, asked: list[dict[str, float]]) -> np.ndarray:
    state = sampling_state([SamplingParams(temperature=0.8, **each) for each in asked])

    @jax.jit
    def filtered(logits):
        return scale_and_filter(logits, state, chunk_maxima(logits, implementation=implementation))[0]

    return np.asarray(filtered(jnp.asarray(logits)))


def check(logits: np.ndarray, asked: list[dict[str, float]]) -> None:
    """The same scores as XLA's; where masses decide, a set that the oracle takes for right."""
    wanted, found = run("xla", logits, asked), run("mosaic", logits, asked)
    for row, each in enumerate(asked):
        if np.array_equal(wanted[row], found[row], equal_nan=True):
            continue
        assert "top_p" in each, f"row {row}, {each}: {(wanted[row] > -np.inf).sum()} {(found[row] > -np.inf).sum()}"
        request = {"temperature": 0.8, **each}
        least, most = (oracle.kept(np.float64(logits[row]), request, slack=slack) for slack in (-SLACK, SLACK))
        assert least <= set(np.flatnonzero(found[row] > -np.inf).tolist()) <= most, f"row {row}, {each}"


@needs_mosaic
@pytest.mark.parametrize("kind", ["normal", "ties", "forbidden"])
def test_interpreted(kind):
    asked = list(ASKED[:8])
    with compat.interpreting():
        check(logits_of(kind, len(asked), VOCAB), asked)


@needs_mosaic
@pytest.mark.parametrize("kind", ["ties", "one lane"])
def test_a_small_top_k_of_a_wide_row_interpreted(kind):
    asked = [{"top_k": 3}, {"top_k": 10, "top_p": 0.8}, {"top_k": 7, "min_p": 0.3}, {"top_k": 11}]
    with compat.interpreting():
        check(logits_of(kind, len(asked), 12 * row_chunks.CHUNK + 132), asked)


@needs_mosaic
@pytest.mark.parametrize("kind", ["normal", "one lane"])
def test_what_is_gathered_late_of_a_wide_row_interpreted(kind):
    """After two passes, where there is no small top_k; in one lane, too much to be gathered at all."""
    asked = [{"top_p": 0.9}, {"top_p": 0.5, "min_p": 0.01}, {"top_k": 40}, {"top_k": 60, "top_p": 0.9}]
    with compat.interpreting():
        check(logits_of(kind, len(asked), 12 * row_chunks.CHUNK + 132), asked)


@needs_mosaic
def test_damaged_rows_are_left_alone_in_the_interpreter():
    logits = logits_of("normal", 3, 512)
    logits[0, 7], logits[1, 8], logits[2] = np.nan, np.inf, -np.inf
    asked = [{"top_k": 3, "top_p": 0.5, "min_p": 0.1}] * 3
    with compat.interpreting():
        np.testing.assert_array_equal(run("mosaic", logits, asked), run("xla", logits, asked))


@needs_mosaic
@pytest.mark.parametrize(("rows", "vocab"), [(1, 512), (256, 128_256), (16, 151_936)])
def test_lowers_to_one_kernel(rows, vocab):
    state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), sampling_state([SamplingParams()])
    )
    logits = jax.ShapeDtypeStruct((rows, vocab), jnp.float32)
    text = compat.lower_for_cuda(with_kernel, logits, state).as_text()
    assert text.count(f"@{compat.CUSTOM_CALL}") == 1


@needs_mosaic
@pytest.mark.parametrize("vocab", [500, 514])
def test_a_vocabulary_that_the_kernel_cannot_take_is_refused_by_name(vocab):
    with pytest.raises(ImplementationError, match=f"filters.*{vocab}"):
        run("mosaic", logits_of("normal", 1, vocab), [{"top_k": 3}])


@needs_mosaic
def test_scores_that_are_left_have_a_gradient():
    state = sampling_state([SamplingParams(temperature=0.8, top_k=5)])
    with compat.interpreting():
        slope = jax.grad(lambda x: jax.nn.logsumexp(with_kernel(x, state)))(jnp.asarray(logits_of("normal", 1, 512)))
        assert int((np.asarray(slope) > 0).sum()) == 4, "all that are left but the best, which scores are told from"


@needs_mosaic
@pytest.mark.parametrize("vocab", [512, VOCAB])
def test_the_best_id_by_chunks_is_the_argmax(vocab):
    logits = logits_of("ties", 4, vocab)
    logits[1, [7, vocab - 1]], logits[2], logits[3, -1] = 1e9, -np.inf, np.inf
    with compat.interpreting():
        check_best_ids(logits)


def check_best_ids(logits: np.ndarray) -> None:
    array = jnp.asarray(logits)
    found = best_id(array, chunk_maxima(array, implementation="mosaic"))
    np.testing.assert_array_equal(found, np.argmax(logits, axis=-1))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["normal", "ties", "forbidden", "flat", "wide", "one lane"])
@pytest.mark.parametrize("vocab", [512, 1284, 49_152, 128_256, 151_936])
def test_mosaic_on_the_gpu(kind, vocab):
    asked = [each for each in ASKED for _ in range(3)]
    check(logits_of(kind, len(asked), vocab, seed=vocab), asked)


@pytest.mark.gpu
def test_mosaic_on_the_gpu_for_more_rows_than_run_at_once():
    asked = [ASKED[i % len(ASKED)] for i in range(600)]
    check(logits_of("ties", len(asked), 32_000), asked)


@pytest.mark.gpu
def test_damaged_rows_are_left_alone_on_the_gpu():
    logits = logits_of("normal", 3, 32_000)
    logits[0, 7], logits[1, 8], logits[2] = np.nan, np.inf, -np.inf
    asked = [{"top_k": 3, "top_p": 0.5, "min_p": 0.1}] * 3
    np.testing.assert_array_equal(run("mosaic", logits, asked), run("xla", logits, asked))
    check_best_ids(logits)
