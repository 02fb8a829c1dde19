"""JAX's persistent compilation cache for the command line: a second start compiles nothing that the first compiled.

A library must not change JAX's configuration behind its user's back, so only the commands call this.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import jax

from jaxrunner.models.default_model import cache_directory

ENVIRONMENT = "JAXRUNNER_COMPILATION_CACHE"
logger = logging.getLogger("jaxrunner")


def use_compilation_cache(directory: str | Path | None = None) -> Path | None:
    """Keep compiled programs in `directory` and return it.

    directory: by default what the environment variable JAXRUNNER_COMPILATION_CACHE says (`off` for none), else `xla` in
    the package's cache. A directory that JAX has been given by its own configuration is left as it is. One that cannot
    be made is reported, and nothing is cached.
    """
    chosen = directory or os.environ.get(ENVIRONMENT) or cache_directory() / "xla"
    if str(chosen) == "off" or jax.config.jax_compilation_cache_dir:
        return None
    path = Path(chosen)
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        logger.warning("no compilation cache: %s", error)
        return None
    jax.config.update("jax_compilation_cache_dir", str(path))
    # JAX keeps only what took a second to compile unless told otherwise; a start has many programs below that.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    return path
