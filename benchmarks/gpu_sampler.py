"""The sampler on a GPU: each tier checked against the NumPy oracle, then timed, at one vocabulary and some batches.

    python benchmarks/gpu_sampler.py [--output FILE] [--seconds 300] [--batch 256 64 8] [--vocab 128256]
                                     [--history 4096] [--only TEXT]

Logits are random bfloat16, about as wide as a language model's. A row names what all requests of its batch ask for. It
is first checked on some rows: the ids that a token was drawn from, the token itself and log-probabilities are the
oracle's. Then `us` is the device time of one call, all its kernels together (see
`benchmarks.report`), and `temp_ratio` the bytes of its temporaries over those of the float32 logits. `adds` is what the
op costs beside the row before it that lacks it. `peer` is vLLM 0.25.1 on the same GPU.
Rows are written as they come; a row is void if anything was compiled while it was timed, or on a CPU, where the
profiler sees no kernel; `--batch 2 --vocab 300 --history 32` tries everything there.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import report  # noqa: E402
from jaxrunner.compile.buckets import Tier  # noqa: E402
from jaxrunner.pallas.implementation import quick_lowering  # noqa: E402
from jaxrunner.sampling.grammar import mask_by_grammar  # noqa: E402
from jaxrunner.sampling.history import History  # noqa: E402
from jaxrunner.sampling.logprobs import TokenLogprobs  # noqa: E402
from jaxrunner.sampling.nans import count_nans  # noqa: E402
from jaxrunner.sampling.packed_bits import pack_bits  # noqa: E402
from jaxrunner.sampling.sampler import Sampled, sample_tokens  # noqa: E402
from jaxrunner.sampling_params import SamplingParams  # noqa: E402
from jaxrunner.state.fields import REQUEST_FIELDS  # noqa: E402
from jaxrunner.state.records import request_record  # noqa: E402
from jaxrunner.state.reports import DEFAULT_REPORTS, Reports  # noqa: E402
from jaxrunner.state.request_lists import DEFAULT_LIST_SIZES, list_writes  # noqa: E402
from jaxrunner.state.sampling import SamplingState  # noqa: E402
from tests.oracle import logprobs as logprobs_oracle  # noqa: E402
from tests.oracle import sampler as oracle  # noqa: E402
from tests.oracle import threefry  # noqa: E402

READ_BYTES_PER_US = 4.6e6
"""The fastest read of an H200."""
CALLS = 4
"""Of one jit: each has logits of its own, so that none finds them in the L2 cache; 16 would fill the memory."""
CHECKED_ROWS = 3
MASS_SLACK = 1e-4
"""Of top_p: masses are integers whose sum is about 2^29, each off by half a unit at most."""
MARKS = {"start": (1,), "end": (2,), "forced_end": (2,)}
PENALTIES = {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2}
FILTERS = {"top_k": 50, "top_p": 0.9}


@dataclasses.dataclass(frozen=True)
class Case:
    """request: what every request asks for, by the names of `SamplingParams`. less: the case that `adds` compares with.
    floor: passes over the float32 logits that cannot be spared. peer: us at batch 256. tier: if not the lowest.
    reports: what is reported of each token. allows: part of the ids that a grammar's mask leaves; None for no mask at
    all, as in a fused step.
    """

    name: str
    request: dict[str, Any]
    less: str | None = None
    floor: float = 1.0
    peer: float | None = None
    tier: Tier | None = None
    reports: Reports = DEFAULT_REPORTS
    allows: float | None = None

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(**self.request)

    @property
    def runs_in(self) -> Tier:
        return self.tier or self.params.tier


CASES = (
    Case("greedy", {"temperature": 0.0}),
    Case("temperature", {"temperature": 0.8}, "greedy"),
    Case("temperature_top_k_top_p", {"temperature": 0.8, **FILTERS}, "temperature"),
    Case(
        "temperature_top_k_top_p_penalties",
        {"temperature": 0.8, **FILTERS, **PENALTIES},
        "temperature_top_k_top_p",
        3.0,
        peer=650.0,
    ),
    Case("logprobs5", {"temperature": 0.8, "logprobs": 5}, "temperature", 2.0),
    Case("logprobs5_greedy", {"temperature": 0.0, "logprobs": 5}, "greedy", 2.0),
    Case("logprobs5_top_k_top_p", {"temperature": 0.8, "logprobs": 5, **FILTERS}, "temperature_top_k_top_p", 2.0),
    Case("greedy/in_constrained", {"temperature": 0.0}, "greedy", tier="constrained"),
    Case("greedy/in_full", {"temperature": 0.0}, "greedy", tier="full"),
    Case("temperature_top_k", {"temperature": 0.8, "top_k": 50}, "temperature", peer=255.0),
    Case("penalties", {"temperature": 0.0, **PENALTIES}, "greedy", 3.0, peer=139.0),
    Case("temperature_top_p", {"temperature": 0.8, "top_p": 0.9}, "temperature", peer=254.0),
    Case("temperature_min_p", {"temperature": 0.8, "min_p": 0.02}, "temperature"),
    Case(
        "everything",
        {
            "temperature": 0.8,
            "min_tokens": 10**6,
            "max_tokens": None,
            "stop_token_ids": (3, 5),
            "logit_bias": {7: 1.5, 11: -3.0},
            "bad_words_token_ids": [[13], [17, 19]],
            **FILTERS,
            **PENALTIES,
        },
        "temperature_top_k_top_p_penalties",
        3.0,
    ),
    Case("greedy/mask_of_all", {"temperature": 0.0}, "greedy", allows=1.0),
    Case("greedy/mask_of_few", {"temperature": 0.0}, "greedy", allows=0.01),
    Case("temperature/mask_of_few", {"temperature": 0.8}, "temperature", allows=0.01),
    Case(
        "processed_logprobs5_top_k_top_p",
        {"temperature": 0.8, "logprobs": 5, **FILTERS},
        "temperature_top_k_top_p",
        2.0,
        reports=Reports("processed_logprobs"),
    ),
    Case("logprobs_all", {"temperature": 0.8, "logprobs": -1}, "temperature", 3.0, reports=Reports(max_logprobs=-1)),
    Case("greedy/nan_count", {"temperature": 0.0}, "greedy", reports=Reports(nan_check="count")),
)
"""Those for which there is a target, and what they are compared with, come first: a short run has them."""


@dataclasses.dataclass(frozen=True)
class Inputs:
    """CALLS batches of logits, and one batch of requests. allowed: of their grammars, the bits of bitmask."""

    logits: list[jax.Array]
    params: SamplingState
    position: jax.Array
    history: History
    tokens: np.ndarray
    prompt_len: np.ndarray
    allowed: np.ndarray
    bitmask: jax.Array | None


@functools.cache
def random_logits(batch: int, vocab: int) -> list[jax.Array]:
    """Drawn as float32: a bfloat16 draw has so few values that hundreds of ids would share the greatest."""
    draw = jax.jit(lambda key: (jax.random.normal(key, (batch, vocab)) * 3).astype(jnp.bfloat16))
    return [draw(key) for key in jax.random.split(jax.random.key(0), CALLS)]


def build(case: Case, batch: int, vocab: int, width: int) -> Inputs:
    rng = np.random.default_rng(0)
    prompt_len = rng.integers(1, width // 2, batch)
    length = rng.integers(width // 2, width, batch)
    records, lists = [], np.zeros((batch, DEFAULT_LIST_SIZES.width), np.int32)
    writes = list_writes(case.params, (), DEFAULT_LIST_SIZES)
    for row in range(batch):
        size = int(prompt_len[row])
        record = request_record(
            prompt_len=size, prefill_len=size, num_computed_tokens=0, params=case.params, seed=row * (2**32 + 1)
        )
        records.append(record[len(REQUEST_FIELDS) :])
        lists[row, writes[:, 0]] = writes[:, 1]
    tokens = np.minimum(rng.zipf(1.3, (batch, width)), vocab) - 1
    allowed = np.ones((batch, vocab), bool) if case.allows is None else rng.random((batch, vocab)) < case.allows
    return Inputs(
        random_logits(batch, vocab),
        SamplingState(jnp.asarray(np.stack(records)), jnp.asarray(lists), reports=case.reports),
        jnp.asarray(length, jnp.int32),
        History(jnp.asarray(tokens, jnp.int32), jnp.arange(batch), jnp.asarray(prompt_len, jnp.int32)),
        tokens,
        prompt_len,
        allowed,
        None if case.allows is None else pack_bits(jnp.asarray(allowed)),
    )


def sampler(tier: Tier, reports: Reports, logits, params, position, history, bitmask) -> tuple[Sampled, Any]:
    """What a step does with bfloat16 logits: (tokens and what belongs to them, NaN of each row if they are counted).
    Scores are no result of a step, and writing them would take as long as a pass."""
    if bitmask is not None:
        logits = mask_by_grammar(logits, bitmask)
    counts = reports.nan_check != "off"
    num_nans = count_nans(logits, jnp.ones(len(logits), bool)) if counts else None
    return sample_tokens(logits, params, position, tier=tier, history=history)._replace(scores=None), num_nans


@functools.cache
def one(tier: Tier, reports: Reports):
    """The sampler as a program. Rows that differ in what their requests ask for run the same one, as in an engine."""
    return jax.jit(functools.partial(sampler, tier, reports))


@functools.cache
def several(tier: Tier, reports: Reports):
    """The same for each of some batches of logits, one after the other, each at a position of its own: its draw would
    else be the first one's, computed once. Lowered once: as a program of its own that each calls."""

    @jax.jit
    def calls(logits, params, position, history, bitmask):
        outputs = []
        for number, each in enumerate(logits):
            each, outputs = jax.lax.optimization_barrier((each, outputs))
            outputs.append(one(tier, reports)(each, params, position - number, history, bitmask))
        return outputs

    return calls


