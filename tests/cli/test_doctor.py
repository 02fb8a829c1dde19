import json

from typer.testing import CliRunner

from jaxrunner.cli import app
from jaxrunner.pallas import compat
from jaxrunner.pallas.implementation import AVAILABLE


def test_json_tells_what_runs_here_and_why_not_the_rest(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXRUNNER_CACHE", str(tmp_path))
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["devices"]
    assert report["backend"] in ("cpu", "gpu")
    assert report["versions"]["jax"]
    assert not report["default_model"]["cached"]
    assert report["default_model"]["path"].startswith(str(tmp_path))
    assert set(report["implementations"]) == set(AVAILABLE)
    for op, entry in report["implementations"].items():
        assert entry["automatic"] in AVAILABLE[op]
        assert entry["unavailable"]["xla"] is None
    assert report["implementations"]["input_prep"]["unavailable"]["mosaic"] == compat.refusal()


def test_the_readable_report_has_every_section():
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    for word in ("Versions", "Devices", "Implementations", "Default model", "jaxlib", "slot_mapping", "host memory"):
        assert word in result.stdout


def test_a_backend_that_cannot_start_is_reported(monkeypatch):
    import jax

    def fail():
        raise RuntimeError("no such platform")

    monkeypatch.setattr(jax, "devices", fail)
    monkeypatch.setattr(jax, "default_backend", fail)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    assert "no such platform" in result.stdout
