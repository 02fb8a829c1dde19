"""vLLM's CUDA-graph dispatch: modes, what is captured, and which graph a step is replayed from, if any.

Modelled are vLLM's V2 runner at 0.28 and 0.33, without LoRA, micro-batches and adaptive draft lengths. Source: 0.28,
`config/compilation.py` (modes and how they are resolved) and `v1/worker/gpu/cudagraph_utils.py` (candidates and
look-up); 0.33, the same file. Nothing here needs vLLM.
"""

from __future__ import annotations

import bisect
import dataclasses
import enum
import functools
from typing import ClassVar, Literal

from jaxrunner.errors import AdmissionError
from jaxrunner.ladder.placement import Placed, StartUp

Release = Literal["0.28", "0.33"]
RELEASES: tuple[Release, ...] = ("0.28", "0.33")


class Mode(enum.Enum):
    """vLLM's CUDAGraphMode: (graphs of uniform decodes, graphs of all other steps)."""

    NONE = ("eager", "eager")
    PIECEWISE = ("piecewise", "piecewise")
    FULL = ("full", "full")
    FULL_DECODE_ONLY = ("full", "eager")
    FULL_AND_PIECEWISE = ("full", "piecewise")

    @property
    def decode(self) -> str:
        return self.value[0]

    @property
    def mixed(self) -> str:
        return self.value[1]

    @property
    def separate_routine(self) -> bool:
        """Whether uniform decodes have graphs of their own."""
        return self in (Mode.FULL_DECODE_ONLY, Mode.FULL_AND_PIECEWISE)


class Support(enum.IntEnum):
    """vLLM's AttentionCGSupport: what an attention backend can run inside a full graph."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3


def resolve(mode: Mode, support: Support, *, query_len: int = 1, splitting: bool = True) -> tuple[Mode, list[str]]:
    """(the mode that vLLM really runs, the warnings on the way to it).

    support: the least of all attention backends. query_len: tokens of a decode, its drafts and one more. splitting:
    the model is compiled in pieces around attention, so that PIECEWISE exists. Raises AdmissionError for a mode that
    vLLM refuses.
    """
    warnings = []

    def fall(to: Mode, why: str) -> Mode:
        warnings.append(f"{mode.name} -> {to.name}: {why}")
        return to

    if mode.mixed == "full" and support < Support.ALWAYS:
        if support is Support.NEVER:
            raise AdmissionError(f"{mode.name} needs attention that runs in a full graph; use PIECEWISE or NONE")
        to = Mode.FULL_AND_PIECEWISE if splitting else Mode.FULL_DECODE_ONLY
        mode = fall(to, "attention runs in a full graph for uniform decodes alone")
    without = Mode.PIECEWISE if splitting else Mode.NONE
    if mode.decode == "full" and support is Support.NEVER:
        mode = fall(without, "attention runs in no full graph")
    if mode.decode == "full" and query_len > 1 and support < Support.UNIFORM_BATCH:
        mode = fall(without, f"attention runs in a full graph for single tokens alone, a decode has {query_len}")
    return mode, warnings


@dataclasses.dataclass(frozen=True)
class Graph:
    """One captured descriptor. None is no constraint. Field names are vLLM's."""

    cg_mode: Literal["full", "piecewise"]
    num_tokens: int
    num_reqs: int | None = None
    uniform_token_count: int | None = None

    def holds(self, num_tokens: int, num_reqs: int, uniform_token_count: int | None) -> bool:
        return (
            self.num_tokens >= num_tokens
            and (self.num_reqs is None or self.num_reqs >= num_reqs)
            and self.uniform_token_count in (None, uniform_token_count)
        )


