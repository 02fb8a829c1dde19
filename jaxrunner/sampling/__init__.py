"""Ops of the sampler, in their documented order."""
