"""Inverse frequencies of the rotary embedding, for every rule that `RopeSpec` can name.

There is no table of cosines: a position is multiplied with the frequencies where it is used, so no context length can
run past the end of one.
"""

from __future__ import annotations

import math

import numpy as np

from jaxrunner.errors import CheckpointError
from jaxrunner.models.model import RopeSpec


def inv_freq(rope: RopeSpec, head_dim: int, max_position_embeddings: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies and the attention factor of a rotary rule.

    Returns float32 `[head_dim // 2]`, computed in float64 and rounded once, and the factor that multiplies both cosine
    and sine (1.0 except for yarn). The rotation of pair `i` at position `p` is the angle `p * inv_freq[i]`.

    `dynamic` has vLLM's meaning: one base for the whole run, from `max_position_embeddings` and `max_trained_positions`
    (equal where the latter is absent: no scaling). Raises `CheckpointError` for an unknown rule.

    Sources: "Extending Context Window of LLMs via Positional Interpolation" (linear), YaRN (arXiv:2309.00071),
    transformers `modeling_rope_utils`, vLLM `rotary_embedding`.
    """
    p = dict(rope.parameters)
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


def _yarn_attention_factor(p: dict[str, float]) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(p["factor"]) + 1.0 if p["factor"] > 1 else 1.0

    if "attention_factor" in p:
        return p["attention_factor"]
    if p.get("mscale") and p.get("mscale_all_dim"):
        return mscale(p["mscale"]) / mscale(p["mscale_all_dim"])
    return mscale(1.0) * p.get("attn_factor", 1.0)
