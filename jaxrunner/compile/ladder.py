"""A ladder of buckets: which padded sizes are compiled. Plain data that can be printed, edited and plotted.

Executables add, they do not multiply: only greedy decodes have a fused step, one for each rung. All other steps are
split into a first half per rung, without a tier, and a second half per request rung and tier, which serves them all. A
product of the axes exists only for the few rungs of the second half.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrunner.compile.buckets import TIER_FEATURES, TIERS, Bucket, Feature, Tier
from jaxrunner.errors import AdmissionError, CapacityError

if TYPE_CHECKING:  # a ladder is studied (`jaxrunner.ladder`) where there is no JAX
    from jaxrunner.models.model import Model
    from jaxrunner.stages.inputs import StepInput

MAX_EXECUTABLES = 40
"""What a default ladder compiles at most."""
OTHER_PROGRAMS = 5
"""Three to admit, one for moves, one for log-probabilities of prompts."""
ALL_RUNGS_REQS, ALL_COSTLY_RUNGS_REQS = 64, 16
"""Most requests for which tiers have a second half for a single one of them: those of a plain draw, and the others."""
FUSED_REQS = 1024
"""Largest decode that has a fused step: beyond it one launch more is nothing beside the step itself."""
ALL_DECODES_REQS = 256
"""Most requests for which two have a decode of their own; of more, two run in that of four, and the largest decode has
a fused step for it."""


@dataclasses.dataclass(frozen=True)
class Ladder:
    """decode: request rungs of the uniform decode. mixed: token rungs of ragged steps. finish: request rungs of the
    second half of a step that is not fused. finish_costly: those of tiers beyond a plain draw, by default the same.
    The last rung of each is the exact maximum. query_len: tokens of a decode.
    """

    decode: tuple[int, ...]
    mixed: tuple[int, ...]
    finish: tuple[int, ...]
    query_len: int = 1
    tiers: tuple[Tier, ...] = TIERS
    finish_costly: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "finish_costly", self.finish_costly or self.finish)
        for name in ("decode", "mixed", "finish", "finish_costly"):
            rungs = getattr(self, name)
            if not rungs or list(rungs) != sorted(set(rungs)) or rungs[0] < 1:
                raise ValueError(f"the {name} rungs must be ascending, distinct and positive, got {rungs}")
        for rungs in (self.finish, self.finish_costly):
            if rungs[-1] != self.decode[-1]:
                raise ValueError(f"decode and finish rungs end at {self.decode[-1]} and {rungs[-1]} requests")

    @property
    def max_num_reqs(self) -> int:
        return self.decode[-1]

    @property
    def max_num_tokens(self) -> int:
        return self.mixed[-1]

    @classmethod
    def default(
        cls, model: Model | None = None, *, max_num_seqs: int = 64, max_num_batched_tokens: int = 2048
    ) -> Ladder:
        """Powers of two for decodes; halves of the maximum for ragged steps, down to 16 or to a 128th of it, as many
        as MAX_EXECUTABLES allows; and three second halves: for one request, for the root of the maximum and for all. Of
        many requests the first is left out, so that the list stays short; where the tier costs more, of fewer. So is
        the decode of two.
        """
        del model  # every model of this package takes the same rungs
        tokens = max(max_num_batched_tokens, max_num_seqs)
        decode = geometric(1, max_num_seqs, 2)
        if max_num_seqs > ALL_DECODES_REQS:
            decode = (1, *decode[2:])
        rungs = default_finish(max_num_seqs)
        finish = rungs if max_num_seqs <= ALL_RUNGS_REQS else rungs[1:]
        costly = rungs if max_num_seqs <= ALL_COSTLY_RUNGS_REQS else rungs[1:]
        fused = sum(n <= FUSED_REQS for n in decode)
        finishes = sum(len(costly if _is_costly(tier) else finish) for tier in TIERS)
        others = len(decode) + fused + finishes + OTHER_PROGRAMS
        mixed = halves(tokens, max(16, tokens // 128), max(3, MAX_EXECUTABLES - others))
        return cls(decode, mixed, finish, finish_costly=costly)

    @classmethod
    def powers_of_two(cls, max_num_seqs: int, max_num_batched_tokens: int | None = None) -> Ladder:
        """Powers of two everywhere."""
        tokens = max(max_num_batched_tokens or 0, max_num_seqs)
        decode = geometric(1, max_num_seqs, 2)
        return cls(decode=decode, mixed=geometric(1, tokens, 2), finish=decode)

    def pick(self, inputs: StepInput) -> Bucket:
        """The smallest bucket that holds `inputs`. Raises CapacityError past the last rung, naming the limit."""
        uniform = None if inputs.keeps_tokens else inputs.uniform_query_len
        return self.pick_sizes(inputs.num_reqs, inputs.num_tokens, uniform, inputs.tier)

    def pick_sizes(
        self, num_reqs: int, num_tokens: int, uniform_query_len: int | None, tier: Tier = "greedy"
    ) -> Bucket:
        """`pick` for a step of which only the sizes are known, see `StepInput`."""
        if num_reqs == 0:
            raise CapacityError("a step without tokens has no bucket; apply its admissions and releases alone")
        if num_reqs > self.max_num_reqs:
            raise CapacityError(f"{num_reqs} requests; this ladder ends at {self.max_num_reqs}")
        if uniform_query_len == self.query_len:
            return self.decode_bucket(_at_least(self.decode, num_reqs), tier)
        if num_tokens > self.max_num_tokens:
            raise CapacityError(f"{num_tokens} tokens; this ladder ends at {self.max_num_tokens}: run a chunk")
        return self.mixed_bucket(_at_least(self.mixed, num_tokens), tier)

    def check_holds(self, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        """Raises AdmissionError if an engine of these sizes could plan a step that no bucket holds."""
        if self.max_num_reqs < max_num_seqs or self.max_num_tokens < max_num_batched_tokens:
            raise AdmissionError(
                f"the ladder ends at {self.max_num_reqs} requests and {self.max_num_tokens} tokens, the engine runs up "
                f"to max_num_seqs={max_num_seqs} and max_num_batched_tokens={max_num_batched_tokens}: add these as the "
                "last rungs of decode (and finish) and of mixed, or lower them"
            )

    def save(self, path: str | Path) -> None:
        """Write the ladder as JSON, to be read by `load`."""
        Path(path).write_text(json.dumps(dataclasses.asdict(self)) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Ladder:
        """A ladder that `save` wrote (or a person: `{"decode": [1, 8], "mixed": [64, 512], "finish": [8]}`). Raises
        AdmissionError, naming the file, for anything else."""
        try:
            fields: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
            fields = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
            return cls(**fields)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise AdmissionError(f"{path} holds no ladder ({error}); Ladder.save writes one") from error

    def decode_bucket(self, num_reqs: int, tier: Tier) -> Bucket:
        return Bucket("decode", num_reqs * self.query_len, num_reqs, self.query_len, tier)

    def mixed_bucket(self, num_tokens: int, tier: Tier) -> Bucket:
        return Bucket("mixed", num_tokens, min(num_tokens, self.max_num_reqs), num_tokens, tier)

    def finish_rungs(self, tier: Tier) -> tuple[int, ...]:
        """Request rungs of the second halves at `tier`."""
        return self.finish_costly if _is_costly(tier) else self.finish

    def finish_rung(self, num_reqs: int, tier: Tier) -> int:
        return _at_least(self.finish_rungs(tier), num_reqs)

    def larger(self, bucket: Bucket) -> list[Bucket]:
        """Buckets of the same kind and tier that also hold what `bucket` holds, in ascending order."""
        if bucket.kind == "decode":
            return [self.decode_bucket(n, bucket.tier) for n in self.decode if n > bucket.num_reqs]
        return [self.mixed_bucket(n, bucket.tier) for n in self.mixed if n > bucket.num_tokens]

    def buckets(self) -> list[Bucket]:
        """Every bucket that a step can be run in, each once, with the lowest tier: a first half has none."""
        decodes = [self.decode_bucket(n, self.tiers[0]) for n in self.decode]
        return decodes + [self.mixed_bucket(n, self.tiers[0]) for n in self.mixed]


def default_finish(max_num_seqs: int) -> tuple[int, ...]:
    """Rungs of the second half of a step: one request, about the root of the maximum, and all."""
    root = 1 << (((max_num_seqs - 1).bit_length() + 1) // 2)
    return tuple(sorted({1, min(root, max_num_seqs), max_num_seqs}))


@functools.cache
def _is_costly(tier: Tier) -> bool:
    return bool(TIER_FEATURES[tier] & ~Feature.DRAW)


def geometric(first: int, last: int, factor: int) -> tuple[int, ...]:
    """first, first * factor, ... below `last`, and `last` itself."""
    rungs, n = [], first
    while n < last:
        rungs.append(n)
        n *= factor
    return (*rungs, last)


def halves(last: int, least: int, count: int) -> tuple[int, ...]:
    """At most `count` sizes from about `least` up to exactly `last`, each half of the next one, rounded up to a
    multiple of 8. Where `count` is too few for that the lower ones, whose padding costs least, are a quarter of the
    next."""
    doublings = max(0, math.ceil(math.log2(last / least)))
    steps = min(doublings, count - 1)
    quarters = min(steps, doublings - steps)
    rungs = [last]
    for i in range(steps):
        rungs.append(-(-rungs[-1] // (2 if i < steps - quarters else 4)))
    return tuple(sorted({-(-n // 8) * 8 for n in rungs[1:]} | {last}))


def _at_least(rungs: tuple[int, ...], n: int) -> int:
    return rungs[bisect.bisect_left(rungs, n)]
