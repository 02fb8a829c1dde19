"""Shared fixtures: small models, session-compiled runners, and what a machine without a GPU skips."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
from collections.abc import Iterator
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


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two processes for the whole suite. None beside this one for tests that were named, and on a GPU, whose memory the
    first of them would take."""
    is_whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    return 2 if is_whole and config.getoption("markexpr") != "gpu" else 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import jax

    if jax.default_backend() != "gpu":
        skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Programs that run a few times each are compiled cheaply; those of the long-lived engine and of a GPU in full."""
    import jax

    cheap = jax.default_backend() == "cpu" and "smollm2_llm" not in getattr(item, "fixturenames", ())
    jax.config.update("jax_disable_most_optimizations", cheap)


MAPPINGS = Path("/proc/self/maps")
MOST_MAPPINGS = 40_000
"""Linux allows a process 65,530 memory mappings, of which an executable of the CPU takes several; XLA dies without a
word when there are no more."""


@pytest.fixture(scope="module", autouse=True)
def room_for_executables() -> Iterator[None]:
    """Forget what JAX keeps of earlier tests before it is too much."""
    yield
    if MAPPINGS.exists() and MAPPINGS.read_bytes().count(b"\n") > MOST_MAPPINGS:
        import jax

        jax.clear_caches()
        gc.collect()


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
def executables_dir(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("executables")


@pytest.fixture
def kept_executables(executables_dir, monkeypatch) -> None:
    """Commands that make an engine each find the executables of the one before, as those of a user do."""
    monkeypatch.setenv("JAXRUNNER_COMPILATION_CACHE", str(executables_dir))


@pytest.fixture(scope="session")
def smollm2_llm():
    """An engine over the embedded default model; compiles a bucket when a test first needs it. Few rungs: thirty
    unrolled layers compile for seconds, and the default ladder is walked with tiny models."""
    from jaxrunner import LLM, Ladder

    ladder = Ladder(decode=(1, 16), mixed=(64, 256), finish=(1, 16))
    return LLM(max_model_len=1024, max_num_seqs=16, max_num_batched_tokens=256, kv_bytes=640 * 2**20, ladder=ladder)
