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


def gates(facts: Facts) -> Answer:
    """Is anything asked for that DeviceRunner cannot do?"""
    if closed := closed_for_device(facts):
        return Answer(", ".join(closed), "host", forced=True)
    return passing("no")


def default(facts: Facts) -> Answer:
    """Which runner is the policy's?"""
    return Answer("it is the policy's choice for every model, and nothing stands against it", "device")


def closed_for_device(facts: Facts) -> list[str]:
    """What DeviceRunner cannot do of what is asked."""
    found = {
        "logits processors that follow batch updates": bool(facts.logits_processors),
        **_recurrent_layers(facts),
    }
    return [what for what, applies in found.items() if applies]


def closed_for_host(facts: Facts) -> list[str]:
    """What HostRunner cannot do of what is asked."""
    return [what for what, applies in _recurrent_layers(facts).items() if applies]


def _recurrent_layers(facts: Facts) -> dict[str, bool]:
    return {"recurrent layers, which no runner of this version has": facts.is_hybrid or facts.is_attention_free}


def _absent_host(facts: Facts) -> list[str]:
    return [] if HOMES["host"].is_built else ["HostRunner is not built in this version"]


POLICY = Policy(
    name="jaxrunner",
    labels={name: home.class_name for name, home in HOMES.items()},
    rules=(asked, recurrent, gates, default),
    gates={"device": closed_for_device, "host": closed_for_host},
    checks={"host": _absent_host},
)
