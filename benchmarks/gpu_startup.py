"""How long a start takes: the whole default ladder of the Llama-3-8B shape, and the first token, cold and warm.

    python benchmarks/gpu_startup.py [--model llama3-8b|tiny] [--output FILE]

Two processes, one after the other, over one empty cache of executables: the first is a cold start, the second a warm
one. In each the clock starts when the random weights are on the device and the package is imported. It runs through
making the state and the runner, beginning to make the ladder in the background, and serving one greedy request.

`first_token/...`: until the first token of a prompt of PROMPT_TOKENS is on the host. `ladder/...`: until the last
executable is there. `executable/...`: seconds of a cold start to trace, lower and compile one, `load_s` of the warm one
to load it, bytes of its code and temporaries. `temporaries/...`: a temporary is there only while its executable runs,
so the device needs the largest; the sum is what would be held if each kept its own, as captured graphs do. `peer` is
vLLM 0.25.1 on the same kind of GPU, `most` what this project asks of itself. Both processes must sample the same
tokens. `--model tiny` is for looking at this benchmark without a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import report  # noqa: E402
from benchmarks.gpu_step import LLAMA3_8B, TINY, Engine  # noqa: E402
from jaxrunner import Ladder, RunnerConfig, SamplingParams  # noqa: E402
from jaxrunner.compile.executable_cache import ExecutableCache  # noqa: E402
from jaxrunner.engine.request import Request  # noqa: E402
from jaxrunner.models.weights import random_weights  # noqa: E402

PROMPT_TOKENS, NEW_TOKENS = 100, 16
MODELS = {
    "llama3-8b": (LLAMA3_8B, RunnerConfig(256, 8192, 8192, 4096)),
    "tiny": (TINY.replace(dtype="float32"), RunnerConfig(4, 256, 128, 64)),
}
"""Name -> the model, and the sizes of its runner: requests, longest sequence, tokens of a step, blocks."""
MOST = {"first_token/cold": 8.0, "ladder/cold": 30.0, "ladder/warm": 5.0}
PEER = {"ladder/cold": 41.0, "temporaries/sum": 0.98 * 1024}
"""LLM() after the import; memory of the captured graphs."""
Row = dict[str, Any]


def start(name: str, directory: Path) -> dict[str, Any]:
    """One start, in this process: what it took, the tokens, and the table's rows."""
    model, sizes = MODELS[name]
    config = dataclasses.replace(sizes, executable_cache=str(directory))
    ladder = Ladder.default(
        model, max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens
    )
    weights = jax.block_until_ready(random_weights(model))
    started = time.perf_counter()
    engine = Engine(model, weights, config, ladder, prefilled=False)
    table = engine.runner.table
    ended: list[float] = []
    total = len(table.programs.all())

    def note(done: int, of: int, _: str) -> None:
        if done == of:
            ended.append(time.perf_counter() - started)

    engine.runner.warm_up(background=True, progress=note)
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    request = Request("first", [(7 * i) % model.vocab_size for i in range(PROMPT_TOKENS)], params)
    engine.scheduler.add(request)
    tokens: list[int] = []
    first_token = first_request = 0.0
    while request.finish_reason is None:
        engine.step()
        engine.scheduler.sync(request)
        tokens = list(request.output_token_ids)
        first_token = first_token or (time.perf_counter() - started if tokens else 0.0)
    first_request = time.perf_counter() - started
    meanwhile = total - len(table.entries)
    table.join()
    return {
        "conditions": report.conditions(model=name, **dataclasses.asdict(ladder)),
        "first_token": first_token,
        "first_request": first_request,
        "left_after_first_request": meanwhile,
        "ladder": ended[0],
        "tokens": tokens,
        "rows": table.stats(),
        "misses": table.misses,
    }


def started_process(name: str, directory: Path) -> dict[str, Any]:
    """`start` in a process of its own."""
    command = [sys.executable, __file__, "--model", name, "--start-with", str(directory)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"a start failed with exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def rows_of(name: str, starts: dict[str, dict[str, Any]], cache_bytes: int) -> list[Row]:
    def row(what: str, value: float, unit: str, **more: Any) -> Row:
        known = {"most": MOST.get(what), "peer": PEER.get(what)} if name == "llama3-8b" else {}
        named = {key: figure for key, figure in known.items() if figure is not None}
        return {"name": f"startup/{name}/{what}", "value": value, "unit": unit, **named, **more}

    rows = []
    for kind, result in starts.items():
        entries = result["rows"]
        sums = {key: round(sum(e[key] for e in entries), 2) for key in ("trace_s", "lower_s", "compile_s", "load_s")}
        then = {"first_request_s": round(result["first_request"], 2), "still_made": result["left_after_first_request"]}
        rows.append(row(f"first_token/{kind}", round(result["first_token"], 2), "s", **then, misses=result["misses"]))
        rows.append(row(f"ladder/{kind}", round(result["ladder"], 2), "s", **sums))
    temporaries = [e["temp_bytes"] / 2**20 for e in starts["cold"]["rows"]]
    loads = {e["executable"]: e["load_s"] for e in starts["warm"]["rows"]}
    rows += [
        row("executables", len(temporaries), "", most=40),
        row("temporaries/largest", round(max(temporaries), 1), "MiB", most=1024),
        row("temporaries/sum", round(sum(temporaries), 1), "MiB"),
        row("cache", round(cache_bytes / 2**20, 1), "MiB"),
    ]
    for e in starts["cold"]["rows"]:
        parts = {key: round(e[key], 2) for key in ("trace_s", "lower_s", "compile_s")}
        parts |= {"load_s": round(loads[e["executable"]], 3), "code_bytes": e["code_bytes"]}
        rows.append(
            row(f"executable/{e['executable']}", round(sum(e[k] for k in ("trace_s", "lower_s", "compile_s")), 2), "s")
            | parts
            | {"temp_bytes": e["temp_bytes"]}
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=tuple(MODELS), default="llama3-8b")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "gpu_startup.json")
    parser.add_argument("--start-with", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.start_with:
        print(json.dumps(start(options.model, options.start_with)))
        return
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "executables"
        starts = {kind: started_process(options.model, directory) for kind in ("cold", "warm")}
        cache_bytes = sum(file.num_bytes for file in ExecutableCache(directory).files())
    conditions = starts["cold"]["conditions"] | {"prompt_tokens": PROMPT_TOKENS}
    report.write(options.output, conditions, rows_of(options.model, starts, cache_bytes))
    if starts["cold"]["tokens"] != starts["warm"]["tokens"]:
        sys.exit("the warm start sampled other tokens than the cold one")


if __name__ == "__main__":
    main()
