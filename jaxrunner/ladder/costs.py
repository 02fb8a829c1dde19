"""What a bucket costs: seconds of a step, seconds to make it and bytes, interpolated from measured buckets."""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxrunner.errors import AdmissionError
from jaxrunner.ladder.placement import KINDS, Placements, Scheme
from jaxrunner.ladder.steps import Steps

MEASURED = "h200-llama3-8b"
"""The engine of this package on one H200, by `benchmarks/gpu_ladder.py`."""
PEER = "h200-vllm"
"""vLLM 0.25.1 on the same kind of GPU and model."""


@dataclasses.dataclass(frozen=True)
class Curve:
    """A cost over the size of a bucket: measured points, straight lines between them.

    Below the first point the cost is the first one's; past the last the last line goes on, unless it falls. With a
    single point the cost grows in proportion to larger sizes.
    """

    sizes: tuple[int, ...]
    values: tuple[float, ...]

    @classmethod
    def of(cls, points: Iterable[tuple[int, float]], *, rising: bool = False) -> Curve:
        """A curve through (size, value). rising: a point below the one before it is noise, and is lifted to it. Raises
        AdmissionError for no points, for two of a size, and for negative values."""
        ordered = sorted(points)
        sizes = tuple(int(n) for n, _ in ordered)
        values = np.array([v for _, v in ordered], np.float64)
        if not sizes or sizes[0] < 1 or len(set(sizes)) != len(sizes) or not (values >= 0).all():
            raise AdmissionError(f"a curve needs points of distinct sizes and no negative cost, got {ordered}")
        return cls(sizes, tuple((np.maximum.accumulate(values) if rising else values).tolist()))

    def __call__(self, size: Any) -> np.ndarray:
        """f64, of the shape of `size`."""
        size = np.asarray(size, np.float64)
        inside = np.interp(size, self.sizes, self.values)
        if len(self.sizes) == 1:
            return np.maximum(1.0, size / self.sizes[0]) * self.values[0]
        slope = (self.values[-1] - self.values[-2]) / (self.sizes[-1] - self.sizes[-2])
        return inside + max(0.0, slope) * np.maximum(0.0, size - self.sizes[-1])


