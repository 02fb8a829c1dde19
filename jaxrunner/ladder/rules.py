"""Rules that name the sizes of a ladder: vLLM's capture sizes exactly, and the usual alternatives.

A rule gives the ascending padded sizes of one axis (tokens of a step, or requests of a decode).
Source of vLLM's rules: 0.28, `config/vllm.py` (capture sizes) and `config/compilation.py` (multiples for drafts).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from jaxrunner.compile.ladder import Ladder, default_finish, geometric
from jaxrunner.errors import AdmissionError

Sizes = tuple[int, ...]
VLLM_CAP, VLLM_CAP_BLACKWELL = 512, 1024
"""Largest capture size: on most GPUs, and on the compute family 10.x."""
DEFAULT_BUDGET = 8192


def vllm_sizes(
    max_num_seqs: int,
    *,
    max_num_batched_tokens: int = DEFAULT_BUDGET,
    num_spec_tokens: int = 0,
    cap: int = VLLM_CAP,
    interactivity: bool = False,
) -> Sizes:
    """vLLM's default CUDA-graph capture sizes, in tokens.

    num_spec_tokens: drafts of a request. cap: VLLM_CAP or VLLM_CAP_BLACKWELL. interactivity: vLLM's performance mode of
    that name, which captures every size up to 32.
    """
    _positive(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, cap=cap)
    if num_spec_tokens < 0:
        raise AdmissionError(f"num_spec_tokens is {num_spec_tokens}; it must be 0 or more")
    largest = min(max_num_seqs * (1 + num_spec_tokens) * 2, cap, max_num_batched_tokens)
    sizes = {n for n in (1, 2, 4) if n <= largest}
    sizes.update(range(8, min(largest + 1, 256), 8), range(256, largest + 1, 16))
    if interactivity:
        sizes.update(range(1, min(largest, 32) + 1))
    if max_num_batched_tokens <= largest:
        sizes.add(max_num_batched_tokens)
    return tuple(sorted(sizes))


def vllm_user_sizes(sizes: Iterable[int], *, max_num_batched_tokens: int, max_size: int | None = None) -> Sizes:
    """What vLLM makes of a user's capture sizes: each once, ascending, none past the token budget.

    Raises AdmissionError if `max_size` (the user's max_cudagraph_capture_size) is not the last of them.
    """
    kept = tuple(sorted({n for n in sizes if n <= max_num_batched_tokens}))
    if max_size is not None and (not kept or kept[-1] != max_size):
        raise AdmissionError(f"max_size {max_size} is not the largest of the sizes {kept}; leave one of the two out")
    return kept


def v1_draft_multiples(sizes: Iterable[int], query_len: int, *, max_size: int) -> Sizes:
    """Capture sizes of vLLM's V1 runner with drafts: rounded up to multiples of `query_len`, none past `max_size`.

    query_len: tokens of a decoding request, its drafts and one more. Raises AdmissionError if none is left.
    """
    rounded = {-(-n // query_len) * query_len for n in sizes}
    if kept := tuple(sorted(n for n in rounded if n <= max_size)):
        return kept
    raise AdmissionError(f"no multiple of {query_len} up to {max_size} is left; raise max_num_seqs or use fewer drafts")


def powers_of_two(last: int) -> Sizes:
    """1, 2, 4, ... and `last` itself."""
    return geometric(1, last, 2)


def steps_of_one_and_a_half(last: int) -> Sizes:
    """1, 2, 3, 5, 8, 12, ...: each one and a half times the one before, rounded up; and `last` itself."""
    sizes, n = [], 1
    while n < last:
        sizes.append(n)
        n = -(-3 * n // 2)
    return (*sizes, last)


def linear(last: int, count: int = 16) -> Sizes:
    """At most `count` sizes, equally far apart up to `last`."""
    _positive(last=last, count=count)
    return tuple(sorted({-(-last * i // count) for i in range(1, count + 1)}))


def vllm_closed(last: int, *, cap: int = VLLM_CAP) -> Sizes:
    """vLLM's grid for a runner that has no way without a bucket: from the cap on it doubles, up to `last` itself."""
    sizes = [n for n in vllm_sizes(last, max_num_batched_tokens=last, cap=cap) if n < last]
    n = 2 * sizes[-1] if sizes else last
    while n < last:
        sizes.append(n)
        n *= 2
    return (*sizes, last)


RULES: dict[str, Callable[[int], Sizes]] = {
    "vllm": vllm_closed,
    "powers-of-two": powers_of_two,
    "1.5-steps": steps_of_one_and_a_half,
    "linear": linear,
}
"""Name -> sizes of an axis up to its exact maximum."""
OWN = "jaxrunner"
"""The name of this package's own default ladder, whose axes are chosen together."""


def ladder_by_rule(rule: str, *, max_num_seqs: int, max_num_batched_tokens: int) -> Ladder:
    """A ladder that an engine can compile, both of its axes by one rule of RULES, or `Ladder.default` by OWN.

    Raises AdmissionError for an unknown rule.
    """
    tokens = max(max_num_batched_tokens, max_num_seqs)
    if rule == OWN:
        return Ladder.default(max_num_seqs=max_num_seqs, max_num_batched_tokens=tokens)
    if rule not in RULES:
        raise AdmissionError(f"unknown rule {rule!r}; use one of {', '.join([OWN, *RULES])}")
    _positive(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    return Ladder(RULES[rule](max_num_seqs), RULES[rule](tokens), default_finish(max_num_seqs))


def _positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise AdmissionError(f"{name} is {value}; it must be at least 1")
