"""Per-request state on the device: token history and counters, one row a request for its life.

Row 0 is the parking row: padded rows of a batch map to it and it stays zero. A request keeps its row until it is
released; rows never move.
"""

from __future__ import annotations

import jax
from flax import struct

from jaxrunner.state.fields import REQUEST_COLUMN

PARKING_ROW = 0


class RequestState(struct.PyTreeNode):
    """R rows, the parking row included; L = max_model_len; K draft tokens.

    token_ids: i32[R, L], prompt and outputs.
    counters: i32[R, len(REQUEST_FIELDS)], see `jaxrunner.state.fields`; the properties below name its columns.
    draft_tokens: i32[R, K], or None when K is 0.
    """

    token_ids: jax.Array
    counters: jax.Array
    draft_tokens: jax.Array | None = None

    @property
    def prompt_len(self) -> jax.Array:
        return self.counters[:, REQUEST_COLUMN["prompt_len"]]

    @property
    def prefill_len(self) -> jax.Array:
        return self.counters[:, REQUEST_COLUMN["prefill_len"]]

    @property
    def total_len(self) -> jax.Array:
        return self.counters[:, REQUEST_COLUMN["total_len"]]

    @property
    def num_computed_tokens(self) -> jax.Array:
        return self.counters[:, REQUEST_COLUMN["num_computed_tokens"]]

    @property
    def last_sampled_token(self) -> jax.Array:
        return self.counters[:, REQUEST_COLUMN["last_sampled_token"]]

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]

    @property
    def max_model_len(self) -> int:
        return self.token_ids.shape[1]
