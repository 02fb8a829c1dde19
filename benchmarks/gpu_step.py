"""Whole engine steps on a GPU, host included: the Llama-3-8B shape and a tiny one, with random weights in bfloat16.

    python benchmarks/gpu_step.py [--output FILE] [--only TEXT] [--seconds 400]

`decode/...`: one step is what `LLM.step` does with asynchronous scheduling: plan, packed upload, launch, then the
tokens of the step before. Every request starts at a context of about 1010 tokens whose KV is taken as computed; 12
steps warm up, 60 are timed. `.../sampled`: with temperature, top_k, top_p and all penalties. `prefill/...`: from the
scheduling of new requests to their first tokens on the host, the whole prompts in one step. `decode_loop/...`: one step
of `decode_loop`, LOOP_STEPS in a call, LOOP_CALLS calls after each other, contexts on average as long as the engine's,
with the options that its bucket has in an engine; and `engine`, the engine's right before, as a GPU that has been busy
for long is slower. `decode/tiny-peer`: a model
so small that the host bounds it, in turns between two runs of `benchmarks.calibration`.

Each row says which implementation of each op its executables hold (`kernels`: calls in their text), and what memory
they need: `memory_bytes` are the arrays held while it was timed and the largest temporary, `peak_bytes` the most that
this process has had allocated so far. `check` compares logits with the XLA implementation, see
`benchmarks.step_check`. A row is void if anything was compiled in its window. `peer` is vLLM 0.25.1 on the same kind
of GPU, `floor` the bytes of weights and KV at 4.2 TB/s, or the products at 781 TFLOP/s.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import itertools
import os
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jaxrunner  # noqa: E402
from benchmarks import report, step_check  # noqa: E402
from benchmarks.calibration import calibrate, speed  # noqa: E402
from jaxrunner import Bucket, DeviceRunner, Ladder, RunnerConfig, SamplingParams, decode_loop  # noqa: E402
from jaxrunner.compile.counter import CompileCounter  # noqa: E402
from jaxrunner.compile.executable_cache import ENVIRONMENT  # noqa: E402
from jaxrunner.compile.hlo import implementations, mosaic_kernels  # noqa: E402
from jaxrunner.engine.request import Request  # noqa: E402
from jaxrunner.engine.scheduler import Scheduler  # noqa: E402
from jaxrunner.models.model import LayerSpec, Model, RopeSpec  # noqa: E402
from jaxrunner.models.weights import random_weights  # noqa: E402

BLOCK_SIZE, WARM_UP, STEPS = 16, 12, 60
CONTEXT = 1009
"""Here and below a token more than whole blocks, so that the first step is a decode already."""
LOOP_STEPS, LOOP_CALLS, LOOP_ROUNDS = 32, 2, 3
LOOP_CONTEXT = CONTEXT + WARM_UP + STEPS // 2 - LOOP_STEPS * (1 + LOOP_CALLS * LOOP_ROUNDS // 2)
"""So that its timed steps have on average as long contexts as the engine's."""
PREFILL_TOKENS, PREFILL_WARM_UP, PREFILL_STEPS = 8192, 2, 6
TURNS, TURN_STEPS, TINY_BATCH, TINY_CONTEXT = 10, 16, 256, 993
CHECK_THREADS = 4
LLAMA3_8B = Model(
    "LlamaForCausalLM",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    layers=(LayerSpec(),) * 32,
    rope=RopeSpec(theta=500000.0),
    rms_norm_eps=1e-5,
    max_position_embeddings=16384,
    dtype="bfloat16",
)
TINY = Model(
    "LlamaForCausalLM", 32000, 256, 512, 4, 2, 64, (LayerSpec(),) * 2, max_position_embeddings=8192, dtype="bfloat16"
)
"""The peer report's, whose intermediate size it does not say."""
FLOOR = {1: 3.60, 8: 3.83, 32: 4.60, 64: 5.63, 128: 7.70, 256: 13.2}
PEER = {1: 4.83, 8: 5.17, 32: 6.16, 64: 7.43, 128: 10.11, 256: 17.14}
PREFILLS = {"1x8192": ((8192,), 169.0, 209.2), "4x2048": ((2048,) * 4, 158.0, 190.4)}
"""Name -> prompt lengths, floor, peer."""
MOST_PREFILLS = max(len(lengths) for lengths, _, _ in PREFILLS.values())
GREEDY = {"temperature": 0.0}
SAMPLED = {
    "temperature": 0.8,
    "top_k": 50,
    "top_p": 0.9,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.3,
    "presence_penalty": 0.2,
}
SAMPLED_BATCH, SAMPLED_PEER = 256, 17.7
TINY_PEER = {"fast": 5.08, "slow": 7.97}
"""Speed of the CPU -> peer."""
Row = dict[str, Any]


