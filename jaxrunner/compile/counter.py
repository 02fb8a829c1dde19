"""Counting what XLA compiles, by JAX's own monitoring events, so that nothing compiles unseen."""

from __future__ import annotations

import threading

import jax

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
PERSISTENT_HIT_EVENT = "/jax/compilation_cache/cache_hits"

_lock = threading.Lock()
_total = 0
_registered = False
_here = threading.local()


def compile_count() -> int:
    """Programs compiled in this process since the first call, helper functions included."""
    _register()
    with _lock:
        return _total


def persistent_hits() -> int:
    """Programs that this thread took from JAX's own persistent cache since the first call of either function."""
    _register()
    return getattr(_here, "hits", 0)


def _register() -> None:
    global _registered
    with _lock:
        if not _registered:
            jax.monitoring.register_event_duration_secs_listener(_listen)
            jax.monitoring.register_event_listener(_listen_hit)
            _registered = True


def _listen_hit(event: str, **_: object) -> None:
    if event == PERSISTENT_HIT_EVENT:
        _here.hits = getattr(_here, "hits", 0) + 1


def _listen(event: str, duration: float, **_: object) -> None:
    global _total
    if event == COMPILE_EVENT:
        with _lock:
            _total += 1


class CompileCounter:
    """`with CompileCounter() as c: ...` and then `c.count`: programs compiled inside the block so far."""

    def __enter__(self) -> CompileCounter:
        self._start = compile_count()
        self._end: int | None = None
        return self

    def __exit__(self, *exc: object) -> None:
        self._end = compile_count()

    @property
    def count(self) -> int:
        return (compile_count() if self._end is None else self._end) - self._start
