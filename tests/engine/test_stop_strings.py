"""Stop strings: found wherever tokens divide them, text cut exactly, and nothing streamed that is taken back."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from jaxrunner import SamplingParams
from jaxrunner.engine.stop_strings import StopStrings
from jaxrunner.errors import AdmissionError

pytestmark = pytest.mark.smollm2
PROMPT = "The capital of France is"
TEXTS = [
    "Hello world, stop here please. END of it",
    "naïve café 🙂🙂 ~ ünïcödé stopstopstop",
    "aaaaaaaaab aab ab",
    "1234567890 12 34 56",
]


def greedy(count=16, **fields):
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, **fields)


def oracle(tokenizer, ids, stop, include, min_tokens):
    """(tokens read, text, the stop string): decode ever longer heads until one holds a stop string."""
    searched = 0
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:count])
        while text.endswith("\ufffd"):
            text = text[:-1]
        if count > min_tokens:
            ends = [(p, i) for i, s in enumerate(stop) for p in range(len(text)) if text.startswith(s, p)]
            ends = [(p, i) for p, i in ends if p + len(stop[i]) > searched]
            if ends:
                place, index = min(ends)
                return count, text[: place + (len(stop[index]) if include else 0)], stop[index]
        searched = len(text)
    return len(ids), tokenizer.decode(ids), None


@pytest.mark.parametrize("text", TEXTS)
def test_any_stop_string_in_any_text(smollm2_llm, text):
    """Random pieces of the text, and strings that are not in it, against the brute-force oracle."""
    tokenizer, rng = smollm2_llm.tokenizer, np.random.default_rng(len(text))
    ids = tokenizer.encode(text).ids
    for _ in range(40):
        starts = rng.integers(0, len(text), rng.integers(1, 4))
        stop = [text[s : s + rng.integers(1, 9)] for s in starts] + ["never"]
        include, min_tokens = bool(rng.integers(2)), int(rng.integers(0, 6))
        search = StopStrings(tokenizer, stop, include=include, min_tokens=min_tokens)
        shown, found, count = [], None, 0
        for count in range(1, len(ids) + 1):
            found = search.update(ids[:count])
            shown.append(search.visible())
            if found:
                break
        search.close()
        assert (count, search.text, found) == oracle(tokenizer, ids, stop, include, min_tokens), stop
        assert all(later.startswith(earlier) for earlier, later in itertools.pairwise([*shown, search.text]))


def test_many_ids_at_once_stop_at_the_same_place(smollm2_llm):
    ids = smollm2_llm.tokenizer.encode(TEXTS[0]).ids
    search = StopStrings(smollm2_llm.tokenizer, ["END"])
    assert search.update(ids) == "END"
    assert search.text == TEXTS[0][: TEXTS[0].index("END")]
    assert search.update([*ids, 5, 6]) == "END"


def test_text_is_shown_up_to_what_may_become_a_stop_string(smollm2_llm):
    search = StopStrings(smollm2_llm.tokenizer, ["stop now", "zz"])
    search.update(smollm2_llm.tokenizer.encode("please stop no").ids)
    assert search.visible() == "please "
    search.update(smollm2_llm.tokenizer.encode("please stop nonsense").ids[:0])
    search.close()
    assert search.text == "please stop no"


@pytest.mark.parametrize("include", [False, True])
def test_generate_and_stream_cut_the_text(smollm2_llm, include):
    (free,) = smollm2_llm.generate(PROMPT, greedy())
    text = free.outputs[0].text
    for stop in (text[9:14], text[3:4], text[-6:]):
        params = greedy(stop=["not in it", stop], include_stop_str_in_output=include)
        (output,) = smollm2_llm.generate(PROMPT, params)
        done = output.outputs[0]
        end = text.index(stop)
        assert done.text == text[: end + (len(stop) if include else 0)]
        assert (done.finish_reason, done.stop_reason) == ("stop", stop)
        assert done.token_ids == free.outputs[0].token_ids[: len(done.token_ids)]
        assert stop in smollm2_llm.tokenizer.decode(done.token_ids)
        assert stop not in smollm2_llm.tokenizer.decode(done.token_ids[:-1])
        streamed = [o.outputs[0] for o in smollm2_llm.stream(PROMPT, params)]
        assert streamed[-1] == done
        assert all(b.text.startswith(a.text) for a, b in itertools.pairwise(streamed))
    assert smollm2_llm.scheduler.pool.num_free == smollm2_llm.scheduler.pool.num_usable


def test_a_string_at_the_last_token_is_a_stop_not_a_length(smollm2_llm):
    (free,) = smollm2_llm.generate(PROMPT, greedy(6))
    tail = smollm2_llm.tokenizer.decode(free.outputs[0].token_ids[-1:])
    assert tail not in smollm2_llm.tokenizer.decode(free.outputs[0].token_ids[:-1])
    (output,) = smollm2_llm.generate(PROMPT, greedy(6, stop=tail))
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", tail)


def test_min_tokens_puts_the_search_off(smollm2_llm):
    (free,) = smollm2_llm.generate(PROMPT, greedy())
    (output,) = smollm2_llm.generate(PROMPT, greedy(stop=" ", min_tokens=5))
    assert len(output.outputs[0].token_ids) >= 6
    assert output.outputs[0].stop_reason == " "
    assert free.outputs[0].text.startswith(output.outputs[0].text)


def test_neighbours_go_on(smollm2_llm):
    (free,) = smollm2_llm.generate(PROMPT, greedy())
    stop = free.outputs[0].text[4:8]
    outputs = smollm2_llm.generate([PROMPT] * 3, [greedy(), greedy(stop=stop), greedy(stop=["never"])])
    first, second, third = (o.outputs[0] for o in outputs)
    assert first.token_ids == third.token_ids == free.outputs[0].token_ids
    assert first.text == third.text == free.outputs[0].text
    assert third.finish_reason == "length"
    assert second.finish_reason == "stop"
    assert len(second.token_ids) < 16


def test_logprobs_match_the_tokens(smollm2_llm):
    (output,) = smollm2_llm.generate(PROMPT, greedy(stop=".", logprobs=1))
    completion = output.outputs[0]
    assert completion.stop_reason == "."
    assert [next(iter(row)) for row in completion.logprobs] == completion.token_ids


def test_an_end_id_keeps_its_reason(smollm2_llm):
    messages = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    params = SamplingParams(temperature=0.0, max_tokens=40, stop=["<|im_end|>", "xyz"])
    (output,) = smollm2_llm.chat(messages, params)
    assert output.outputs[0].text == "The capital of France is Paris."
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", None)


def test_without_a_tokenizer_stop_strings_are_refused(smollm2_llm):
    tokenizer, smollm2_llm.tokenizer = smollm2_llm.tokenizer, None
    try:
        with pytest.raises(AdmissionError, match="stop_token_ids"):
            smollm2_llm.generate([[504]], greedy(stop="x"))
    finally:
        smollm2_llm.tokenizer = tokenizer
    assert not smollm2_llm.scheduler.has_work
