"""The device that programs are traced for: JAX's default one, or, in a process that has not got it, a described one."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import NamedTuple

import jax


class Target(NamedTuple):
    """platform: "gpu" or "cpu". compute_capability: e.g. "9.0", empty where it is not NVIDIA's. num_cores: its
    multiprocessors, None where they are not known. kind: its name, e.g. "NVIDIA H200"."""

    platform: str
    compute_capability: str
    num_cores: int | None
    kind: str = ""


_described: contextvars.ContextVar[Target | None] = contextvars.ContextVar("target", default=None)


def target() -> Target:
    """What is traced for here and now."""
    if (described := _described.get()) is not None:
        return described
    device = jax.devices()[0]
    capability = str(getattr(device, "compute_capability", None) or "")
    cores, kind = getattr(device, "core_count", None), getattr(device, "device_kind", "")
    return Target(jax.default_backend(), capability, cores, kind)


@contextlib.contextmanager
def tracing_for(described: Target) -> Iterator[None]:
    """Programs traced inside are for the described device. They can be lowered and exported, not compiled or run.

    One device for a process: JAX takes a function that it has traced before for one device as traced for any.
    """
    token = _described.set(described)
    try:
        yield
    finally:
        _described.reset(token)
