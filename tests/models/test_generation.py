import json

import pytest

from jaxrunner.errors import CheckpointError
from jaxrunner.models.generation import eos_token_ids, read_generation_config


def test_k106_an_override_is_merged_key_by_key(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 9, 12], "top_k": 64}))
    merged = read_generation_config(tmp_path, {"temperature": 0.5})
    assert merged == {"eos_token_id": [1, 9, 12], "top_k": 64, "temperature": 0.5}
    assert read_generation_config(tmp_path, {"top_k": 1})["top_k"] == 1
    assert eos_token_ids(merged["eos_token_id"]) == (1, 9, 12)


def test_k107_int_list_and_absent_are_accepted():
    assert eos_token_ids([1, 9], 1) == (1, 9)
    assert eos_token_ids(9, None, [3]) == (3, 9)
    assert eos_token_ids(None, None) == ()
    assert eos_token_ids((7, 0)) == (0, 7)


def test_absent_file_is_empty_and_damaged_file_is_named(tmp_path):
    assert read_generation_config(tmp_path) == {}
    for content in ("{", "[]"):
        (tmp_path / "generation_config.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"generation_config.json"):
            read_generation_config(tmp_path)
