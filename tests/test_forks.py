"""Forks: a fork is its source, in every field and in its KV; what one row writes, no other row sees."""

from __future__ import annotations

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import SamplingParams, admit, audit, init_state, manual, plan, release, reserve
from jaxrunner.compile.buckets import Bucket
from jaxrunner.compile.counter import CompileCounter
from jaxrunner.errors import AdmissionError, CapacityError, DonatedStateError
from jaxrunner.forks import _seed_words, fork_request, fork_state
from jaxrunner.state.block_tables import KVGroup
from jaxrunner.state.fields import REQUEST_COLUMN
from jaxrunner.state.runner_state import host_view
from tests.stages import harness

COMPUTED, TOTAL = REQUEST_COLUMN["num_computed_tokens"], REQUEST_COLUMN["total_len"]
GROUPS = {
    "one": (KVGroup((0, 1, 2), None, 4),),
    "two kernel blocks in a block": (KVGroup((0, 1, 2), None, 2, 2),),
    "a window, three in a block": (KVGroup((0, 2), None, 4, 1), KVGroup((1,), 8, 2, 3)),
}
ROWS, LENGTH = 5, 40
LENGTHS = (1, 6, 9, 12)
every_grouping = pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS.keys())


def small_model(groups):
    """Shapes only: none of these tests but the last run it. One head of four, three layers."""
    windows = [next(g.window for g in groups if i in g.layers) for i in range(3)]
    model, _ = harness.tiny("llama", tuple(windows))
    return model.replace(num_heads=1, num_kv_heads=1, head_dim=4)


def empty(groups, num_blocks=60, rows=ROWS, **options):
    model = small_model(groups)
    options = dict(max_requests=rows, max_model_len=LENGTH, num_blocks=num_blocks, groups=groups) | options
    return init_state(model, **options)


