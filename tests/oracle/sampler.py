"""What the sampler does to one row of logits, in plain NumPy and Python: constraints, filters, the set that is left.

Written from the definitions; shares no code with the package. A request is a dictionary of vLLM's parameter names;
what is left out asks for nothing.
"""

from __future__ import annotations

import collections
import math

import numpy as np

NEVER = -math.inf


def constrained(
    logits: np.ndarray, request: dict, tokens: list[int], prompt_len: int, *, stop_ids: list[int], marks: dict
) -> np.ndarray:
    """f64[V] before the temperature. tokens: all so far. marks: ids of thinking: start, end, forced_end."""
    row = np.array(logits, np.float64)
    output = tokens[prompt_len:]
    seen, times = set(tokens), collections.Counter(output)
    for token in range(len(row)):
        value = row[token]
        if request.get("allowed_token_ids") and token not in request["allowed_token_ids"]:
            value = NEVER
        value += request.get("logit_bias", {}).get(token, 0.0)
        if len(output) < request.get("min_tokens", 0) and token in stop_ids:
            value = NEVER
        row[token] = penalised(value, request, token in seen, times[token])
    for word in request.get("bad_words_token_ids", []):
        *before, last = word
        if len(before) <= len(output) and output[len(output) - len(before) :] == before:
            row[last] = NEVER
    forced = forced_id(tokens, request.get("thinking_token_budget"), **marks)
    if forced is not None:
        row[forced] = 1e9
    return row


def penalised(value: float, request: dict, is_seen: bool, times: int) -> float:
    """times: occurrences in the output. is_seen: in the prompt or the output."""
    repetition = request.get("repetition_penalty", 1.0)
    if is_seen:
        value = value / repetition if value > 0 else value * repetition
    value -= request.get("frequency_penalty", 0.0) * times
    return value - (request.get("presence_penalty", 0.0) if times else 0.0)


def forced_id(tokens: list[int], budget: int | None, start, end, forced_end) -> int | None:
    """The id that ends the thinking, None if there is nothing to end."""
    if budget is None or budget < 0:
        return None
    begun, ended = last_place(tokens, list(start)), last_place(tokens, list(end))
    if begun is None or (ended is not None and ended >= begun):
        return None
    if len(tokens) - (begun + len(start)) < budget:
        return None
    for length in range(len(forced_end) - 1, -1, -1):
        if tokens[len(tokens) - length :] == list(forced_end[:length]):
            return forced_end[length]
    raise AssertionError("the empty prefix ends every text")


def last_place(tokens: list[int], part: list[int]) -> int | None:
    places = [i for i in range(len(tokens) - len(part) + 1) if tokens[i : i + len(part)] == part]
    return places[-1] if places else None


def kept(row: np.ndarray, request: dict, *, slack: float = 0.0) -> set[int]:
    """Ids with a finite probability after temperature, min_p, top_k and top_p. slack: added to the mass of top_p."""
    alive = [t for t in range(len(row)) if row[t] > NEVER]
    temperature = request.get("temperature", 1.0)
    if temperature == 0 or not alive:
        return set(alive)
    best = max(row[t] for t in alive)
    order = sorted(alive, key=lambda t: (-row[t], t))
    weight = {t: math.exp((row[t] - best) / temperature) for t in order}
    order = [t for t in order if weight[t] >= request.get("min_p", 0.0)]
    k = request.get("top_k", 0)
    order = order[:k] if 0 < k < len(row) else order
    total, mass, chosen = sum(weight[t] for t in order), 0.0, []
    for token in order:
        if chosen and mass >= (request.get("top_p", 1.0) + slack) * total:
            break
        chosen.append(token)
        mass += weight[token]
    return set(chosen)
