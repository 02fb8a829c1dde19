"""Repetition, frequency and presence penalties, counted from the history that the state has anyway.

No table of counts is kept for any request. The tokens of the step's rows are scattered into a scratch of one word for
each id and row, which lives inside the executable and in no other tier. Moving bytes decides the cost: of 256 rows by
128,256 ids the scratch is 131 MB, as large as the logits, so filling it and reading it back take about 31 us each at
4.2 TB/s; the scatter itself is a million atomic additions for 256 histories of 4096 tokens. One scatter counts prompt
and output, each in a half of the word, wherever a history is short enough for that. Sorting the histories would spare
the scratch, but the 78 compare-and-swap rounds of 256 x 4096 keys cost more than these two passes; a table carried from
step to step would spare the scatter, but takes R x V words for good and has to be built anew for every request that
comes or comes back. A preempted, forked or replayed request needs nothing restored: its history is all.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from jaxrunner.sampling.history import History
from jaxrunner.state.sampling import SamplingState

SHORT, LONG = 1 << 16, 1 << 31
"""What an occurrence in the prompt adds to a word, or sets in one, that counts those in the output below it."""


class Penalties(NamedTuple):
    """Of B rows. words, unit: see `occurrences`. repetition, frequency, presence: f32[B]; 1, 0 and 0 are off."""

    words: UInt32[Array, "B V"]
    unit: int
    repetition: Float32[Array, "B"]
    frequency: Float32[Array, "B"]
    presence: Float32[Array, "B"]

    @classmethod
    def of_history(
        cls, history: History, position: Int32[Array, "B"], params: SamplingState, vocab_size: int
    ) -> Penalties:
        """position: index of the new token, so the tokens before it count. params: a repetition of 0 is off as well."""
        repetition = jnp.where(params.repetition_penalty <= 0, 1.0, params.repetition_penalty)
        frequency, presence = params.frequency_penalty, params.presence_penalty
        is_on = (repetition != 1) | (frequency != 0) | (presence != 0)
        words, unit = occurrences(history, jnp.where(is_on, position, 0), vocab_size)
        return cls(words, unit, repetition, frequency, presence)

    def apply(self, logits: Float32[Array, "B V"]) -> Float32[Array, "B V"]:
        """Penalised logits; rows without a penalty stay bit for bit.

        Of an id that the prompt or the output holds: logit / repetition if it is positive, else logit * repetition.
        Then minus frequency * (times in the output), minus presence if it is in the output at all. Prompt and output
        part at prompt_len, also in a request that came back with tokens of its own.
        Source: Keskar et al. 2019 (CTRL) for the repetition penalty; vLLM for all three.
        """
        return self._penalise(logits, self.words)

    def apply_at(self, logits: Float32[Array, "B N"], column: Int32[Array, "B N"]) -> Float32[Array, "B N"]:
        """`apply` for logits of some ids of each row. column: the ids; what is outside the vocabulary gives junk."""
        return self._penalise(logits, jnp.take_along_axis(self.words, column, axis=1, mode="clip"))

    def _penalise(self, logits: Float32[Array, "B N"], words: UInt32[Array, "B N"]) -> Float32[Array, "B N"]:
        count = (words & (self.unit - 1)).astype(jnp.float32)
        # Not "!= 0": XLA takes that 0 for what the scratch is filled with, and reads it from a second scratch.
        factor = jnp.where(words >= 1, self.repetition[:, None], 1.0)
        logits = jnp.where(logits > 0, logits / factor, logits * factor)
        logits = logits - self.frequency[:, None] * count
        return logits - jnp.where(count > 0, self.presence[:, None], 0.0)


def occurrences(history: History, length: Int32[Array, "B"], vocab_size: int) -> tuple[UInt32[Array, "B V"], int]:
    """(for each id of each row how often it is in the output, plus a multiple of `unit` if in the prompt; the unit).
    length: how many tokens of each row are meant."""
    tokens = history.of_rows()
    rows, width = tokens.shape
    index, row = jnp.arange(width), jnp.arange(rows)[:, None]
    is_known, is_output = index < length[:, None], index >= history.prompt_len[:, None]

    def column(chosen: Bool[Array, "B L"]) -> Int32[Array, "B L"]:
        return jnp.where(chosen & (tokens >= 0), tokens, vocab_size)  # out of range: dropped, where -1 would wrap

    words = jnp.zeros((rows, vocab_size), jnp.uint32)
    if width < SHORT:
        each = jnp.where(is_output, jnp.uint32(1), jnp.uint32(SHORT))
        return words.at[row, column(is_known)].add(each, mode="drop"), SHORT
    # The bit is not added: two occurrences in the prompt would cancel.
    words = words.at[row, column(is_known & ~is_output)].max(LONG, mode="drop")
    return words.at[row, column(is_known & is_output)].add(1, mode="drop"), LONG
