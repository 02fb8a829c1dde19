"""XLA options: chosen by size, for the executable alone, and only where they were measured."""

from __future__ import annotations

import jax
import pytest

from jaxrunner import Bucket, BucketTable, Ladder, compiler_options
from jaxrunner.compile import options
from jaxrunner.compile.compiler import LoweredProgram
from tests.compile.test_table import programs_of


def test_a_cpu_takes_the_defaults():
    assert compiler_options(Bucket("decode", 64, 64)) == {}


@pytest.mark.parametrize(
    ("bucket", "generated"),
    [
        (Bucket("decode", 1, 1), True),
        (Bucket("decode", 2, 2), False),
        (Bucket("decode", 128, 128), False),
        (Bucket("decode", 256, 256), False),
        (Bucket("mixed", 1, 1), False),
        (Bucket("mixed", 256, 8), False),
    ],
    ids=str,
)
def test_a_gpu_generates_products_only_where_that_was_faster(monkeypatch, bucket, generated):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    given = compiler_options(bucket)
    assert given == ({} if generated else options.LIBRARY_PRODUCTS)
    given["changed"] = True
    assert "changed" not in options.LIBRARY_PRODUCTS


def test_the_users_options_come_last(monkeypatch):
    seen = []
    compiler = "jaxrunner.compile.compiler"
    monkeypatch.setattr(f"{compiler}.compiler_options", lambda bucket: {"xla_a": bucket.num_tokens, "xla_b": 0})
    monkeypatch.setattr(f"{compiler}.other_options", lambda: {"xla_a": 0, "xla_b": 0})
    table = BucketTable(programs_of(Ladder((2,), (4,), (2,), tiers=("greedy",))), compiler_options={"xla_b": 1})

    class Lowered:
        def compile(self, compiler_options):
            seen.append(compiler_options)
            raise StopIteration

    for program in table.programs.all():
        with pytest.raises(StopIteration):
            table.compiler.compile(LoweredProgram(program, Lowered(), 0.0, 0.0))
    assert {o["xla_b"] for o in seen} == {1}
    assert {0, 2, 4} <= {o["xla_a"] for o in seen}
