"""The table of executables: what it compiles, when, what it refuses, and that executables add up."""

from __future__ import annotations

import logging

import jax
import pytest

from jaxrunner import BucketTable, DeviceRunner, Ladder, RunnerConfig, init_state
from jaxrunner.compile.buckets import TIERS
from jaxrunner.compile.counter import CompileCounter
from jaxrunner.compile.programs import Program, ProgramSet
from jaxrunner.errors import BucketMissError
from tests.conftest import load_tiny
from tests.runner.plans import new, plan, run


def programs_of(ladder: Ladder) -> ProgramSet:
    model, weights = load_tiny("llama")
    state = init_state(model, max_requests=ladder.max_num_reqs, max_model_len=64, num_blocks=8, block_size=8)
    return ProgramSet(model, weights, state, ladder)


SMALL = Ladder(decode=(1, 2), mixed=(4, 16), finish=(2,), tiers=("greedy",))


@pytest.mark.parametrize(("seqs", "tokens"), [(8, 256), (64, 2048), (256, 8192), (1024, 8192)])
def test_a_default_engine_has_at_most_40_executables(seqs, tokens):
    model, _ = load_tiny("llama")
    roomy = model.replace(max_position_embeddings=8192)
    ladder = Ladder.default(model, max_num_seqs=seqs, max_num_batched_tokens=tokens)
    shapes = jax.eval_shape(
        lambda: init_state(roomy, max_requests=seqs, max_model_len=8192, num_blocks=64, block_size=16)
    )
    names = [str(p) for p in ProgramSet(model, {}, shapes, ladder).all()]
    print(f"\n{seqs} requests, {tokens} tokens: {len(names)} executables: {', '.join(names)}")
    assert len(names) == len(set(names)) <= 40


def test_only_the_greedy_decode_is_fused():
    """Every other step is a first half of its bucket, shared by the tiers, and a second half of its tier."""
    programs = programs_of(Ladder((1, 2), (4, 16), (1, 2)))
    listed = programs.all()
    assert {str(p) for p in listed if p.kind == "step"} == {"decode[1x1]/greedy", "decode[2x1]/greedy"}
    for tier in TIERS:
        for bucket in (programs.ladder.decode_bucket(2, tier), programs.ladder.mixed_bucket(16, tier)):
            first = programs.first(bucket)
            assert first in listed
            assert (first.kind == "step") == (bucket.kind == "decode" and tier == "greedy")
            assert programs.finish(2, tier) in listed
    shapes = {str(programs.pending_shapes(p.bucket).last_tokens) for p in listed if p.kind == "begin"}
    assert len(shapes) == 1, "one second half must take the result of every first half"


def test_warm_up_compiles_everything_once_and_reports(capsys):
    table = BucketTable(programs_of(SMALL), policy="refuse")
    seen = []
    table.warm_up(threads=2, progress=lambda done, total, name: seen.append((done, total)))
    count = len(table.programs.all())
    assert seen == [(i + 1, count) for i in range(count)]
    assert set(table.entries) == set(table.programs.all())
    assert all(e.lower_seconds > 0 and e.compile_seconds > 0 for e in table.entries.values())
    with CompileCounter() as counter:
        table.warm_up()
    assert counter.count == 0
    text = str(table)
    assert f"{count} executables, 0 misses" in text
    assert "decode[2x1]/greedy" in text


def test_a_warm_up_can_show_a_bar_on_stderr(capfd):
    table = BucketTable(programs_of(SMALL))
    table.warm_up([Program("admit", size=64)], progress=True)
    captured = capfd.readouterr()
    assert "1/1" in captured.err
    assert captured.out == ""


def test_policy_refuse_names_the_program_and_the_way_out():
    table = BucketTable(programs_of(SMALL), policy="refuse")
    with pytest.raises(BucketMissError, match=r"decode\[1x1\]/greedy is not compiled.*warm_up"):
        table.get(Program("step", SMALL.decode_bucket(1, "greedy")))


def test_policy_next_larger_takes_it_and_counts_the_miss():
    table = BucketTable(programs_of(SMALL), policy="next_larger")
    larger = Program("step", SMALL.decode_bucket(2, "greedy"))
    table.warm_up([larger])
    assert table.get(Program("step", SMALL.decode_bucket(1, "greedy"))).program == larger
    assert table.misses == 1
    with pytest.raises(BucketMissError, match="begin"):
        table.get(table.programs.first(SMALL.mixed_bucket(4, "greedy")))


def test_policy_compile_counts_and_announces(caplog):
    table = BucketTable(programs_of(SMALL), policy="compile")
    with caplog.at_level(logging.INFO, logger="jaxrunner"):
        table.get(Program("admit", size=64))
    assert table.compiled_on_demand == table.misses == 1
    assert "admit[64] on demand" in caplog.text
    table.get(Program("admit", size=64))
    assert table.misses == 1


def test_unknown_policy():
    with pytest.raises(ValueError, match="next_larger"):
        BucketTable(programs_of(SMALL), policy="perhaps")  # type: ignore[arg-type]


def test_a_mismatch_names_the_leaf_that_differed():
    model, weights = load_tiny("llama")
    config = RunnerConfig(2, 64, 16, 20, 8)
    runner = DeviceRunner(model, weights, config, ladder=Ladder((2,), (16,), (2,), tiers=("greedy",)))
    run(runner, plan({"a": 1}, [new("a", [5], [1])]))
    layers = runner.weights["layers"]
    broken = ({**layers[0], "o": layers[0]["o"][:, :-1]}, *layers[1:])
    good, runner.weights = runner.weights, {**runner.weights, "layers": broken}
    with pytest.raises(BucketMissError, match=r"'o'.*|\['o'\]") as caught:
        runner.execute_model(plan({"a": 1}))
    assert "decode[2x1]/greedy" in str(caught.value)
    runner.weights = good
    assert len(run(runner, plan({"a": 1}))["a"]) == 1


def test_next_larger_gives_the_same_tokens():
    model, weights = load_tiny("llama")
    prompt = [5, 9, 17]
    tokens = {}
    for policy in ("compile", "next_larger"):
        config = RunnerConfig(4, 64, 16, 20, 8, bucket_policy=policy)
        runner = DeviceRunner(model, weights, config, ladder=Ladder((1, 4), (4, 16), (1, 4), tiers=("greedy",)))
        if policy == "next_larger":
            names = {"decode[4x1]/greedy", "begin mixed[t16/r4]", "finish[4]/greedy", "admit[64]"}
            runner.warm_up(programs=[p for p in runner.table.programs.all() if str(p) in names])
        out = run(runner, plan({"a": 3}, [new("a", prompt, [1, 2])]))["a"]
        for _ in range(4):
            out += run(runner, plan({"a": 1}))["a"]
        tokens[policy] = out
        assert runner.table.misses > 0
    assert tokens["compile"] == tokens["next_larger"]


def test_statistics_count_real_and_padded_tokens():
    model, weights = load_tiny("llama")
    runner = DeviceRunner(model, weights, RunnerConfig(4, 64, 16, 20, 8), ladder=Ladder((4,), (16,), (4,)))
    run(runner, plan({"a": 3}, [new("a", [5, 6, 7], [1])]))
    run(runner, plan({"a": 1}))
    rows = {r["executable"]: r for r in runner.table.stats()}
    assert (rows["begin mixed[t16/r4]"]["real_tokens"], rows["begin mixed[t16/r4]"]["padded_tokens"]) == (3, 16)
    assert rows["decode[4x1]/greedy"]["waste"] == 0.75
    assert rows["finish[4]/greedy"]["hits"] == 1
