"""Files that only their owner can have written: what is refused, and that a file is there whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from jaxrunner.compile import private_files
from jaxrunner.compile.private_files import open_directory, read_file, secret, write_file


def test_a_new_directory_and_its_files_are_the_users_alone(tmp_path):
    directory = open_directory(tmp_path / "a" / "b")
    write_file(directory / "file", b"1")
    assert directory.stat().st_mode & 0o777 == 0o700
    assert (directory / "file").stat().st_mode & 0o777 == 0o600
    assert read_file(directory / "file") == b"1"


def test_a_directory_that_others_can_enter_is_refused_with_the_way_out(tmp_path):
    tmp_path.chmod(0o755)
    with pytest.raises(PermissionError, match=f"chmod 700 {tmp_path}"):
        open_directory(tmp_path)
    tmp_path.chmod(0o700)
    assert open_directory(tmp_path) == tmp_path


def test_another_users_directory_and_file_are_refused(tmp_path, monkeypatch):
    directory = open_directory(tmp_path / "cache")
    write_file(directory / "file", b"1")
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(PermissionError, match=f"belongs to user {me}"):
        open_directory(directory)
    with pytest.raises(PermissionError, match=f"belongs to user {me}"):
        read_file(directory / "file")


def test_a_file_that_others_can_write_and_a_link_are_refused(tmp_path):
    write_file(tmp_path / "file", b"1")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(PermissionError, match="link cannot be opened"):
        read_file(tmp_path / "link")
    (tmp_path / "file").chmod(0o622)
    with pytest.raises(PermissionError, match="others can write file"):
        read_file(tmp_path / "file")


def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    write_file(tmp_path / "file", b"old")

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(private_files.os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_file(tmp_path / "file", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert read_file(tmp_path / "file") == b"old"


def test_a_secret_is_made_once_and_replaced_when_it_cannot_be_trusted(tmp_path):
    first = secret(tmp_path)
    assert len(first) == 32
    assert secret(tmp_path) == first
    path = tmp_path / private_files.SECRET_NAME
    path.chmod(0o666)
    second = secret(tmp_path)
    assert second != first
    path.write_bytes(b"short")
    assert secret(tmp_path) not in (first, second, b"short")


def test_the_secret_of_the_process_that_was_first_holds(tmp_path, monkeypatch):
    real = write_file

    def late(path: Path, data: bytes, **options):
        real(path, b"f" * 32)
        real(path, data, **options)

    monkeypatch.setattr(private_files, "write_file", late)
    assert secret(tmp_path) == b"f" * 32
