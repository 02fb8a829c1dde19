"""What a configuration means for a `HostRunner`: how large its rows are, and what the device holds at the start."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jaxrunner.compile.ladder import Ladder
from jaxrunner.host_runner.device_carry import DeviceCarry
from jaxrunner.host_runner.input_arrays import HostSizes
from jaxrunner.host_runner.row_fields import RowBank
from jaxrunner.models.model import Model
from jaxrunner.runner.config import RunnerConfig
from jaxrunner.state.fields import SAMPLING_FIELDS
from jaxrunner.state.request_arrays import empty_extras
from jaxrunner.state.runner_state import check_sizes, default_groups, init_kv_cache


def num_rows(config: RunnerConfig, ladder: Ladder) -> int:
    """Rows that hold every request and every row of the largest bucket."""
    return max(config.max_num_seqs, ladder.max_num_reqs)


def host_sizes(model: Model, config: RunnerConfig) -> HostSizes:
    """Raises AdmissionError for sizes that cannot work."""
    per_kv_block = config.blocks_per_kv_block
    check_sizes(model, config.max_num_seqs, config.max_model_len, config.kernel_block, per_kv_block)
    groups = default_groups(model, block_size=config.kernel_block, blocks_per_kv_block=per_kv_block)
    declared = config.custom.declared
    return HostSizes(groups, config.max_model_len, config.list_sizes, config.thinking, config.reports, declared)


def empty_carry(model: Model, config: RunnerConfig, count: int) -> DeviceCarry:
    """What the device holds at the start. count: rows."""
    sizes = host_sizes(model, config)
    num_blocks = config.num_blocks * config.blocks_per_kv_block
    options: dict[str, Any] = dict(kv_cache_dtype=config.kv_cache_dtype, kv_scales=config.kv_scales)
    kv = init_kv_cache(model, sizes.groups, num_blocks, **options)
    outcome = jnp.zeros((count, 2), jnp.int32)
    return DeviceCarry(kv=kv, outcome=outcome, extras=empty_extras(sizes.custom, count), sizes=sizes)


def row_bank(sizes: HostSizes, count: int) -> RowBank:
    """Empty rows of these sizes."""
    columns = {
        "max_model_len": sizes.max_model_len,
        "num_groups": len(sizes.groups),
        "table_width": sum(sizes.widths),
        "sampling_width": len(SAMPLING_FIELDS),
    }
    return RowBank(count, columns)
