"""Public request traces: CSV files with an arrival time and two token counts a request.

Known column names are those of the Azure LLM inference traces (github.com/Azure/AzurePublicDataset) and of BurstGPT
(github.com/HPMLL/BurstGPT).
"""

from __future__ import annotations

import csv
import datetime
import importlib.resources
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxrunner.errors import AdmissionError
from jaxrunner.ladder.traces import Trace

logger = logging.getLogger("jaxrunner")


class Format(NamedTuple):
    """Column names of a public trace."""

    arrival: str
    prompt_tokens: str
    output_tokens: str


FORMATS = {
    "Azure": Format("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "BurstGPT": Format("Timestamp", "Request tokens", "Response tokens"),
}
SAMPLE = "sample_trace.csv"
SAMPLE_PARAMETERS = dict(rate=12.0, n=1200, seed=4, period_s=25.0, prompt_mean=400, output_mean=120)
"""SAMPLE is `write_trace(Trace.diurnal(**SAMPLE_PARAMETERS), path)`."""
EPOCH = datetime.datetime(2020, 1, 1)


def read_trace(path: str | Path, *, max_requests: int | None = None) -> Trace:
    """A trace from a CSV file in one of FORMATS, or in this package's, which has the field names of `Trace`.

    An arrival is a number of seconds or a date with a time. Requests without prompt or output tokens (failed ones, in
    BurstGPT) are left out, and their number is logged; the rest is ordered by arrival, which begins at 0.
    max_requests: read no more lines. Raises AdmissionError naming the file and the line or the columns.
    """
    path = Path(path)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            columns = _columns(path, reader.fieldnames or ())
            rows: list[tuple[float, ...]] = []
            for row in reader:
                if max_requests is not None and len(rows) == max_requests:
                    break
                try:
                    rows.append((_seconds(row[columns.arrival]), *(float(row[c]) for c in columns[1:])))
                except (TypeError, ValueError) as error:
                    raise AdmissionError(f"{path}, line {reader.line_num}: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise AdmissionError(f"{path} cannot be read: {error}") from error
    table = np.array(rows, np.float64).reshape(-1, 3)
    table = table[np.argsort(table[:, 0], kind="stable")]
    usable = (table[:, 1:] >= 1).all(axis=1)
    if dropped := int((~usable).sum()):
        logger.info("%s: %d of %d requests have no prompt or no output and are left out", path, dropped, len(table))
    table = table[usable]
    if not len(table):
        raise AdmissionError(f"{path} holds no request with prompt and output tokens")
    return Trace(path.stem, table[:, 0] - table[0, 0], table[:, 1], table[:, 2])


def sample_trace() -> Trace:
    """The small trace that comes with the package, in Azure's format. It was generated, by
    SAMPLE_PARAMETERS, so it shows no real users."""
    with importlib.resources.as_file(importlib.resources.files(__package__).joinpath(SAMPLE)) as path:
        return read_trace(path)


def write_trace(trace: Trace, path: str | Path, *, begin: datetime.datetime = EPOCH) -> None:
    """Write the Azure format, which every tool of this field reads; arrivals are counted from `begin`."""
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(FORMATS["Azure"])
        for when, prompt, output in zip(trace.arrival_s, trace.prompt_tokens, trace.output_tokens, strict=True):
            stamp = (begin + datetime.timedelta(seconds=float(when))).isoformat(" ", "microseconds")
            writer.writerow((stamp, int(prompt), int(output)))


def _formats() -> list[Format]:
    return [*FORMATS.values(), Format("arrival_s", "prompt_tokens", "output_tokens")]


def _columns(path: Path, fieldnames: Sequence[str]) -> Format:
    for format_ in _formats():
        if set(format_) <= set(fieldnames):
            return format_
    known = "; ".join(", ".join(format_) for format_ in _formats())
    raise AdmissionError(f"{path} is no request trace: its columns are {list(fieldnames)}, known are {known}")


def _seconds(text: str) -> float:
    """Seconds since any fixed moment."""
    try:
        return float(text)
    except ValueError:
        moment = datetime.datetime.fromisoformat(text)
        return (moment - EPOCH.replace(tzinfo=moment.tzinfo)).total_seconds()
