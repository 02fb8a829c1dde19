"""Shared fixtures: small models, session-compiled runners, and what a machine without a GPU skips."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from pathlib import Path

import pytest
from jaxtyping import install_import_hook

# Triton compiles the source of a function in the names of its own module: its kernels are imported unchecked.
with contextlib.suppress(ImportError):
    importlib.import_module("jaxrunner.pallas.attention_triton_kernels")

# A kept executable describes its results by a pytree of placeholders, which are no arrays.
importlib.import_module("jaxrunner.sampling.logprobs")

# Every jaxtyping annotation of these packages is checked at each call, traced calls included.
install_import_hook(
    ["jaxrunner.pallas", "jaxrunner.models.layers", "jaxrunner.models.transformer", "jaxrunner.sampling"],
    "beartype.beartype",
)

GOLDEN = Path(__file__).parent / "golden"
os.environ["JAXRUNNER_COMPILATION_CACHE"] = "off"  # a cache would hide compilations from the tests that count them


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import jax

    if jax.default_backend() != "gpu":
        skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


@functools.cache
def load_tiny(name: str):
    """(model, weights) of a tiny golden checkpoint, float32."""
    from jaxrunner.models.loading import load

    model, weights, _ = load(str(GOLDEN / "tiny" / name))
    return model, weights


@pytest.fixture(scope="session")
def tiny_llama():
    return load_tiny("llama")


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    return GOLDEN


@pytest.fixture(scope="session")
def smollm2_llm():
    """An engine over the embedded default model; compiles a bucket when a test first needs it."""
    from jaxrunner import LLM

    return LLM(max_model_len=1024, max_num_seqs=16, max_num_batched_tokens=256, kv_bytes=640 * 2**20)
