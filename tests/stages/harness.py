"""Host descriptions of states, turned into `RunnerState`s and back, and one compiled step a bucket for all tests."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner import SamplingParams, init_state, step
from jaxrunner.compile.buckets import Bucket
from jaxrunner.models import transformer
from jaxrunner.models.loading import load
from jaxrunner.models.model import LayerSpec
from jaxrunner.stages.inputs import StepInput
from jaxrunner.state.block_writes import no_block_writes
from jaxrunner.state.fields import REQUEST_COLUMN, REQUEST_FIELDS, SAMPLING_COLUMN
from jaxrunner.state.records import request_record
from jaxrunner.state.runner_state import RunnerState

TINY = Path(__file__).parents[1] / "golden" / "tiny"
ROWS, MAX_MODEL_LEN, BLOCK_SIZE, NUM_BLOCKS = 8, 640, 16, 280


@functools.cache
def tiny(name: str, windows: tuple[int | None, ...] | None = None, layout: str = "layers"):
    """(model, weights) of a golden, float32; positions up to MAX_MODEL_LEN; windows: of each layer, if not its own."""
    model, weights, _ = load(str(TINY / name), layout=layout)
    if windows is not None:
        specs = zip(windows, model.layers, strict=True)
        model = model.replace(layers=tuple(LayerSpec(window, spec.rope) for window, spec in specs))
    if model.rope.rope_type == "default":
        model = model.replace(max_position_embeddings=MAX_MODEL_LEN)
    return model, weights


def constant(model, weights, scores):
    """(model, weights) of the same shapes whose logits are `scores`, f32[vocab], exactly, whatever the tokens are."""
    layers = tuple({**layer, "o": layer["o"] * 0, "down": layer["down"] * 0} for layer in weights["layers"])
    head = jnp.zeros_like(weights["lm_head"]).at[:, 0].set(jnp.asarray(scores))
    ones = {name: jnp.ones_like(weights[name]) for name in ("embed_tokens", "norm")}
    return model.replace(rms_norm_eps=0.0), {**weights, **ones, "lm_head": head, "layers": layers}


@functools.cache
def compiled_step(model, bucket: Bucket):
    """`step` for one bucket, jitted once for the whole test session: run(weights, state, packed)."""
    return jax.jit(functools.partial(step, model, bucket=bucket, return_hidden=True))


@functools.cache
def compiled_logits(model):
    return jax.jit(functools.partial(transformer.logits, model))


def run(model, weights, state: RunnerState, inputs: StepInput | np.ndarray, bucket: Bucket):
    """(new state, output) through the session's executable."""
    packed = inputs.pack(bucket) if isinstance(inputs, StepInput) else inputs
    return compiled_step(model, bucket)(weights, state, packed)


def step_input(state: RunnerState, batch, tier="greedy", block_writes=None) -> StepInput:
    """batch: (row, tokens to run) pairs in batch order."""
    rows, counts = np.array(batch, np.int32).reshape(-1, 2).T
    return StepInput(
        idx_mapping=rows,
        num_scheduled_tokens=counts,
        num_draft_tokens=np.zeros(len(rows), np.int32),
        groups=state.tables.groups,
        block_writes=no_block_writes() if block_writes is None else np.array(block_writes, np.int32).reshape(-1, 4),
        tier=tier,
    )


def empty_host(model, rows=ROWS, max_model_len=MAX_MODEL_LEN, num_blocks=NUM_BLOCKS, **options) -> SimpleNamespace:
    """A state without requests as writable NumPy arrays. `template` keeps what is static."""
    template = init_state(
        model, max_requests=rows, max_model_len=max_model_len, num_blocks=num_blocks, block_size=BLOCK_SIZE, **options
    )
    return to_host(template)


def to_host(state: RunnerState) -> SimpleNamespace:
    """Copies of everything in a state: counters by name, sampling parameters as the words they are."""
    counters = np.array(state.requests.counters)
    return SimpleNamespace(
        template=jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state),
        token_ids=np.array(state.requests.token_ids),
        params=np.array(state.sampling.params),
        block_table=[np.array(t) for t in state.tables.block_table],
        num_blocks=np.array(state.tables.num_blocks),
        kv=[np.array(b) for b in state.kv.blocks],
        kv_scales=[np.array(s) for s in state.kv.scales],
        **{name: counters[:, column].copy() for name, column in REQUEST_COLUMN.items()},
    )


def to_state(host: SimpleNamespace) -> RunnerState:
    """The `RunnerState` of a description. Nothing is compiled: every leaf is copied up."""
    state, put = host.template, lambda array: jax.device_put(np.array(array))
    counters = np.stack([getattr(host, name) for name in REQUEST_COLUMN], axis=1)
    return state.replace(
        requests=state.requests.replace(token_ids=put(host.token_ids), counters=put(counters)),
        sampling=jax.tree.map(lambda leaf: put(np.zeros(leaf.shape, leaf.dtype)), state.sampling).replace(
            params=put(host.params)
        ),
        tables=state.tables.replace(block_table=tuple(map(put, host.block_table)), num_blocks=put(host.num_blocks)),
        kv=state.kv.replace(blocks=tuple(map(put, host.kv)), scales=tuple(map(put, host.kv_scales))),
    )


