"""The rotary rule of a configuration, in every spelling that checkpoints use, as one `RopeSpec`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxrunner.errors import CheckpointError
from jaxrunner.models.model import RopeSpec

REQUIRED: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("original_max_position_embeddings", "short_factor", "long_factor"),
}
OPTIONAL: Mapping[str, tuple[str, ...]] = {
    "dynamic": ("max_trained_positions",),
    "yarn": (
        "attention_factor",
        "attn_factor",
        "beta_fast",
        "beta_slow",
        "extrapolation_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "longrope": ("attention_factor", "factor", "short_mscale", "long_mscale"),
}
LISTS = ("short_factor", "long_factor")
_NOT_NUMBERS = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned")
_KNOWN = {name for table in (REQUIRED, OPTIONAL) for names in table.values() for name in names} | set(_NOT_NUMBERS)


def rope_from_config(config: Mapping[str, Any], *, default_theta: float, max_position_embeddings: int) -> RopeSpec:
    """The `RopeSpec` of a configuration, which is not changed.

    Reads `rope_parameters` (transformers 5) or `rope_scaling` (transformers 4), the rule's name under `rope_type` or
    `type`, and the base `rope_theta` inside the dictionary or at the top level. Spellings that say the same thing twice
    are fine; two that disagree raise `CheckpointError`, as do unknown rules, unknown parameters and missing ones.
    """
    given = {key: config[key] for key in ("rope_parameters", "rope_scaling") if config.get(key)}
    rules = list(given.values())
    for key, rule in given.items():
        if not isinstance(rule, Mapping):
            raise CheckpointError(f"{key} must be an object, not {rule!r}. Correct config.json.")
        if any(isinstance(value, Mapping) for value in rule.values()):
            raise CheckpointError("rope_parameters per layer type are not supported; one rule for all layers is.")
    specs = [_one_rule(rule, config, default_theta, max_position_embeddings) for rule in rules or [{}]]
    if any(spec != specs[0] for spec in specs):
        raise CheckpointError("rope_parameters and rope_scaling disagree. Delete one of the two from config.json.")
    return specs[0]


def _one_rule(rule: Mapping[str, Any], config: Mapping[str, Any], theta: float, max_positions: int) -> RopeSpec:
    rope_type = _agreeing("rope_type", {"rope_type": rule.get("rope_type"), "type": rule.get("type")})
    rope_type = "default" if rope_type is None else rope_type
    if not isinstance(rope_type, str) or rope_type not in REQUIRED:
        raise CheckpointError(
            f"rope type {rope_type!r} is not supported. Supported: {', '.join(REQUIRED)}. Use another checkpoint."
        )
    both = {"rope_parameters.rope_theta": rule.get("rope_theta"), "rope_theta": config.get("rope_theta")}
    base = _agreeing("rope_theta", both)
    partials = {
        "rope_parameters.partial_rotary_factor": rule.get("partial_rotary_factor"),
        "partial_rotary_factor": config.get("partial_rotary_factor"),
    }
    partial = _agreeing("partial_rotary_factor", partials)
    if partial not in (None, 1, 1.0):
        raise CheckpointError(f"partial_rotary_factor {partial} is not supported; all of a head is rotated.")
    if unknown := sorted(set(rule) - _KNOWN):
        raise CheckpointError(f"rope parameter {unknown[0]!r} is unknown. Known: {', '.join(sorted(_KNOWN))}.")

    fallback = {"original_max_position_embeddings": config.get("original_max_position_embeddings")}
    if rope_type == "yarn" and fallback["original_max_position_embeddings"] is None:
        fallback["original_max_position_embeddings"] = max_positions
    parameters: dict[str, Any] = {}
    for name in REQUIRED[rope_type] + OPTIONAL.get(rope_type, ()):
        value = rule.get(name)
        value = fallback.get(name) if value is None else value
        if value is not None:
            parameters[name] = _numbers(name, value) if name in LISTS else _number(name, value)
        elif name in REQUIRED[rope_type]:
            raise CheckpointError(f"rope type {rope_type!r} needs the parameter {name}. Add it to config.json.")
    base = _number("rope_theta", theta if base is None else base)
    if base <= 0 or parameters.get("factor", 1.0) <= 0:
        raise CheckpointError(f"rope_theta {base} and factor must be positive. Correct config.json.")
    return RopeSpec(base, rope_type, tuple(sorted(parameters.items())))


def _agreeing(what: str, spellings: Mapping[str, Any]) -> Any:
    """The one value that the given spellings have; None where none has one."""
    given = {key: value for key, value in spellings.items() if value is not None}
    values = list(given.values())
    if any(value != values[0] for value in values):
        raise CheckpointError(f"conflicting values of {what}: {given}. Keep one of them in config.json.")
    return values[0] if values else None


def _number(what: str, value: Any) -> float:
    """A finite number; `truncate` is a truth value, which counts as one."""
    if not isinstance(value, int | float) or not -math.inf < value < math.inf:
        raise CheckpointError(f"{what} must be a finite number, not {value!r}. Correct config.json.")
    return float(value)


def _numbers(what: str, value: Any) -> tuple[float, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise CheckpointError(f"{what} must be a list of numbers, not {value!r}. Correct config.json.")
    numbers = tuple(_number(what, v) for v in value)
    if min(numbers) <= 0:
        raise CheckpointError(f"{what} must be positive, not {min(numbers)}. Correct config.json.")
    return numbers
