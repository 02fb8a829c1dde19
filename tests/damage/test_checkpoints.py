"""Damaged checkpoints: every one is refused with an error that names the thing, or says the same as the whole one."""

from __future__ import annotations

import itertools
import time
from collections import Counter

import jax
import numpy as np
import pytest

from jaxrunner.errors import JaxrunnerError
from jaxrunner.models.gguf_file import GGUFFile
from jaxrunner.models.loading import load
from tests.damage import generator, pristine

SEED, MOST_SECONDS = 0, 5.0


def leaves(source) -> list[bytes]:
    _, weights, _ = load(source)
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(weights)]


@pytest.fixture(scope="module")
def sound_gguf(tmp_path_factory):
    return pristine.write_gguf(tmp_path_factory.mktemp("sound") / "sound.gguf")


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return leaves(generator.directory({})(tmp_path_factory.mktemp("sound") / "sound"))


def check(damages, path, expected) -> Counter[str]:
    """How many were refused, and how many said the same."""
    found: Counter[str] = Counter()
    wrong = []
    for number, damage in enumerate(damages):
        started = time.perf_counter()
        source = damage.write(path / f"d{number}")
        try:
            same = leaves(source) == expected
        except JaxrunnerError as error:
            found["refused"] += 1
            if not any(name in str(error) for name in damage.names):
                wrong.append(f"{damage.label}: none of {damage.names} is named in: {str(error)[:300]}")
        except BaseException as error:  # a panic of a native library is no Exception
            if isinstance(error, KeyboardInterrupt):
                raise
            wrong.append(f"{damage.label}: {type(error).__name__}: {str(error)[:300]}")
        else:
            found["same"] += 1
            if damage.must_fail:
                wrong.append(f"{damage.label}: accepted")
            elif not same:
                wrong.append(f"{damage.label}: other weights without an error")
        if (seconds := time.perf_counter() - started) > MOST_SECONDS:
            wrong.append(f"{damage.label}: {seconds:.1f} s")
    assert not wrong, f"{len(wrong)} of them:\n" + "\n".join(wrong[:40])
    return found


def test_the_whole_files_load_and_agree(expected, sound_gguf):
    assert leaves(sound_gguf) == expected


@pytest.mark.parametrize(
    ("name", "count"), [("safetensors", 330), ("sharded", 66), ("configs", 200), ("tokenizers", 64)]
)
def test_damaged_directories(tmp_path, expected, name, count):
    damages = getattr(generator, name)(np.random.default_rng(SEED), count)
    found = check(damages, tmp_path, expected)
    assert found.total() == count
    assert found["refused"] > 0.75 * count


def test_damaged_gguf_files(tmp_path, expected, sound_gguf):
    begin = min(tensor.begin for tensor in GGUFFile.open(sound_gguf).tensors.values())
    damages = generator.gguf_files(np.random.default_rng(SEED), 240, sound_gguf.read_bytes(), begin)
    found = check(damages, tmp_path, expected)
    assert found["refused"] > 120


def test_the_generator_repeats_itself():
    first, again = (generator.configs(np.random.default_rng(SEED), 20) for _ in range(2))
    assert all(a.label == b.label for a, b in itertools.zip_longest(first, again))