def oracle_state(host: SimpleNamespace, block_writes=()) -> dict:
    """The same as the plain dictionaries that `tests.oracle.step` takes, with the step's new blocks in the tables."""
    groups = host.template.tables.groups
    tables = [
        {row: host.block_table[g][row, : host.num_blocks[row, g]].tolist() for row in range(len(host.num_blocks))}
        for g in range(len(groups))
    ]
    for g, row, column, block in block_writes:
        assert column == len(tables[g][row])
        tables[g][row].append(int(block))
    low = SAMPLING_COLUMN["seed_lo"]
    return {
        "token_ids": host.token_ids.tolist(),
        "prefill_len": host.prefill_len.tolist(),
        "total_len": host.total_len.tolist(),
        "num_computed": host.num_computed_tokens.tolist(),
        "last_sampled": host.last_sampled_token.tolist(),
        "temperature": host.params[:, SAMPLING_COLUMN["temperature"]].view(np.float32).tolist(),
        "seed": [int(s) for s in host.params[:, low : low + 2].copy().view(np.uint64)[:, 0]],
        "tables": tables,
        "groups": [list(g.layers) for g in groups],
        "block_size": [g.block_size for g in groups],
        "kv": [b.astype(np.float64) for b in host.kv],
    }


def random_host(model, rng: np.random.Generator, bucket: Bucket):
    """(host, batch, block_writes): rows at every stage of their life, in any order, with random KV behind them.

    In a decode bucket every request of the batch has query_len tokens. Some rows are live but not in the batch, some
    are free. The step's last blocks come as staged writes.
    """
    uniform = bucket.query_len if bucket.kind == "decode" else None
    host = empty_host(model)
    groups = host.template.tables.groups
    live = rng.permutation(np.arange(1, ROWS + 1))[: rng.integers(1, ROWS + 1)]
    batched = live[: rng.integers(1, len(live) + 1)]
    pools = [list(rng.permutation(np.arange(1, NUM_BLOCKS))) for _ in groups]
    for kv in host.kv:
        kv[...] = rng.normal(size=kv.shape)
    batch, writes, budget = [], [], bucket.num_tokens
    for row in live:
        decodes = rng.random() < 0.5 and uniform in (None, 1)
        longest = 600 if rng.random() < 0.25 else 80
        computed = int(rng.integers(1, longest)) if decodes else int(rng.choice([0, 5, 16, rng.integers(1, longest)]))
        known = 1 if decodes else int(rng.integers(1, 41))
        if uniform:
            count, known = uniform, max(known, uniform)
        else:
            count = int(rng.integers(0 if rng.random() < 0.2 else 1, known + 1))
        total = computed + known
        prefill = int(rng.integers(1, computed + 1)) if decodes else total
        host.prefill_len[row], host.prompt_len[row] = prefill, int(rng.integers(1, prefill + 1))
        host.total_len[row], host.num_computed_tokens[row] = total, computed
        host.token_ids[row, :total] = rng.integers(0, model.vocab_size, total)
        host.last_sampled_token[row] = host.token_ids[row, total - 1] if decodes else 0
        random = bucket.tier == "random" and rng.random() < 0.7
        params = SamplingParams(float(rng.choice([0.3, 0.8, 1.0, 1.7])) if random else 0.0)
        seed = int(rng.integers(0, 2**64, dtype=np.uint64))
        record = request_record(prompt_len=1, prefill_len=1, num_computed_tokens=0, params=params, seed=seed)
        host.params[row] = record[len(REQUEST_FIELDS) :]
        runs = row in batched and count <= budget
        if runs:
            batch.append((int(row), count))
            budget -= count
        for g, group in enumerate(groups):
            have = -(-computed // group.block_size) + int(rng.integers(0, 2))
            need = -(-(computed + count) // group.block_size) if runs else have
            ids = [int(pools[g].pop()) for _ in range(max(have, need))]
            host.block_table[g][row, :have], host.num_blocks[row, g] = ids[:have], have
            writes += [(g, int(row), column, ids[column]) for column in range(have, need)]
    return host, batch, writes


def new_slots(host: SimpleNamespace, batch, block_writes=(), g: int = 0) -> list[tuple[int, int]]:
    """(block, offset) of every token that the step writes in group g."""
    tables, size = oracle_state(host, block_writes)["tables"][g], host.template.tables.groups[g].block_size
    slots = []
    for row, count in batch:
        start = int(host.num_computed_tokens[row])
        slots += [(tables[row][p // size], p % size) for p in range(start, start + count)]
    return slots


def live_hidden(output, batch) -> list[np.ndarray]:
    """Final hidden states of each request's tokens."""
    ends = np.cumsum([count for _, count in batch])
    hidden = np.asarray(output.hidden)
    return [hidden[end - count : end] for end, (_, count) in zip(ends, batch, strict=True)]
