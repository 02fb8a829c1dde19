"""Structured outputs through the engine: the tiny golden model over single bytes, and few of SmolLM2."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from jaxrunner import LLM, ListSizes, SamplingParams, StructuredOutputsParams
from jaxrunner.engine import llm as engine
from jaxrunner.errors import AdmissionError
from jaxrunner.runner.output import AsyncOutput
from tests.engine.byte_tokenizer import EOS, with_byte_tokenizer

SIZES = dict(max_num_seqs=4, max_model_len=64, max_num_batched_tokens=16, num_blocks=13, block_size=8)
SIZES |= {"list_sizes": ListSizes(replay_tokens=2)}
"""The cache holds 96 tokens, less than half of what four requests can grow to."""
PROMPT = list(range(20, 32))
DATE, WORDS = r"[0-9]{4}-[0-9]{2}-[0-9]{2}", r"([a-z]{3} ){8}[a-z]{3}"
LONG = r"[ab]{60}"


def asking(regex: str, **fields) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 40, **fields}, structured_outputs=StructuredOutputsParams(regex=regex))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return with_byte_tokenizer(tmp_path_factory.mktemp("checkpoint") / "llama")


@pytest.fixture(scope="module")
def llm(checkpoint):
    return LLM(checkpoint, **SIZES)


@pytest.fixture(scope="module")
def synchronous(checkpoint, llm):
    made = LLM(checkpoint, **SIZES, async_scheduling=False)
    made.runner.table = llm.runner.table
    return made


def text_of(output) -> str:
    return output.outputs[0].text


MIXED = [
    asking(DATE, seed=1),
    SamplingParams(seed=2, max_tokens=24, ignore_eos=True),
    asking(WORDS, seed=3, top_p=0.9),
    asking(DATE, temperature=0.0),
    asking(WORDS, seed=4, presence_penalty=0.5),
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
]


@pytest.fixture(scope="module")
def outputs(llm):
    """Six requests in four rows: by turns with and without a grammar, drawn and greedy, preempted for lack of room."""
    ended = []
    retire = llm.scheduler._preempt
    llm.scheduler._preempt = lambda req_id: ended.append(req_id) or retire(req_id)
    try:
        made = llm.generate([PROMPT] * len(MIXED), MIXED)
    finally:
        del llm.scheduler._preempt
    assert ended, "nothing was preempted"
    return made


def test_every_output_matches_and_ends(outputs):
    for params, output in zip(MIXED, outputs, strict=True):
        completion = output.outputs[0]
        assert completion.error is None
        if params.structured_outputs is None:
            assert completion.finish_reason == "length"
            continue
        assert re.fullmatch(params.structured_outputs.regex, completion.text)
        assert (completion.finish_reason, completion.token_ids[-1]) == ("stop", EOS), "the grammar's end forces EOS"
        assert EOS not in completion.token_ids[:-1]


def test_the_same_tokens_without_asynchronous_scheduling_alone_and_from_the_prefix_cache(llm, synchronous, outputs):
    """Whatever was in flight, preempted, cached or beside it."""
    expected = [output.outputs[0].token_ids for output in outputs]
    together = synchronous.generate([PROMPT] * len(MIXED), MIXED)
    assert [output.outputs[0].token_ids for output in together] == expected
    for params, ids in list(zip(MIXED, expected, strict=True))[:3]:
        (alone,) = llm.generate([PROMPT], params)
        assert alone.outputs[0].token_ids == ids


def test_masks_are_filled_while_the_forward_pass_runs(llm, monkeypatch):
    """Of each decode: its forward pass is launched, then the tokens before it are taken, then its mask is filled and
    it is sampled. A plain request does not wait: its tokens are taken after the next step is whole."""
    seen = []

    def spied(name, original):
        return lambda *args, **options: seen.append(name) or original(*args, **options)

    monkeypatch.setattr(llm.runner, "execute_model", spied("forward", llm.runner.execute_model))
    monkeypatch.setattr(llm.runner, "sample_tokens", spied("sample", llm.runner.sample_tokens))
    monkeypatch.setattr(AsyncOutput, "get_output", spied("take", AsyncOutput.get_output))
    monkeypatch.setattr(engine, "fill_masks", spied("mask", engine.fill_masks))
    llm.generate([PROMPT], asking("[ab]{9}", temperature=0.0, max_tokens=4))
    assert seen[:3] == ["forward", "mask", "sample"]
    assert seen[3:15] == ["forward", "take", "mask", "sample"] * 3
    seen.clear()
    llm.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    assert seen[:8] == ["forward", "sample", "forward", "sample", "take", "forward", "sample", "take"]


def test_k074_nothing_follows_the_end_of_the_grammar(llm, synchronous):
    """Without an end id the grammar's own end is the output's, although the next step is in flight by then; no block
    of it stays behind."""
    params = asking(r"[ab]{18}c", seed=9, ignore_eos=True)
    for each in (llm, synchronous):
        each.scheduler.weights_changed()  # forgets the prefixes of other tests
        (output,) = each.generate([PROMPT], params)
        completion = output.outputs[0]
        assert re.fullmatch(r"[ab]{18}c", completion.text)
        assert (len(completion.token_ids), completion.finish_reason, completion.stop_reason) == (19, "stop", None)
        assert len(each.scheduler.pool._block_of) == 3, "31 tokens: three full blocks, and none of what came after"


def test_ignore_eos_goes_on_as_long_as_the_grammar_can(llm):
    (output,) = llm.generate([PROMPT], asking("[ab]+", seed=3, max_tokens=30, ignore_eos=True))
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (30, "length")
    assert set(text_of(output)) == {"a", "b"}


def test_stop_strings_and_the_length_end_an_output_before_its_grammar(llm):
    stopped, cut = llm.generate([PROMPT] * 2, [asking(LONG, seed=2, stop="ab"), asking(LONG, seed=2, max_tokens=5)])
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", "ab")
    assert re.fullmatch("[ab]*", text_of(stopped))
    assert "ab" not in text_of(stopped)
    assert (cut.outputs[0].finish_reason, len(text_of(cut))) == ("length", 5)
    both = asking("a{5}b", seed=2, stop="ab", ignore_eos=True)
    assert [text_of(o) for o in llm.generate([PROMPT], both)] == ["aaaa"], "a string that the last token completes"


def test_an_output_that_cannot_go_on_fails_alone(llm):
    """The grammar ends after two tokens, min_tokens forbids the end before four; a trace brings a forbidden token."""
    free = SamplingParams(seed=5, max_tokens=12, ignore_eos=True)
    (expected,) = llm.generate([PROMPT], free)
    stuck, traced = asking("ab", seed=1, min_tokens=4), asking("a[bc]", seed=1, replay_token_ids=[64, 1])
    outputs = llm.generate([PROMPT] * 4, [stuck, free, traced, asking(DATE, seed=1)])
    assert [o.outputs[0].finish_reason for o in outputs] == ["error", "length", "error", "stop"]
    assert text_of(outputs[0]) == "ab"
    assert "forbid every token id" in outputs[0].outputs[0].error
    assert "grammar forbids token id 1 at position 1" in outputs[2].outputs[0].error
    assert outputs[2].request_id in outputs[2].outputs[0].error
    assert outputs[1].outputs[0].token_ids == expected.outputs[0].token_ids
    assert re.fullmatch(DATE, text_of(outputs[3]))


def test_a_bad_grammar_is_refused_at_admission_and_touches_no_other_request(llm):
    (expected,) = llm.generate([PROMPT], asking(WORDS, seed=8))
    stream = llm.stream(PROMPT, asking(WORDS, seed=8))
    next(stream)
    with pytest.raises(AdmissionError, match="regex cannot be compiled"):
        llm.generate([PROMPT] * 2, [asking(DATE), asking("((")])
    *_, last = stream
    assert last.outputs[0].token_ids == expected.outputs[0].token_ids
    assert not llm.scheduler.has_unfinished


def test_another_tokenizer_gets_a_compiler_of_its_own(llm):
    """K075 through the engine: what was compiled for the old one is not asked."""
    params = dataclasses.replace(asking("a"), max_tokens=2)
    llm.generate([PROMPT], params)
    before = llm._grammars
    original = llm.tokenizer
    llm.tokenizer = type(original)(original.backend, eos_token_ids=original.eos_token_ids)
    llm.generate([PROMPT], params)
    assert llm._grammars is not before
    assert llm._grammars.num_cached == 1


def test_a_wait_that_is_interrupted_leaves_an_engine_that_works(llm, monkeypatch):
    """As by Ctrl-C in a notebook while the host waits for the tokens that a mask needs."""

    def interrupt(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(AsyncOutput, "get_output", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([PROMPT], asking(DATE, seed=1))
    assert re.fullmatch(DATE, text_of(llm.generate([PROMPT], asking(DATE, seed=1))[0]))


def test_a_model_without_a_tokenizer_says_so():
    from tests.conftest import GOLDEN

    bare = LLM(str(GOLDEN / "tiny" / "llama"), max_num_seqs=1, max_model_len=32, max_num_batched_tokens=16)
    with pytest.raises(AdmissionError, match="no tokenizer"):
        bare.generate([[1, 2]], asking("a"))


@pytest.mark.smollm2
def test_smollm2_answers_in_json_and_by_choice(smollm2_llm):
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "inhabitants": {"type": "integer"}},
        "required": ["city", "inhabitants"],
        "additionalProperties": False,
    }
    kinds = [{"json": schema}, {"choice": ["Rome", "Paris"]}, {"grammar": 'root ::= "Paris" | "I do not know" "!"?'}]
    params = [
        SamplingParams(temperature=0.0, max_tokens=48, structured_outputs=StructuredOutputsParams(**kind))
        for kind in kinds
    ]
    prompt = smollm2_llm.chat_prompt([{"role": "user", "content": "What is the capital of France?"}])
    made = smollm2_llm.generate([prompt] * 3, params)
    assert [o.outputs[0].finish_reason for o in made] == ["stop"] * 3
    answer = json.loads(text_of(made[0]))
    assert answer.keys() == {"city", "inhabitants"}
    assert isinstance(answer["inhabitants"], int)
    assert text_of(made[1]) == "Paris"
    assert text_of(made[2]) in ("Paris", "I do not know", "I do not know!")