class World:
    """A state and, beside it, what each row should hold: {row: (token ids, [keys and values per group])}."""

    def __init__(self, state, seed):
        self.state, self.rng = state, np.random.default_rng(seed)
        self.rows: dict[int, tuple[list[int], list[list[np.ndarray]]]] = {}

    def admit(self, length):
        ids = self.rng.integers(1, 200, length).tolist()
        self.state, (row,) = admit(self.state, [ids])
        self.rows[row] = (ids, [[] for _ in self.state.kv.blocks])
        self.advance({row: length})
        return row

    def advance(self, counts):
        """What a step does to the cache and the counters, without a model: random KV at each new slot."""
        counters, token_ids = host_view(self.state.requests.counters), host_view(self.state.requests.token_ids)
        caches = [host_view(b) for b in self.state.kv.blocks]
        for row, count in counts.items():
            ids, kept = self.rows[row]
            for position in range(counters[row, COMPUTED], counters[row, COMPUTED] + count):
                for g, group in enumerate(self.state.tables.groups):
                    column = position // group.block_size
                    assert column < int(self.state.tables.num_blocks[row, g]), "the row had no block for it"
                    block = int(self.state.tables.block_table[g][row, column])
                    new = self.rng.normal(size=caches[g][:, :, 0, 0].shape).astype(np.float32)
                    caches[g][:, :, block, position % group.block_size] = new
                    kept[g].append(new)
            counters[row, COMPUTED] += count
            if counters[row, TOTAL] == counters[row, COMPUTED]:
                token = int(self.rng.integers(1, 200))
                token_ids[row, counters[row, TOTAL]] = token
                counters[row, TOTAL] += 1
                ids.append(token)
        requests = self.state.requests.replace(counters=jnp.asarray(counters), token_ids=jnp.asarray(token_ids))
        blocks = tuple(map(jnp.asarray, caches))
        self.state = self.state.replace(requests=requests, kv=self.state.kv.replace(blocks=blocks))

    def forked(self, pairs):
        old = {row: (list(ids), [list(k) for k in kept]) for row, (ids, kept) in self.rows.items()}
        for src, dst in pairs:
            self.rows[dst] = (list(old[src][0]), [list(k) for k in old[src][1]])

    def check(self):
        audit(self.state, shared_blocks=True)
        host = harness.to_host(self.state)
        assert np.flatnonzero(host.total_len).tolist() == sorted(self.rows)
        for row, (ids, kept) in self.rows.items():
            assert host.token_ids[row, : host.total_len[row]].tolist() == ids
            for g, group in enumerate(self.state.tables.groups):
                assert len(kept[g]) == host.num_computed_tokens[row]
                for position, expected in enumerate(kept[g]):
                    block = host.block_table[g][row, position // group.block_size]
                    found = host.kv[g][:, :, block, position % group.block_size]
                    np.testing.assert_array_equal(found, expected, err_msg=f"row {row}, position {position}, group {g}")


@every_grouping
@pytest.mark.parametrize("seed", range(2))
def test_random_forks_of_random_rows(groups, seed):
    """Forks, also of forks, onto longer and shorter rows, several at once and crosswise, between writes and releases.

    After every action each row holds exactly the tokens and the KV that an independent copy would hold.
    """
    world = World(empty(groups), seed)
    world.admit(int(world.rng.choice(LENGTHS)))
    for _ in range(50):
        live, rng = sorted(world.rows), world.rng
        action = rng.choice(["admit", "fork", "fork", "permute", "advance", "advance", "release"])
        if action == "admit" and len(live) < ROWS:
            world.admit(int(rng.choice(LENGTHS)))
        elif action == "fork":
            pairs = [(int(rng.choice(live)), int(rng.integers(1, ROWS + 1)))]
            world.state = fork_request(world.state, *pairs[0])
            world.forked(pairs)
        elif action == "permute":
            targets = rng.permutation(np.arange(1, ROWS + 1))[: rng.integers(1, ROWS + 1)]
            pairs = [(int(rng.choice(live)), int(dst)) for dst in targets]
            world.state = fork_request(world.state, *np.array(pairs).T)
            world.forked(pairs)
        elif action == "advance":
            rows = [r for r in live if len(world.rows[r][0]) + 4 < LENGTH]
            world.state = reserve(world.state, rows, 3)
            for _ in range(rng.integers(1, 4)):
                world.advance(dict.fromkeys(rows, 1))
        elif action == "release" and len(live) > 1:
            row = int(rng.choice(live))
            world.state = release(world.state, [row])
            del world.rows[row]
        world.check()


@every_grouping
def test_only_the_tail_is_copied(groups):
    """Full blocks are the same blocks; the tail is the row's own; a prompt of whole blocks needs no block at all."""
    world = World(empty(groups), 0)
    row = world.admit(13)
    world.state, (fork,) = manual.fork(world.state, row)
    host = harness.to_host(world.state)
    for g, group in enumerate(groups):
        full = 13 // group.kv_block_size * group.blocks_per_kv_block
        a, b = (host.block_table[g][r, : host.num_blocks[r, g]] for r in (row, fork))
        assert full > 0
        assert a[:full].tolist() == b[:full].tolist()
        assert not set(a[full:]) & set(b)
        assert len(b) == full + group.blocks_per_kv_block
    world = World(empty(groups), 0)
    row = world.admit(24)
    world.state, (fork,) = manual.fork(world.state, row)
    for table in world.state.tables.block_table:
        np.testing.assert_array_equal(table[row], table[fork])


def test_a_shared_block_is_free_when_its_last_row_is_gone():
    groups = GROUPS["one"]
    world = World(empty(groups, num_blocks=6), 0)
    row = world.admit(9)  # blocks 1, 2 and the tail 3; the fork's tail is 4, so one is left
    world.state, (fork,) = manual.fork(world.state, row)
    world.forked([(row, fork)])
    world.state = release(world.state, [row])
    del world.rows[row]
    with pytest.raises(CapacityError, match="no free KV block"):
        admit(world.state, [[1] * 9])
    world.state, _ = admit(world.state, [[1] * 8])
    world.state = release(world.state, [row])
    world.check()
    world.state = release(world.state, [fork])
    admit(world.state, [[1] * 20])


def test_reservations_are_kept_and_blocks_that_others_read_are_not():
    """dst keeps its reserved blocks past the end of src. Those it has lent to a fork of its own are replaced."""
    world = World(empty(GROUPS["one"]), 0)
    deep, shallow = world.admit(16), world.admit(6)
    world.state = reserve(world.state, [deep], 8)
    world.state, (lent,) = manual.fork(world.state, deep)
    world.forked([(deep, lent)])
    before = host_view(world.state.tables.block_table[0][deep, :7])
    world.state = fork_request(world.state, shallow, deep)
    world.forked([(shallow, deep)])
    after = host_view(world.state.tables.block_table[0][deep, :7])
    assert int(world.state.tables.num_blocks[deep, 0]) == 7
    assert not set(after[1:4]) & set(before[1:4]), "blocks of the lent prefix would be overwritten"
    assert after[4:].tolist() == before[4:].tolist()
    for _ in range(3):
        world.advance({deep: 1})
    world.check()


def test_every_field_of_the_row_is_copied_and_no_other():
    state = empty(GROUPS["one"], num_draft_tokens=3)
    state, rows = admit(state, [[5, 6, 7], [8]])
    rng = np.random.default_rng(0)

    def scramble(a):
        """Random content in all rows but the parking row, of any dtype."""
        new = rng.integers(1, 2**31, a.shape).astype(a.dtype)
        new[0] = 0
        return jnp.asarray(new)

    extras = {"x": jnp.zeros((6, 2, 3)), "flag": jnp.zeros(6, bool), "h": jnp.zeros((6, 2), jnp.bfloat16)}
    counters = state.requests.counters
    state = state.replace(
        requests=jax.tree.map(scramble, state.requests).replace(counters=counters),
        sampling=jax.tree.map(scramble, state.sampling),
        extras=jax.tree.map(scramble, extras),
    )
    after = fork_request(state, rows[0], 4)
    for part in ("requests", "sampling", "extras"):
        for old, new in zip(jax.tree.leaves(getattr(state, part)), jax.tree.leaves(getattr(after, part)), strict=True):
            expected = host_view(old)
            expected[4] = expected[rows[0]]
            assert expected.tobytes() == host_view(new).tobytes()
    assert after.requests.draft_tokens[4].any()


def seeds_of(state):
    """The 64-bit seed of each row."""
    return np.ascontiguousarray(host_view(state.sampling.seed)).view(np.uint64)[:, 0]


def test_a_new_seed_is_64_bits_and_touches_nothing_else():
    state, rows = admit(empty(GROUPS["one"]), [[5, 6, 7]], SamplingParams(seed=1))
    seeds = [2**40 + 7, -3]
    forked, forks = manual.fork(state, rows[0], 2, seeds=seeds)
    assert seeds_of(forked)[forks].tolist() == [2**40 + 7, 2**64 - 3]
    assert seeds_of(forked)[rows[0]] == 1
    plain = fork_request(state, [rows[0]] * 2, forks)
    assert seeds_of(plain)[forks].tolist() == [1, 1]
    assert forked.sampling.temperature[jnp.array(forks)].tolist() == [1.0, 1.0]
    words = np.array(seeds, np.int64).view(np.int32).reshape(2, 2)
    again = jax.jit(lambda s, w: fork_request(s, [rows[0]] * 2, forks, seed=w))(state, words.view(np.uint32))
    np.testing.assert_array_equal(again.sampling.params, forked.sampling.params)
    for given in (words, words.view(np.uint32), jnp.asarray(words), seeds):
        np.testing.assert_array_equal(_seed_words(given), words)
    np.testing.assert_array_equal(_seed_words(jnp.array([3, 4], jnp.uint32)), [[3, 0], [4, 0]])


def same_state(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@every_grouping
def test_in_a_users_jit_and_loop(groups):
    """Traced rows, in a jit and in a compiled loop, do what single calls do."""
    world = World(empty(groups), 3)
    rows = [world.admit(n) for n in (13, 6, 9)]
    state = reserve(world.state, rows, 4)
    pairs = jnp.array([[rows[0], rows[1]], [rows[2], 4], [4, rows[0]], [rows[1], rows[1]]])
    expected = functools.reduce(lambda s, p: fork_request(s, int(p[0]), int(p[1])), pairs, state)

    @jax.jit
    def loop(state, pairs):
        return jax.lax.fori_loop(0, len(pairs), lambda i, s: fork_request(s, pairs[i, 0], pairs[i, 1]), state)

    same_state(loop(state, pairs), expected)
    audit(expected, shared_blocks=True)
    constant = jax.jit(lambda: fork_request(state, rows[0], 4))()
    same_state(constant, fork_request(state, rows[0], 4))


def test_pairs_that_do_nothing_in_a_trace():
    """The parking row as dst, an empty src, rows out of range: the state is the same, bit for bit."""
    world = World(empty(GROUPS["one"]), 0)
    world.admit(7)
    src, dst = jnp.array([1, 3, 1, 1, 99, -1]), jnp.array([0, 2, 99, -1, 2, 2])
    same_state(jax.jit(fork_request)(world.state, src, dst), world.state)


def test_without_a_free_block_the_fork_is_refused_or_empty():
    world = World(empty(GROUPS["one"], num_blocks=6), 0)
    row = world.admit(9)  # two full blocks and a tail: room for two more tails
    with pytest.raises(CapacityError, match=r"tail of row 1, to be copied for row 4.*init_state with more num_blocks"):
        fork_request(world.state, row, [2, 3, 4])
    after = jax.jit(fork_request)(world.state, jnp.full(3, row), jnp.array([2, 3, 4]))
    assert np.flatnonzero(host_view(after.requests.total_len)).tolist() == [1, 2, 3]
    assert not host_view(after.requests.counters)[4].any()
    assert not host_view(after.tables.num_blocks)[4].any()
    assert not host_view(after.requests.token_ids)[4].any()
    audit(after, shared_blocks=True)
    # Reserved columns give way: the tails of all forks come first, later columns while blocks last.
    world = World(empty(GROUPS["one"], num_blocks=9), 0)
    deep, shallow = world.admit(16), world.admit(2)
    world.state, (lent,) = manual.fork(world.state, deep)
    after = fork_request(world.state, shallow, deep)
    assert int(after.tables.num_blocks[deep, 0]) == 3
    audit(after, shared_blocks=True)
    del lent


@pytest.mark.parametrize(
    ("src", "dst", "seed", "message"),
    [
        (3, 2, None, r"row 3 holds no request; live rows are \[1\]"),
        (0, 2, None, "row 0 holds no request"),
        (1, 0, None, r"row 0 cannot become a fork; rows are 1\.\.5"),
        (1, 6, None, "row 6 cannot become"),
        ([1, 1], [2, 2], None, "a fork twice"),
        (1, [2, 3], 5, r"1 seed\(s\) for 2 fork"),
        (1, 2, jnp.zeros(1), "32-bit words, got float32"),
    ],
)
def test_refusals(src, dst, seed, message):
    state, _ = admit(empty(GROUPS["one"]), [[5, 6, 7]])
    with pytest.raises(AdmissionError, match=message):
        fork_request(state, src, dst, seed=seed)


def test_more_forks_than_rows():
    state, (row,) = admit(empty(GROUPS["one"], rows=3), [[5, 6, 7]])
    with pytest.raises(CapacityError, match="3 forks but 2 free rows"):
        manual.fork(state, row, 3)
    assert manual.fork(state, row, 0) == (state, [])


def test_single_calls_compile_a_few_sizes():
    state, (row,) = admit(empty(GROUPS["one"]), [[5, 6, 7]])
    fork_request(state, [row] * 3, [2, 3, 4])
    with CompileCounter() as counter:
        fork_request(state, [row] * 4, [2, 3, 4, 5])
    assert counter.count == 0


def test_a_donated_fork_is_in_place():
    """The compiled fork updates the cache in place, and needs no memory that grows with it."""

    groups = GROUPS["a window, three in a block"]

    def memory(num_blocks):
        state = jax.eval_shape(lambda: empty(groups, num_blocks=num_blocks))
        pair = jax.ShapeDtypeStruct((2,), jnp.int32)
        compiled = jax.jit(fork_request, donate_argnums=0).lower(state, pair, pair).compile()
        kv = sum(b.size * b.dtype.itemsize for b in state.kv.blocks)
        return compiled.memory_analysis(), kv

    small, _ = memory(600)
    large, kv = memory(6000)
    assert large.alias_size_in_bytes >= kv
    # Per block of the cache only its use is noted: a byte, a sum and an index.
    assert large.temp_size_in_bytes - small.temp_size_in_bytes < 5400 * 32 * len(groups)
    assert large.temp_size_in_bytes < kv // 2


MIXED, DECODE = Bucket("mixed", 32, 4, 32, "random"), Bucket("decode", 4, 4, 1, "random")


@functools.cache
def prefilled():
    """A row in the middle of its second block, that has sampled once."""
    model, weights = harness.tiny("llama")
    state = init_state(model, max_requests=4, max_model_len=64, num_blocks=20, block_size=8)
    state, (row,) = admit(state, [list(range(5, 24))], SamplingParams(temperature=0.8, seed=11))
    state, _ = harness.run(model, weights, state, plan(state, {row: 19}), MIXED)
    return state, row


def continue_(state, rows, steps=12):
    model, weights = harness.tiny("llama")
    state, tokens = reserve(state, rows, steps), []
    for _ in range(steps):
        packed = plan(state, dict.fromkeys(rows, 1)).pack(DECODE)
        state, output = harness.run(model, weights, state, packed, DECODE)
        tokens.append(np.asarray(output.sampled_token_ids)[: len(rows), 0])
    return np.stack(tokens, 1).tolist(), state


def test_a_fork_continues_like_its_source_and_a_reseeded_one_like_a_fresh_request():
    model, weights = harness.tiny("llama")
    state, row = prefilled()
    forked, (same, other) = manual.fork(state, row, 2, seeds=[11, 12])
    (a, b, c), after = continue_(forked, [row, same, other])
    assert a == b
    assert a != c
    audit(after, shared_blocks=True)
    history = [int(t) for t in host_view(state.requests.token_ids)[row, :20]]
    fresh = release(state, [row])
    fresh, (alone,) = admit(fresh, [history], SamplingParams(temperature=0.8, seed=12))
    fresh, output = harness.run(model, weights, fresh, plan(fresh, {alone: 20}), MIXED)
    (d,), _ = continue_(fresh, [alone], 11)
    assert c == [int(output.sampled_token_ids[0, 0]), *d]
    # The source goes on as it would have without forks, also after they are released.
    (e,), _ = continue_(release(forked, [same, other]), [row])
    assert e == a


def test_forks_in_the_middle_of_a_prefill():
    """Both finish the same prefill in their own tail blocks."""
    model, weights = harness.tiny("llama")
    prompt = np.random.default_rng(0).integers(1, 200, 27).tolist()
    state = init_state(model, max_requests=4, max_model_len=64, num_blocks=20, block_size=8)
    state, (row,) = admit(state, [prompt])
    whole, expected = harness.run(model, weights, state, plan(state, {row: 27}), MIXED)
    state, _ = harness.run(model, weights, state, plan(state, {row: 13}), MIXED)
    state, (fork,) = manual.fork(state, row)
    state, output = harness.run(model, weights, state, plan(state, {fork: 14, row: 14}), MIXED)
    assert output.sampled_token_ids[:2, 0].tolist() == [int(expected.sampled_token_ids[0, 0])] * 2
    audit(state, shared_blocks=True)
    (a, b), _ = continue_(state, [row, fork], 6)
    (c,), _ = continue_(whole, [row], 6)
    assert a == b == c


def test_fork_state_copies_everything_and_says_how_much(caplog):
    state, row = prefilled()
    with caplog.at_level(logging.INFO, logger="jaxrunner"):
        copy = fork_state(state)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert f"copies {size} bytes, {state.kv.nbytes} of them KV cache" in caplog.text
    same_state(copy, state)
    again = fork_state(copy)
    jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)(copy)
    same_state(again, state)
    with pytest.raises(DonatedStateError):
        fork_state(copy)
    with pytest.raises(DonatedStateError):
        fork_request(copy, row, 2)


def test_fork_state_refuses_what_does_not_fit(monkeypatch):
    state, _ = prefilled()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    with pytest.raises(CapacityError, match=f"takes {size} bytes on .* but {size - 1} are free"):
        fork_state(state, bytes_limit=size - 1)
    fork_state(state, bytes_limit=size)
    # What a device says of itself counts; one that says nothing has no limit.
    from jaxrunner import forks

    monkeypatch.setattr(forks, "free_device_bytes", lambda device: 100)
    with pytest.raises(CapacityError, match="but 100 are free"):
        fork_state(state)
