"""Inverse frequencies of the rotary embedding, for every rule that `RopeSpec` can name.

There is no table of cosines: a position is multiplied with the frequencies where it is used, so no context length can
run past the end of one.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jaxrunner.errors import CheckpointError
from jaxrunner.models.model import RopeSpec


def inv_freq(
    rope: RopeSpec, head_dim: int, max_position_embeddings: int, max_model_len: int | None = None
) -> tuple[np.ndarray, float]:
    """Inverse frequencies and the attention factor of a rotary rule.

    Returns float32 `[head_dim // 2]`, computed in float64 and rounded once, and the factor that multiplies both cosine
    and sine (1.0 except for yarn and longrope). The rotation of pair `i` at position `p` has angle `p * inv_freq[i]`.

    `dynamic` has vLLM's meaning: one base for the whole run, from `max_position_embeddings` and `max_trained_positions`
    (equal where the latter is absent: no scaling). `longrope` takes its long factors if `max_model_len` (positions that
    a run may use; max_position_embeddings if None) exceeds the original context, else its short ones, for the whole
    run: two sets would leave keys of two rotations in one cache. Raises `CheckpointError` for an unknown rule and for
    lists of factors of another length.

    Sources: "Extending Context Window of LLMs via Positional Interpolation" (linear), YaRN (arXiv:2309.00071),
    LongRoPE (arXiv:2402.13753), transformers `modeling_rope_utils`, vLLM `rotary_embedding`.
    """
    p: dict[str, Any] = dict(rope.parameters)
    plain = _plain(rope.theta, head_dim)
    factor = 1.0
    if rope.rope_type == "default":
        out = plain
    elif rope.rope_type == "linear":
        out = plain / p["factor"]
    elif rope.rope_type == "dynamic":
        trained = p.get("max_trained_positions", max_position_embeddings)
        growth = p["factor"] * max_position_embeddings / trained - (p["factor"] - 1)
        out = _plain(rope.theta * growth ** (head_dim / (head_dim - 2)), head_dim)
    elif rope.rope_type == "llama3":
        out = _llama3(plain, p)
    elif rope.rope_type == "yarn":
        out, factor = _yarn(plain, rope.theta, head_dim, p), _yarn_attention_factor(p)
    elif rope.rope_type == "longrope":
        long = (max_model_len or max_position_embeddings) > p["original_max_position_embeddings"]
        factors = np.array(p["long_factor" if long else "short_factor"], np.float64)
        if len(factors) != head_dim // 2:
            raise CheckpointError(
                f"longrope has {len(factors)} factors, a head of {head_dim} needs {head_dim // 2}. Correct config.json."
            )
        out, factor = plain / factors, _longrope_attention_factor(p, long, max_position_embeddings)
    else:
        raise CheckpointError(f"rope type {rope.rope_type!r} is not supported: see jaxrunner.models.rope_config.")
    return out.astype(np.float32), factor


def _plain(theta: float, head_dim: int) -> np.ndarray:
    return theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


def _llama3(plain: np.ndarray, p: dict[str, float]) -> np.ndarray:
    """Long wavelengths are divided by `factor`, short ones kept, those between interpolated."""
    turns = p["original_max_position_embeddings"] * plain / (2 * math.pi)  # of each pair over the original context
    low, high = p["low_freq_factor"], p["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - smooth) * plain / p["factor"] + smooth * plain


def _yarn(plain: np.ndarray, theta: float, head_dim: int, p: dict[str, float]) -> np.ndarray:
    def pair_with(turns: float) -> float:
        """The (fractional) index of the pair that makes so many turns over the original context."""
        wavelength = p["original_max_position_embeddings"] / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(theta))

    low, high = pair_with(p.get("beta_fast", 32.0)), pair_with(p.get("beta_slow", 1.0))
    if p.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float64) - low) / (high - low), 0.0, 1.0)
    kept = (1 - ramp) * p.get("extrapolation_factor", 1.0)
    return plain / p["factor"] * (1 - kept) + plain * kept


def _longrope_attention_factor(p: dict[str, Any], long: bool, max_position_embeddings: int) -> float:
    given = p.get("attention_factor", p.get("long_mscale" if long else "short_mscale"))
    if given is not None:
        return given
    original = p["original_max_position_embeddings"]
    growth = p.get("factor", max_position_embeddings / original)
    return math.sqrt(1 + math.log(growth) / math.log(original)) if growth > 1 else 1.0


def _yarn_attention_factor(p: dict[str, float]) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(p["factor"]) + 1.0 if p["factor"] > 1 else 1.0

    if "attention_factor" in p:
        return p["attention_factor"]
    if p.get("mscale") and p.get("mscale_all_dim"):
        return mscale(p["mscale"]) / mscale(p["mscale_all_dim"])
    return mscale(1.0) * p.get("attn_factor", 1.0)
