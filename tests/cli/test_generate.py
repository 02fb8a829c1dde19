import json
import os
import re

import pytest
from typer.testing import CliRunner

from jaxrunner.cli import app
from tests.conftest import GOLDEN
from tests.engine.byte_tokenizer import with_byte_tokenizer

pytestmark = pytest.mark.usefixtures("kept_executables")
TINY = str(GOLDEN / "tiny" / "llama")
GREEDY = json.loads((GOLDEN / "tiny" / "llama" / "golden.json").read_text())["greedy"]


def run(*args):
    return CliRunner().invoke(app, ["generate", *map(str, args)])


def prompt_ids(index):
    import numpy as np

    with np.load(GOLDEN / "tiny" / "llama" / "golden.npz") as golden:
        return ",".join(map(str, golden[f"input_ids_{index}"].ravel().tolist()))


@pytest.mark.parametrize("index", [0, 1, 2])
def test_json_is_one_object_with_the_golden_ids(index):
    options = ("--max-tokens", 16, "--temperature", 0, "--ignore-eos", "--json")
    result = run("--model", TINY, "--prompt-ids", prompt_ids(index), *options)
    assert result.exit_code == 0, result.stderr
    expected = {"token_ids": GREEDY[index]["ids"], "text": "", "finish_reason": "length"}
    assert json.loads(result.stdout) == expected
    assert "ready: finish[1]/greedy" in result.stderr
    assert "16 new in" in result.stderr


def test_nothing_is_compiled_while_the_text_comes():
    result = run("--model", TINY, "--prompt-ids", ",".join(["7"] * 20), "--max-tokens", 3)
    assert result.exit_code == 0, result.stderr
    assert "on demand" not in result.stderr


def test_ids_are_streamed_where_the_model_has_no_tokenizer():
    result = run("--model", TINY, "--prompt-ids", prompt_ids(0), "--max-tokens", 4, "--ignore-eos")
    assert result.stdout == " ".join(map(str, GREEDY[0]["ids"][:4])) + "\n"


def test_a_trace_holds_every_step_and_leaves_the_output_alone(tmp_path):
    options = ("--model", TINY, "--prompt-ids", "1,2,3", "--max-tokens", 4, "--ignore-eos")
    result = run(*options, "--trace", tmp_path / "trace.json")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == run(*options).stdout
    assert "median microseconds of a step" in result.stderr
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    steps = [e["args"]["executable"] for e in events if e["name"] == "forward"]
    assert steps[0].startswith("begin mixed")
    assert steps[1:] == ["decode[1x1]/greedy"] * 3
    assert f"{len(steps)} steps in" in result.stderr
    refused = run(*options, "--trace", tmp_path / "none" / "trace.json")
    assert refused.exit_code == 1
    assert "cannot be written" in refused.stderr


def test_a_seed_decides_the_draws():
    options = (
        "--model",
        TINY,
        "--prompt-ids",
        "1,2,3",
        "--max-tokens",
        12,
        "--temperature",
        1.5,
        "--ignore-eos",
        "--json",
    )
    first, again, other = (run(*options, "--seed", seed).stdout for seed in (1, 1, 2))
    assert first == again != other


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory):
    return with_byte_tokenizer(tmp_path_factory.mktemp("checkpoint") / "llama")


def test_an_output_fits_a_schema_or_a_regex(byte_model, tmp_path):
    """And nothing is compiled while the text comes: a structured decode has other executables than a plain one."""
    schema = tmp_path / "schema.json"
    schema.write_text(
        '{"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"], '
        '"additionalProperties": false, "x-guidance": {"whitespace_flexible": false}}'
    )
    result = run("aaaa", "--model", byte_model, "--json-schema", schema, "--max-tokens", 9)
    assert result.exit_code == 0, result.stderr
    assert result.stdout in ('{"a":1}\n', '{"a":22}\n')
    assert "on demand" not in result.stderr
    result = run("aaaa", "--model", byte_model, "--regex", "[ab]{3}", "--json")
    assert json.loads(result.stdout)["finish_reason"] == "stop"
    assert re.fullmatch("[ab]{3}", json.loads(result.stdout)["text"])


def test_structures_that_cannot_be(byte_model, tmp_path):
    result = run("a", "--model", byte_model, "--regex", "((")
    assert result.exit_code == 1
    assert "error: structured_outputs.regex cannot be compiled" in result.stderr.splitlines()[-1]
    for options in (("--regex", "a", "--choice", "b"), ("--json-schema", tmp_path / "none.json")):
        assert run("a", "--model", byte_model, *options).exit_code == 2


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("a text", "--prompt-ids", "1,2"),
        ("--prompt-ids", "1,two"),
        ("--prompt-ids", ""),
        ("--prompt-ids", "1,2", "--max-tokens", 0),
        ("--prompt-ids", "1,2", "--temperature", -1),
        ("--no-such-option",),
    ],
    ids=str,
)
def test_usage_errors_exit_with_2(args):
    result = run(*args)
    assert result.exit_code == 2
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--model", "/no/such/model", "--prompt-ids", "1"), "does not exist"),
        (("--model", TINY, "--prompt-ids", "1", "--dtype", "int7"), "int7"),
        (("--model", TINY, "--prompt-ids", "1,9999"), "token id 9999 at position 1"),
        (("--model", TINY, "--prompt-ids", "-1"), "token id -1"),
        (("--model", TINY, "a text"), "no tokenizer; use --prompt-ids"),
        (("--model", TINY, "--prompt-ids", "1,2,3,4", "--max-model-len", 3), "exceeds max_model_len 3"),
        (("--model", TINY, "--prompt-ids", "1", "--max-model-len", 100000), "positions end at 128"),
        (("--model", TINY, "--prompt-ids", "1", "--seed", 2**64), "does not fit 64 bits"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_errors_of_the_package_are_one_line_and_exit_with_1(args, message):
    result = run(*args)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert message in result.stderr
    *log, error = result.stderr.strip().splitlines()
    assert error.startswith("error: ")
    assert all(line.startswith("runner: ") for line in log)
    assert "Traceback" not in result.stderr


def test_help_lists_the_commands_without_importing_jax():
    import subprocess
    import sys

    code = "import sys, jaxrunner.cli; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, check=False).returncode == 0
    text = CliRunner().invoke(app, ["--help"]).stdout
    assert all(name in text for name in ("generate", "score", "doctor"))


@pytest.mark.smollm2
def test_the_default_model_answers_with_its_chat_template():
    result = run("What is the capital of France?", "--max-tokens", 16)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "The capital of France is Paris.\n"


@pytest.mark.smollm2
def test_raw_continues_the_text():
    prompts, golden = (
        {entry["name"]: entry for entry in entries}
        for entries in (
            json.loads((GOLDEN / "smollm2" / "prompts.json").read_text()),
            json.loads((GOLDEN / "smollm2" / "f32.json").read_text())["prompts"],
        )
    )
    result = run(prompts["raw_story"]["text"], "--raw", "--max-tokens", 12, "--ignore-eos", "--json")
    assert json.loads(result.stdout)["token_ids"] == golden["raw_story"]["greedy"][:12]
