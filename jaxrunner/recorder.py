"""The flight recorder of a `DeviceRunner`: what its last steps were given, on disk, and their exact replay.

A step is a function of the weights, the state and one upload. So a record is one saved state and, after it, the upload
of every executable that ran; what came out is kept as tokens and a digest, to be compared with a replay.

A recording is a directory of segments, of which the newest few are kept:

    segment-000007/state.safetensors   the state before the segment (`save_state`)
    segment-000007/calls.jsonl         what ran: a line for the segment, then a line for each call and each output
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrunner.compile.buckets import Bucket
from jaxrunner.compile.ladder import Ladder
from jaxrunner.compile.programs import Program, ProgramSet
from jaxrunner.compile.table import BucketTable, Entry
from jaxrunner.errors import CheckpointError
from jaxrunner.models.model import Model
from jaxrunner.pallas.custom_attention import described, from_described
from jaxrunner.runner.device_runner import DeviceRunner
from jaxrunner.runner.grammar import no_grammar
from jaxrunner.sampling.custom import CustomSampling
from jaxrunner.stages.sample import StepOutput
from jaxrunner.stages.step import Pending
from jaxrunner.state.runner_state import RunnerState, host_view
from jaxrunner.state.saving import checksums_of, load_state, raw_bytes, save_state, saved_checksums

STATE_FILE, CALLS_FILE = "state.safetensors", "calls.jsonl"
OUTPUT_LAG = 4
"""An output is read back when so many calls have followed it: by then it is there, and nothing waits for it."""


class FlightRecorder:
    """Records `runner` from now on until `close` (or the end of a `with`), without changing what it does.

    directory: made if it is not there; must hold no other recording. steps: calls of a segment; a new segment begins
    with a copy of the whole state on disk, so it costs time and space. segments: how many are kept, the one being
    written included; so between (segments - 1) * steps and segments * steps of the last calls can be replayed.

    A call is on disk before it runs, so that the one that crashes is there too. Replaced weights are noted, the
    weights themselves are not recorded.
    """

    def __init__(self, runner: DeviceRunner, directory: str | Path, *, steps: int = 1000, segments: int = 2):
        if steps < 1 or segments < 1:
            raise ValueError(f"steps {steps} and segments {segments} must be at least 1")
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        if _segments(self.directory):
            raise CheckpointError(f"{self.directory} already holds a recording; give another directory")
        self._runner, self._steps, self._segments = runner, steps, segments
        self._number = self._calls = self._left = 0
        self._file: Any = None
        self._weights, self._state = runner.weights, runner.state
        self._outputs: collections.deque[tuple[int, StepOutput]] = collections.deque()
        self._original = runner.table.call
        self._begin(self._state)
        runner.table.call = self._call  # type: ignore[method-assign]

    def __enter__(self) -> FlightRecorder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop recording. Reads back the last outputs and the checksums of the state, for the replay to end with."""
        if self._file is None:
            return
        del self._runner.table.call  # the method of the class is there again
        self._write_outputs(lag=0)
        self._write({"end": checksums_of(self._state)} if _alive(self._state) else {"end": None})
        self._file.close()
        self._file = None

    def _call(self, entry: Entry, *args: Any) -> Any:
        state = next(a for a in args if isinstance(a, RunnerState))
        # A segment does not begin between the two halves of a step: the first half could not be found again.
        if state is not self._state or (self._left <= 0 and not any(isinstance(a, Pending) for a in args)):
            self._begin(state)
        if not isinstance(args[0], RunnerState) and args[0] is not self._weights:
            self._weights = args[0]
            self._write({"weights": "replaced"})
        self._calls, self._left = self._calls + 1, self._left - 1
        call = {"call": self._calls, "program": dataclasses.asdict(entry.program)}
        free = tuple(self._runner.masks.free.values())
        self._write({**call, "args": [_describe(a, self._weights, free) for a in args]})
        try:
            result = self._original(entry, *args)
        except Exception as error:
            self._write({"failed": self._calls, "error": str(error)})
            raise
        self._state, output = (result, None) if isinstance(result, RunnerState) else result
        if isinstance(output, StepOutput):
            self._outputs.append((self._calls, output))
        self._write_outputs(lag=OUTPUT_LAG)
        return result

    def _begin(self, state: RunnerState) -> None:
        """A new segment, from `state` on."""
        if self._file is not None:
            self._write_outputs(lag=0)
            self._file.close()
        folder = self.directory / f"segment-{self._number:06d}"
        folder.mkdir()
        save_state(folder / STATE_FILE, state)
        self._file = (folder / CALLS_FILE).open("w")
        programs = self._runner.table.programs
        self._write(
            {
                "segment": self._number,
                # Whether the state is the one that the segment before ended with, or was put there from outside.
                "continues": self._number > 0 and state is self._state,
                "jax": jax.__version__,
                "device": jax.devices()[0].device_kind,
                "ladder": dataclasses.asdict(programs.ladder),
                "implementation": described(programs.implementation),
                "custom": programs.custom.names,
                "compiler_options": self._runner.table.compiler_options,
            }
        )
        self._number, self._left, self._state = self._number + 1, self._steps, state
        for old in _segments(self.directory)[: -self._segments]:
            shutil.rmtree(old)

    def _write_outputs(self, *, lag: int) -> None:
        while self._outputs and self._outputs[0][0] <= self._calls - lag:
            number, output = self._outputs.popleft()
            self._write({"output": number, **_summary(output)})

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


