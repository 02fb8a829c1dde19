"""The picture of `benchmarks/two_runners.py`: bars of host time by stage, for each load, size and contender."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxrunner.ladder.pictures import COLORS, new_figure, save

LABELS = {
    "preprocess": "rows and checks",
    "inputs": "input preparation",
    "lookup": "bucket lookup",
    "bookkeeping": "bookkeeping",
    "postprocess": "output",
    "rest": "rest",
    "admit": "call: admissions",
    "forward": "call: step or first half",
    "sample": "call: second half",
}
"""Stage -> what the legend says, from the bottom up."""
STAGE_COLORS = dict(zip(LABELS, (*COLORS[:5], "#dddddd", *COLORS[5:], "#bab0ac"), strict=True))


def draw(rows: list[dict[str, Any]], conditions: dict[str, Any], path: Path) -> None:
    """Void rows are left out. Waiting for the device is not drawn: its time is not the CPU's."""
    bars = [row for row in rows if row.get("stages") and "void" not in row]
    loads = list(dict.fromkeys(row["name"].split("/")[1] for row in bars))
    figure, axes = new_figure(5.2 * max(len(loads), 1) + 1.2, 4.2, max(len(loads), 1))
    for ax, load in zip(axes, loads, strict=False):
        _panel(ax, [row for row in bars if row["name"].split("/")[1] == load])
        ax.set_title(f"{load}: host time of a step, medians")
    if bars:
        axes[-1].legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    figure.suptitle(f"{conditions['device']}, {conditions['processor']}", fontsize=8)
    save(figure, path)


def _panel(ax: Any, rows: list[dict[str, Any]]) -> None:
    sizes = sorted({int(row["name"].split("/")[2][1:]) for row in rows})
    names = list(dict.fromkeys(row["name"].split("/")[3] for row in rows))
    width = 0.8 / len(names)
    for row in rows:
        _, _, size, name = row["name"].split("/")
        x = sizes.index(int(size[1:])) + (names.index(name) - (len(names) - 1) / 2) * width
        base = 0.0
        for stage, color in STAGE_COLORS.items():
            height = row["stages"][stage]
            ax.bar(x, height, width * 0.92, base, color=color, label=LABELS[stage] if row is rows[0] else None)
            base += height
        ax.text(x, base, f" {name}", rotation=90, ha="center", va="bottom", fontsize=7)
    ax.set(xticks=range(len(sizes)), xticklabels=sizes, xlabel="requests", ylabel="microseconds")
    ax.set_ylim(0, 1.3 * max(sum(row["stages"].values()) - row["wait_us"] for row in rows))
