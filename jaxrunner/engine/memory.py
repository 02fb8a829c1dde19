"""How many KV blocks fit: measured free memory of the device, less the largest temporary of a step.

`bytes_limit - bytes_in_use` is what this process may still take, so a device that is not empty gives fewer blocks, and
weights that are already loaded count. The temporary comes from compiling the most expensive programs of the ladder:
the largest ragged first half, and the sampler at its most expensive tier for every request.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jaxrunner.compile.compiler import Compiler
from jaxrunner.compile.entry import Entry
from jaxrunner.compile.executable_cache import ExecutableCache, open_cache
from jaxrunner.compile.ladder import Ladder
from jaxrunner.compile.programs import Program, Programs
from jaxrunner.compile.warm_up import WarmUp
from jaxrunner.errors import CapacityError
from jaxrunner.models.model import Model
from jaxrunner.runner.config import RunnerConfig
from jaxrunner.selection.build import choose_runner
from jaxrunner.selection.registry import runner_class

MARGIN = 0.02
"""Part of the free memory left alone: allocators round up and fragment."""


def largest_temporary(programs: Programs, cache: ExecutableCache | None = None) -> int:
    """Bytes of temporaries and outputs of the most expensive programs, the state itself not counted."""
    ladder = programs.ladder
    tier = ladder.tiers[-1]
    heavy = [
        programs.first(ladder.mixed_bucket(ladder.mixed[-1], tier)),
        Program("finish", size=ladder.finish[-1], tier=tier),
    ]
    made: dict[Program, Entry] = {}
    WarmUp(Compiler(programs, cache=cache), heavy, made).run()
    return max(entry.temp_bytes + entry.output_bytes for entry in made.values())


def blocks_that_fit(model: Model, weights: Any, config: RunnerConfig, ladder: Ladder, free_bytes: int) -> int:
    """Allocator blocks of every KV-cache group, the null block included, that `free_bytes` hold beside everything else.

    weights: arrays or shapes; they are not counted, being on the device already. Raises CapacityError, with the
    numbers, if not even one full sequence fits.
    """
    provisional = dataclasses.replace(config, num_blocks=2)
    runner = runner_class(choose_runner(model, config).runner)
    programs = runner.programs_of(model, weights, provisional, ladder)
    state = programs.state_shapes
    kv_bytes = sum(x.size * x.dtype.itemsize for x in state.kv.blocks)
    per_block = kv_bytes // 2
    rest = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) - kv_bytes + programs.brought_bytes
    temporary = largest_temporary(programs, open_cache(config.executable_cache))
    available = int(free_bytes * (1 - MARGIN)) - rest - temporary
    blocks = available // per_block
    needed = -(-config.max_model_len // config.block_size) + 1
    if blocks < needed:
        raise CapacityError(
            f"{free_bytes / 2**20:.0f} MiB are free; less {temporary / 2**20:.0f} MiB of temporaries and "
            f"{rest / 2**20:.0f} MiB of request state they hold {max(blocks, 0)} KV blocks of "
            f"{per_block / 2**20:.2f} MiB, and one sequence of max_model_len={config.max_model_len} needs {needed}. "
            "Lower max_model_len or max_num_batched_tokens, or free memory on the device."
        )
    most = needed * config.max_num_seqs
    return int(min(blocks, most))
