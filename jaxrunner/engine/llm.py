"""`LLM`: prompts in, text out."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from jaxrunner.compile.ladder import Ladder
from jaxrunner.contract import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from jaxrunner.device_memory import free_device_bytes
from jaxrunner.engine.bad_words import bad_words_token_ids
from jaxrunner.engine.grammar import Grammar, fill_masks
from jaxrunner.engine.grammar_compiler import GrammarCompiler
from jaxrunner.engine.logprobs import listed_logprobs, token_logprobs
from jaxrunner.engine.memory import blocks_that_fit
from jaxrunner.engine.outputs import CompletionOutput, RequestOutput
from jaxrunner.engine.request import Request
from jaxrunner.engine.scheduler import Frame, Scheduler
from jaxrunner.engine.sizes import runner_config
from jaxrunner.engine.stop_strings import StopStrings
from jaxrunner.errors import AdmissionError
from jaxrunner.models.loading import load
from jaxrunner.models.stream_decoder import StreamDecoder
from jaxrunner.runner.device_runner import default_ladder
from jaxrunner.runner.output import AsyncOutput
from jaxrunner.sampling.packed_bits import num_words
from jaxrunner.sampling_params import SamplingParams
from jaxrunner.selection.build import build_runner
from jaxrunner.state.records import check_token_ids, derived_seed
from jaxrunner.state.reports import check_reports
from jaxrunner.state.request_arrays import check_extra_args
from jaxrunner.state.request_lists import check_lists

Prompt = str | Sequence[int] | Mapping[str, Any]


class LLM:
    """An engine over one model.

    model: a directory, a .gguf file, a hub id, or None for the embedded default model. dtype: of weights and
    activations. The other options size the runner, see `RunnerConfig`; what is left out is chosen for the model and
    the device (`jaxrunner.engine.sizes`): on a GPU the KV cache takes what is free (`jaxrunner.engine.memory`).
    kv_bytes: memory of the KV cache in place of num_blocks. kv_cache_dtype: "fp8" stores it in float8_e4m3fn.
    warm_up: make the executables of the whole ladder now instead of each at its first use; "background" begins now and
    serves meanwhile, in larger buckets where the right one is not ready. seed: requests without a seed of
    their own get one derived from it and their number. prefix_caching: reuse the KV of equal prefixes.
    async_scheduling: plan and launch each step before the tokens of the one before have arrived.
    ladder: buckets of your own, e.g. fitted to a trace (`jaxrunner.ladder`); AdmissionError if the engine could outgrow
    them. runner: "device" or "host"; None leaves it to JAXRUNNER_RUNNER and then to the policy. Which one was built,
    and why, is logged; `jaxrunner explain` shows the way to it.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        dtype: str = "float32",
        warm_up: bool | Literal["background"] = False,
        seed: int = 0,
        prefix_caching: bool = True,
        async_scheduling: bool = True,
        ladder: Ladder | None = None,
        **options: Any,
    ):
        if warm_up not in (False, True, "background"):
            raise AdmissionError(f"warm_up is {warm_up!r}; it is True, False or 'background'")
        self.model, weights, self.tokenizer = load(model, dtype=dtype)
        config = runner_config(self.model, async_scheduling=async_scheduling, **options)
        free = free_device_bytes() if not {"num_blocks", "kv_bytes"} & set(options) else None
        ladder = ladder or default_ladder(self.model, config)
        sizes = {"max_num_seqs": config.max_num_seqs, "max_num_batched_tokens": config.max_num_batched_tokens}
        ladder.check_holds(**sizes)
        if free is not None:
            config = dataclasses.replace(config, num_blocks=blocks_that_fit(self.model, weights, config, ladder, free))
        self.runner = build_runner(self.model, weights, config, ladder=ladder, seed=seed)
        self.scheduler = Scheduler(
            config, len(self.runner.groups), prefix_caching=prefix_caching, max_stop_ids=config.list_sizes.stop_ids
        )
        self._seed = seed
        self._ids = itertools.count()
        self._in_flight: deque[tuple[Frame, ModelRunnerOutput | AsyncOutput]] = deque()
        self._watched: list[Request] = []  # requests with stop strings
        self._grammars: GrammarCompiler | None = None
        if warm_up == "background":
            self.runner.warm_up(background=True)
        elif warm_up:
            self.runner.warm_up(progress=True)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt; outputs in the order of the prompts.

        A prompt is text, a list of token ids, or `{"prompt_token_ids": [...]}` / `{"prompt": "..."}`. All prompts are
        checked before any is run. Raises AdmissionError naming the prompt that cannot be run.
        """
        requests = self._requests(_as_list(prompts), sampling_params)
        try:
            for request in requests:
                self.scheduler.add(request)
            while any(r.finish_reason is None for r in requests):
                self.step()
        except BaseException:
            for request in requests:
                self.scheduler.abort(request.request_id)
            raise
        finally:
            self._drain()
        return [self._output(r) for r in requests]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Complete one prompt, yielding after every token; `outputs[0].text` grows by whole characters.

        Leaving the loop early aborts the request.
        """
        (request,) = self._requests([prompt], sampling_params)
        self.scheduler.add(request)
        decoder = StreamDecoder(self.tokenizer) if self.tokenizer else None
        text, pushed = "", 0
        try:
            while request.finish_reason is None:
                self.step()
                self.scheduler.sync(request)
                fresh = request.output_token_ids[pushed:]
                pushed += len(fresh)
                if request.stops is not None:
                    text = request.stops.visible() if request.finish_reason is None else request.stops.text
                elif decoder is not None:
                    text += decoder.push(fresh) + (decoder.flush() if request.finish_reason else "")
                if fresh or request.error:
                    yield self._output(request, text)
        finally:
            self.scheduler.abort(request.request_id)
            self._drain()

    def chat(
        self, messages: Sequence[Mapping[str, str]], sampling_params: SamplingParams | None = None
    ) -> list[RequestOutput]:
        """Complete one conversation, written out by the model's chat template."""
        return self.generate([self.chat_prompt(messages)], sampling_params)

    def chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The token ids of a conversation. Raises AdmissionError if the model has no chat template.

        The template writes the special tokens itself, so encoding adds none.
        """
        if self.tokenizer is None or not self.tokenizer.chat_template:
            raise AdmissionError("this model has no chat template; send a plain prompt")
        text = self.tokenizer.apply_chat_template(list(messages))
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def step(self) -> list[Request]:
        """One engine step: plan and launch the next one, then take the tokens of the oldest in flight if it is time
        to. Returns the requests that ended.

        While executables are still made nothing is launched ahead: it might wait for its own, and these tokens with it.
        """
        plan, frame = self.scheduler.schedule()
        says_something = plan.total_num_scheduled_tokens or plan.finished_req_ids or plan.preempted_req_ids
        ended: list[Request] = []
        if says_something and self.runner.execute_model(plan) is None:
            ended += self._sample(plan, frame)
        ahead = self.runner.config.async_scheduling and not self.runner.table.warming_up
        while self._in_flight and (len(self._in_flight) > ahead or not plan.total_num_scheduled_tokens):
            ended += self._take_oldest()
        return ended

    def _sample(self, plan: SchedulerOutput, frame: Frame) -> list[Request]:
        """Complete a step that was launched; returns the requests that ended meanwhile.

        The masks of grammars follow all earlier tokens. These arrive while the step's forward pass runs, and masks are
        filled in the same time: the device waits for neither.
        """
        if not plan.has_structured_output_requests:
            self._in_flight.append((frame, self.runner.sample_tokens()))
            return []
        ended: list[Request] = []
        try:
            while plan.pending_structured_output_tokens and self._in_flight:
                ended += self._take_oldest()
        finally:  # also when the wait is interrupted: a step that was launched must be completed
            requests = self.scheduler.structured(frame)
            grammars = [None if request is None else request.grammar for _, request in requests]
            masks = fill_masks(grammars, num_words(self.model.vocab_size)).view(np.int32)
            grammar_output = GrammarOutput([req_id for req_id, _ in requests], masks)
            self._in_flight.append((frame, self.runner.sample_tokens(grammar_output)))
        return ended + self._follow_grammars(frame)

    def _take_oldest(self) -> list[Request]:
        """Take the tokens of the oldest step in flight; returns the requests that ended with them."""
        frame, output = self._in_flight.popleft()
        result = output.get_output() if isinstance(output, AsyncOutput) else output
        self._take_reports(frame, result)
        ended = self._fail(frame, result) + self.scheduler.update(frame, result) + self._stop_by_text()
        return ended + self._follow_grammars(frame)

    def _take_reports(self, frame: Frame, output: ModelRunnerOutput) -> None:
        """Log-probabilities and sampling masks of the requests that ask for some."""
        self._take_prompt_reports(frame, output)
        if output.logprobs is None and output.sampling_masks is None:
            return
        for row, (req_id, ids) in enumerate(zip(output.req_ids, output.sampled_token_ids, strict=True)):
            request = self.scheduler.owner(frame, req_id)
            if not ids or request is None:
                continue
            if request.logprobs is not None and output.logprobs is not None:
                count, num_listed = request.params.logprobs or 0, len(request.params.logprob_token_ids or ())
                request.logprobs.append(token_logprobs(output.logprobs, row, count, self.tokenizer, num_listed))
            if request.sampling_mask is not None and output.sampling_masks is not None:
                request.sampling_mask.append(output.sampling_masks.of_request(row).tolist())

    def _take_prompt_reports(self, frame: Frame, output: ModelRunnerOutput) -> None:
        """Log-probabilities of the prompts that are complete with this step."""
        for req_id, lists in output.prompt_logprobs_dict.items():
            request = self.scheduler.owner(frame, req_id)
            if request is not None and request.prompt_logprobs is not None:
                count = request.params.prompt_logprobs or 0
                rows = range(len(lists.sampled_token_ranks))
                request.prompt_logprobs[1:] = [token_logprobs(lists, row, count, self.tokenizer) for row in rows]
        for req_id, values in output.prompt_token_id_logprobs_dict.items():
            request = self.scheduler.owner(frame, req_id)
            if request is not None and request.prompt_token_id_logprobs is not None:
                ids = request.params.prompt_logprob_token_ids or ()
                request.prompt_token_id_logprobs[1:] = listed_logprobs(values, ids)

    def _fail(self, frame: Frame, output: ModelRunnerOutput) -> list[Request]:
        """End the requests for which nothing could be sampled; the others go on."""
        failed = []
        for req_id, error in output.sampling_errors.items():
            request = self.scheduler.owner(frame, req_id)
            if request is not None:
                self.scheduler.abort(req_id)
                request.finish_reason, request.error = "error", error
                failed.append(request)
        return failed

    def _follow_grammars(self, frame: Frame) -> list[Request]:
        """Move the grammars of a step's requests on by the tokens that have arrived; returns those that end by it."""
        ended = []
        for req_id, request in self.scheduler.structured(frame):
            if request is None or request.grammar is None:
                continue
            self.scheduler.sync(request)
            request.grammar.advance(request.output_token_ids)
            if request.grammar.error is not None or request.grammar.is_over:
                self.scheduler.abort(req_id)
                request.finish_reason = "stop"
                if request.grammar.error is not None:
                    request.finish_reason, request.error = "error", f"request {req_id!r}: {request.grammar.error}"
                ended.append(request)
        return ended + (self._stop_by_text() if ended else [])

    def _stop_by_text(self) -> list[Request]:
        """Look for stop strings in the text that has arrived; returns the requests that were running until then."""
        ended, watched = [], self._watched
        for request in watched:
            assert request.stops is not None
            self.scheduler.sync(request)
            found = request.stops.update(request.output_token_ids, search=request.finish_reason != "stop")
            if found is not None:
                if request.finish_reason is None:
                    self.scheduler.abort(request.request_id)
                    ended.append(request)
                request.finish_reason, request.stop_reason = "stop", found
            if request.finish_reason is not None:
                request.stops.close()
        self._watched = [request for request in watched if request.finish_reason is None]
        return ended

    def set_weights(self, weights: Any) -> None:
        """Go on with other weights of the same shapes; cached prefixes are forgotten, nothing compiles.

        Raises AdmissionError while requests are running: their KV belongs to the old weights.
        """
        if self.scheduler.has_unfinished:
            raise AdmissionError("weights cannot change while requests run; finish or abort them first")
        self.runner.weights = weights
        self.scheduler.weights_changed()

    def _drain(self) -> None:
        """When nothing is left to run: drop what is still in flight, release what has finished, look for leaks."""
        if self.scheduler.has_unfinished:
            return
        self._in_flight.clear()
        self._watched.clear()
        if self.scheduler.has_work:
            self.step()
        self.scheduler.check_idle()

    def _requests(self, prompts: Sequence[Prompt], params: Any) -> list[Request]:
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(prompts)
        if len(each) != len(prompts):
            raise AdmissionError(f"{len(prompts)} prompts but {len(each)} sampling parameters")
        return [self._request(prompt, p) for prompt, p in zip(prompts, each, strict=True)]

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        if isinstance(prompt, Mapping):
            if unknown := set(prompt) - {"prompt", "prompt_token_ids"}:
                raise AdmissionError(f"a prompt has no field {sorted(unknown)}; use prompt or prompt_token_ids")
            return self._request(prompt.get("prompt_token_ids", prompt.get("prompt")), params)
        text = prompt if isinstance(prompt, str) else None
        ids = check_token_ids(self._encode(prompt), self.model.vocab_size).tolist()
        eos, config = self.model.eos_token_ids, self.runner.config
        params = self._with_bad_words(params)
        has_thinking = config.thinking is not None
        vocab_size = self.model.vocab_size
        check_lists(params, eos, vocab_size=vocab_size, sizes=config.list_sizes, has_thinking=has_thinking)
        check_reports(params, config.reports)
        check_extra_args(params, config.custom.declared)
        number = next(self._ids)
        seed = derived_seed(self._seed, number)
        request = Request(f"req-{number}", ids, params, eos, text, seed=seed)
        asks_any = params.logprobs is not None or params.logprob_token_ids is not None
        request.logprobs = [] if asks_any else None
        request.prompt_logprobs = None if params.prompt_logprobs is None else [None]
        request.prompt_token_id_logprobs = None if params.prompt_logprob_token_ids is None else [None]
        request.sampling_mask = [] if params.return_sampling_mask else None
        request.grammar = self.grammar(params)
        if params.stop_strings:
            request.stops = self._stop_strings(params)
            self._watched.append(request)
        return request

    def _with_bad_words(self, params: SamplingParams) -> SamplingParams:
        """The parameters with the ids of their bad words."""
        if not params.bad_words:
            return params
        if self.tokenizer is None:
            raise AdmissionError("this model has no tokenizer, so bad_words mean nothing; use bad_words_token_ids")
        given = params.bad_words_token_ids or ()
        words = bad_words_token_ids(self.tokenizer, params.bad_words)
        return dataclasses.replace(params, bad_words_token_ids=[*given, *words])

    def grammar(self, params: SamplingParams) -> Grammar | None:
        """The grammar of params.structured_outputs before the first token, None if there is none. Raises AdmissionError
        for one that cannot be followed.
        """
        if params.structured_outputs is None:
            return None
        if self.tokenizer is None:
            raise AdmissionError("this model has no tokenizer, so structured_outputs mean nothing; use a mask by hand")
        if self._grammars is None or self._grammars.tokenizer is not self.tokenizer:
            self._grammars = GrammarCompiler(self.tokenizer, self.model.vocab_size, self.model.eos_token_ids)
        return self._grammars.start(params.structured_outputs, ignore_eos=params.ignore_eos)

    def _stop_strings(self, params: SamplingParams) -> StopStrings:
        if self.tokenizer is None:
            raise AdmissionError("this model has no tokenizer, so stop strings cannot be found; use stop_token_ids")
        include, min_tokens = params.include_stop_str_in_output, params.min_tokens
        return StopStrings(self.tokenizer, params.stop_strings, include=include, min_tokens=min_tokens)

    def _encode(self, prompt: str | Sequence[int]) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            raise AdmissionError("this model has no tokenizer; send token ids")
        return self.tokenizer.encode(prompt).ids

    def _output(self, request: Request, text: str | None = None) -> RequestOutput:
        ids = list(request.output_token_ids)
        if text is None and request.stops is not None:
            text = request.stops.text
        elif text is None:
            text = self.tokenizer.decode(ids) if self.tokenizer else ""
        completion = CompletionOutput(0, text or "", ids, request.finish_reason, request.stop_reason)
        if request.logprobs is not None:
            completion.logprobs = list(request.logprobs)
            chosen = zip(request.logprobs, ids, strict=True)
            completion.cumulative_logprob = math.fsum(entry[token_id].logprob for entry, token_id in chosen)
        if request.sampling_mask is not None:
            completion.sampling_mask = list(request.sampling_mask)
        completion.error = request.error
        finished = request.finish_reason is not None
        output = RequestOutput(request.request_id, request.prompt, request.prompt_token_ids, [completion], finished)
        if request.prompt_logprobs is not None:
            output.prompt_logprobs = list(request.prompt_logprobs)
        if request.prompt_token_id_logprobs is not None:
            output.prompt_token_id_logprobs = list(request.prompt_token_id_logprobs)
        return output


def _as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    is_ids = len(prompts) > 0 and not isinstance(prompts[0], str | Sequence | Mapping)
    return [prompts] if is_ids else prompts  # type: ignore[return-value, list-item]
