"""This package's own choice of a runner."""

from __future__ import annotations

from jaxrunner.selection.facts import Facts
from jaxrunner.selection.policy import Answer, Policy, passing
from jaxrunner.selection.registry import HOMES


def asked(facts: Facts) -> Answer:
    """Is a runner asked for, by `runner` or by JAXRUNNER_RUNNER?"""
    if facts.override is None:
        return passing("neither is set: the policy decides")
    return Answer(f"asked for by {facts.override_from}", facts.override, forced=True)


def recurrent(facts: Facts) -> Answer:
    """Does the model keep recurrent state (hybrid or attention-free)?"""
    if not (facts.is_hybrid or facts.is_attention_free):
        return passing("no: keys and values alone")
    kind = "hybrid" if facts.is_hybrid else "attention-free"
    return Answer(f"{kind}: its state would have to move with every row of HostRunner", "device", forced=True)


def default(facts: Facts) -> Answer:
    """Which runner is the policy's?"""
    return Answer("it is the policy's choice for every model, and nothing stands against it", "device")


def unsupported(facts: Facts) -> list[str]:
    """What no runner can do of what is asked."""
    recurrent_layers = facts.is_hybrid or facts.is_attention_free
    return ["recurrent layers, which no runner of this version has"] if recurrent_layers else []


POLICY = Policy(
    name="jaxrunner",
    labels={name: home.class_name for name, home in HOMES.items()},
    rules=(asked, recurrent, default),
    gates={"device": unsupported, "host": unsupported},
    checks={},
)
