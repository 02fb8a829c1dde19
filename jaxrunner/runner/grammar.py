"""From a `GrammarOutput` to the mask of a step's rows."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from jaxrunner.contract import GrammarOutput
from jaxrunner.errors import AdmissionError
from jaxrunner.sampling.packed_bits import num_words


def check_grammar_output(
    grammar_output: GrammarOutput | None, req_ids: Sequence[str], is_structured: np.ndarray, samples: np.ndarray
) -> None:
    """Raises AdmissionError where a mask is missing, belongs to no request with a grammar, or is none.

    req_ids: of the step, in batch order. is_structured, samples: bool[B], requests with structured_outputs, and those
    that get a token in this step: others need no mask, but may have one.
    """
    given = grammar_output or GrammarOutput([], np.zeros((0, 0), np.int32))
    masks, ids = np.asarray(given.grammar_bitmask), given.structured_output_request_ids
    if masks.ndim != 2 or masks.dtype.kind not in "iu" or masks.dtype.itemsize != 4 or len(masks) != len(ids):
        raise AdmissionError(
            f"grammar_bitmask is {masks.dtype}{list(masks.shape)} for {len(ids)} requests; it must be int32, a row each"
        )
    if len(listed := set(ids)) != len(ids):
        raise AdmissionError(f"structured_output_request_ids names a request twice: {list(ids)}")
    known = {req_id: bool(samples[i]) for i, req_id in enumerate(req_ids) if is_structured[i]}
    if strange := listed - known.keys():
        raise AdmissionError(f"request {min(strange)!r} has a grammar mask, but no structured_outputs in this step")
    if missing := {req_id for req_id, has_token in known.items() if has_token} - listed:
        raise AdmissionError(
            f"request {min(missing)!r} has structured_outputs; give sample_tokens a GrammarOutput with its mask"
        )


def step_bitmask(
    grammar_output: GrammarOutput, req_ids: Sequence[str], *, num_rows: int, vocab_size: int
) -> np.ndarray:
    """u32[num_rows, W] in batch order, see `jaxrunner.sampling.grammar`: all bits set in rows without a mask and in
    padding. A mask finds its row by its request, wherever it stands in grammar_output. Bits past the vocabulary are
    cut off; ids past a narrower mask's last word are forbidden.
    """
    bitmask = no_grammar(num_rows, vocab_size)
    place = {req_id: i for i, req_id in enumerate(req_ids)}
    rows = [place[req_id] for req_id in grammar_output.structured_output_request_ids]
    masks = np.asarray(grammar_output.grammar_bitmask)[:, : bitmask.shape[1]]
    bitmask[rows] = 0
    bitmask[rows, : masks.shape[1]] = masks.view(np.uint32)
    return bitmask


def no_grammar(num_rows: int, vocab_size: int) -> np.ndarray:
    """u32[num_rows, W], the mask that forbids nothing."""
    return np.full((num_rows, num_words(vocab_size)), ~np.uint32(0), np.uint32)


class GrammarMasks:
    """Masks of steps, and those that forbid nothing: these live on the device, so that most steps upload no mask.

    free: by the number of rows.
    """

    def __init__(self, vocab_size: int):
        self._vocab_size = vocab_size
        self.free: dict[int, jax.Array] = {}

    def of(self, grammar_output: GrammarOutput | None, req_ids: Sequence[str], num_rows: int) -> np.ndarray | jax.Array:
        """u32[num_rows, W], see `step_bitmask`. None: no request of the step has a grammar."""
        if grammar_output is not None:
            return step_bitmask(grammar_output, req_ids, num_rows=num_rows, vocab_size=self._vocab_size)
        if num_rows not in self.free:
            self.free[num_rows] = jax.device_put(no_grammar(num_rows, self._vocab_size))
        return self.free[num_rows]
