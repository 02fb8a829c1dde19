"""A state in a file: bit for bit, of any dtype, and every damaged or foreign file is refused by name."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxrunner
from jaxrunner import ListSizes, ThinkingTokens, init_state
from jaxrunner.errors import CheckpointError, DonatedStateError
from jaxrunner.models.safetensors_file import SafetensorsFile
from jaxrunner.state.fields import RECORD_FIELDS
from jaxrunner.state.runner_state import host_view
from jaxrunner.state.saving import checksums_of, load_state, save_state, saved_checksums
from tests.stages import harness


@functools.cache
def scrambled(kv_cache_dtype="float32"):
    """(model, a state with random bits in every leaf): two groups, drafts, extras, NaNs of all kinds."""
    model, _ = harness.tiny("llama", (8, None, 8))
    state = init_state(
        model,
        max_requests=3,
        max_model_len=32,
        num_blocks=(5, 7),
        kv_cache_dtype=kv_cache_dtype,
        num_draft_tokens=2,
        list_sizes=ListSizes(stop_ids=3, replay_tokens=2),
        thinking=ThinkingTokens(start=(1, 2), end=(3,)),
    )
    state = state.replace(
        extras={"scalar": jnp.int8(0), "none": jnp.zeros((4, 0)), "x": jnp.zeros((4, 3), jnp.float16)}
    )
    rng = np.random.default_rng(0)

    def scramble(leaf):
        raw = rng.integers(0, 256, leaf.nbytes, np.uint8)
        return jnp.asarray(raw.view(leaf.dtype).reshape(leaf.shape))

    return model, jax.tree.map(scramble, state)


def bits(state):
    return [(leaf.dtype, leaf.shape, host_view(leaf).tobytes()) for leaf in jax.tree.leaves(state)]


@pytest.mark.parametrize("kv_cache_dtype", ["float32", "bfloat16", "fp8"])
def test_a_state_comes_back_bit_for_bit(tmp_path, kv_cache_dtype):
    model, state = scrambled(kv_cache_dtype)
    path = tmp_path / "state.safetensors"
    checksums = save_state(path, state)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
    for like in (model, state, shapes):
        loaded = load_state(path, like)
        assert jax.tree.structure(loaded) == jax.tree.structure(state)
        assert bits(loaded) == bits(state)
    assert checksums == saved_checksums(path) == checksums_of(loaded)
    assert list(tmp_path.iterdir()) == [path]


def test_a_loaded_state_can_be_donated(tmp_path):
    model, state = scrambled()
    save_state(tmp_path / "s", state)
    loaded = load_state(tmp_path / "s", model)
    jax.jit(lambda s: jax.tree.map(lambda x: x, s), donate_argnums=0)(loaded)
    with pytest.raises(DonatedStateError):
        save_state(tmp_path / "s", loaded)
    assert bits(load_state(tmp_path / "s", model)) == bits(state), "a failed save must leave the old file"


def test_the_file_is_plain_safetensors(tmp_path):
    """The `safetensors` package reads it, and the header says what the arrays do not."""
    from safetensors import safe_open

    _, state = scrambled()
    save_state(tmp_path / "s", state)
    with safe_open(tmp_path / "s", "numpy") as file:
        np.testing.assert_array_equal(file.get_tensor("requests/counters"), state.requests.counters)
        np.testing.assert_array_equal(file.get_tensor("kv/blocks/1"), state.kv.blocks[1])
        metadata = file.metadata()
    assert metadata["jaxrunner"] == jaxrunner.__version__
    assert metadata["jax"] == jax.__version__
    assert [g["window"] for g in json.loads(metadata["groups"])] == [None, 8]
    assert json.loads(metadata["fields"]) == [f.name for f in RECORD_FIELDS]


def rewrite(path: Path, change) -> None:
    """Change the header of a file, leaving its arrays."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    new = json.dumps(header).encode()
    path.write_bytes(len(new).to_bytes(8, "little") + new + raw[8 + length :])


