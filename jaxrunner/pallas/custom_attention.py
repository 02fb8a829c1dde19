"""An attention of the user's own in the place of the built-in ones.

    def my_attention(q, blocks, layer, metadata, *, scale, window=None, soft_cap=None, sinks=None): ...

    LLM(implementation={"attention": my_attention})  # or implementation=my_attention; so for step, decode_loop, ...

It is called while a step is traced, once for each kind of layer and bucket, with the arguments of
`jaxrunner.pallas.attention.attention`, and takes every layer: nothing falls back to a built-in one. Over a float8
cache, whose blocks are bytes (`jaxrunner.state.kv_dtype.from_bytes`), it is also given kv_scales. `jaxrunner
check-attention module:function` judges it by this package's own specs.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxrunner.errors import ImplementationError
from jaxrunner.pallas.implementation import Implementation, check

SIGNATURE = "(q, blocks, layer, metadata, *, scale, window, soft_cap, sinks)"


def custom(implementation: Implementation) -> Callable[..., Any] | None:
    """The user's attention in a choice of implementations, or None. Raises ImplementationError, see `check`."""
    check(implementation)
    value = implementation.get("attention") if isinstance(implementation, Mapping) else implementation
    return value if callable(value) else None


def call(attend: Callable[..., Any], q: jax.Array, *args: Any, **options: Any) -> jax.Array:
    """`attend`, and a check of what it gave. Raises ImplementationError where that is no attention's result."""
    check_signature(attend, **{name: options[name] for name in options.keys() & {"kv_scales"}})
    result = attend(q, *args, **options)
    if getattr(result, "shape", None) != q.shape or getattr(result, "dtype", None) != q.dtype:
        found = f"{result.dtype}{list(result.shape)}" if hasattr(result, "shape") else type(result).__name__
        raise ImplementationError(
            f"the attention {name_of(attend)} gave {found}, not the shape and type of q, {q.dtype}{list(q.shape)}"
        )
    return result


def check_signature(attend: Any, **more: Any) -> None:
    """Raises ImplementationError unless `attend` can be called like the built-in implementations.

    more: further arguments by name that the call has.
    """
    if not callable(attend):
        raise ImplementationError(f"an attention is a function {SIGNATURE}, not {type(attend).__name__}")
    try:
        signature = inspect.signature(attend)
    except (TypeError, ValueError):  # some callables have none; calling them tells
        return
    try:
        signature.bind(None, None, None, None, scale=1.0, window=None, soft_cap=None, sinks=None, **more)
    except TypeError as error:
        raise ImplementationError(
            f"an attention is called as {SIGNATURE}, but {name_of(attend)} takes {signature}: {error}"
        ) from None


def name_of(attend: Callable[..., Any]) -> str:
    """`module:name`; of a partial, its function's; of an object, its class's."""
    while isinstance(attend, functools.partial):
        attend = attend.func
    named = attend if hasattr(attend, "__qualname__") else type(attend)
    return f"{named.__module__}:{named.__qualname__}"


def described(implementation: Implementation) -> str | dict[str, str] | None:
    """For reports and records: names as they are, a function by its `module:name`."""
    if isinstance(implementation, Mapping):
        return {op: name_of(value) if callable(value) else value for op, value in implementation.items()}
    return name_of(implementation) if callable(implementation) else implementation


def from_described(record: str | dict[str, str] | None) -> Implementation:
    """The way back. Raises ImplementationError where a function cannot be found by its name."""
    if isinstance(record, dict):
        return {op: from_name(value) if ":" in value else value for op, value in record.items()}
    return from_name(record) if record and ":" in record else record


def from_name(name: str) -> Callable[..., Any]:
    """The function of a `module:function`. Raises ImplementationError where there is none."""
    module, _, path = name.partition(":")
    if not module or not path:
        raise ImplementationError(f"{name!r} is not of the form module:function, e.g. my_kernels.attention:decode")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and f"{module}.".startswith(f"{error.name}."):
            raise ImplementationError(
                f"there is no module {error.name!r}; install it, or add its folder to PYTHONPATH"
            ) from None
        raise ImplementationError(f"the module {module!r} needs {error.name!r}, which is not installed") from None
    except Exception as error:  # of a user's module, hence of any kind
        raise ImplementationError(f"importing {module!r} raised {type(error).__name__}: {error}") from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise ImplementationError(f"the module {module!r} has no function {path!r}")
        found = getattr(found, part)
    if not callable(found):
        raise ImplementationError(f"{name} is no function but a {type(found).__name__}")
    return found