def check(case: Case, inputs: Inputs) -> str | None:
    """What is wrong with the first rows, None if nothing."""
    count = min(CHECKED_ROWS, len(inputs.tokens))
    rows = slice(0, count)
    few = inputs.history._replace(rows=inputs.history.rows[rows], prompt_len=inputs.history.prompt_len[rows])
    arguments = inputs.logits[0][rows], inputs.params.take(jnp.arange(count)), inputs.position[rows], few
    arguments += (None if inputs.bitmask is None else inputs.bitmask[rows],)
    full = one("full", case.reports)(*arguments)[0]
    masks = np.unpackbits(np.asarray(full.sampling_mask).view(np.uint8), axis=1, bitorder="little")
    own = one(case.runs_in, case.reports)(*arguments)[0]
    for row, token in enumerate(np.asarray(own.token_ids)):
        logits = np.where(inputs.allowed[row], np.asarray(inputs.logits[0][row], np.float64), -np.inf)
        length = int(inputs.position[row])
        known, prompt_len = inputs.tokens[row, :length].tolist(), int(inputs.prompt_len[row])
        stop_ids = list(case.request.get("stop_token_ids", ()))
        wanted = oracle.constrained(logits, case.request, known, prompt_len, stop_ids=stop_ids, marks=MARKS)
        least, most = (oracle.kept(wanted, case.request, slack=slack) for slack in (-MASS_SLACK, MASS_SLACK))
        mask = set(np.flatnonzero(masks[row]).tolist())
        if not least <= mask <= most:
            return f"row {row}: {len(mask)} ids are left, of the oracle's {len(least)} to {len(most)}"
        scores = np.where(np.isin(np.arange(len(wanted)), list(mask)), wanted, -np.inf)
        if not case.params.is_greedy:
            noise = threefry.gumbel(threefry.row_key(row * (2**32 + 1), length), len(wanted))
            scores = scores / case.params.temperature + noise
        if scores.max() - scores[token] > 1e-3:
            return f"row {row}: token {token} scores {scores[token]}, the oracle's best {scores.max()}"
        if own.logprobs is not None and (wrong := check_logprobs(case, own.logprobs, row, logits, wanted, mask)):
            return f"row {row}: {wrong}"
    return None


