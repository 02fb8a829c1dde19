"""Files that only their owner can have written: a directory of mode 0700, atomic writes, and a secret of its own.

What is read from here may be code, so anything that another user could have put there is refused.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from pathlib import Path

SECRET_NAME = "secret"
SECRET_BYTES = 32
_OTHERS, _OTHERS_WRITE = 0o077, 0o022


def open_directory(path: Path) -> Path:
    """The directory, made with mode 0700 if it is not there. Raises PermissionError if it is another user's or others
    can enter it, OSError if it cannot be made."""
    if not hasattr(os, "geteuid"):
        raise PermissionError("this system does not tell who owns a file")
    path = path.expanduser().resolve()
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{path} is no directory")
    _check_owner(found, str(path))
    if found.st_mode & _OTHERS:
        raise PermissionError(f"others can enter {path}; run `chmod 700 {path}` if only you have written to it")
    return path


def read_file(path: Path) -> bytes:
    """Its bytes. Raises FileNotFoundError, and PermissionError for a link, another user's file, or one that others can
    write."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:  # ELOOP: a link
        raise PermissionError(f"{path.name} cannot be opened as a file of its own: {error.strerror}") from error
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise PermissionError(f"{path.name} is no regular file")
        _check_owner(found, path.name)
        if found.st_mode & _OTHERS_WRITE:
            raise PermissionError(f"others can write {path.name}")
        return file.read()


def _check_owner(found: os.stat_result, name: str) -> None:
    if found.st_uid != os.geteuid():
        raise PermissionError(f"{name} belongs to user {found.st_uid}, not to you")


def write_file(path: Path, data: bytes, *, replace: bool = True) -> None:
    """Write a file of mode 0600 that appears under its name whole or not at all, whoever else writes it at the time.

    replace: False raises FileExistsError where there is one. Raises OSError, and then leaves nothing behind.
    """
    descriptor, temporary = tempfile.mkstemp(prefix=".writing-", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        if replace:
            os.replace(temporary, path)
        else:
            os.link(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def secret(directory: Path) -> bytes:
    """The random bytes that this directory's owner signs with, made at the first call; one that is damaged or could be
    another's is replaced, which makes everything signed with it foreign."""
    path = directory / SECRET_NAME
    with contextlib.suppress(FileNotFoundError, PermissionError):
        if len(found := read_file(path)) == SECRET_BYTES:
            return found
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    with contextlib.suppress(FileExistsError):  # another process was first: its secret holds
        write_file(path, secrets.token_bytes(SECRET_BYTES), replace=False)
    return read_file(path)
