"""Log-probabilities through the engine: prefix cache, preemption, text; SmolLM2's against transformers."""

from __future__ import annotations

import json

import pytest

from jaxrunner import LLM, SamplingParams
from jaxrunner.errors import AdmissionError
from tests.conftest import GOLDEN

PROMPT = [(7 * i + 3) % 250 for i in range(17)]
ONE = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, prompt_logprobs=1)
SIZES = {"max_num_seqs": 3, "max_model_len": 48, "max_num_batched_tokens": 16, "block_size": 8, "num_blocks": 7}


def tiny(**options):
    """Its cache holds one sequence of full length, so several preempt each other."""
    return LLM(str(GOLDEN / "tiny" / "llama"), **SIZES, **options)


def assert_same(found, expected):
    """Equal up to the rounding of another batch: numbers, ids and ranks, the first token None."""
    assert found[0] is expected[0] is None
    assert len(found) == len(expected)
    for a, b in zip(found[1:], expected[1:], strict=True):
        assert list(a) == list(b)
        for token, entry in a.items():
            assert entry.rank == b[token].rank
            assert entry.logprob == pytest.approx(b[token].logprob, abs=1e-4)


@pytest.fixture(scope="module")
def llm():
    return tiny()


def test_k067_a_cached_prompt_is_scored_like_a_new_one(llm):
    """17 tokens in blocks of 8, twice; then once more without scores, which takes the cached blocks."""
    first, second = (llm.generate([PROMPT], ONE)[0] for _ in range(2))
    assert [entry is None for entry in first.prompt_logprobs] == [True] + [False] * 16
    assert [next(iter(entry)) for entry in first.prompt_logprobs[1:]] == PROMPT[1:]
    assert all(1 <= len(entry) <= 2 and 1 in {e.rank for e in entry.values()} for entry in first.prompt_logprobs[1:])
    assert_same(second.prompt_logprobs, first.prompt_logprobs)
    assert second.outputs[0].token_ids == first.outputs[0].token_ids
    (request,) = llm._requests([PROMPT], SamplingParams(temperature=0.0, max_tokens=1))
    llm.scheduler.add(request)
    while request.finish_reason is None:
        llm.step()
    assert request.num_cached_tokens == 16


@pytest.mark.parametrize("asynchronous", [False, True])
def test_k068_preemption_at_any_time_changes_no_score(llm, asynchronous):
    """Prompts are evicted between chunks and after their first tokens; alone, none is."""
    prompts = [[(p * t + 1) % 250 for t in range(2, 20 + p)] for p in (3, 5, 7, 11)]
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, prompt_logprobs=2)
    calm = [llm.generate([prompt], params)[0] for prompt in prompts]
    small = tiny(async_scheduling=asynchronous)
    small.runner.table = llm.runner.table
    requests = small._requests(prompts, params)
    for request in requests:
        small.scheduler.add(request)
    while any(r.finish_reason is None for r in requests):
        small.step()
    assert sum(r.num_preemptions for r in requests) > 0
    for request, expected in zip(requests, calm, strict=True):
        assert request.output_token_ids == expected.outputs[0].token_ids
        assert_same(request.prompt_logprobs, expected.prompt_logprobs)


def test_listed_ids_of_outputs_and_of_the_prompt(llm):
    """Named ids stand behind the best, once, without a rank; alone they need no `logprobs`."""
    named = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, logprob_token_ids=[9, 200])
    both = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, logprobs=2, logprob_token_ids=[9, 200])
    prompt = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, prompt_logprob_token_ids=[9, 200])
    a, b, c = llm.generate([PROMPT] * 3, [named, both, prompt])
    for alone, more in zip(a.outputs[0].logprobs, b.outputs[0].logprobs, strict=True):
        token = next(iter(alone))
        assert list(alone) == list(dict.fromkeys([token, 9, 200]))
        assert alone[200].rank is None or token == 200
        assert [entry.rank for entry in more.values()][:2] == [1, 2]
        assert more[200].logprob == pytest.approx(alone[200].logprob, abs=1e-5)
    assert c.outputs[0].logprobs is None
    assert c.prompt_logprobs is None
    assert [entry and list(entry) for entry in c.prompt_token_id_logprobs] == [None] + [[9, 200]] * 16
    (scored,) = llm.generate([[*PROMPT, 200]], ONE)
    assert scored.prompt_logprobs[17][200].logprob == pytest.approx(a.outputs[0].logprobs[0][200].logprob, abs=1e-4)


def test_streams_and_short_prompts(llm):
    """A stream has the prompt's scores with its first token; a prompt of one token has nothing to be scored."""
    outputs = list(llm.stream(PROMPT, ONE))
    assert [len(o.prompt_logprobs) for o in outputs] == [17] * 3
    assert llm.generate([[5]], ONE)[0].prompt_logprobs == [None]
    with pytest.raises(AdmissionError, match="max_logprobs=-1"):
        llm.generate([PROMPT], SamplingParams(prompt_logprobs=-1))
    assert llm.scheduler.pool.num_free == llm.scheduler.pool.num_usable


@pytest.mark.smollm2
def test_prompt_scores_of_smollm2_equal_transformers(smollm2_llm):
    """Two prompts in one batch: numbers, ranks, the five best, their text."""
    prompts = {p["name"]: p["ids"] for p in json.loads((GOLDEN / "smollm2" / "prompts.json").read_text())}
    golden = json.loads((GOLDEN / "smollm2" / "f32.json").read_text())["prompts"]
    golden = [p for p in golden if "prompt_logprobs" in p]
    assert len(golden) == 2
    five = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=5)
    for output, case in zip(smollm2_llm.generate([prompts[p["name"]] for p in golden], five), golden, strict=True):
        assert output.prompt_logprobs[0] is case["prompt_logprobs"][0] is None
        for found, expected in zip(output.prompt_logprobs[1:], case["prompt_logprobs"][1:], strict=True):
            own = found[expected["id"]]
            assert own.logprob == pytest.approx(expected["logprob"], abs=1e-3)
            assert abs(own.rank - expected["rank"]) <= expected["rank"] * 0.01, "equal up to near ties"
            for token, value in zip(expected["top5"], expected["top5_logprobs"], strict=True):
                assert found[token].logprob == pytest.approx(value, abs=1e-3)
                assert found[token].decoded_token == smollm2_llm.tokenizer.decode([token], skip_special_tokens=False)
