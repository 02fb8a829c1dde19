"""Which implementation of an op runs.

`None` picks the best that is available here and takes the call's shapes and types; a name means that one or an
`ImplementationError` with the reason, never a silent fallback. A mapping gives a name per op, e.g.
`{"attention": "xla"}`; a plain name applies to the ops which have it. A function in place of a name is an attention of
the user's own, see `jaxrunner.pallas.custom_attention`. `choice_table()` prints the rule.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from jaxrunner.errors import ImplementationError
from jaxrunner.pallas.target import target

Implementation = str | Callable[..., Any] | Mapping[str, str | Callable[..., Any]] | None

AVAILABLE: dict[str, tuple[str, ...]] = {
    "input_prep": ("xla", "mosaic"),
    "slot_mapping": ("xla", "mosaic"),
    "kv_write": ("xla", "mosaic"),
    "rope_kv_write": ("xla", "mosaic"),
    "commit": ("xla", "mosaic"),
    "attention": ("xla", "mosaic", "triton", "reference"),
    "attention_with_rope": ("xla", "mosaic"),
    "filters": ("xla", "mosaic"),
    "best_ids": ("xla", "mosaic"),
}
"""Op -> implementations that exist."""

HOPPER, SINCE_AMPERE = "9.0", "8.0 or newer, not 9.0"
AUTOMATIC: dict[str, tuple[tuple[str, str, str], ...]] = {
    "input_prep": ((HOPPER, "mosaic", "always"),),
    "slot_mapping": ((HOPPER, "mosaic", "always"),),
    "commit": ((HOPPER, "mosaic", "always"),),
    "kv_write": ((HOPPER, "mosaic", "KVH * D >= 128, D a multiple of 16"),),
    "rope_kv_write": ((HOPPER, "mosaic", "bfloat16 or float16 throughout, D a multiple of 16"),),
    "attention": (
        (HOPPER, "mosaic", "bfloat16 or float16 throughout, D a multiple of 16 in 32..256, blocks of 8n >= 16"),
        (SINCE_AMPERE, "triton", "with jaxrunner[triton]: bfloat16, float16 or float32 throughout, D <= 256"),
    ),
    "attention_with_rope": ((HOPPER, "mosaic", "one token of each request, both ops Mosaic's, D = 128, H <= 16 KVH"),),
    "filters": ((HOPPER, "mosaic", "V >= 512, a multiple of 4"),),
    "best_ids": ((HOPPER, "mosaic", "V >= 512, a multiple of 4"),),
}
"""Op -> (compute capability, automatic choice, shapes and types it is for); all else is XLA's."""


def resolve(
    op: str,
    implementation: Implementation,
    against: Mapping[str, str | None] | None = None,
) -> str:
    """The name of the implementation of `op` to trace; beside a function, which is for attention, the automatic choice.

    against: kernel ("mosaic", "triton") -> why it cannot take this call's shapes and types, or None. A reason turns the
    automatic choice to XLA, and raises ImplementationError where that kernel was asked for by name.
    """
    check(implementation)
    name = implementation.get(op) if isinstance(implementation, Mapping) else implementation
    if name is None or callable(name):
        return best(op, against)
    if name not in AVAILABLE[op]:
        if isinstance(implementation, str) and any(name in names for names in AVAILABLE.values()):
            return best(op, against)
        raise ImplementationError(f"{op} has no implementation {name!r}; it has {', '.join(AVAILABLE[op])}")
    if name in UNAVAILABLE:
        refuse(op, name, UNAVAILABLE[name](), (against or {}).get(name))
    return name


def refuse(op: str, name: str, unavailable: str | None, reason: str | None) -> None:
    """Raises ImplementationError if one is given: why `name` cannot run here, why it cannot take this call."""
    if unavailable:
        raise ImplementationError(f"{op}: the {name} implementation cannot run here: {unavailable}")
    if reason:
        raise ImplementationError(f"{op}: the {name} implementation cannot take this case: {reason}")


def check(implementation: Implementation) -> None:
    """Raises ImplementationError for a mapping of unknown ops and for a function that cannot be used."""
    chosen = implementation if isinstance(implementation, Mapping) else {"attention": implementation}
    if unknown := set(chosen) - set(AVAILABLE):
        raise ImplementationError(f"no op is called {sorted(unknown)}; the ops are {sorted(AVAILABLE)}")
    for op, value in chosen.items():
        if not callable(value):
            continue
        if op != "attention":
            raise ImplementationError(f"{op} takes the name of an implementation; only attention takes a function")
        try:
            hash(value)
        except TypeError as error:
            raise ImplementationError(
                f"attention: the function must be hashable, since it is part of what is compiled ({error}); "
                "use a plain function or a frozen dataclass"
            ) from None


def best(op: str, against: Mapping[str, str | None] | None = None) -> str:
    """The automatic choice: what `AUTOMATIC` names for this GPU if it takes the call (see `resolve`), else XLA."""
    found = compute_capability()
    for capability, name, _ in AUTOMATIC[op] if found else ():
        meant_for = found == HOPPER if capability == HOPPER else found != HOPPER
        if meant_for and (against or {}).get(name) is None and UNAVAILABLE[name]() is None:
            return name
    return "xla"


def choice_table() -> str:
    """The automatic choice of every op, as a table to print."""
    rows = [("op", "GPU", "choice", "for")]
    for op, choices in AUTOMATIC.items():
        rows += [(op, *choice) for choice in choices] + [(op, "any other", "xla", "everything")]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def compute_capability() -> str | None:
    """Of the GPU that is traced for, e.g. "9.0"; None without one."""
    return target().compute_capability or None if target().platform == "gpu" else None


def mosaic_unavailable() -> str | None:
    """Why Mosaic GPU kernels cannot even be built in this process, or None."""
    from jaxrunner.pallas import compat

    return compat.unavailable_reason()


def quick_lowering() -> contextlib.AbstractContextManager[None]:
    """`compat.quick_lowering` for a GPU; elsewhere nothing, and Mosaic is not imported."""
    if target().platform != "gpu":
        return contextlib.nullcontext()
    from jaxrunner.pallas import compat

    return compat.quick_lowering()


def triton_refusal() -> str | None:
    """Why a Triton kernel cannot run here, or None."""
    from jaxrunner.pallas import triton_compat

    return triton_compat.refusal()


UNAVAILABLE: dict[str, Callable[[], str | None]] = {
    "mosaic": lambda: mosaic_unavailable(),
    "triton": lambda: triton_refusal(),
}
"""Kernel -> why it cannot run in this process, or None."""