class PrefilledScheduler(Scheduler):
    """Takes all but the last token of every prompt as computed: what is timed is decoding."""

    def _cached_prefix(self, request: Request, tokens) -> list[int]:
        return list(itertools.islice(self.pool._free, (len(tokens) - 1) // BLOCK_SIZE))


class Engine:
    """A scheduler over a runner; depth: results in flight before the oldest is taken."""

    def __init__(self, model: Model, weights: Any, config: RunnerConfig, ladder: Ladder, *, prefilled: bool):
        self.runner = DeviceRunner(model, weights, config, ladder=ladder)
        scheduler = PrefilledScheduler if prefilled else Scheduler
        self.scheduler = scheduler(config, len(self.runner.groups), prefix_caching=False)
        self.depth = 1 if config.async_scheduling else 0
        self.in_flight: deque = deque()
        self.names = (f"r{i}" for i in itertools.count())

    def add(self, prompt: list[int], max_tokens: int, asked: dict[str, Any] = GREEDY) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **asked)
        self.scheduler.add(Request(next(self.names), prompt, params))

    def step(self) -> None:
        plan, frame = self.scheduler.schedule()
        if self.runner.execute_model(plan) is None:
            self.in_flight.append((frame, self.runner.sample_tokens()))
        ahead = self.depth if plan.total_num_scheduled_tokens and not self.runner.table.warming_up else 0
        while len(self.in_flight) > ahead:
            frame, output = self.in_flight.popleft()
            self.scheduler.update(frame, output.get_output() if self.depth else output)

    def described(self) -> Row:
        """What its executables of steps hold and need."""
        entries = [e for e in self.runner.table.entries.values() if e.program.kind in ("step", "begin", "finish")]
        texts = {e.program: e.compiled.as_text() for e in entries}
        return {
            "implementation": implementations("\n".join(texts.values())),
            "kernels": dict(sum(map(mosaic_kernels, texts.values()), Counter())),
            **memory(max(e.temp_bytes for e in entries)),
            "lower_s": round(sum(e.trace_seconds + e.lower_seconds for e in entries), 2),
            "compile_s": round(sum(e.compile_seconds for e in entries), 2),
        }


def memory(temp_bytes: int) -> Row:
    stats = jax.devices()[0].memory_stats() or {}
    held = stats.get("bytes_in_use", 0)
    return {"temp_bytes": temp_bytes, "memory_bytes": held + temp_bytes, "peak_bytes": stats.get("peak_bytes_in_use")}


def void(counter: CompileCounter) -> Row:
    return {"void": f"{counter.count} programs were compiled in the timed window"} if counter.count else {}


def seconds_of(run: Callable[[], None]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def decoding(
    model: Model, weights: Any, batch: int, context: int, steps: int, asked: dict[str, Any] = GREEDY
) -> Engine:
    """An engine whose `batch` requests all decode, warm. asked: what each request asks for."""
    tokens = WARM_UP + steps + 8
    blocks = batch * -(-(context + tokens) // BLOCK_SIZE) + 1
    config = RunnerConfig(batch, 2048, max(batch, 64), blocks, BLOCK_SIZE, async_scheduling=True)
    tiers = tuple(dict.fromkeys(("greedy", SamplingParams(**asked).tier)))
    ladder = Ladder((batch,), (max(batch, 64),), (batch,), tiers=tiers)
    engine = Engine(model, weights, config, ladder, prefilled=True)
    for i in range(batch):
        engine.add([(7 * i + j) % 30000 for j in range(context)], tokens, asked)
    for _ in range(WARM_UP):
        engine.step()
    return engine


def measure_decode(weights: Callable[[], Any], batch: int, asked: dict[str, Any], row: Row) -> Row:
    engine = decoding(LLAMA3_8B, weights(), batch, CONTEXT, STEPS, asked)
    with CompileCounter() as counter:
        times = [seconds_of(engine.step) for _ in range(STEPS)]
    return row | report.milliseconds(times) | engine.described() | void(counter)


def measure_prefill(weights: Callable[[], Any], lengths: tuple[int, ...], row: Row) -> Row:
    blocks = PREFILL_TOKENS // BLOCK_SIZE + 2 * MOST_PREFILLS + 1
    config = RunnerConfig(MOST_PREFILLS, PREFILL_TOKENS + 16, PREFILL_TOKENS, blocks, BLOCK_SIZE)
    ladder = Ladder((MOST_PREFILLS,), (PREFILL_TOKENS,), (MOST_PREFILLS,), tiers=("greedy",))
    engine = Engine(LLAMA3_8B, weights(), config, ladder, prefilled=False)

    def step(seed: int) -> float:
        for prompt in step_check.random_prompts(LLAMA3_8B, lengths, seed):
            engine.add(prompt, 1)
        return seconds_of(engine.step)

    for seed in range(PREFILL_WARM_UP):
        step(seed)
    with CompileCounter() as counter:
        times = [step(100 + seed) for seed in range(PREFILL_STEPS)]
    return row | report.milliseconds(times) | engine.described() | void(counter)


def measure_loop_beside_engine(weights: Callable[[], Any], batch: int, row: Row) -> Row:
    engine = measure_decode(weights, batch, GREEDY, {})
    if "void" in engine:
        return row | {"void": f"the engine's: {engine['void']}"}
    return measure_loop(LLAMA3_8B, weights, batch, LOOP_CONTEXT, row | {"engine": engine["value"]})


def measure_loop(model: Model, weights: Callable[[], Any], batch: int, context: int, row: Row) -> Row:
    prompts = step_check.random_prompts(model, (context + 1,) * batch)
    total = LOOP_STEPS * (LOOP_CALLS * LOOP_ROUNDS + 1) + 1
    state, rows = step_check.computed_state(model, prompts, context, room=total)
    state = jaxrunner.reserve(state, rows, total)
    bucket = Bucket("decode", batch, batch)

    def loop(weights, state):
        return decode_loop(model, weights, state, rows, steps=LOOP_STEPS, bucket=bucket)

    lowered = jax.jit(loop, donate_argnums=1).lower(weights(), state)
    compiled = lowered.compile(compiler_options=jaxrunner.compiler_options(bucket))

    def calls(number: int) -> None:
        """Their tokens are waited for at the end, as those of an asynchronous engine are."""
        nonlocal state
        made = []
        for _ in range(number):
            state, _, counts = compiled(weights(), state)
            made.append(counts)
        assert all((counts == LOOP_STEPS).all() for counts in jax.device_get(made)), "a row stopped"

    calls(1)
    with CompileCounter() as counter:
        times = [seconds_of(partial(calls, LOOP_CALLS)) / (LOOP_CALLS * LOOP_STEPS) for _ in range(LOOP_ROUNDS)]
    text = compiled.as_text()
    held = {"implementation": implementations(text), "kernels": dict(mosaic_kernels(text))}
    return (
        row | report.milliseconds(times) | held | memory(compiled.memory_analysis().temp_size_in_bytes) | void(counter)
    )


def measure_tiny(row: Row) -> Row:
    engine = decoding(TINY, random_weights(TINY), TINY_BATCH, TINY_CONTEXT, TURNS * TURN_STEPS)
    turns = []
    with CompileCounter() as counter:
        for _ in range(TURNS):
            before = calibrate()
            times = [seconds_of(engine.step) for _ in range(TURN_STEPS)]
            turns.append((before, calibrate(), times))
    calibrations = [c for before, after, _ in turns for c in (before, after)]
    row |= report.milliseconds([t for *_, times in turns for t in times])
    row["calibration_ms"] = round(statistics.median(calibrations), 2)
    for kind, peer in TINY_PEER.items():
        chosen = [t for before, after, times in turns if speed(before, after) == kind for t in times]
        if chosen:
            row |= {f"{kind}_cpu": report.milliseconds(chosen)["value"], f"{kind}_cpu_peer": peer}
    row["turns"] = [[round(b, 2), round(a, 2), round(statistics.median(t) * 1e3, 3)] for b, a, t in turns]
    return row | engine.described() | void(counter)


Job = tuple[Row, Callable[[Row], Row], Callable[[], Row]]
"""The head of a row, what measures it, what checks it."""


def jobs(weights: Callable[[], Any]) -> list[Job]:
    def row(name: str, **more: Any) -> Row:
        return {"name": name, "value": None, "unit": "ms", **more}

    result: list[Job] = []
    for batch in FLOOR:
        head = row(f"decode/llama3-8b/b{batch}/ctx1030/greedy", floor=FLOOR[batch], peer=PEER[batch])
        result.append((head, partial(measure_decode, weights, batch, GREEDY), partial(check_decode, weights, batch)))
    head = row(f"decode/llama3-8b/b{SAMPLED_BATCH}/ctx1030/sampled", floor=FLOOR[SAMPLED_BATCH], peer=SAMPLED_PEER)
    measure = partial(measure_decode, weights, SAMPLED_BATCH, SAMPLED)
    result.append((head, measure, partial(check_decode, weights, SAMPLED_BATCH)))
    for name, (lengths, floor, peer) in PREFILLS.items():
        head = row(f"prefill/llama3-8b/{name}", floor=floor, peer=peer)
        result.append((head, partial(measure_prefill, weights, lengths), partial(check_prefill, weights, lengths)))
    for batch in (1, 64):
        head = row(f"decode_loop/llama3-8b/b{batch}", floor=FLOOR[batch])
        measure = partial(measure_loop_beside_engine, weights, batch)
        result.append((head, measure, partial(check_decode, weights, batch)))
    tiny = functools.cache(lambda: random_weights(TINY))
    measure = partial(measure_loop, TINY, tiny, TINY_BATCH, TINY_CONTEXT)
    result.append((row(f"decode_loop/tiny-peer/b{TINY_BATCH}"), measure, check_tiny))
    return [*result, (row(f"decode/tiny-peer/b{TINY_BATCH}"), measure_tiny, check_tiny)]


@functools.cache
def check_decode(weights: Callable[[], Any], batch: int) -> Row:
    return step_check.check_decode(LLAMA3_8B, weights(), batch, CONTEXT + 20)


def check_prefill(weights: Callable[[], Any], lengths: tuple[int, ...]) -> Row:
    return step_check.check_prefill(LLAMA3_8B, weights(), lengths, MOST_PREFILLS)


@functools.cache
def check_tiny() -> Row:
    return step_check.check_decode(TINY, random_weights(TINY), TINY_BATCH, TINY_CONTEXT)


def run_checks(done: list[tuple[Row, Callable[[], Row]]]) -> None:
    """Each row's `check`, several at a time: they compile for most of theirs. After all timings, because a check needs
    memory of its own, which would count as a row's peak."""
    with concurrent.futures.ThreadPoolExecutor(CHECK_THREADS) as pool:
        running = [pool.submit(report.guarded, {"pass": False}, check) for _, check in done]
        for (row, _), future in zip(done, running, strict=True):
            row["check"] = future.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "gpu_step.json")
    parser.add_argument("--only", default="", help="only rows with this in their name")
    parser.add_argument("--seconds", type=float, default=400)
    options = parser.parse_args()
    os.environ.setdefault(ENVIRONMENT, "off")  # lower_s and compile_s are of executables made here
    shape = {"model": "llama3-8b shape, random bfloat16", "steps": STEPS, "prefill_steps": PREFILL_STEPS}
    result = report.Report(options.output, report.conditions(**shape), seconds=options.seconds)
    weights = functools.cache(lambda: random_weights(LLAMA3_8B))
    chosen = [job for job in jobs(weights) if options.only in job[0]["name"]]
    done = []
    for head, measure, check in chosen:
        if result.left:
            result.add(report.guarded(head, partial(measure, dict(head))))
            done.append((result.rows[-1], check))
            report.show(result.rows[-1:], leave_out=("turns",))
    run_checks(done)
    result.conditions["rows_left_out"] = len(chosen) - len(done)
    result.write()
    print()
    report.show(result.rows, leave_out=("turns", "p10", "p90", "lower_s", "compile_s", "kernels", "temp_bytes"))
    if any(row["check"]["pass"] is False for row, _ in done):
        sys.exit("a check failed")


if __name__ == "__main__":
    main()
