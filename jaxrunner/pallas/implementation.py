"""Which implementation of an op runs.

`None` picks the best that is available here and takes the call's shapes and types; a name means that one or an
`ImplementationError` with the reason, never a silent fallback. A mapping gives a name per op, e.g.
`{"attention": "xla"}`. `choice_table()` prints the rule.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax

from jaxrunner.errors import ImplementationError

Implementation = str | Mapping[str, str] | None

AVAILABLE: dict[str, tuple[str, ...]] = {
    "input_prep": ("xla", "mosaic"),
    "slot_mapping": ("xla", "mosaic"),
    "kv_write": ("xla", "mosaic"),
    "rope_kv_write": ("xla", "mosaic"),
    "attention": ("xla", "mosaic", "reference"),
}
"""Op -> implementations that exist."""

HOPPER = "9.0"
AUTOMATIC: dict[str, tuple[tuple[str, str, str], ...]] = {
    "input_prep": ((HOPPER, "mosaic", "always"),),
    "slot_mapping": ((HOPPER, "mosaic", "always"),),
    "kv_write": ((HOPPER, "mosaic", "KVH * D >= 128, D a multiple of 16"),),
    "rope_kv_write": ((HOPPER, "mosaic", "bfloat16 or float16 throughout, D a multiple of 16"),),
    "attention": (
        (HOPPER, "mosaic", "bfloat16 or float16 throughout, D a multiple of 16 in 32..256, blocks of 8n >= 16"),
    ),
}
"""Op -> (compute capability, automatic choice, shapes and types it is for); everything else is XLA's."""


def resolve(op: str, implementation: Implementation, reason: str | None = None) -> str:
    """The name of the implementation of `op` to trace.

    reason: why the Mosaic kernel cannot take this call's shapes and types, or None. It turns the automatic choice to
    XLA, and raises ImplementationError where "mosaic" was asked for by name.
    """
    name = implementation.get(op) if isinstance(implementation, Mapping) else implementation
    if isinstance(implementation, Mapping) and (unknown := set(implementation) - set(AVAILABLE)):
        raise ImplementationError(f"no op is called {sorted(unknown)}; the ops are {sorted(AVAILABLE)}")
    if name is None:
        return best(op, reason)
    if name not in AVAILABLE[op]:
        if isinstance(implementation, str) and any(name in names for names in AVAILABLE.values()):
            return best(op, reason)
        raise ImplementationError(f"{op} has no implementation {name!r}; it has {', '.join(AVAILABLE[op])}")
    if name == "mosaic":
        if unavailable := mosaic_unavailable():
            raise ImplementationError(f"{op}: the mosaic implementation cannot run here: {unavailable}")
        if reason:
            raise ImplementationError(f"{op}: the mosaic implementation cannot take this case: {reason}")
    return name


def best(op: str, reason: str | None = None) -> str:
    """The automatic choice: what `AUTOMATIC` names for this GPU if it takes the call (see `resolve`), else XLA."""
    for capability, name, _ in AUTOMATIC[op]:
        if compute_capability() == capability and reason is None and mosaic_unavailable() is None:
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
    """Of the default GPU, e.g. "9.0"; None without one."""
    if jax.default_backend() != "gpu":
        return None
    return str(getattr(jax.devices()[0], "compute_capability", "")) or None


def mosaic_unavailable() -> str | None:
    """Why Mosaic GPU kernels cannot even be built in this process, or None."""
    from jaxrunner.pallas import compat

    return compat.unavailable_reason()
