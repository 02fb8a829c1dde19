"""The command line: `jaxrunner generate`, `score`, `check-attention`, `buckets`, `cache`, `ladder`, `explain` and
`doctor`.

JAX is imported when a command runs, not before.
"""

from __future__ import annotations

import typer

from jaxrunner.cli.buckets import buckets
from jaxrunner.cli.cache import cache
from jaxrunner.cli.check_attention import check_attention
from jaxrunner.cli.doctor import doctor
from jaxrunner.cli.explain import EXTRA, explain
from jaxrunner.cli.generate import generate
from jaxrunner.cli.ladder import app as ladder
from jaxrunner.cli.score import score

app = typer.Typer(
    name="jaxrunner",
    help="A GPU model runner in JAX: immutable request state, one compiled step per bucket, Pallas kernels.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
app.command()(generate)
app.command()(score)
app.command()(check_attention)
app.command()(buckets)
app.add_typer(cache)
app.add_typer(ladder)
app.command(context_settings=EXTRA)(explain)
app.command()(doctor)
