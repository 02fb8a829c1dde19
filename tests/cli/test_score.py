import json

import numpy as np
import pytest
from typer.testing import CliRunner

from jaxrunner.cli import app
from tests.conftest import GOLDEN

TINY = GOLDEN / "tiny" / "llama"


def run(*args):
    return CliRunner().invoke(app, ["score", *map(str, args)])


def golden():
    with np.load(TINY / "golden.npz") as file:
        return {i: (file[f"input_ids_{i}"].ravel().tolist(), file[f"logits_{i}"]) for i in range(3)}


def test_logits_of_every_position_are_written(tmp_path):
    expected = golden()
    (tmp_path / "ids.json").write_text(json.dumps([ids for ids, _ in expected.values()]))
    result = run("--model", TINY, "--dtype", "float32", "--ids", tmp_path / "ids.json", "--out", tmp_path / "o.npz")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == ""
    with np.load(tmp_path / "o.npz") as written:
        assert sorted(written.files) == ["logits_0", "logits_1", "logits_2"]
        for i, (_, logits) in expected.items():
            assert written[f"logits_{i}"].dtype == np.float32
            np.testing.assert_allclose(written[f"logits_{i}"], logits.reshape(-1, 256), atol=1e-4, rtol=1e-4)


def test_the_file_has_the_name_that_was_given(tmp_path):
    (tmp_path / "ids.json").write_text("[[1, 2]]")
    result = run("--model", TINY, "--ids", tmp_path / "ids.json", "--out", tmp_path / "logits")
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "logits").is_file()


@pytest.mark.parametrize("text", ["", "{}", "[1, 2]", "[[1], 2]"])
def test_a_file_of_the_wrong_form_is_a_usage_error(tmp_path, text):
    (tmp_path / "ids.json").write_text(text)
    result = run("--model", TINY, "--ids", tmp_path / "ids.json", "--out", tmp_path / "o.npz")
    assert result.exit_code == 2
    assert not (tmp_path / "o.npz").exists()


def test_missing_files_are_usage_errors(tmp_path):
    (tmp_path / "ids.json").write_text("[[1]]")
    assert run("--ids", tmp_path / "none.json", "--out", tmp_path / "o.npz").exit_code == 2
    assert run("--ids", tmp_path / "ids.json", "--out", tmp_path / "none" / "o.npz").exit_code == 2


def test_a_sequence_that_cannot_be_run_is_one_line_and_nothing_is_written(tmp_path):
    (tmp_path / "ids.json").write_text("[[1, 2], []]")
    result = run("--model", TINY, "--ids", tmp_path / "ids.json", "--out", tmp_path / "o.npz")
    assert result.exit_code == 1
    assert "sequence 1 is empty" in result.stderr
    assert not (tmp_path / "o.npz").exists()
