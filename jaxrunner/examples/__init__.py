"""Logits processors and samplers to use or to start from, see `jaxrunner.sampling.custom`."""
