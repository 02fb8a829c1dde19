"""Where a step runs: `Placed`, what every kind of ladder answers, and `Buckets`, the ladder of compiled executables."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal, NamedTuple, Protocol

import numpy as np

from jaxrunner.compile.ladder import FUSED_REQS, OTHER_PROGRAMS, Ladder
from jaxrunner.errors import CapacityError
from jaxrunner.ladder.steps import Steps

Way = Literal["bucket", "miss", "full", "piecewise", "eager"]
WAYS: tuple[Way, ...] = ("bucket", "miss", "full", "piecewise", "eager")
"""bucket: a compiled executable of this package. miss: a step past the last rung, whose executable is compiled on
demand at its own size. full, piecewise: a replayed CUDA graph of the whole model, or graphs between its attentions.
eager: no graph and no padding."""
KINDS = ("decode", "mixed")


class Placed(NamedTuple):
    """way: see WAYS. kind: one of KINDS, which of the two kinds of executables or graphs runs. size: tokens it runs."""

    way: Way
    kind: str
    size: int


class StartUp(NamedTuple):
    """What is made before the first request.

    buckets: sizes that a step can be padded to. executables: programs or CUDA graphs. sizes: tokens of those programs
    that hold the model; a bucket may have two, the fused greedy step and the first half of every other step.
    """

    buckets: int
    executables: int
    sizes: tuple[int, ...] = ()


class Scheme(Protocol):
    """A ladder together with the rule by which a step finds its place in it."""

    @property
    def name(self) -> str: ...

    @property
    def made(self) -> Literal["compiled", "captured"]:
        """Whether start-up compiles executables or captures CUDA graphs."""
        ...

    def place(self, num_reqs: int, num_tokens: int, max_query_len: int, num_prefills: int) -> Placed:
        """Where a step of these sizes runs, see `Steps`."""
        ...

    def start_up(self) -> StartUp: ...

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Kind of executable -> padded tokens of each."""
        ...


@dataclasses.dataclass(frozen=True)
class Buckets:
    """An engine's `Ladder` as a scheme: what `DeviceRunner` does with a step of these sizes."""

    name: str
    ladder: Ladder
    made: ClassVar[Literal["compiled"]] = "compiled"

    def place(self, num_reqs: int, num_tokens: int, max_query_len: int, num_prefills: int) -> Placed:
        uniform = max_query_len if max_query_len * num_reqs == num_tokens else None
        try:
            bucket = self.ladder.pick_sizes(num_reqs, num_tokens, uniform)
        except CapacityError:
            return Placed("miss", "decode" if uniform == self.ladder.query_len else "mixed", num_tokens)
        return Placed("bucket", bucket.kind, bucket.num_tokens)

    def start_up(self) -> StartUp:
        """Executables as `jaxrunner.compile.programs.ProgramSet` counts them, the admissions at their usual number."""
        sizes, ladder = self.sizes(), self.ladder
        fused = [n for n, reqs in zip(sizes["decode"], ladder.decode, strict=True) if reqs <= FUSED_REQS]
        halves = sizes["decode"] if ladder.tiers != ("greedy",) else sizes["decode"][len(fused) :]
        models = (*fused, *halves, *sizes["mixed"])
        others = sum(len(ladder.finish_rungs(tier)) for tier in ladder.tiers) + OTHER_PROGRAMS
        return StartUp(len(ladder.decode) + len(ladder.mixed), len(models) + others, models)

    def sizes(self) -> dict[str, tuple[int, ...]]:
        return {"decode": tuple(n * self.ladder.query_len for n in self.ladder.decode), "mixed": self.ladder.mixed}


@dataclasses.dataclass(frozen=True)
class Placements:
    """Where S steps run: indices into WAYS and KINDS, and the tokens that run. i64[S] each."""

    way: np.ndarray
    kind: np.ndarray
    size: np.ndarray

    def count(self, way: Way) -> int:
        return int((self.way == WAYS.index(way)).sum())


def place_all(scheme: Scheme, steps: Steps) -> Placements:
    """`scheme.place` of every step; called once for each distinct size."""
    table = np.stack([steps.num_reqs, steps.num_tokens, steps.max_query_len, steps.num_prefills], axis=1)
    distinct, index = np.unique(table, axis=0, return_inverse=True)
    placed = [scheme.place(*row) for row in distinct.tolist()]
    columns = np.array([(WAYS.index(p.way), KINDS.index(p.kind), p.size) for p in placed], np.int64).reshape(-1, 3)
    return Placements(*columns[index.reshape(-1)].T)


def as_scheme(ladder: Scheme | Ladder, name: str = "ladder") -> Scheme:
    """An engine's ladder under `name`; a scheme as it is."""
    return Buckets(name, ladder) if isinstance(ladder, Ladder) else ladder
