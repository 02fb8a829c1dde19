"""Immutable request state: the pytrees that carry a batch of requests from step to step."""
