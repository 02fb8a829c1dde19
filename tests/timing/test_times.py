"""Times as a table and as a trace, from columns written by hand."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from rich.console import Console

from jaxrunner.timing.ranges import RANGES
from jaxrunner.timing.times import DEVICE_THREAD, HOST_THREAD, StepTimes

US = 1000


def times(*steps, ready=None) -> StepTimes:
    """steps: range -> (first began, last ended, spent) in microseconds."""
    shape = (3, len(steps), len(RANGES))
    columns = np.zeros(shape, np.int64)
    for i, step in enumerate(steps):
        for name, values in step.items():
            columns[:, i, RANGES.index(name)] = np.array(values) * US
    count = len(steps)
    sizes = np.arange(count), np.full(count, 2), np.full(count, 5), tuple(f"decode[{2 + i % 2}]" for i in range(count))
    return StepTimes(*sizes, *columns, np.zeros(count, bool) if ready is None else np.array(ready))


# The second step is launched at 140, while the first one runs until 170.
FIRST = {
    "preprocess": (100, 120, 16),
    "admit": (105, 109, 4),
    "forward": (120, 130, 10),
    "wait": (160, 170, 10),
    "postprocess": (170, 173, 3),
}
SECOND = {
    "preprocess": (130, 140, 10),
    "forward": (140, 145, 5),
    "sample": (145, 147, 2),
    "wait": (180, 190, 10),
    "postprocess": (190, 194, 4),
}


def test_host_dispatch_and_device_time():
    both = times(FIRST, SECOND)
    assert both.host_us.tolist() == [19, 14]
    assert both.dispatch_us.tolist() == [14, 7]
    assert both.device_us.tolist() == [50, 20]  # 120 to 170; 170, not 140, to 190
    assert both.us("lookup").tolist() == [0, 0]


def test_the_table_has_a_line_for_each_executable_and_one_for_all():
    stream = io.StringIO()
    Console(file=stream, width=200).print(times(FIRST, SECOND, FIRST, ready=[False, True, False]).table())
    lines = [
        [c.strip() for c in line.strip("│┃ ").replace("┃", "│").split("│")] for line in stream.getvalue().splitlines()
    ]
    heading = next(line for line in lines if line[0] == "executable")
    rows = {line[0]: dict(zip(heading, line, strict=True)) for line in lines if line[0].startswith(("decode", "all"))}
    assert list(rows) == ["decode[2]", "decode[3]", "all"]
    assert (rows["decode[2]"]["steps"], rows["decode[2]"]["tokens"], rows["decode[2]"]["host"]) == ("2", "10", "19")
    assert rows["decode[3]"]["device"] == "<=20"
    assert (rows["all"]["steps"], rows["all"]["admit"]) == ("3", "4")
    assert times().table().row_count == 0


def test_the_trace_is_nested_ordered_and_complete(tmp_path):
    path = tmp_path / "trace.json"
    times(FIRST, SECOND, ready=[False, True]).write_trace(path)
    trace = json.loads(path.read_text())
    named = {e["args"]["name"]: e["tid"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert named == {"host": HOST_THREAD, "device": DEVICE_THREAD}
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert all(e["dur"] >= 0 <= e["ts"] and e["pid"] == 1 for e in events)
    host = [(e["args"]["step"], e["name"], e["ts"], e["dur"]) for e in events if e["tid"] == HOST_THREAD]
    assert host[:3] == [(0, "preprocess", 0, 20), (0, "admit", 5, 4), (0, "forward", 20, 10)]
    assert len(host) == len(FIRST) + len(SECOND)
    device = [e for e in events if e["tid"] == DEVICE_THREAD]
    assert [(e["name"], e["ts"], e["dur"]) for e in device] == [("decode[2]", 20, 50), ("decode[3]", 70, 20)]
    assert [e["args"]["upper_bound"] for e in device] == [False, True]
    assert device[0]["args"] == pytest.approx(
        {"step": 0, "executable": "decode[2]", "requests": 2, "tokens": 5, "upper_bound": False}
    )
    assert times().trace()["traceEvents"][0]["ph"] == "M"
