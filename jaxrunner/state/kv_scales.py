"""Scales of a float8 KV cache: one for the keys and one for the values of each layer.

They mean what vLLM's `k_scale` and `v_scale` do: what is stored is value / scale, kept within the range of the type,
and what is used is stored * scale. They are arrays of the state, so other scales compile nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner.errors import AdmissionError
from jaxrunner.state.block_tables import KVGroup
from jaxrunner.state.kv_dtype import FLOAT8_BYTES

if TYPE_CHECKING:
    from jaxrunner.state.runner_state import RunnerState

LEAST, MOST = 1e-37, 1e37  # a scale and its inverse are normal numbers
Scales = Sequence[Sequence[float]] | np.ndarray | jax.Array
"""[layers of the model, 2]: the scale of each layer's keys, then of its values."""


def group_scales(kv_scales: Scales | None, num_layers: int, groups: tuple[KVGroup, ...]) -> tuple[jax.Array, ...]:
    """f32[layers of the group, 2] for each KV-cache group; ones for None.

    Raises AdmissionError unless there are two numbers between LEAST and MOST for each layer of the model.
    """
    scales = np.ones((num_layers, 2), np.float32) if kv_scales is None else checked_scales(kv_scales, num_layers)
    return tuple(jnp.asarray(scales[list(group.layers)]) for group in groups)


def checked_scales(kv_scales: Any, num_layers: int) -> np.ndarray:
    """f32[num_layers, 2]. Raises AdmissionError for anything but numbers in range, of that shape."""
    try:
        scales = np.array(kv_scales, np.float32)
    except (TypeError, ValueError):
        raise AdmissionError(f"kv_scales must be numbers of the shape [{num_layers}, 2], not {kv_scales!r}") from None
    if scales.shape != (num_layers, 2):
        raise AdmissionError(f"kv_scales has the shape {list(scales.shape)}; this model needs [{num_layers}, 2]")
    if bad := np.argwhere(~((scales > LEAST) & (scales < MOST))).tolist():
        layer, which = bad[0]
        raise AdmissionError(
            f"kv_scales: the scale of the {('keys', 'values')[which]} of layer {layer} is {scales[layer, which]}; it "
            f"must lie between {LEAST} and {MOST}"
        )
    return scales


def set_kv_scales(state: RunnerState, kv_scales: Scales) -> RunnerState:
    """The state with other scales; whatever its cache holds keeps its bytes, so it then stands for other values.

    Raises AdmissionError for a cache that is not float8 and for scales that cannot be used.
    """
    if not state.kv.scales:
        raise AdmissionError(
            f"a cache of {state.kv.blocks[0].dtype} has no scales; init_state with kv_cache_dtype='fp8'"
        )
    num_layers = sum(len(group.layers) for group in state.tables.groups)
    return state.replace(kv=state.kv.replace(scales=group_scales(kv_scales, num_layers, state.tables.groups)))


def initial_scales(
    dtype: np.dtype, kv_scales: Scales | None, of_checkpoint: Scales, num_layers: int, groups: tuple[KVGroup, ...]
) -> tuple[jax.Array, ...]:
    """The scales of an empty cache: those asked for, else the checkpoint's, else 1; none where it is not float8.

    Raises AdmissionError for scales that cannot be used, or that a cache of another type was to have.
    """
    if dtype != FLOAT8_BYTES:
        if kv_scales is not None:
            raise AdmissionError(
                f"kv_scales are for a float8 cache, and this one is {dtype}; ask for kv_cache_dtype='fp8'"
            )
        return ()
    return group_scales(of_checkpoint or None if kv_scales is None else kv_scales, num_layers, groups)
