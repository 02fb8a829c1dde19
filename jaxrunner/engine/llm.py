"""`LLM`: prompts in, text out."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxrunner.engine.outputs import CompletionOutput, RequestOutput
from jaxrunner.engine.request import Request
from jaxrunner.engine.scheduler import Scheduler
from jaxrunner.engine.sizes import runner_config
from jaxrunner.errors import AdmissionError
from jaxrunner.models.loading import load
from jaxrunner.models.stream_decoder import StreamDecoder
from jaxrunner.runner.device_runner import DeviceRunner
from jaxrunner.runner.output import AsyncOutput
from jaxrunner.sampling_params import SamplingParams
from jaxrunner.state.records import check_token_ids

Prompt = str | Sequence[int] | Mapping[str, Any]


class LLM:
    """An engine over one model.

    model: a directory, a .gguf file, a hub id, or None for the embedded default model. dtype: of weights and
    activations. The other options size the runner, see `RunnerConfig`; what is left out is chosen for the model and
    the device (`jaxrunner.engine.sizes`). kv_bytes: memory of the KV cache in place of num_blocks.
    warm_up: compile the whole ladder now instead of each bucket at its first use.
    """

    def __init__(
        self, model: str | None = None, *, dtype: str = "float32", warm_up: bool = False, seed: int = 0, **options: Any
    ):
        self.model, weights, self.tokenizer = load(model, dtype=dtype)
        config = runner_config(self.model, **options)
        self.runner = DeviceRunner(self.model, weights, config, seed=seed)
        self.scheduler = Scheduler(config, len(self.runner.groups))
        self._ids = itertools.count()
        if warm_up:
            self.runner.warm_up()

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
                fresh = request.output_token_ids[pushed:]
                pushed += len(fresh)
                if decoder is not None:
                    text += decoder.push(fresh) + (decoder.flush() if request.finish_reason else "")
                if fresh:
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
        """One engine step: schedule, run, take the tokens. Returns the requests that got one."""
        plan = self.scheduler.schedule()
        if self.runner.execute_model(plan) is not None:
            return []
        output = self.runner.sample_tokens()
        return self.scheduler.update(output.get_output() if isinstance(output, AsyncOutput) else output)

    def _drain(self) -> None:
        """When nothing is left to run, let the runner release what has finished."""
        if self.scheduler.has_work and not (self.scheduler.running or self.scheduler.waiting):
            self.step()

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
        check_stop_ids(params, self.model.vocab_size)
        return Request(f"req-{next(self._ids)}", ids, params, self.model.eos_token_ids, text)

    def _encode(self, prompt: str | Sequence[int]) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            raise AdmissionError("this model has no tokenizer; send token ids")
        return self.tokenizer.encode(prompt).ids

    def _output(self, request: Request, text: str | None = None) -> RequestOutput:
        ids = list(request.output_token_ids)
        if text is None:
            text = self.tokenizer.decode(ids) if self.tokenizer else ""
        completion = CompletionOutput(0, text, ids, request.finish_reason, request.stop_reason)
        finished = request.finish_reason is not None
        return RequestOutput(request.request_id, request.prompt, request.prompt_token_ids, [completion], finished)


def check_stop_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raises AdmissionError for a stop id outside the vocabulary."""
    if bad := [t for t in params.stop_token_ids if not 0 <= t < vocab_size]:
        raise AdmissionError(f"stop_token_ids holds {bad[0]}, which is outside the vocabulary 0..{vocab_size - 1}")


def _as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    is_ids = len(prompts) > 0 and not isinstance(prompts[0], str | Sequence | Mapping)
    return [prompts] if is_ids else prompts  # type: ignore[return-value, list-item]