def check_logprobs(case: Case, found: TokenLogprobs, row: int, logits, wanted, mask: set[int]) -> str | None:
    """logits: f64[V]. wanted: these after constraints; mask: ids that the token was drawn from."""
    if case.reports.is_processed:
        logits = np.where(
            np.isin(np.arange(len(wanted)), list(mask)), wanted / (case.params.temperature or 1.0), -np.inf
        )
    expected, ids = logprobs_oracle.log_softmax(logits), np.asarray(found.logprob_token_ids[row])
    if not case.reports.is_processed and ids[1:].tolist() != logprobs_oracle.best_ids(logits, len(ids) - 1):
        return f"the best ids are {ids[1:]}"
    numbers = {"best": (found.logprobs[row], expected[ids])}
    if found.every is not None:
        numbers["all"] = found.every[row], expected
    for name, (own, exact) in numbers.items():
        if not np.allclose(own, exact, atol=1e-4):
            return f"log-probabilities of the {name} ids are {own}, the oracle's {exact}"
    return None


def measure(
    case: Case, batch: int, vocab: int, width: int, times: dict[str, float], temporaries: dict[Any, int]
) -> report.Row:
    """times: us of rows so far, by name. temporaries: bytes of the programs so far, which cases share; both grow."""
    prefix = f"sampler/b{batch}/v{vocab}/"
    pass_us = batch * vocab * 4 / READ_BYTES_PER_US
    row: report.Row = {"name": prefix + case.name, "value": None, "unit": "us", "floor": round(case.floor * pass_us, 1)}
    row |= {"tier": case.runs_in, "history": width}
    if case.peer is not None and (batch, vocab) == (256, 128_256):
        row["peer"] = case.peer

    def run() -> report.Row:
        inputs = build(case, batch, vocab, width)
        if wrong := check(case, inputs):
            return row | {"error": wrong}
        arguments = (inputs.logits, inputs.params, inputs.position, inputs.history, inputs.bitmask)
        program = case.runs_in, case.reports, batch, inputs.bitmask is None
        if program not in temporaries:
            compiled = one(case.runs_in, case.reports).lower(inputs.logits[0], *arguments[1:]).compile()
            temporaries[program] = compiled.memory_analysis().temp_size_in_bytes
        row["temp_ratio"] = round(temporaries[program] / (batch * vocab * 4), 2)
        report.timed(row, several(case.runs_in, case.reports), arguments, calls=CALLS, wall_runs=10)
        if "void" in row:
            return row
        times[prefix + case.name] = row["us"]
        if case.less and prefix + case.less in times:
            row["adds"] = round(row["us"] - times[prefix + case.less], 1)
        return row | {"value": row["us"]}

    return report.guarded(row, run)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "gpu_sampler.json")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--batch", type=int, nargs="+", default=[256, 64, 8])
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--history", type=int, default=4096)
    parser.add_argument("--only", default="", help="only rows whose name contains this")
    options = parser.parse_args()
    conditions = report.conditions(**(report.KERNEL_TIMING | {"calls_per_jit": CALLS}))
    result = report.Report(options.output, conditions, seconds=options.seconds)
    times: dict[str, float] = {}
    temporaries: dict[Any, int] = {}
    for batch in options.batch:
        for case in CASES:
            if options.only in f"sampler/b{batch}/v{options.vocab}/{case.name}" and result.left:
                with quick_lowering():
                    result.add(measure(case, batch, options.vocab, options.history, times, temporaries))
                report.show(result.rows[-1:], leave_out=("kernels",))
    return 1 if any("error" in row for row in result.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
