"""Every error this package raises on purpose. Each message names the thing that is wrong and the way out."""

from __future__ import annotations


class JaxrunnerError(Exception):
    """Base of all errors below."""


class CheckpointError(JaxrunnerError, ValueError):
    """A checkpoint, its configuration or its tokenizer is missing, damaged, or of a kind that cannot be run."""


class AdmissionError(JaxrunnerError, ValueError):
    """A request cannot be accepted as given; no other request is affected."""


class NotBuiltError(AdmissionError, NotImplementedError):
    """A request or an option asks for a capability that this version does not have."""


class ImplementationError(JaxrunnerError, NotImplementedError):
    """The implementation of an op that was asked for by name cannot take this case on this machine."""


class BucketMissError(JaxrunnerError, RuntimeError):
    """A step fits no compiled bucket and the policy does not allow to compile one."""


class CacheError(JaxrunnerError, OSError):
    """The cache of executables was asked for by name and cannot be used."""


class DonatedStateError(JaxrunnerError, RuntimeError):
    """A state was used after a call had consumed (donated) it."""


class CapacityError(JaxrunnerError, RuntimeError):
    """A fixed-size table, pool or bucket would overflow."""


class InvariantError(JaxrunnerError, AssertionError):
    """`audit` found a state or a plan that breaks an invariant."""
