"""Compiled executables on disk, so that a second start neither traces nor compiles.

An entry holds machine code and a pickle (`jax.experimental.serialize_executable`), so a file that somebody else wrote
must never be opened as one. The directory belongs to its user alone; each entry is signed (HMAC-SHA256 with a secret
kept beside it), and nothing of it is used before the signature, then the key, have been found right. An entry that is
damaged, stale or foreign is reported and made anew. Nothing here can stop a start: where the cache cannot be used, that
is said once, and programs are compiled as without it.

JAX's own persistent cache was not taken for this: its entries are not signed, are not written atomically, stay as they
are when damaged, belong to settings of the whole process, and leave tracing and lowering to be done at each start.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import json
import logging
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from jaxrunner.compile.cache_key import Key, target_device
from jaxrunner.compile.private_files import open_directory, read_file, secret, write_file
from jaxrunner.models.default_model import cache_directory

ENVIRONMENT = "JAXRUNNER_COMPILATION_CACHE"
SUFFIX = ".executable"
MAGIC = b"jaxrunner executable 1\n"
MAC_BYTES = hashlib.sha256().digest_size
LIMIT_BYTES = 4 << 30
"""What the directory may hold; the entries that were not used for longest go first."""
logger = logging.getLogger("jaxrunner")


class BadEntryError(Exception):
    """Why an entry cannot be used."""


@dataclasses.dataclass(frozen=True)
class CachedFile:
    """An entry as `ExecutableCache.files` found it. problem: why it cannot be used, or None; the rest is known only
    where the signature is right. used: when it was last stored or loaded, seconds since the epoch."""

    path: Path
    num_bytes: int
    used: float
    problem: str | None
    program: str = ""
    parts: dict[str, Any] = dataclasses.field(default_factory=dict)

    def differs(self, environment: dict[str, Any]) -> list[str]:
        """The parts of `environment` (see `cache_key`) that it was not made for."""
        return [name for name, value in environment.items() if self.parts.get(name) != value]


def open_cache(directory: str | Path | None = None) -> ExecutableCache | None:
    """The cache in `directory`; None, with one warning that says why, where it cannot be used.

    directory: by default what the environment variable JAXRUNNER_COMPILATION_CACHE says, else `executables` in the
    package's cache. "off" is none.
    """
    chosen = directory or os.environ.get(ENVIRONMENT) or default_directory()
    if str(chosen) == "off":
        return None
    try:
        return ExecutableCache(Path(chosen))
    except OSError as error:
        logger.warning("no cache of executables: %s", error)
        return None


def default_directory() -> Path:
    return cache_directory() / "executables"


class ExecutableCache:
    """directory: made if it is not there. Raises PermissionError if another user owns it or can enter it, OSError if it
    cannot be made or written."""

    def __init__(self, directory: Path):
        self.directory = open_directory(directory)
        self._secret = secret(self.directory)
        self._writes = True
        self._lock = threading.Lock()

    def holds(self, key: Key) -> bool:
        """Whether there is an entry to try."""
        return self._path(key).is_file()

    def load(self, key: Key) -> tuple[jax.stages.Compiled, dict[str, Any]] | None:
        """The executable of `key` and the facts stored with it, or None: not there, or not to be used (reported)."""
        path = self._path(key)
        try:
            header, payload = self._verified(path)
            if header["program"] != key.program or header["parts"] != key.parts:
                raise BadEntryError("it was made for something else")
            compiled = _from_bytes(payload)
        except FileNotFoundError:
            return None
        except Exception as error:  # XLA has many ways to say that it does not take an executable
            logger.warning("the cached executable of %s is made anew: %s", key.program, error)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return compiled, header["facts"]

    def store(self, key: Key, compiled: jax.stages.Compiled, facts: dict[str, Any]) -> None:
        """Keep an executable. facts: JSON types. One that JAX cannot serialise is left out (one with calls back into
        Python); a directory that cannot be written, because the disk is full, is left alone from then on."""
        if not self._writes:
            return
        try:
            payload = _to_bytes(compiled)
        except Exception as error:
            logger.debug("%s is not kept: %s", key.program, error)
            return
        header = json.dumps({"program": key.program, "parts": key.parts, "facts": facts}).encode()
        body = len(header).to_bytes(4, "big") + header + payload
        try:
            write_file(self._path(key), MAGIC + self._mac(body) + body)
        except OSError as error:
            with self._lock:
                first, self._writes = self._writes, False
            if first:
                logger.warning("executables are no longer kept in %s: %s", self.directory, error)

    def files(self) -> list[CachedFile]:
        """Every entry, verified, the last used first."""
        found = []
        for path in self.directory.glob(f"*{SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):
                stat = path.lstat()
                entry = CachedFile(path, stat.st_size, stat.st_mtime, None)
                try:
                    header, _ = self._verified(path)
                except (BadEntryError, PermissionError) as error:
                    found.append(dataclasses.replace(entry, problem=str(error)))
                else:
                    found.append(dataclasses.replace(entry, program=header["program"], parts=header["parts"]))
        return sorted(found, key=lambda entry: -entry.used)

    def trim(self, keep: int = LIMIT_BYTES) -> int:
        """Remove entries until the rest has at most `keep` bytes, the ones unused for longest first. Returns how many
        were removed."""
        known = []
        for path in self.directory.glob(f"*{SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):
                stat = path.lstat()
                known.append((stat.st_mtime, stat.st_size, path))
        total, removed = sum(size for _, size, _ in known), 0
        for _, size, path in sorted(known):
            if total <= keep:
                break
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
                removed += 1
            total -= size
        return removed

    def _path(self, key: Key) -> Path:
        return self.directory / f"{key.digest[:40]}{SUFFIX}"

    def _mac(self, body: bytes) -> bytes:
        return hmac.digest(self._secret, MAGIC + body, "sha256")

    def _verified(self, path: Path) -> tuple[dict[str, Any], bytes]:
        """(header, payload) of a file whose signature is right."""
        data = read_file(path)
        start = len(MAGIC) + MAC_BYTES
        if not data.startswith(MAGIC) or len(data) < start + 4:
            raise BadEntryError("it is no entry of this version")
        body = data[start:]
        if not hmac.compare_digest(data[len(MAGIC) : start], self._mac(body)):
            raise BadEntryError("its signature is wrong: it is damaged, or was not written here")
        length = int.from_bytes(body[:4], "big")
        return json.loads(body[4 : 4 + length]), body[4 + length :]


def _to_bytes(compiled: jax.stages.Compiled) -> bytes:
    serialized, in_tree, out_tree = serialize_executable.serialize(compiled)
    return pickle.dumps((serialized, _skeleton(in_tree), _skeleton(out_tree)))


def _from_bytes(payload: bytes) -> jax.stages.Compiled:
    """Only for bytes whose signature has been verified: this runs what is in them."""
    if target_device().platform == "gpu":
        import jaxrunner.pallas.compat  # noqa: F401 - Mosaic's import tells XLA where the runtime of its kernels is
    serialized, inputs, outputs = pickle.loads(payload)
    trees = jax.tree.structure(inputs), jax.tree.structure(outputs)
    return serialize_executable.deserialize_and_load(serialized, *trees, execution_devices=[target_device()])


def _skeleton(tree: Any) -> Any:
    """A pytree of this structure with numbers for leaves: structures themselves cannot be pickled."""
    return jax.tree.unflatten(tree, range(tree.num_leaves))
