"""What ops of the sampler may know of a row's tokens so far."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32


class History(NamedTuple):
    """token_ids: i32[R, L], of `RequestState`: every token that a row's request has, the newest included.

    rows: i32[B], state row of each logits row. prompt_len: i32[B]; tokens from there on are output.
    """

    token_ids: jax.Array
    rows: jax.Array
    prompt_len: jax.Array

    def of_rows(self) -> Int32[Array, "B L"]:
        """The whole width of the batch's rows; tokens from a row's length on are junk."""
        return self.token_ids[self.rows]

    def at(self, index: Int32[Array, "B N"]) -> Int32[Array, "B N"]:
        """Tokens at some places of each row; a place outside of the row gives junk."""
        return self.token_ids[self.rows[:, None], jnp.clip(index, 0, self.token_ids.shape[1] - 1)]