@dataclasses.dataclass(frozen=True)
class Costs:
    """name: for tables. decode, mixed: cost of a step without the keys that it reads; a larger bucket never costs less.
    per_key: cost of a key.

    unit: "s", or "tokens" where nothing was measured and a padded token costs 1. make: seconds to trace and compile an
    executable of a bucket, code_bytes what it holds, temp_bytes what it needs while it runs; None where they were not
    measured. other_seconds: of an executable that holds no model (sampling, admission). graph_seconds, graph_bytes: to
    capture a CUDA graph, and what it holds. once_seconds: paid once, whatever the ladder. rows, conditions: what was
    read.
    """

    name: str
    decode: Curve
    mixed: Curve
    per_key: float = 0.0
    unit: str = "s"
    make: Curve | None = None
    code_bytes: Curve | None = None
    temp_bytes: Curve | None = None
    other_seconds: float = 0.0
    graph_seconds: float | None = None
    graph_bytes: float = 0.0
    once_seconds: float = 0.0
    rows: tuple[Mapping[str, Any], ...] = ()
    conditions: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def tokens(cls) -> Costs:
        """A padded token costs 1: for ladders that shall waste as few as possible."""
        line = Curve((1, 2), (1.0, 2.0))
        return cls("padded tokens", line, line, unit="tokens")

    @classmethod
    def load(cls, source: str | Path, *, variant: str | None = None) -> Costs:
        """Costs from a report of `benchmarks/gpu_ladder.py`, or shipped ones by name (`shipped()`).

        variant: which of the ways in which buckets were measured ("on" or "off", XLA's command buffers); the report's
        own choice if left out.
        """
        path = Path(source)
        if str(source) in shipped():
            text = importlib.resources.files(__package__).joinpath("measured", f"{source}.json").read_text("utf-8")
        elif path.is_file():
            text = path.read_text(encoding="utf-8")
        else:
            raise AdmissionError(f"{source} is no file; shipped measurements are {', '.join(shipped())}")
        try:
            report = json.loads(text)
            return cls.from_rows(report["rows"], report["conditions"], name=path.stem, variant=variant)
        except AdmissionError:
            raise
        except (ValueError, KeyError, TypeError) as error:
            raise AdmissionError(f"{source} is no report of benchmarks/gpu_ladder.py ({error!r})") from error

    @classmethod
    def from_rows(
        cls, rows: Iterable[Mapping[str, Any]], conditions: Mapping[str, Any], *, name: str, variant: str | None = None
    ) -> Costs:
        """Costs from a benchmark's rows. A measured bucket is a row with `kind`, `size`, `value` in ms and, for a
        decode, `context`, the keys of a request; it may have `variant`, `make_s`, `code_bytes` and `temp_bytes`. A row
        `start-up/VARIANT` has the seconds of a warm-up by the clock: its executables were made at the same time, on all
        cores, so each is priced at its share of that. Other rows without `kind` are left alone, and so are those that
        are void or failed.

        conditions: `ns_per_key`, and where they apply `variant` (the default one), `other_s`, `graph_s`, `graph_bytes`
        and `once_s`.
        """
        variant = variant or conditions.get("variant")
        rows = tuple(rows)
        buckets = [r for r in rows if r.get("kind") in KINDS and r.get("value") is not None and not r.get("void")]
        chosen = [r for r in buckets if variant is None or r.get("variant", variant) == variant]
        if not chosen:
            known = sorted({str(r["variant"]) for r in buckets if "variant" in r})
            raise AdmissionError(f"no bucket was measured with variant {variant!r}; there are {known}")
        per_key = conditions.get("ns_per_key", 0.0) * 1e-9
        curves = {}
        for kind in KINDS:
            points: dict[int, list[float]] = {}
            for row in chosen:
                if row["kind"] == kind:
                    keys = row["size"] * row.get("context", 0) if kind == "decode" else 0
                    points.setdefault(row["size"], []).append(row["value"] * 1e-3 - per_key * keys)
            curves[kind] = {size: max(0.0, float(np.mean(values))) for size, values in points.items()}
        if not curves["decode"] or not curves["mixed"]:
            raise AdmissionError("measured are buckets of one kind alone; decode and mixed are needed")
        share = _share_of_clock(rows, chosen, variant, conditions.get("other_s", 0.0))
        # A ragged step runs the products of a decode of as many tokens: decodes bound it where it was not measured.
        smaller = {n: v for n, v in curves["decode"].items() if n < min(curves["mixed"])}
        return cls(
            name,
            Curve.of(curves["decode"].items(), rising=True),
            Curve.of((smaller | curves["mixed"]).items(), rising=True),
            per_key,
            make=_curve(chosen, "make_s", share),
            code_bytes=_curve(chosen, "code_bytes"),
            temp_bytes=_curve(chosen, "temp_bytes"),
            other_seconds=conditions.get("other_s", 0.0) * share,
            graph_seconds=conditions.get("graph_s"),
            graph_bytes=conditions.get("graph_bytes", 0.0),
            once_seconds=conditions.get("once_s", 0.0),
            rows=rows,
            conditions=conditions,
        )

    def variants(self) -> list[Costs]:
        """These costs, and those of the other variants that were measured beside them, each under its name."""
        names = list(
            dict.fromkeys(row["variant"] for row in self.rows if row.get("kind") in KINDS and "variant" in row)
        )
        if len(names) < 2:
            return [self]
        return [
            self.from_rows(self.rows, self.conditions, name=f"{self.name}, {variant}", variant=variant)
            for variant in names
        ]

    def bucket_rows(self) -> list[dict[str, Any]]:
        """The rows of measured buckets, with None where one has no such entry."""
        entries = ("name", "kind", "size", "context", "value", "make_s", "temp_bytes", "code_bytes")
        return [{e: row.get(e) for e in entries} for row in self.rows if row.get("kind") in KINDS]

    def bucket(self, kind: str, size: Any) -> np.ndarray:
        """Cost of a step of `size` tokens, without keys. f64, of the shape of `size`."""
        return (self.decode if kind == "decode" else self.mixed)(size)

    def of_placements(self, placed: Placements, steps: Steps) -> np.ndarray:
        """Cost of each step, f64[S]. An eager step costs what a bucket of its own size would: no measurement of eager
        steps is at hand, so this is a lower bound."""
        base = np.where(placed.kind == KINDS.index("decode"), self.decode(placed.size), self.mixed(placed.size))
        return base + self.per_key * steps.context_tokens

    def without_padding(self, placed: Placements, steps: Steps) -> np.ndarray:
        """Cost of each step if its bucket had its very size, f64[S]."""
        return self.of_placements(dataclasses.replace(placed, size=steps.num_tokens), steps)

    def start_up(self, scheme: Scheme) -> tuple[float | None, float | None]:
        """(seconds to make all that the scheme needs, bytes), None where not measured. Seconds of executables are by
        the clock of a warm-up on all cores, if one was measured, else one after the other, as those of graphs are.

        Bytes of executables are their code and the largest temporary alone: only one runs at a time.
        """
        made = scheme.start_up()
        if self.graph_seconds is not None:
            return self.once_seconds + made.executables * self.graph_seconds, made.executables * self.graph_bytes
        if self.make is None:
            return None, None
        others = (made.executables - len(made.sizes)) * self.other_seconds
        seconds = float(self.make(made.sizes).sum()) + others + self.once_seconds
        if self.code_bytes is None or self.temp_bytes is None:
            return seconds, None
        largest = float(self.temp_bytes(max(made.sizes))) if made.sizes else 0.0
        return seconds, float(self.code_bytes(made.sizes).sum()) + largest


def shipped() -> list[str]:
    """Names of the measurements that come with the package."""
    folder = importlib.resources.files(__package__).joinpath("measured")
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


def _share_of_clock(
    rows: Iterable[Mapping[str, Any]], buckets: list[Mapping[str, Any]], variant: str | None, other_seconds: float
) -> float:
    """Seconds of the warm-up by the clock over those of its executables together; 1 where it was not measured."""
    own = {(row["kind"], row["size"]): row["make_s"] for row in buckets if row.get("make_s")}
    start = next((row for row in rows if row.get("name") == f"start-up/{variant}" and row.get("value")), None)
    if start is None or not own:
        return 1.0
    return start["value"] / (sum(own.values()) + (start["executables"] - start["buckets"]) * other_seconds)


def _curve(rows: list[Mapping[str, Any]], field: str, factor: float = 1.0) -> Curve | None:
    points: dict[int, list[float]] = {}
    for row in rows:
        if row.get(field) is not None:
            points.setdefault(row["size"], []).append(row[field] * factor)
    return Curve.of((n, float(np.mean(v))) for n, v in points.items()) if points else None
