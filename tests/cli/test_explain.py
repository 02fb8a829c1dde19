"""`jaxrunner explain`: the rules that were asked, what reads each field, and what is refused."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from jaxrunner.cli import app
from jaxrunner.selection import explain
from tests.conftest import GOLDEN

TINY = str(GOLDEN / "tiny" / "llama")


@pytest.fixture(autouse=True)
def surroundings(monkeypatch):
    monkeypatch.delenv("JAXRUNNER_RUNNER", raising=False)


def run(*args, model=TINY):
    return CliRunner().invoke(app, ["explain", "--model", str(model), *map(str, args)])


def told(*args, **options):
    (report,) = json.loads(run(*args, "--json", **options).stdout)
    return report


def test_the_way_to_the_default_is_shown_rule_by_rule():
    result = run("--max-num-seqs", 64)
    assert result.exit_code == 0, result.stderr
    assert "1. Is a runner asked for, by `runner` or by JAXRUNNER_RUNNER?" in result.stdout
    assert "=> DeviceRunner" in result.stdout
    assert "runner/device_runner.py: DeviceRunner.__init__" in result.stdout
    assert len(told()["visits"]) == 3
    assert told()["fields"]["prefix_caching"] == ["engine/llm.py: LLM.__init__"]


def test_what_only_the_other_runner_reads_is_refused(monkeypatch):
    mine = {"device": "runner/device_runner.py: DeviceRunner", "host": "host_runner/runner.py: HostRunner"}
    for name, place in mine.items():
        assert told("--runner", name)["fields"]["bucket_policy"] == [f"{place}.__init__"]
    monkeypatch.setattr(explain, "option_readers", lambda: {"runner": (), "bucket_policy": (mine["device"],)})
    assert run("--runner", "device", "--bucket-policy", "refuse").exit_code == 0
    result = run("--runner", "host", "--bucket-policy", "refuse")
    assert result.exit_code == 1
    assert "bucket_policy: nothing reads it under jaxrunner with HostRunner" in result.stderr


def test_a_field_that_nothing_reads_is_refused_with_the_nearest_names():
    result = run("--max-num-seq", 3)
    assert result.exit_code == 1
    assert "max_num_seq: nothing reads it under jaxrunner with DeviceRunner; near it: max_num_seqs" in result.stderr
    assert result.stdout == ""


def test_a_value_that_the_engine_would_refuse_is_refused():
    assert "is below max_num_seqs 8" in run("--max-num-batched-tokens", 2).stderr
    assert "runner is 'v2'; use one of" in run("--runner", "v2").stderr
    assert run("--max-num-seqs").exit_code == 2
    assert run("max").exit_code == 2


@pytest.fixture
def hybrid(tmp_path):
    """A model that no runner of this package runs."""
    layers = {"num_attention_heads": 8, "layer_types": ["linear_attention", "full_attention"]}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3NextForCausalLM"], **layers}))
    return tmp_path


def test_a_runner_that_cannot_be_built_is_an_error_behind_the_way_to_it(monkeypatch, hybrid):
    assert run("--runner", "host").exit_code == 0
    result = run("--runner", "host", model=hybrid)
    assert result.exit_code == 1
    assert "=> HostRunner" in result.stdout
    assert "error: HostRunner does not support recurrent layers" in result.stdout
    monkeypatch.setenv("JAXRUNNER_RUNNER", "host")
    assert told()["why"] == "asked for by JAXRUNNER_RUNNER=host"


def test_variables_that_nothing_reads_are_named(monkeypatch):
    monkeypatch.setenv("JAXRUNNER_RUNER", "host")
    assert "set, but read by nothing: JAXRUNNER_RUNER" in run().stdout.replace("JAXRUNNER_CI_TIMED, ", "")


def test_a_model_that_cannot_be_run_is_an_error_and_vllms_choice_is_still_shown(hybrid):
    report = told(model=hybrid)
    assert [w in report["errors"][i] for i, w in enumerate(("recurrent layers", "Qwen3NextForCausalLM"))] == [True] * 2
    result = run("--policy", "vllm-0.28", "--policy", "vllm-0.33", model=hybrid)
    assert result.exit_code == 0, result.stderr
    assert "=> V1, of which vLLM says nothing" in result.stdout
    assert "hybrid, and not on the allow-list" in result.stdout
    assert "=> V2\n" in result.stdout


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        ("vllm-0.33", ("--is-moe", "true"), "is_moe: nothing reads it under vllm-0.33 with V2"),
        ("vllm-0.28", ("--use-xpress", "true"), "use_xpress: nothing reads it"),
        ("vllm-0.28", ("--cudagraph-metrics", "true"), "V2 of vllm-0.28 accepts it, but does not read it"),
        ("vllm-0.28", ("--is-moe", "true", "--rejection-sample-method", "block"), "goes on as standard"),
        ("vllm-0.33", ("--enable-layerwise-nvtx-tracing", "true"), "registers no hooks"),
        ("vllm-0.28", ("--spec-logprob-token-ids", "true"), "max_num_logprobs alone"),
        ("vllm-0.28", ("--use-cascade-attention", "true"), "common prefix is always 0"),
        ("vllm-0.33", ("--use-cascade-attention", "true", "--override", "host"), "was removed"),
        ("vllm-0.28", ("--memory-profiler-estimate-cudagraphs", "true"), "its estimate is 0"),
        ("vllm-0.28", ("--cudagraph-num-of-warmups", 2), "warms up once"),
        ("vllm-0.33", ("--draft-max-model-len", 64), "takes the target's"),
        ("vllm-0.28", ("--kv-connector-uniform-layout", "true"), "not done yet"),
        ("vllm-0.28", ("--enable-lora", 1), "enable_lora is 1; it must be a bool"),
        ("vllm-0.28", ("--override", "v2"), "override is 'v2'; use one of ('device', 'host')"),
        ("vllm-0.29", (), "no policy is called 'vllm-0.29'"),
    ],
)
def test_fields_that_vllm_accepts_and_ignores_are_refused(policy, options, message):
    result = run("--policy", policy, *options)
    assert result.exit_code == 1
    assert message in result.stderr
    assert result.stdout == ""


def test_what_the_other_runner_of_vllm_reads_is_taken_there():
    v1 = told("--policy", "vllm-0.28", "--override", "host", "--cudagraph-metrics", "true")
    assert v1["fields"]["cudagraph_metrics"] == ["vLLM's V1"]
    v2 = told("--policy", "vllm-0.28", "--rejection-sample-method", "block")
    assert v2["fields"]["rejection_sample_method"] == ["vLLM's V2"]


def test_a_field_with_an_effect_elsewhere_is_noted():
    report = told("--policy", "vllm-0.28", "--disable-padded-drafter-batch", "true")
    assert report["async_scheduling"]["enabled"] is False
    assert "still turns async scheduling off" in report["notes"][0]


def test_functions_of_the_users_own_are_options_of_both_meanings():
    """For vLLM they are names that close a gate; here they are functions, which a command line cannot give."""
    fields = told()["fields"]
    assert "engine/llm.py: LLM._request" in fields["logits_processors"]  # through a property of the configuration
    assert fields["logprobs_mode"] == fields["nan_check"]
    assert "a Sampler is a function, not 'my.sampler'" in run("--sampler", "my.sampler").stderr
    assert "custom logits processors" in told("--policy", "vllm-0.28", "--logits-processors", "my.P")["why"]
