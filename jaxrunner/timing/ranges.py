"""The named ranges of a step, the same in every runner.

On the host a runner opens them with its `annotate`, by default JAX's `TraceAnnotation`: a profile taken with
`jax.profiler` shows it, and while none is taken it runs no Python. Inside the compiled step `jax.named_scope` makes
DEVICE_SCOPES part of the names of its operations, by which profilers tell the kernels of one stage from another's.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

RANGES = ("preprocess", "inputs", "lookup", "admit", "forward", "bookkeeping", "sample", "wait", "postprocess")
"""preprocess: all that the host does before the launch. In it, inputs: the batch is ordered and its upload is made;
lookup: an executable is looked up, and made where it is not there; admit: executables that admit, release, arrange,
copy and move are launched. forward: the step is launched, or its first half. bookkeeping: what the host keeps of the
rows follows, and the second half is prepared; in it, sample: that half is launched, and the scoring of prompts. wait:
for the tokens. postprocess: the output is built from them, and the rows of a HostRunner get them."""
DEVICE_SCOPES = ("preprocess", "forward", "sample", "postprocess")


class Annotate(Protocol):
    """Opens a range; metadata is shown beside its name."""

    def __call__(self, name: str, /, **metadata: Any) -> AbstractContextManager[Any]: ...