@dataclasses.dataclass(frozen=True)
class CudaGraphs:
    """The CUDA-graph ladder as a scheme.

    capture_sizes: ascending, in tokens (`rules.vllm_sizes`). mode: as resolved. release: whose look-up. query_len:
    tokens of a decode, its drafts and one more. num_layers: attentions of the model, between which pieces lie.
    """

    name: str
    capture_sizes: tuple[int, ...]
    max_num_seqs: int
    mode: Mode = Mode.FULL_AND_PIECEWISE
    release: Release = "0.33"
    query_len: int = 1
    num_layers: int = 32
    made: ClassVar[Literal["captured"]] = "captured"

    def __post_init__(self) -> None:
        if self.release not in RELEASES:
            raise AdmissionError(f"unknown release {self.release!r}; use one of {RELEASES}")
        if list(self.capture_sizes) != sorted(set(self.capture_sizes)) or min(self.capture_sizes, default=1) < 1:
            raise AdmissionError(f"capture sizes must be ascending, distinct and positive, got {self.capture_sizes}")

    @functools.cached_property
    def decodes(self) -> tuple[Graph, ...]:
        """Full graphs of uniform decodes: every capture size, rounded up to whole requests."""
        if not self.mode.separate_routine or not self.capture_sizes:
            return ()
        q, largest = self.query_len, self.capture_sizes[-1]
        rounded = {-(-n // q) * q for n in self.capture_sizes}
        kept = sorted(n for n in rounded if n <= min(largest, self.max_num_seqs * q))
        return tuple(Graph("full", n, n // q, q) for n in kept)

    @functools.cached_property
    def others(self) -> tuple[Graph, ...]:
        """Graphs that take any step."""
        if self.mode.mixed == "piecewise":
            return tuple(Graph("piecewise", n) for n in self.capture_sizes)
        if self.mode.mixed == "full":
            return tuple(Graph("full", n, min(n, self.max_num_seqs)) for n in self.capture_sizes)
        return ()

    @property
    def graphs(self) -> tuple[Graph, ...]:
        """All that is captured."""
        return self.decodes + self.others

    def candidates(self, num_tokens: int) -> list[Graph]:
        """The graphs that a step of `num_tokens` is compared with, in order.

        0.28 looks at the smallest size that holds the step, among the sizes of decodes and of other steps together,
        and at nothing larger; so a size that only decodes have offers nothing to another step. 0.33 looks at the full
        graphs of the smallest such size, then at the piecewise ones of theirs.
        """
        if self.release == "0.28":
            return _smallest(self.graphs, num_tokens)
        full, piecewise = (tuple(g for g in self.graphs if g.cg_mode == mode) for mode in ("full", "piecewise"))
        return _smallest(full, num_tokens) + _smallest(piecewise, num_tokens)

    def dispatch(self, num_reqs: int, num_tokens: int, max_query_len: int, num_prefills: int) -> Graph | None:
        """The graph that a step is replayed from, or None: it runs eagerly, without padding."""
        uniform = max_query_len if not num_prefills and max_query_len * num_reqs == num_tokens else None
        return next((g for g in self.candidates(num_tokens) if g.holds(num_tokens, num_reqs, uniform)), None)

    def place(self, num_reqs: int, num_tokens: int, max_query_len: int, num_prefills: int) -> Placed:
        graph = self.dispatch(num_reqs, num_tokens, max_query_len, num_prefills)
        kind = "mixed" if num_prefills or max_query_len * num_reqs != num_tokens else "decode"
        return Placed("eager", kind, num_tokens) if graph is None else Placed(graph.cg_mode, kind, graph.num_tokens)

    def start_up(self) -> StartUp:
        """Buckets are capture sizes; a full graph is one, a piecewise one has a graph before, between and after all
        attentions."""
        pieces = {"full": 1, "piecewise": self.num_layers + 1}
        return StartUp(len(self.capture_sizes) if self.graphs else 0, sum(pieces[g.cg_mode] for g in self.graphs))

    def sizes(self) -> dict[str, tuple[int, ...]]:
        full = self.decodes or (self.others if self.mode.decode != "eager" else ())
        return {"decode": tuple(g.num_tokens for g in full), "mixed": tuple(g.num_tokens for g in self.others)}


def _smallest(graphs: tuple[Graph, ...], num_tokens: int) -> list[Graph]:
    """Those of the smallest size that holds `num_tokens`, in their order."""
    sizes = sorted({g.num_tokens for g in graphs})
    place = bisect.bisect_left(sizes, num_tokens)
    return [g for g in graphs if g.num_tokens == sizes[place]] if place < len(sizes) else []
