"""Damaged checkpoints, configurations and tokenizers, drawn from a seed.

Each `Damage` writes one source for `load`. `must_fail` is false only where the bytes are changed blindly, so that the
result may still say the same; then the weights that come out must be the old ones, bit for bit.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.damage import pristine

HUGE = 10**30
Write = Callable[[Path], Path]


@dataclasses.dataclass(frozen=True)
class Damage:
    """label: what was done. names: texts of which the error must hold one."""

    label: str
    write: Write
    names: tuple[str, ...]
    must_fail: bool = True


def directory(files: dict[str, bytes | str]) -> Write:
    """Writes a whole checkpoint with these files instead of, or besides, its own; None leaves one out."""
    header, data = pristine.safetensors_parts()
    whole = {
        "config.json": json.dumps(pristine.CONFIG),
        "tokenizer.json": pristine.tokenizer_text(),
        "model.safetensors": pristine.safetensors_bytes(header, data),
    } | files

    def write(path: Path) -> Path:
        path.mkdir()
        for name, content in whole.items():
            if content is not None:
                (path / name).write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


def flipped(raw: bytes, rng: np.random.Generator, end: int, count: int) -> bytes:
    """`raw` with `count` bytes before `end` replaced."""
    out = bytearray(raw)
    for place in rng.integers(0, end, count):
        out[place] = rng.integers(0, 256)
    return bytes(out)


def safetensors(rng: np.random.Generator, count: int) -> Iterator[Damage]:
    header, data = pristine.safetensors_parts()
    whole = pristine.safetensors_bytes(header, data)
    names = [n for n in header if n != "__metadata__"]

    def one(label: str, raw: bytes, *named: str, must_fail: bool = True) -> Damage:
        return Damage(
            label, directory({"model.safetensors": raw}), named or ("model.safetensors", "lacks tensor"), must_fail
        )

    def edited(label: str, change: Callable[[dict, str], Any], *named: str, body: bytes = data) -> Damage:
        changed, name = copy.deepcopy(header), names[rng.integers(len(names))]
        change(changed, name)
        return one(f"{label} of {name}", pristine.safetensors_bytes(changed, body), *named)

    def put(key: str, value: Any) -> Callable[[dict, str], Any]:
        return lambda h, name: h[name].__setitem__(key, value)

    def grow(h: dict, name: str) -> None:
        h[name]["shape"] = [n + 1 for n in h[name]["shape"]]

    def swap_sizes(h: dict, name: str) -> None:
        h[name]["shape"] = [1, *h[name]["shape"]]

    def drop(h: dict, name: str) -> None:
        del h[name]

    def rename(h: dict, name: str) -> None:
        h[name + "x"] = h.pop(name)

    def overlap(h: dict, name: str) -> None:
        other = names[(names.index(name) + 1) % len(names)]
        h[name]["data_offsets"] = list(h[other]["data_offsets"])

    lengths = (0, 1, 2**16, 2**31, 2**40, 2**63, 2**64 - 1, len(whole), len(whole) - 8)
    dims = (-1, HUGE, 2**62, 1.5, "8", None, [8])
    kinds = ("F128", "f32", "", None, 5, "I32", "F16", "F4", ["F32"])
    offsets = ([0], [], None, "ab", [0, 1, 2], [-4, 0], [8, 4], [0, HUGE], [0, 2**63], [0.5, 8], ["0", "8"])
    bodies = (b"", b"[]", b"null", b"5", b"{", b"\xff\xfe", b'{"a": 5}', b'{"a": {}}', b"[" * 50_000, b'"x"', b"{}")
    makers: list[Callable[[], Damage]] = [
        lambda: one("cut", whole[: int(rng.integers(0, len(whole)))]),
        lambda: one("bytes too many", whole + bytes(int(rng.integers(1, 100)))),
        lambda: one("flipped", flipped(whole, rng, len(whole) - len(data), int(rng.integers(1, 4))), must_fail=False),
        lambda: one("length", int(lengths[rng.integers(len(lengths))]).to_bytes(8, "little") + whole[8:]),
        lambda: one("header", pristine.safetensors_bytes(bodies[rng.integers(len(bodies))], data)),
        lambda: edited("size", put("shape", [dims[rng.integers(len(dims))], 8])),
        lambda: edited("type", put("dtype", kinds[rng.integers(len(kinds))])),
        lambda: edited("offsets", put("data_offsets", offsets[rng.integers(len(offsets))])),
        lambda: edited("no field", lambda h, n: h[n].pop(("dtype", "shape", "data_offsets")[rng.integers(3)])),
        lambda: edited("missing entry", drop),
        lambda: edited("new name", rename),
        lambda: edited("overlap", overlap),
        lambda: edited("larger shape", grow),
        lambda: edited("more axes", swap_sizes),
        lambda: edited("another value", lambda h, n: h.__setitem__(n, [5, "x", None, []][rng.integers(4)])),
        lambda: _rewritten(rng),
    ]
    for i in range(count):
        yield makers[i % len(makers)]()


def _rewritten(rng: np.random.Generator) -> Damage:
    """A sound file of wrong tensors: one misses, is too many, has another shape or another type."""
    arrays = dict(pristine.tensors())
    name = list(arrays)[rng.integers(len(arrays))]
    kind = ("missing", "extra", "transposed", "integers", "lm_head only")[rng.integers(5)]
    if kind == "missing":
        del arrays[name]
    elif kind == "extra":
        name = f"model.layers.{pristine.LAYERS}.input_layernorm.weight"
        arrays[name] = np.ones(pristine.HIDDEN, np.float32)
    elif kind == "transposed":
        arrays[name] = arrays[name].reshape(-1, 1, 1)
    elif kind == "integers":
        arrays[name] = arrays[name].astype(np.int32)
    else:
        arrays, name = {"lm_head.weight": arrays["lm_head.weight"]}, "lacks tensor"
    header, data = {}, b""
    for key, array in arrays.items():
        raw = array.tobytes()
        shown = "I32" if array.dtype == np.int32 else "F32"
        header[key] = {"dtype": shown, "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    return Damage(f"{kind} {name}", directory({"model.safetensors": pristine.safetensors_bytes(header, data)}), (name,))


def sharded(rng: np.random.Generator, count: int) -> Iterator[Damage]:
    """Two shards with an index, of which something is wrong."""
    arrays = list(pristine.tensors().items())
    index: dict[str, Any] = {"metadata": {}, "weight_map": {}}
    shards = {}
    for number, part in enumerate((arrays[:9], arrays[9:]), 1):
        header, data = {}, b""
        name = f"model-0000{number}-of-00002.safetensors"
        for key, array in part:
            raw = array.tobytes()
            header[key] = {
                "dtype": "F32",
                "shape": list(array.shape),
                "data_offsets": [len(data), len(data) + len(raw)],
            }
            data += raw
            index["weight_map"][key] = name
        shards[name] = pristine.safetensors_bytes(header, data)
    file = "model.safetensors.index.json"
    first, second = shards

    def write(label: str, text: str | bytes | None = None, *named: str, **changed: bytes | None) -> Damage:
        files = {"model.safetensors": None, **shards, file: json.dumps(index) if text is None else text}
        files |= {{"first": first, "second": second}[key]: value for key, value in changed.items()}
        return Damage(label, directory(files), named or (file,))

    def mapped(value: Any) -> str:
        changed = copy.deepcopy(index)
        changed["weight_map"][arrays[rng.integers(len(arrays))][0]] = value
        return json.dumps(changed)

    texts = ("", "{", "[]", "null", "{}", '{"weight_map": 5}', '{"weight_map": []}', '{"weight_map": {"a": 5}}')
    makers: list[Callable[[], Damage]] = [
        lambda: write("no second shard", None, second, second=None),
        lambda: write("no first shard", None, first, first=None),
        lambda: write("empty shard", None, first, first=b""),
        lambda: write("cut shard", None, second, second=shards[second][: rng.integers(0, len(shards[second]))]),
        lambda: write("index", texts[rng.integers(len(texts))], file, "lacks tensor"),
        lambda: write("index of no UTF-8", b"\xff\xfe\x00", file),
        lambda: write("deep index", "[" * 50_000, file),
        lambda: write("file elsewhere", mapped("../model.safetensors"), "../model.safetensors"),
        lambda: write("unknown file", mapped("other.safetensors"), "other.safetensors"),
        lambda: write("file name of another type", mapped([5, None, ["x"], {}][rng.integers(4)]), file),
        lambda: write("no file name", mapped(""), file, "''"),
    ]
    for i in range(count):
        yield makers[i % len(makers)]()


def gguf_files(rng: np.random.Generator, count: int, whole: bytes, data_begin: int) -> Iterator[Damage]:
    """whole: a sound file, whose tensor data begins at `data_begin`."""
    fields = [i for i in range(data_begin - 8) if whole[i : i + 5] in (b"llama", b"token", b"gener")]

    def one(label: str, raw: bytes, must_fail: bool = True) -> Damage:
        def write(path: Path) -> Path:
            file = path.with_suffix(".gguf")
            file.write_bytes(raw)
            return file

        return Damage(label, write, (".gguf",), must_fail)

    def number(place: int, size: int, value: int) -> bytes:
        return whole[:place] + value.to_bytes(size, "little") + whole[place + size :]

    def noise() -> bytes:
        begin = fields[rng.integers(len(fields))]
        span = bytes(rng.integers(0, 256, int(rng.integers(1, 24)), np.uint8))
        return whole[:begin] + span + whole[begin + len(span) :]

    huge = (2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1)
    makers: list[Callable[[], Damage]] = [
        lambda: one("cut", whole[: int(rng.integers(0, len(whole)))]),
        lambda: one("cut header", whole[: int(rng.integers(0, data_begin))]),
        lambda: one("bytes too many", whole + bytes(int(rng.integers(64, 200)))),
        lambda: one("flipped", flipped(whole, rng, data_begin, 1), must_fail=False),
        lambda: one("flipped a few", flipped(whole, rng, data_begin, int(rng.integers(2, 6))), must_fail=False),
        lambda: one("noise", noise(), must_fail=False),
        lambda: one("magic", b"GGML" + whole[4:]),
        lambda: one("version", number(4, 4, int(rng.integers(4, 2**31)))),
        lambda: one("tensors", number(8, 8, huge[rng.integers(len(huge))])),
        lambda: one("values", number(16, 8, huge[rng.integers(len(huge))])),
        lambda: one("first key's length", number(24, 8, huge[rng.integers(len(huge))])),
        lambda: one("deep arrays", whole[:8] + bytes(8) + (1).to_bytes(8, "little") + _nested(5_000)),
    ]
    for i in range(count):
        yield makers[i % len(makers)]()


def _nested(depth: int) -> bytes:
    """A metadata value that is an array of an array of an array..."""
    inner = (9).to_bytes(4, "little") + (1).to_bytes(8, "little")
    return (1).to_bytes(8, "little") + b"k" + (9).to_bytes(4, "little") + inner * depth


def configs(rng: np.random.Generator, count: int) -> Iterator[Damage]:
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
    optional = ("num_key_value_heads", "head_dim", "max_position_embeddings")
    bad = (0, -1, 1.5, "x", "8", [], {}, [8], True, math.nan, math.inf, HUGE, 10**400)
    cases: list[tuple[str, Any, tuple[str, ...]]] = [(k, v, (k,)) for k in sizes + optional for v in bad]
    cases += [(k, None, (k,)) for k in sizes]
    cases += [("num_hidden_layers", n, ("num_hidden_layers",)) for n in (10**5, 10**9)]
    cases += [("num_hidden_layers", 3, ("model.layers.2",)), ("num_hidden_layers", 1, ("model.layers.1",))]
    cases += [("hidden_size", 9, ("shape",)), ("vocab_size", 23, ("vocabulary",)), ("vocab_size", 25, ("shape",))]
    cases += [("num_key_value_heads", 3, ("num_key_value_heads",)), ("head_dim", 3, ("head_dim",))]
    cases += [("rms_norm_eps", v, ("rms_norm_eps",)) for v in ("x", [], {}, -1, math.nan, math.inf, None, True)]
    cases += [("rope_theta", v, ("rope_theta",)) for v in ("x", [], 5.0, -5, math.nan)]
    cases += [("hidden_act", v, ("hidden_act",)) for v in ("gelu", 5, [], None, {})]
    cases += [
        ("architectures", v, ("architectur",)) for v in ("LlamaForCausalLM", 5, [5], [None], ["GPT2"], [[]], {"a": 1})
    ]
    cases += [("quantization_config", v, ("quantization_config",)) for v in ({}, 5, {"quant_method": "gptq"}, [])]
    cases += [("layer_types", v, ("layer_types",)) for v in (5, [], ["full_attention"], ["x", "x"], [[], []], "ab")]
    flags = ("attention_bias", "mlp_bias", "tie_word_embeddings")
    cases += [(k, v, (k,)) for k in flags for v in ("false", "yes", 5, [1], {})]
    cases += [
        ("tie_word_embeddings", True, ("tie",)),
        ("attention_bias", True, ("bias",)),
        ("mlp_bias", True, ("bias",)),
    ]
    cases += [("eos_token_id", v, ("eos_token_id",)) for v in ("x", {}, -1, [2, "x"], 1.5, True, HUGE, [[2]])]
    rules: list[Any] = [5, "x", [1], {"rope_type": "wat"}, {"rope_type": []}, {"rope_type": "linear"}, {"a": 1}]
    rules += [{"rope_type": "linear", "factor": f} for f in ("x", [], 0, -2, math.nan, math.inf)]
    rules += [{"rope_type": "linear", "type": "yarn", "factor": 2.0}, {"rope_type": "llama3", "factor": 8.0}]
    rules += [{"rope_theta": v} for v in (0, -1, "x", [], {})] + [{"full_attention": {"rope_type": "default"}}]
    cases += [("rope_parameters", v, ("rope", "factor")) for v in rules]
    cases += [("rope_scaling", {"type": "linear", "factor": 4.0}, ("rope_scaling",))]
    cases += [("partial_rotary_factor", v, ("partial_rotary_factor",)) for v in (0.5, "x", [])]
    texts = (b"", b"{", b"[]", b"null", b"5", b"\xff\xfe\x00", b"[" * 50_000, b'{"a": 1' + b"0" * 5_000 + b"}")
    for i in range(count):
        if i % 8 == 0:
            yield Damage(
                "text of config.json", directory({"config.json": texts[rng.integers(len(texts))]}), ("config.json",)
            )
        elif i % 8 == 1:
            raw = json.dumps(pristine.CONFIG).encode()
            raw = flipped(raw, rng, len(raw), 1)
            yield Damage(
                "flipped config.json", directory({"config.json": raw}), ("config", "tensor", "is missing"), False
            )
        elif i % 8 == 2:
            key = ("architectures", *sizes)[rng.integers(6)]
            left = {k: v for k, v in pristine.CONFIG.items() if k not in (key, "model_type")}
            yield Damage(f"no {key}", directory({"config.json": json.dumps(left)}), (key[:10],))
        else:
            key, value, names = cases[(i * 37) % len(cases)]
            text = json.dumps(pristine.CONFIG | {key: value})
            yield Damage(f"{key} = {str(value)[:40]}", directory({"config.json": text}), names)


def tokenizers(rng: np.random.Generator, count: int) -> Iterator[Damage]:
    whole = pristine.tokenizer_text()

    def one(label: str, text: str | bytes, must_fail: bool = True) -> Damage:
        return Damage(label, directory({"tokenizer.json": text}), ("tokenizer",), must_fail)

    def changed(key: str, value: Any) -> str:
        return json.dumps(json.loads(whole) | {key: value})

    beside: tuple[tuple[str, str], ...] = (
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"chat_template": 5}'),
        ("tokenizer_config.json", '{"chat_template": [5]}'),
        ("special_tokens_map.json", "null"),
        ("generation_config.json", '{"eos_token_id": "x"}'),
        ("generation_config.json", "\x00"),
        ("chat_template.json", "5"),
    )

    def another() -> Damage:
        name, text = beside[rng.integers(len(beside))]
        named = ("chat_template", "eos_token_id", name)
        return Damage(f"{name} {text!r}", directory({name: text}), named)

    models = (
        None,
        5,
        [],
        {},
        {"type": "Wat"},
        {"type": "WordLevel"},
        {"type": "WordLevel", "vocab": 5, "unk_token": "a"},
    )
    makers: list[Callable[[], Damage]] = [
        lambda: one("cut", whole[: int(rng.integers(0, len(whole) - 1))]),
        lambda: one("flipped", flipped(whole.encode(), rng, len(whole), int(rng.integers(1, 4))), must_fail=False),
        lambda: one("text", ("", "{}", "[]", "null", "5", "\x00", "[" * 50_000)[rng.integers(7)]),
        lambda: one("model", changed("model", models[rng.integers(len(models))])),
        lambda: one("pre-tokenizer", changed("pre_tokenizer", {"type": ("Wat", "Split", 5)[rng.integers(3)]})),
        lambda: one("added tokens", changed("added_tokens", (5, [5], [{}], "x")[rng.integers(4)])),
        lambda: one("ids", changed("model", {"type": "WordLevel", "unk_token": "a", "vocab": {"a": 1000}})),
        another,
    ]
    for i in range(count):
        yield makers[i % len(makers)]()
