"""The sizes of a runner where the user names none."""

from __future__ import annotations

from typing import Any

from jaxrunner.errors import AdmissionError
from jaxrunner.models.model import Model
from jaxrunner.runner.config import RunnerConfig
from jaxrunner.state.kv_dtype import kv_dtype

DEFAULT_MAX_MODEL_LEN = 4096
DEFAULT_MAX_NUM_SEQS = 8
DEFAULT_MAX_NUM_BATCHED_TOKENS = 256
DEFAULT_KV_BYTES = 512 * 2**20


def runner_config(
    model: Model,
    *,
    max_model_len: int | None = None,
    max_num_seqs: int = DEFAULT_MAX_NUM_SEQS,
    max_num_batched_tokens: int | None = None,
    num_blocks: int | None = None,
    kv_bytes: int | None = None,
    block_size: int = 16,
    **options: Any,
) -> RunnerConfig:
    """A `RunnerConfig` for `model`. The cache holds every sequence at full length, but no more than `kv_bytes`
    (512 MiB by default) unless one full sequence needs more. Raises AdmissionError for an unknown option.
    """
    max_model_len = max_model_len or min(model.max_position_embeddings, DEFAULT_MAX_MODEL_LEN)
    if unknown := set(options) - set(RunnerConfig.__dataclass_fields__):
        raise AdmissionError(f"unknown option {sorted(unknown)}; see RunnerConfig")
    if num_blocks is not None and kv_bytes is not None:
        raise AdmissionError("give num_blocks or kv_bytes, not both")
    if num_blocks is None:
        per_sequence = -(-max_model_len // block_size)
        block_bytes = kv_block_bytes(model, block_size, options.get("kv_cache_dtype"))
        fitting = (kv_bytes or DEFAULT_KV_BYTES) // block_bytes
        if kv_bytes is None:
            fitting = max(fitting, per_sequence + 1)
        num_blocks = min(fitting, per_sequence * max_num_seqs + 1)
        if num_blocks < 2:
            raise AdmissionError(f"kv_bytes={kv_bytes} holds no block of {block_bytes} bytes besides the null block")
    return RunnerConfig(
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens or max(DEFAULT_MAX_NUM_BATCHED_TOKENS, max_num_seqs),
        num_blocks=num_blocks,
        block_size=block_size,
        **options,
    )


def kv_block_bytes(model: Model, block_size: int, kv_cache_dtype: str | None = None) -> int:
    """Bytes of one allocator block over all layers, keys and values."""
    item = kv_dtype(kv_cache_dtype, model.dtype).itemsize
    return model.num_layers * 2 * block_size * model.num_kv_heads * model.head_dim * item
