"""A bucket: the static shape of one step. Plain data, hashable, made to be printed and edited."""

from __future__ import annotations

import dataclasses
from typing import Literal

Kind = Literal["decode", "mixed"]
Tier = Literal["greedy", "random", "filtered", "logprobs"]
TIERS: tuple[Tier, ...] = ("greedy", "random", "filtered", "logprobs")
"""Sampler tiers in order of cost, each able to do what the ones before it do; a batch runs in the lowest tier that
covers all of its requests. "filtered": min_tokens, min_p, top_k, top_p. "logprobs": log-probabilities as well."""


def covers(tier: Tier, other: Tier) -> bool:
    """Whether `tier` can do what `other` does."""
    return TIERS.index(tier) >= TIERS.index(other)


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
