"""One self-contained HTML page of a study: its tables, and its pictures embedded."""

from __future__ import annotations

import base64
import dataclasses
import importlib.resources
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from jaxrunner.errors import AdmissionError
from jaxrunner.ladder import pictures
from jaxrunner.ladder.replay import COLUMNS
from jaxrunner.ladder.study import FITTED_SHOWN, PAIR_COLUMNS, Study
from jaxrunner.ladder.tables import Column, shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HORIZON_S = 3600.0


@dataclasses.dataclass(frozen=True)
class Picture:
    """title: over it. text: what a reader sees in it. data: its PNG, base64."""

    title: str
    text: str
    data: str


def write_page(study: Study, path: str | Path, *, horizon_s: float = HORIZON_S) -> None:
    """Write the page. horizon_s: how long an engine serves this load, for the number of buckets that pays."""
    Path(path).write_text(page(study, horizon_s=horizon_s), encoding="utf-8")


def page(study: Study, *, horizon_s: float = HORIZON_S) -> str:
    """The page as text. It loads nothing from anywhere. Needs matplotlib (extra `plots`)."""
    source = importlib.resources.files(__package__).joinpath("page.html.j2").read_text("utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    try:
        best = study.best(horizon_s)
    except AdmissionError:  # nothing says what a bucket costs to make
        best = None
    return environment.from_string(source).render(
        study=study,
        best=best,
        horizon_h=horizon_s / 3600,
        comparison=_table(study.comparison.rows(), COLUMNS),
        pairs=_table(study.pair_rows(), PAIR_COLUMNS),
        ladders=_table(_ladder_rows(study), LADDER_COLUMNS),
        costs=[(c.name, _table(c.bucket_rows(), BUCKET_COLUMNS), _facts(c.conditions)) for c in _measured(study)],
        pictures=_pictures(study),
    )


LADDER_COLUMNS = (("ladder", "ladder", "s"), ("decode", "decode or capture sizes", "s"), ("mixed", "ragged", "s"))
BUCKET_COLUMNS = (
    ("name", "measured", "s"),
    ("size", "tokens", "d"),
    ("value", "ms/step", ".2f"),
    ("make_s", "to make, s", ".1f"),
    ("temp_bytes", "temporaries, GiB", "GiB"),
    ("code_bytes", "code, GiB", "GiB"),
)


def _table(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> dict[str, Any]:
    cells = [[shown(row[key], form) for key, _, form in columns] for row in rows]
    return {"headings": [heading for _, heading, _ in columns], "rows": cells}


def _ladder_rows(study: Study) -> list[dict[str, Any]]:
    sizes = [(scheme.name, scheme.sizes()) for scheme in study.schemes]
    fitted = [study.fitted.ladders[count - 2] for count in FITTED_SHOWN]
    sizes += [
        (f"fitted, {n}", {"decode": f.decode, "mixed": f.mixed}) for n, f in zip(FITTED_SHOWN, fitted, strict=True)
    ]
    return [{"ladder": name, **{kind: _brief(s[kind]) for kind in ("decode", "mixed")}} for name, s in sizes]


def _brief(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes)) or "none"


def _measured(study: Study) -> list[Any]:
    return [c for c in (study.costs, study.graph_costs) if c.bucket_rows()]


def _facts(conditions: Mapping[str, Any]) -> str:
    return "; ".join(f"{name}: {value}" for name, value in conditions.items() if isinstance(value, str | int | float))


def _pictures(study: Study) -> list[Picture]:
    drawn = [
        ("The load", "Requests in each step over time, and how often each number ran.", pictures.load(study)),
        (
            "Waste over batch size",
            "What part of a decode of each size would be padding.",
            pictures.waste(study.schemes, study.limits.max_num_seqs),
        ),
        (
            "The frontier",
            "The least that any number of buckets can lose, as fitted on the first half and judged on the second.",
            pictures.frontier(study),
        ),
        ("What is lost, and how steps ran", "Over the second half.", pictures.comparison(study.comparison)),
    ]
    if measured := _measured(study):
        drawn.append(
            (
                "Buckets",
                "Measured, and interpolated between.",
                pictures.bucket_costs([v for c in measured for v in c.variants()]),
            )
        )
    if spans := pictures.timeline_spans(study.costs):
        drawn.append(("One step", "As it was measured beside the buckets.", pictures.timeline(spans)))
    return [Picture(title, text, _png(figure)) for title, text, figure in drawn]


def _png(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return base64.b64encode(buffer.getvalue()).decode()
