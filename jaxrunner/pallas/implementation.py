"""Which implementation of an op runs.

`None` picks the best that is available here; a name means that one or an `ImplementationError` with the reason, never
a silent fallback. A mapping gives a name per op, e.g. `{"attention": "xla"}`.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax

from jaxrunner.errors import ImplementationError

Implementation = str | Mapping[str, str] | None

AVAILABLE: dict[str, tuple[str, ...]] = {
    "input_prep": ("xla", "mosaic"),
    "slot_mapping": ("xla", "mosaic"),
    "kv_write": ("xla",),
    "attention": ("xla",),
}
"""Op -> implementations that exist."""


def resolve(op: str, implementation: Implementation) -> str:
    """The name of the implementation of `op` to trace."""
    name = implementation.get(op) if isinstance(implementation, Mapping) else implementation
    if isinstance(implementation, Mapping) and (unknown := set(implementation) - set(AVAILABLE)):
        raise ImplementationError(f"no op is called {sorted(unknown)}; the ops are {sorted(AVAILABLE)}")
    if name is None:
        return best(op)
    if name not in AVAILABLE[op]:
        if isinstance(implementation, str) and any(name in names for names in AVAILABLE.values()):
            return best(op)
        raise ImplementationError(f"{op} has no implementation {name!r}; it has {', '.join(AVAILABLE[op])}")
    if name == "mosaic" and (reason := mosaic_unavailable()):
        raise ImplementationError(f"{op}: the mosaic implementation cannot run here: {reason}")
    return name


def best(op: str) -> str:
    """The automatic choice: Mosaic GPU kernels on Hopper where they exist, XLA everywhere else."""
    if "mosaic" in AVAILABLE[op] and on_hopper() and mosaic_unavailable() is None:
        return "mosaic"
    return "xla"


def on_hopper() -> bool:
    if jax.default_backend() != "gpu":
        return False
    return str(getattr(jax.devices()[0], "compute_capability", "")) == "9.0"


def mosaic_unavailable() -> str | None:
    """Why Mosaic GPU kernels cannot even be built in this process, or None."""
    from jaxrunner.pallas import compat

    return compat.unavailable_reason()
