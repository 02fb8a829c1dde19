"""Log-probabilities of prompts, chunk by chunk: which tokens of a step are asked for, and what has arrived so far.

A request's results are kept here and not in a row or a step: they outlive the rows of a batch and are gathered when the
prompt is complete. A request that is preempted before that starts over with them, as it does with its tokens; one that
resumes with output of its own has reported them.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import numpy as np

from jaxrunner.contract import LogprobsLists
from jaxrunner.runner.logprob_columns import Found, columns, start_copy
from jaxrunner.sampling.logprobs import TokenLogprobs
from jaxrunner.sampling_params import SamplingParams


class AskedTokens(NamedTuple):
    """The tokens of one step whose numbers are asked for, in batch order. N tokens.

    tokens, rows, positions: i32[N], see `jaxrunner.stages.prompt_logprobs`. owner: i32[N], place of the request in the
    batch. completes: bool[B], requests that ask and whose prompt is complete with this step; its last token has no
    successor in the prompt, so there may be no token of theirs.
    """

    tokens: np.ndarray
    rows: np.ndarray
    positions: np.ndarray
    owner: np.ndarray
    completes: np.ndarray


def asked_tokens(rows: np.ndarray, counts: np.ndarray, computed: np.ndarray, asked: np.ndarray) -> AskedTokens | None:
    """rows, counts: of the batch. computed: tokens of each request before the step. asked: how many of its first tokens
    have their successor scored, prompt_len - 1 or 0. None if the step has none of them and completes no prompt."""
    numbers = np.clip(asked - computed, 0, counts)
    completes = (asked > 0) & (computed <= asked) & (computed + counts > asked)
    if not (numbers.any() or completes.any()):
        return None
    owner = np.repeat(np.arange(len(rows), dtype=np.int32), numbers)
    offset = np.arange(len(owner), dtype=np.int32) - np.repeat(np.cumsum(numbers) - numbers, numbers)
    starts = np.cumsum(counts) - counts
    return AskedTokens(starts[owner] + offset, rows[owner], computed[owner] + offset + 1, owner, completes)


def num_asked(params: SamplingParams, prompt_len: int, num_tokens: int) -> int:
    """How many first tokens of a request that comes with `num_tokens` have their successor scored: of the prompt all
    but the last, or none, also where the request resumes with output, since then they have been reported."""
    return prompt_len - 1 if params.scores_prompt and num_tokens == prompt_len else 0


class Piece:
    """What one step found: one `TokenLogprobs` a call, on the device until somebody asks for it."""

    def __init__(self, found: list[TokenLogprobs], num_tokens: int, num_best: int, num_listed: int):
        self._found = [start_copy(f, num_best, num_listed) for f in found]
        self._num_tokens = num_tokens
        self._arrays: Found | None = None

    def arrays(self) -> Found:
        """As NumPy arrays, one row a token. Frees what the device holds."""
        if self._arrays is None:
            joined = jax.tree.map(lambda *parts: np.concatenate(list(map(np.asarray, parts))), *self._found)
            self._arrays = jax.tree.map(lambda a: a[: self._num_tokens], joined)
            self._found = []
        return self._arrays


@dataclasses.dataclass
class PromptReport:
    """Of one request. num_best: see `columns`; None if only listed ids are asked for, and num_listed None if none are.
    parts: the pieces that hold it, and which rows of each."""

    num_best: int | None
    num_listed: int | None
    parts: list[tuple[Piece, slice]] = dataclasses.field(default_factory=list)

    @classmethod
    def asked_by(cls, params: SamplingParams, vocab_size: int) -> PromptReport:
        listed = params.prompt_logprob_token_ids
        best = params.prompt_logprobs
        return cls(vocab_size if best == -1 else best, None if listed is None else len(listed))

    def gather(self) -> tuple[LogprobsLists | None, np.ndarray | None]:
        """(the chosen and best ids of each token, f32[prompt_len - 1, num_listed]), each None if not asked for."""
        arrays = [jax.tree.map(lambda a, rows=rows: a[rows], piece.arrays()) for piece, rows in self.parts]
        whole = jax.tree.map(lambda *a: np.concatenate(a), *arrays)
        listed = whole.listed_logprobs[:, : self.num_listed] if self.num_listed is not None else None
        if self.num_best is None:
            return None, listed
        count = np.full(len(whole.logprobs), self.num_best)
        found = whole._replace(listed_ids=None, listed_logprobs=None)
        return columns(found, count, np.zeros_like(count), np.ones(len(count), bool)), listed


class PromptReports:
    """Of the requests that ask and whose prompts are not complete."""

    def __init__(self) -> None:
        self._of: dict[str, PromptReport] = {}

    def __len__(self) -> int:
        return len(self._of)

    def add(self, req_id: str, report: PromptReport) -> None:
        """Begin, also for an id that has begun before."""
        self._of[req_id] = report

    def drop(self, req_id: str) -> None:
        """Forget what has arrived, if the request asked."""
        self._of.pop(req_id, None)

    def most(self, req_ids: list[str], asked: AskedTokens) -> tuple[int, int]:
        """(best ids, listed ids), the most that a request of the step asks for."""
        reports = [self._of[req_ids[i]] for i in np.unique(asked.owner).tolist()]
        return max(r.num_best or 0 for r in reports), max(r.num_listed or 0 for r in reports)

    def enter(
        self, req_ids: list[str], asked: AskedTokens, found: list[TokenLogprobs]
    ) -> tuple[Piece | None, tuple[tuple[str, PromptReport], ...]]:
        """Note what the device found for the tokens of a step, one for each call. Returns (that, the requests whose
        prompts are complete with it), as `Asked` holds them."""
        piece = Piece(found, len(asked.tokens), *self.most(req_ids, asked)) if found else None
        return piece, tuple(self.take(req_ids, asked, piece))

    def take(self, req_ids: list[str], asked: AskedTokens, piece: Piece | None) -> list[tuple[str, PromptReport]]:
        """Note a step's piece with its requests; returns those that are complete with it."""
        for i in np.unique(asked.owner).tolist():
            assert piece is not None
            first, end = np.searchsorted(asked.owner, [i, i + 1]).tolist()
            self._of[req_ids[i]].parts.append((piece, slice(first, end)))
        return [(req_ids[i], self._of.pop(req_ids[i])) for i in np.flatnonzero(asked.completes).tolist()]