def flip(path: Path, offset: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1
    path.write_bytes(raw)


def set_metadata(**changes):
    return lambda path: rewrite(path, lambda header: header["__metadata__"].update(changes))


def rename(old, new):
    return lambda path: rewrite(path, lambda header: header.update({new: header.pop(old)}))


DAMAGES = {
    "cut off": (lambda p: p.write_bytes(p.read_bytes()[:-9]), "its header describes"),
    "bytes too many": (lambda p: p.write_bytes(p.read_bytes() + b"x"), "its header describes"),
    "empty": (lambda p: p.write_bytes(b""), "not \\(or no longer\\) a state"),
    "text": (lambda p: p.write_text("a poem, of some length"), "not \\(or no longer\\) a state"),
    "a bit of the cache": (lambda p: flip(p, -1), r"bytes of extras/x do not match|bytes of kv|do not match"),
    "other metadata": (set_metadata(format="pt"), "holds no state"),
    "a later version": (set_metadata(format_version="3"), "format version 3; this is 2"),
    "other fields": (set_metadata(fields='["a"]', jaxrunner="9.0"), r"jaxrunner 9\.0, whose rows hold \['a'\]"),
    "an array under another name": (
        rename("requests/counters", "counters"),
        "only one has counters, requests/counters",
    ),
    "no cache": (rename("kv/blocks/1", "kv"), "does not have kv/blocks/1"),
    "other groups": (set_metadata(groups="[]"), r"caches the layers \[\]; this model has 3"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_or_foreign_file_is_refused(tmp_path, name):
    model, state = scrambled()
    path = tmp_path / "state.safetensors"
    save_state(path, state)
    damage, message = DAMAGES[name]
    damage(path)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_state(path, model)
    assert str(path) in str(caught.value)


def test_a_bit_of_any_array_is_noticed(tmp_path):
    model, state = scrambled()
    path = tmp_path / "s"
    save_state(path, state)
    clean = path.read_bytes()
    for name, entry in SafetensorsFile.open(path).tensors.items():
        if entry.end > entry.begin:
            flip(path, (entry.begin + entry.end) // 2)
            with pytest.raises(CheckpointError, match=f"the bytes of {name} do not match"):
                load_state(path, model)
            path.write_bytes(clean)


def test_a_state_of_another_kind_is_refused(tmp_path):
    model, state = scrambled()
    path = tmp_path / "s"
    save_state(path, state)
    with pytest.raises(CheckpointError, match=r"kv/blocks/0 is float32\[1, 2, 5, 16, \d, \d+\]; expected"):
        load_state(path, model.replace(head_dim=model.head_dim * 2))
    with pytest.raises(CheckpointError, match="this model has 2"):
        load_state(path, model.replace(layers=model.layers[:2]))
    shorter = state.replace(requests=state.requests.replace(token_ids=state.requests.token_ids[:, 1:]))
    with pytest.raises(CheckpointError, match=r"requests/token_ids is int32\[4, 32\]; expected int32\[4, 31\]"):
        load_state(path, shorter)
    with pytest.raises(CheckpointError, match="only one has extras/x"):
        load_state(path, state.replace(extras={n: v for n, v in state.extras.items() if n != "x"}))
    one_group = state.replace(tables=state.tables.replace(groups=state.tables.groups[::-1]))
    with pytest.raises(CheckpointError, match="has the KV-cache groups"):
        load_state(path, one_group)


def test_a_dtype_without_a_name_is_refused(tmp_path):
    _, state = scrambled()
    for value in (jnp.zeros(4, ml_dtypes.float8_e4m3b11fnuz), jax.random.key(0)):
        with pytest.raises(CheckpointError, match="extras/k has the dtype"):
            save_state(tmp_path / "s", state.replace(extras={"k": value}))
    assert not list(tmp_path.iterdir())


def test_a_replayed_step_from_a_file_is_the_same_step(tmp_path):
    """The use of it: save, load, step; the same bits as without the file."""
    model, weights = harness.tiny("llama")
    bucket = harness.Bucket("mixed", 16, 3, 16)
    state = init_state(model, max_requests=3, max_model_len=32, num_blocks=12)
    state, (row,) = jaxrunner.admit(state, [[1, 2, 3]])
    save_state(tmp_path / "s", state)
    packed = jaxrunner.plan(state, {row: 3}).pack(bucket)
    expected = harness.run(model, weights, state, packed, bucket)
    assert bits(harness.run(model, weights, load_state(tmp_path / "s", model), packed, bucket)) == bits(expected)
