"""Generation on the CPU: SmolLM2-135M-Instruct, float32, 1 and 8 requests of 64 tokens, greedy.

    python benchmarks/cpu_generate.py [--torch-python PYTHON] [--output FILE]

Each side runs in a process of its own, one after the other, on the same weights. The peer is transformers + torch; it
is measured with the interpreter given by --torch-python (which needs torch, transformers and gguf), and left out
without it. `first_token` is the time from the start of the process, imports and loading included, to the first token of
`jaxrunner generate`, with an empty and with a filled compilation cache. `peak_memory` is the resident memory of a run
above that of a process that has only imported the package, over the bytes of the float32 weights.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

PROMPT = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
TOKENS = 64
BATCHES = (1, 8)
RUNS = 3


def ours() -> dict:
    """Tokens per second of the engine, peak memory, and the tokens."""
    import jax

    from jaxrunner import LLM, SamplingParams

    jax.numpy.zeros(1).block_until_ready()
    baseline = _peak_bytes()
    llm = LLM(max_num_seqs=8, max_model_len=512, kv_bytes=64 * 2**20, prefix_caching=False)
    weights = sum(w.nbytes for w in jax.tree.leaves(llm.runner.weights))
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    result: dict = {"weights_bytes": weights}
    for batch in BATCHES:
        prompts = [PROMPT] * batch
        llm.generate(prompts, params)  # compiles
        compiled = len(llm.runner.table.entries)
        times = []
        for _ in range(RUNS):
            started = time.perf_counter()
            outputs = llm.generate(prompts, params)
            times.append(time.perf_counter() - started)
        assert len(llm.runner.table.entries) == compiled, "something was compiled while the clock ran"
        result[f"b{batch}"] = {
            "tokens_per_s": batch * TOKENS / sorted(times)[RUNS // 2],
            "ids": outputs[0].outputs[0].token_ids,
        }
    result["peak_above_import_bytes"] = _peak_bytes() - baseline
    return result


def peer(gguf: str) -> dict:
    """The same with transformers and torch. Runs under another interpreter."""
    import torch
    import transformers

    path = Path(gguf)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32
    )
    model.eval()
    result: dict = {"torch": torch.__version__, "transformers": transformers.__version__}
    for batch in BATCHES:
        ids = torch.tensor([PROMPT] * batch)
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": TOKENS, "min_new_tokens": TOKENS}
        times = []
        with torch.inference_mode():
            for _ in range(RUNS + 1):
                started = time.perf_counter()
                out = model.generate(ids, do_sample=False, pad_token_id=2, eos_token_id=None, **options)
                times.append(time.perf_counter() - started)
        result[f"b{batch}"] = {
            "tokens_per_s": batch * TOKENS / sorted(times[1:])[RUNS // 2],
            "ids": out[0, len(PROMPT) :].tolist(),
        }
    return result


def first_token(cache: str) -> float:
    """Seconds from process start to the end of a one-token generation of the command line."""
    command = [sys.executable, "-m", "jaxrunner", "generate", "--prompt-ids", ",".join(map(str, PROMPT))]
    command += ["--max-tokens", "1", "--ignore-eos", "--json"]
    environment = {**os.environ, "JAXRUNNER_COMPILATION_CACHE": cache, "PYTHONPATH": str(ROOT)}
    started = time.perf_counter()
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch-python", help="an interpreter with torch, transformers and gguf")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "cpu_generate.json")
    parser.add_argument("--child", choices=("ours", "peer"), help=argparse.SUPPRESS)
    parser.add_argument("--gguf", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print("RESULT" + json.dumps(ours() if arguments.child == "ours" else peer(arguments.gguf)))
        return

    from benchmarks.report import conditions, write
    from jaxrunner.models.default_model import default_model_path

    gguf = str(default_model_path())
    with tempfile.TemporaryDirectory() as cache:
        cold, warm = first_token(cache), first_token(cache)
    mine = _child(sys.executable, "ours", gguf)
    theirs = _child(arguments.torch_python, "peer", gguf) if arguments.torch_python else {}
    rows = []
    for batch in BATCHES:
        row = {"name": f"generate/smollm2/b{batch}", "value": mine[f"b{batch}"]["tokens_per_s"], "unit": "tok/s"}
        if theirs:
            row["peer"] = theirs[f"b{batch}"]["tokens_per_s"]
            row["ratio"] = row["value"] / row["peer"]
            row["same_ids"] = mine[f"b{batch}"]["ids"] == theirs[f"b{batch}"]["ids"]
        rows.append(row)
    rows.append({"name": "first_token/cold", "value": cold, "unit": "s"})
    rows.append({"name": "first_token/warm", "value": warm, "unit": "s"})
    ratio = mine["peak_above_import_bytes"] / mine["weights_bytes"]
    rows.append({"name": "peak_memory/weights", "value": ratio, "unit": "x", "weights_bytes": mine["weights_bytes"]})
    peer_versions = {k: theirs[k] for k in ("torch", "transformers") if k in theirs}
    write(arguments.output, conditions(prompt_tokens=len(PROMPT), new_tokens=TOKENS, runs=RUNS, **peer_versions), rows)


def _child(python: str, which: str, gguf: str) -> dict:
    command = [python, str(Path(__file__).resolve()), "--child", which, "--gguf", gguf]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(next(line for line in output.splitlines() if line.startswith("RESULT"))[6:])


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
