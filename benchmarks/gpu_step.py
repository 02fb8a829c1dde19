"""Whole engine steps on a GPU: decodes of the Llama-3-8B shape with random weights in bfloat16, host included.

    python benchmarks/gpu_step.py [--output FILE] [--batches 1 8 64 256] [--seconds 200]

One step is what `LLM.step` does with asynchronous scheduling: plan, packed upload, launch, then the tokens of the step
before. Every request starts at a context of about 1010 tokens whose KV is taken as computed; 12 steps warm up, 60 are
timed. A row is void if anything was compiled in its window. `kernels` counts the Mosaic kernels in the executable that
ran. The outputs of random weights say nothing; the same kernels are compared with XLA in `tests/gpu`. `peer` is vLLM
0.25.1 on the same kind of GPU, `floor` the bytes of weights and KV at 4.2 TB/s (or the products at 781 TFLOP/s).
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections import deque
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import timing  # noqa: E402
from jaxrunner import DeviceRunner, Ladder, RunnerConfig, SamplingParams  # noqa: E402
from jaxrunner.compile.counter import CompileCounter  # noqa: E402
from jaxrunner.engine.request import Request  # noqa: E402
from jaxrunner.engine.scheduler import Scheduler  # noqa: E402
from jaxrunner.models.model import LayerSpec, Model, RopeSpec  # noqa: E402
from jaxrunner.models.weights import random_weights  # noqa: E402

CONTEXT, BLOCK_SIZE, WARM_UP, STEPS = 1009, 16, 12, 60
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
    max_position_embeddings=8192,
    dtype="bfloat16",
)
FLOOR = {1: 3.60, 8: 3.83, 32: 4.60, 64: 5.63, 128: 7.70, 256: 13.2}
PEER = {1: 4.83, 8: 5.17, 32: 6.16, 64: 7.43, 128: 10.11, 256: 17.14}


class PrefilledScheduler(Scheduler):
    """Takes all but the last token of every prompt as computed: what is timed is decoding."""

    def _cached_prefix(self, request: Request, tokens) -> list[int]:
        return list(itertools.islice(self.pool._free, (len(tokens) - 1) // BLOCK_SIZE))


def measure(weights, batch: int) -> dict:
    row = {"name": f"decode/llama3-8b/b{batch}/ctx1030/greedy", "unit": "ms"}
    blocks = batch * -(-(CONTEXT + WARM_UP + STEPS + 8) // BLOCK_SIZE) + 1
    config = RunnerConfig(batch, 2048, max(batch, 64), blocks, BLOCK_SIZE, async_scheduling=True)
    ladder = Ladder((batch,), (max(batch, 64),), (batch,), tiers=("greedy",))
    runner = DeviceRunner(LLAMA3_8B, weights, config, ladder=ladder)
    scheduler = PrefilledScheduler(config, len(runner.groups), prefix_caching=False)
    for i in range(batch):
        params = SamplingParams(temperature=0.0, max_tokens=WARM_UP + STEPS + 4, ignore_eos=True)
        scheduler.add(Request(f"r{i}", [(7 * i + j) % 100000 for j in range(CONTEXT)], params))
    in_flight: deque = deque()

    def step() -> None:
        plan, frame = scheduler.schedule()
        runner.execute_model(plan)
        in_flight.append((frame, runner.sample_tokens()))
        if len(in_flight) > 1:
            frame, output = in_flight.popleft()
            scheduler.update(frame, output.get_output())

    for _ in range(WARM_UP):
        step()
    times = []
    with CompileCounter() as counter:
        for _ in range(STEPS):
            started = time.perf_counter()
            step()
            times.append((time.perf_counter() - started) * 1e3)
    (entry,) = [e for e in runner.table.entries.values() if e.program.kind == "step"]
    row |= {
        "value": round(statistics.median(times), 3),
        "p10": round(sorted(times)[STEPS // 10], 3),
        "p90": round(sorted(times)[STEPS * 9 // 10], 3),
        "floor": FLOOR.get(batch),
        "peer": PEER.get(batch),
        "kernels": entry.compiled.as_text().count('custom_call_target="mosaic_gpu'),
        "temp_bytes": entry.temp_bytes,
        "lower_s": round(entry.lower_seconds, 2),
        "compile_s": round(entry.compile_seconds, 2),
    }
    if counter.count:
        row["void"] = f"{counter.count} programs were compiled in the timed window"
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "gpu_step.json")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64, 256, 8])
    parser.add_argument("--seconds", type=float, default=200)
    arguments = parser.parse_args()
    report = timing.Report(
        arguments.output, arguments.seconds, timing.conditions(model="llama3-8b shape, random bfloat16", steps=STEPS)
    )
    weights = random_weights(LLAMA3_8B)
    for batch in arguments.batches:
        if report.left:
            name = {"name": f"decode/llama3-8b/b{batch}/ctx1030/greedy", "unit": "ms"}
            report.add(timing.guarded(name, lambda b=batch: measure(weights, b)))
            print(report.rows[-1], flush=True)


if __name__ == "__main__":
    main()
