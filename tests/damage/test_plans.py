"""Damaged plans: each is refused before anything changes, and the good request beside it keeps its tokens."""

from __future__ import annotations

import time

import numpy as np

from jaxrunner.errors import AdmissionError, CapacityError
from jaxrunner.state.runner_state import host_view
from tests.conftest import GOLDEN
from tests.damage.plans import damaged_plans
from tests.runner.conftest import runner, shared_table  # noqa: F401
from tests.runner.plans import new, plan, run

SEED, COUNT, MOST_SECONDS = 0, 200, 2.0


def test_damaged_plans_change_nothing(runner):  # noqa: F811
    data = np.load(GOLDEN / "tiny" / "llama" / "golden.npz")
    prompt, greedy = data["input_ids_1"].reshape(-1).tolist(), data["greedy_1"].tolist()
    long = data["input_ids_2"].reshape(-1).tolist()
    so = plan({"good": len(prompt), "long": 8}, [new("good", prompt, [1, 2, 3, 4, 5, 6]), new("long", long, [7, 8])])
    tokens = run(runner, so)["good"]
    wrong = []
    for number, (label, damaged, names) in enumerate(damaged_plans(np.random.default_rng(SEED), COUNT)):
        before = host_view(runner.state.requests.counters)
        started = time.perf_counter()
        try:
            runner.execute_model(damaged)
        except (AdmissionError, CapacityError) as error:
            if not any(name in str(error) for name in names):
                wrong.append(f"{label}: none of {names} is named in: {str(error)[:200]}")
        except Exception as error:
            wrong.append(f"{label}: {type(error).__name__}: {str(error)[:200]}")
        else:
            wrong.append(f"{label}: accepted")
            runner.sample_tokens() if runner._parked else None
        if time.perf_counter() - started > MOST_SECONDS:
            wrong.append(f"{label}: {time.perf_counter() - started:.1f} s")
        if not np.array_equal(before, host_view(runner.state.requests.counters)) or runner.rows.keys() != {
            "good",
            "long",
        }:
            wrong.append(f"{label}: the state changed")
            break
        if number % (COUNT // 15) == 0 and len(tokens) < 16:
            tokens += run(runner, plan({"good": 1}))["good"]
    assert not wrong, f"{len(wrong)} of them:\n" + "\n".join(wrong[:30])
    assert tokens == greedy
    runner.audit()