@dataclasses.dataclass(frozen=True)
class ReplayReport:
    """calls: executables that ran again. outputs: step outputs compared. states: states compared, bit for bit, at the
    ends of segments. differences: what was not the same, in order, each with the number of its call; empty is good.
    failed: calls that raised when they were recorded, and were not run again.
    """

    calls: int
    outputs: int
    states: int
    differences: tuple[str, ...]
    failed: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        return not self.differences

    def __str__(self) -> str:
        found = "all equal" if self.exact else f"first difference: {self.differences[0]}"
        return f"{self.calls} calls replayed, {self.outputs} outputs and {self.states} states compared: {found}"


def replay(
    path: str | Path,
    model: Model,
    weights: Any,
    *,
    replacements: Sequence[Any] = (),
    logits_processors: Any = (),
    sampler: Any = None,
) -> ReplayReport:
    """Run a recording again and compare every output, and the state at the end of every segment, bit for bit.

    path: the recorder's directory. weights: those the oldest kept segment began with. replacements: the weights that
    followed, one pytree for each time they were replaced while that was recorded. logits_processors, sampler: those of
    the recorded runner, of which a recording has the names alone.

    The same executables are compiled again, from the recorded ladder; where the JAX version, the device or the
    compiler's flags are others than the recorded ones, differences of rounding are to be expected. The last line of a
    recording that was cut off is left out. Raises CheckpointError for a directory without a recording, a damaged
    segment, other logits processors or another sampler, and for weights that were replaced more often than
    `replacements` says.
    """
    folders = _segments(Path(path))
    if not folders:
        raise CheckpointError(f"{path} holds no recording of a FlightRecorder")
    custom = CustomSampling.of(logits_processors, sampler)
    player = _Player(model, weights, list(replacements), custom)
    for folder in folders:
        player.play(folder)
    return ReplayReport(player.calls, player.outputs, player.states, tuple(player.differences), tuple(player.failed))


