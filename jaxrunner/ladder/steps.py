"""`Steps`: the sizes of a sequence of engine steps, as NumPy columns and as a CSV file."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

import numpy as np

from jaxrunner.errors import AdmissionError

COLUMNS = {
    "start_s": np.float64,
    "num_reqs": np.int64,
    "num_tokens": np.int64,
    "max_query_len": np.int64,
    "num_prefills": np.int64,
    "context_tokens": np.int64,
}


@dataclasses.dataclass(frozen=True)
class Steps:
    """S steps, one entry each in every column.

    start_s: f64[S], seconds from the begin of the trace. num_reqs, num_tokens: i64[S], requests and tokens that ran.
    max_query_len: i64[S], most tokens of a request. num_prefills: i64[S], requests that were still in their prompt.
    context_tokens: i64[S], keys that the step read, summed over its requests, those it wrote itself included.
    Raises AdmissionError for columns that no engine could have made.
    """

    start_s: np.ndarray
    num_reqs: np.ndarray
    num_tokens: np.ndarray
    max_query_len: np.ndarray
    num_prefills: np.ndarray
    context_tokens: np.ndarray

    def __post_init__(self) -> None:
        columns = {name: np.asarray(getattr(self, name), dtype) for name, dtype in COLUMNS.items()}
        for name, column in columns.items():
            object.__setattr__(self, name, column)
        if len({column.shape for column in columns.values()}) != 1 or self.start_s.ndim != 1:
            raise AdmissionError(f"the columns of steps differ in length: { {n: c.shape for n, c in columns.items()} }")
        wrong = (self.num_reqs < 1) | (self.num_tokens < self.num_reqs) | (self.num_prefills > self.num_reqs)
        wrong |= (self.max_query_len * self.num_reqs < self.num_tokens) | (self.context_tokens < self.num_tokens)
        wrong |= self.max_query_len > self.num_tokens - self.num_reqs + 1
        if wrong.any():
            i = int(wrong.argmax())
            raise AdmissionError(f"step {i} cannot be: { {n: c[i].item() for n, c in columns.items()} }")

    def __len__(self) -> int:
        return len(self.start_s)

    def __getitem__(self, part: slice) -> Steps:
        return Steps(*(getattr(self, name)[part] for name in COLUMNS))

    def halves(self) -> tuple[Steps, Steps]:
        """The first half of the steps, to fit on, and the second, to judge on."""
        middle = len(self) // 2
        return self[:middle], self[middle:]

    @property
    def uniform_query_len(self) -> np.ndarray:
        """i64[S], tokens of each request where all have the same number, else 0."""
        return np.where(self.max_query_len * self.num_reqs == self.num_tokens, self.max_query_len, 0)

    def write(self, path: str | Path) -> None:
        """One line a step, the names of the columns first."""
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            writer.writerows(zip(*(getattr(self, name).tolist() for name in COLUMNS), strict=True))


def read_steps(path: str | Path) -> Steps:
    """Steps that `Steps.write` or a `StepRecorder` wrote. Raises AdmissionError, naming file and line, for others."""
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if missing := set(COLUMNS) - set(reader.fieldnames or ()):
                raise AdmissionError(f"{path} is no file of steps: the columns {sorted(missing)} are missing")
            rows = []
            for row in reader:
                try:
                    rows.append([float(row[name]) for name in COLUMNS])
                except (TypeError, ValueError) as error:
                    raise AdmissionError(f"{path}, line {reader.line_num}: {error}") from error
    except OSError as error:
        raise AdmissionError(f"{path} cannot be read: {error}") from error
    return Steps(*np.array(rows, np.float64).reshape(-1, len(COLUMNS)).T)
