"""All that changes a request's logits before its temperature, in the order of vLLM V2."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from jaxrunner.sampling.allowed_ids import keep_allowed
from jaxrunner.sampling.bad_words import mask_bad_words
from jaxrunner.sampling.custom import CustomRun
from jaxrunner.sampling.history import History
from jaxrunner.sampling.logit_bias import add_bias
from jaxrunner.sampling.min_tokens import mask_stop_ids
from jaxrunner.sampling.penalties import Penalties
from jaxrunner.sampling.thinking import end_thinking
from jaxrunner.state.sampling import SamplingState


def constrain(
    logits: Float32[Array, "B V"],
    params: SamplingState,
    position: Int32[Array, "B"],
    history: History,
    custom: CustomRun | None = None,
) -> tuple[Float32[Array, "B V"], dict[str, jax.Array]]:
    """(logits after every constraint of each row, new values of arrays that the user's processors update).

    What a row does not ask for leaves it bit for bit. params: the rows' parameters in batch order. position: index the
    new token will have in its request. custom: the user's processors.
    """
    raw, penalties = logits, Penalties.of_history(history, position, params, logits.shape[1])
    # Lists come before penalties. They hold few ids, so all are penalised in one pass and those of the lists once more.
    logits = keep_allowed(penalties.apply(raw), raw, penalties, params.list_of("allowed_ids"))
    bias = lax.bitcast_convert_type(params.list_of("bias_values"), jnp.float32)
    logits = add_bias(logits, raw, penalties, params.list_of("bias_ids"), bias)
    logits = mask_stop_ids(logits, params.list_of("stop_ids"), params.min_len, position)
    words, place = params.list_of("bad_word_ids"), params.list_of("bad_word_place")
    logits = mask_bad_words(logits, history, position, words, place)
    logits, updates = custom.process(logits, asked=True) if custom else (logits, {})
    if params.thinking is not None:
        logits = end_thinking(logits, history, position, params.thinking_budget, params.thinking)
    return logits, updates


def has_no_id(logits: Float32[Array, "B V"]) -> Bool[Array, "B"]:
    """Rows in which every id is forbidden. A row with a NaN is damaged, which is another matter."""
    return (logits == -jnp.inf).all(axis=-1)