class _Player:
    """One replay: the state and the outputs it has come to."""

    def __init__(self, model: Model, weights: Any, replacements: list[Any], custom: CustomSampling):
        self.model, self.weights, self.replacements, self.custom = model, weights, replacements, custom
        self.calls = self.outputs = self.states = 0
        self.differences: list[str] = []
        self.failed: list[str] = []
        self.state: RunnerState | None = None
        self.table: BucketTable | None = None
        self.header: dict[str, Any] = {}
        self.pending: Pending | None = None
        self.results: dict[int, StepOutput] = {}

    def play(self, folder: Path) -> None:
        header, *lines = _lines(folder / CALLS_FILE)
        self._begin(folder, header)
        failed = {line["failed"]: line["error"] for line in lines if "failed" in line}
        self.failed += [f"call {number}: {error}" for number, error in failed.items()]
        for line in lines:
            if line.get("call") in failed:
                continue
            if "weights" in line:
                if not self.replacements:
                    raise CheckpointError(
                        f"{folder}: the weights were replaced after call {self.calls}; pass them as `replacements`"
                    )
                self.weights = self.replacements.pop(0)
            elif "call" in line:
                self._run(folder, line)
            elif "output" in line and (output := self.results.pop(line["output"], None)) is not None:
                self._compare_output(line, output)
            elif line.get("end"):
                self._compare_state(line["end"], "the last call")

    def _begin(self, folder: Path, header: dict[str, Any]) -> None:
        if self.state is not None and header["continues"]:
            self._compare_state(saved_checksums(folder / STATE_FILE), f"segment {header['segment']}")
        self.state = load_state(folder / STATE_FILE, self.model)
        if header["custom"] != self.custom.names:
            raise CheckpointError(
                f"{folder} was recorded with the logits processors and sampler {header['custom']}, not with "
                f"{self.custom.names}: pass the same logits_processors=... and sampler=..."
            )
        made_with = {name: header[name] for name in ("ladder", "implementation", "compiler_options")}
        if made_with != self.header:
            ladder = Ladder(**{name: _tuples(value) for name, value in header["ladder"].items()})
            implementation = from_described(header["implementation"])
            options: dict[str, Any] = {"implementation": implementation, "custom": self.custom}
            programs = ProgramSet(self.model, self.weights, self.state, ladder, **options)
            self.table = BucketTable(programs, compiler_options=header["compiler_options"])
            self.header = made_with

    def _run(self, folder: Path, line: dict[str, Any]) -> None:
        assert self.table is not None
        if "pending" in line["args"] and self.pending is None:
            raise CheckpointError(f"{folder}: call {line['call']} completes a step whose first half was not recorded")
        fields = {name: _tuples(value) for name, value in line["program"].items()}
        bucket = fields.pop("bucket")
        program = Program(bucket=Bucket(**bucket) if bucket else None, **fields)
        pending = self.pending and (self.pending if program.kind == "prompt" else self.pending.last_tokens)
        known = {"weights": self.weights, "state": self.state, "pending": pending, "none": None}
        if "no_grammar" in line["args"]:
            known["no_grammar"] = no_grammar(program.size, self.model.vocab_size)
        args = [known[a] if isinstance(a, str) else _array(a) for a in line["args"]]
        result = self.table.call(self.table.get(program), *args)
        self.state, output = (result, None) if isinstance(result, RunnerState) else result
        self.calls += 1
        if isinstance(output, StepOutput):
            self.results[line["call"]] = output
        elif isinstance(output, Pending):
            self.pending = output

    def _compare_output(self, line: dict[str, Any], output: StepOutput) -> None:
        self.outputs += 1
        now = _summary(output)
        if now["sampled_token_ids"] != line["sampled_token_ids"]:
            text = f"sampled {now['sampled_token_ids']}, recorded {line['sampled_token_ids']}"
            self.differences.append(f"call {line['output']}: {text}")
        elif now["sha256"] != line["sha256"]:
            self.differences.append(f"call {line['output']}: the same tokens, but other bits in its outputs")

    def _compare_state(self, recorded: dict[str, int], where: str) -> None:
        assert self.state is not None
        self.states += 1
        now = checksums_of(self.state)
        if other := [name for name in recorded if recorded[name] != now.get(name)]:
            self.differences.append(f"state at {where}: other bits in {', '.join(other)}")


def _describe(value: Any, weights: Any, free_masks: Sequence[jax.Array]) -> str | dict[str, Any]:
    """An argument of an executable: by name if the replay has it, else its contents."""
    if isinstance(value, RunnerState):
        return "state"
    if isinstance(value, Pending):
        return "pending"
    if value is weights:
        return "weights"
    if value is None:
        return "none"
    if any(value is mask for mask in free_masks):
        return "no_grammar"
    array = host_view(value)
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": base64.b64encode(raw_bytes(array)).decode()}


def _array(described: dict[str, Any]) -> np.ndarray:
    raw = np.frombuffer(base64.b64decode(described["data"]), np.dtype(described["dtype"]))
    return raw.reshape(described["shape"])


def _summary(output: StepOutput) -> dict[str, Any]:
    """The tokens in clear and a digest of every array of an output."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(output):
        digest.update(raw_bytes(leaf))
    return {"sampled_token_ids": host_view(output.sampled_token_ids).tolist(), "sha256": digest.hexdigest()}


def _lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a segment. A last line that was cut off is left out; any other damage raises."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: the recording is incomplete")
    *texts, _ = path.read_text(errors="replace").split("\n")
    lines = []
    for number, text in enumerate(texts, 1):
        try:
            lines.append(json.loads(text))
        except ValueError as error:
            raise CheckpointError(f"{path} is damaged at line {number}: {error}") from error
    if not lines:
        raise CheckpointError(f"{path} is empty: the recording is incomplete")
    return lines


def _segments(directory: Path) -> list[Path]:
    return sorted(directory.glob("segment-*"))


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value


def _alive(state: RunnerState) -> bool:
    return not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
