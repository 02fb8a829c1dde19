"""What a runner keeps of preempted requests: the arrays that the user's functions updated for them.

Everything else of a request that comes back is in its parameters and its tokens. These values exist only in its row, so
they are copied out of it before the row goes to another request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from jaxrunner.contract import NewRequestData
from jaxrunner.errors import AdmissionError
from jaxrunner.sampling_params import SamplingParams
from jaxrunner.state.request_arrays import GENERATIONS, ArraySets, updated_names
from jaxrunner.state.row_copies import RowCopies


class KeptArrays:
    """By request id, until the request comes back or ends. Values stay on the device until they are needed."""

    def __init__(self, sets: ArraySets):
        self._sets = tuple(owned for owned in sets if owned.is_updated)
        self._places: dict[str, tuple[RowCopies, int]] = {}

    def __len__(self) -> int:
        return len(self._places)

    @property
    def is_needed(self) -> bool:
        """Whether any array is ever updated."""
        return bool(self._sets)

    def keep(self, req_ids: Sequence[str], copied: RowCopies) -> None:
        """copied: one row for each request, in this order; further ones are padding."""
        self._places.update((req_id, (copied, place)) for place, req_id in enumerate(req_ids))

    def forget(self, req_ids: Iterable[str]) -> None:
        for req_id in req_ids:
            self._places.pop(req_id, None)

    def values(self, request: NewRequestData) -> dict[str, np.ndarray]:
        """The values a request had when it had the tokens that it comes back with, by name in `state.extras`; nothing
        for one that has no output yet, or for which nothing is updated. Waits for the step that made them.

        Raises AdmissionError where they are not known.
        """
        params = request.sampling_params or SamplingParams()
        asked = [owned for owned in self._sets if owned.asked_by(params)]
        prompt = request.prompt_token_ids or []
        length = len(request.prefill_token_ids or prompt)
        if not asked or length == len(prompt):
            return {}
        where = f"request {request.req_id!r} comes back with {length} tokens, and {asked[0].owner}"
        if request.req_id not in self._places:
            raise AdmissionError(
                f"{where} has updated arrays of its own for it, which this runner does not know: preempt it by "
                "preempted_req_ids of this runner, or start it anew without its output"
            )
        copied, place = self._places[request.req_id]
        total, first = int(copied.total_len[place]), int(copied.prefill_len[place])
        if not max(first, total - GENERATIONS + 1) <= length <= total:
            raise AdmissionError(
                f"{where} updated its arrays until it had {total}; values are kept for {GENERATIONS} lengths, of which "
                f"the newest is that one: come back with at least {max(first, total - GENERATIONS + 1)} tokens"
            )
        kept = {name: np.asarray(value)[place, length % GENERATIONS] for name, value in copied.values.items()}
        return {name: kept[name] for name in updated_names(tuple(asked))}
