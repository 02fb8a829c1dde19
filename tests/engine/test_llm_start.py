"""When an engine makes its executables."""

from __future__ import annotations

import pytest

from jaxrunner import LLM
from jaxrunner.errors import AdmissionError
from tests.conftest import GOLDEN

TINY = str(GOLDEN / "tiny" / "llama")


def test_warm_up_is_in_front_in_the_background_or_not_at_all(monkeypatch):
    asked = []
    monkeypatch.setattr("jaxrunner.runner.device_runner.DeviceRunner.warm_up", lambda self, **how: asked.append(how))
    for how in (False, True, "background"):
        LLM(TINY, max_num_seqs=1, max_model_len=64, warm_up=how)
    assert asked == [{"progress": True}, {"background": True}]
    with pytest.raises(AdmissionError, match="warm_up is 'later'"):
        LLM(TINY, warm_up="later")
