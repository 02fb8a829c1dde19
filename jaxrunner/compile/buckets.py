"""A bucket: the static shape of one step. Plain data, hashable, made to be printed and edited."""

from __future__ import annotations

import dataclasses
import enum
import functools
from typing import Literal

Kind = Literal["decode", "mixed"]
Tier = Literal["greedy", "random", "logprobs", "filtered", "constrained", "full"]


class Feature(enum.IntFlag):
    """What a request may ask of the sampler beyond an argmax. A row holds its request's bits, a batch their union.

    DRAW: a temperature. FILTERS: min_p, top_k, top_p. CONSTRAINTS: what changes logits before the temperature, and
    trace replay. LOGPROBS, SAMPLING_MASK: more in the output than tokens.
    """

    DRAW = 1
    FILTERS = 2
    CONSTRAINTS = 4
    LOGPROBS = 8
    SAMPLING_MASK = 16


REPORTS = Feature.LOGPROBS | Feature.SAMPLING_MASK
TIER_FEATURES: dict[Tier, Feature] = {
    "greedy": Feature(0),
    "random": Feature.DRAW,
    "logprobs": Feature.DRAW | Feature.LOGPROBS,
    "filtered": Feature.DRAW | Feature.FILTERS,
    "constrained": Feature.DRAW | Feature.FILTERS | Feature.CONSTRAINTS,
    "full": Feature.DRAW | Feature.FILTERS | Feature.CONSTRAINTS | REPORTS,
}
"""Sampler tiers in order of cost, and what each can do. A tier is a static part of an executable: a batch runs in the
first one that has all features its requests use, and pays for no other. A new tier is one entry here."""
TIERS: tuple[Tier, ...] = tuple(TIER_FEATURES)


@functools.cache
def lowest_tier(features: int) -> Tier:
    """The cheapest tier that has these bits of `Feature`."""
    return next(tier for tier, offered in TIER_FEATURES.items() if not features & ~offered)


@functools.cache
def forbids_ids(tier: Tier) -> bool:
    """Whether a request's own parameters can forbid it ids in this tier."""
    return Feature.CONSTRAINTS in TIER_FEATURES[tier]


@dataclasses.dataclass(frozen=True, order=True)
class Bucket:
    """kind: `"decode"` (every request has exactly query_len tokens) or `"mixed"` (ragged).

    num_tokens, num_reqs: padded sizes. query_len: tokens of each request (decode), or the most one may have (mixed).
    tier: what the sampler must be able to do. num_active_loras: adapters in the step.
    """

    kind: Kind
    num_tokens: int
    num_reqs: int
    query_len: int = 1
    tier: Tier = "greedy"
    num_active_loras: int = 0

    def __post_init__(self) -> None:
        if self.num_reqs < 1 or self.num_reqs > self.num_tokens:
            raise ValueError(f"{self.num_reqs} requests cannot share {self.num_tokens} tokens: {self}")
        if self.kind == "decode" and self.num_tokens != self.num_reqs * self.query_len:
            raise ValueError(f"a decode bucket has num_reqs * query_len tokens: {self}")
        if self.kind not in ("decode", "mixed") or self.tier not in TIERS:
            raise ValueError(f"unknown kind or tier: {self}")

    def __str__(self) -> str:
        shape = f"{self.num_reqs}x{self.query_len}" if self.kind == "decode" else f"t{self.num_tokens}/r{self.num_reqs}"
        return f"{self.kind}[{shape}]/{self.tier}"

    def replace(self, **changes) -> Bucket:
        return dataclasses.replace(self, **changes)
