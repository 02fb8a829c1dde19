"""`BatchUpdate`: which rows of the dense batch were removed, added and moved since the step before.

Whoever keeps arrays of its own over the rows (a logits processor, say) follows the batch by these records alone. Rows
in `removed` and in `added` are distinct, so their order does not matter; moves come after both, in their order.
Source: vLLM V1, `sample/logits_processor`.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from jaxrunner.sampling_params import SamplingParams


class MoveKind(enum.Enum):
    """ONE_WAY: the row of origin is empty afterwards. SWAP: the rows change places."""

    ONE_WAY = enum.auto()
    SWAP = enum.auto()


@dataclasses.dataclass(frozen=True)
class AddedRow:
    """A request that has moved into `row`, over whatever was there.

    num_tokens: that it comes with. kept: values of arrays that it had when it was preempted, see `KeptArrays`.
    """

    row: int
    req_id: str
    params: SamplingParams
    num_tokens: int = 0
    kept: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class MovedRow:
    """A request that has gone from row `source` to row `target`."""

    source: int
    target: int
    kind: MoveKind


@dataclasses.dataclass(frozen=True)
class BatchUpdate:
    """batch_size: requests in the batch afterwards. removed: rows that nobody has moved into before any move."""

    batch_size: int
    removed: tuple[int, ...]
    added: tuple[AddedRow, ...]
    moved: tuple[MovedRow, ...]


class BatchListener(Protocol):
    """What follows the rows of the batch."""

    def update_state(self, update: BatchUpdate) -> None: ...


def follow(array: np.ndarray, moved: tuple[MovedRow, ...], empty: Any = 0) -> None:
    """Move the rows of `array`, in place, as the batch's were."""
    for move in moved:
        if move.kind is MoveKind.SWAP:
            array[[move.source, move.target]] = array[[move.target, move.source]]
        else:
            array[move.target] = array[move.source]
            array[move.source] = empty


def swaps_of(source: np.ndarray, target: np.ndarray) -> list[MovedRow]:
    """The same permutation (row source[i] becomes row target[i]) as swaps, one after the other."""
    place = {row: row for row in source.tolist()}  # where the content of each row is by now
    content = dict(place)  # whose content each row holds by now
    swaps = []
    for wanted, row in zip(source.tolist(), target.tolist(), strict=True):
        if (origin := place[wanted]) != row:
            swaps.append(MovedRow(origin, row, MoveKind.SWAP))
            other = content[row]
            content[row], content[origin] = wanted, other
            place[wanted], place[other] = row, origin
    return swaps
