"""Ladders and the real engine: what is recorded, that predictions of padding come true, and fitted ladders that run."""

from __future__ import annotations

import pytest

from jaxrunner import LLM, DeviceRunner, Ladder, SamplingParams
from jaxrunner.errors import AdmissionError
from jaxrunner.ladder.costs import Costs
from jaxrunner.ladder.fitting import fit_ladder
from jaxrunner.ladder.placement import Buckets
from jaxrunner.ladder.recording import StepRecorder
from jaxrunner.ladder.replay import replay
from jaxrunner.ladder.steps import read_steps
from tests.conftest import GOLDEN, load_tiny
from tests.runner.plans import CONFIG, new, plan, run

PROMPT = [1, 2, 3, 4, 5]
LADDER = Ladder((1, 4), (8, 32), (4,), tiers=("greedy",))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """(runner, file, tokens of the request "a"): a ragged step, and decodes of three and of two requests, one of them
    new and a token long."""
    path = tmp_path_factory.mktemp("steps") / "steps.csv"
    runner = DeviceRunner(*load_tiny("llama"), CONFIG, ladder=LADDER)
    with StepRecorder(runner, path):
        tokens = run(runner, plan({"a": 5, "b": 9}, [new("a", PROMPT, [1, 2]), new("b", [9] * 9, [4, 5])]))["a"]
        tokens += run(runner, plan({"a": 1, "b": 1}))["a"]
        tokens += run(runner, plan({"a": 1, "b": 1, "c": 1}, [new("c", [7], [7])]))["a"]
        runner.execute_model(plan({}, finished_req_ids={"a"}))
        run(runner, plan({"b": 1, "c": 1}))
        with pytest.raises(AdmissionError):
            runner.execute_model(plan({"b": 1}, [new("b", [1], [0])]))
    assert "execute_model" not in vars(runner)
    return runner, path, tokens


def test_a_recording_holds_the_sizes_of_every_step(recorded):
    steps = read_steps(recorded[1])
    assert steps.num_reqs.tolist() == [2, 2, 3, 2]
    assert steps.num_tokens.tolist() == [14, 2, 3, 2]
    assert steps.max_query_len.tolist() == [9, 1, 1, 1]
    assert steps.num_prefills.tolist()[0] == 2
    assert steps.num_prefills.tolist()[2] >= 1
    assert (steps.start_s[1:] > steps.start_s[:-1]).all()


def test_k113_the_padding_that_a_replay_predicts_is_what_the_engine_ran(recorded):
    """The look-up of the study is the look-up of the engine."""
    runner, path, _ = recorded
    outcome = replay(read_steps(path), Buckets("ladder", LADDER), Costs.tokens())
    rows = runner.table.stats()
    assert sum(r["padded_tokens"] for r in rows) == outcome.padded_tokens
    assert sum(r["real_tokens"] for r in rows) == outcome.real_tokens
    assert outcome.padded_tokens == 32 + 4 + 4 + 4


def test_start_up_counts_the_programs_of_the_engine(recorded):
    for ladder in (LADDER, Ladder((1, 4), (8, 32), (1, 4))):
        programs = DeviceRunner(*load_tiny("llama"), CONFIG, ladder=ladder).table.programs.all()
        made = Buckets("ladder", ladder).start_up()
        admits = sum(p.kind in ("admit", "moves") for p in programs)
        models = [p for p in programs if p.bucket is not None]
        assert sorted(p.num_tokens for p in models) == sorted(made.sizes)
        assert made.executables - len(made.sizes) - 4 == len(programs) - len(models) - admits


def test_an_engine_runs_a_fitted_ladder_and_gives_the_same_tokens(recorded, tmp_path):
    steps = read_steps(recorded[1])
    fitted = fit_ladder(steps, 4, Costs.tokens(), max_num_seqs=4, max_num_batched_tokens=32).ladder
    fitted.save(tmp_path / "ladder.json")
    llm = LLM(
        str(GOLDEN / "tiny" / "llama"),
        ladder=Ladder.load(tmp_path / "ladder.json"),
        max_num_seqs=4,
        max_num_batched_tokens=32,
        max_model_len=64,
    )
    assert llm.runner.ladder == fitted != Ladder.default(max_num_seqs=4, max_num_batched_tokens=32)
    (output,) = llm.generate(
        [{"prompt_token_ids": PROMPT}], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    )
    assert output.outputs[0].token_ids == recorded[2]


def test_a_ladder_that_the_engine_could_outgrow_is_refused_at_start():
    with pytest.raises(AdmissionError, match=r"ends at 4 requests and 32 tokens.*max_num_seqs=8.*add these"):
        LLM(str(GOLDEN / "tiny" / "llama"), ladder=LADDER, max_num_seqs=8, max_num_batched_tokens=32)


@pytest.mark.parametrize("text", ["", "[]", '{"decode": [1]}', '{"decode": [2, 1], "mixed": [4], "finish": [1]}'])
def test_what_is_no_ladder_file_is_named(tmp_path, text):
    (tmp_path / "l.json").write_text(text)
    with pytest.raises(AdmissionError, match=r"l\.json holds no ladder"):
        Ladder.load(tmp_path / "l.json")
