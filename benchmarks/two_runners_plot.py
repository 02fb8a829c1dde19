"""The picture of `benchmarks/two_runners.py`: bars of host time by stage, for each load, size and contender."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxrunner.ladder.pictures import COLORS, new_figure, save

STAGES = ("preprocess", "inputs", "lookup", "bookkeeping", "postprocess", "admit", "forward", "sample")
LABELS = {"preprocess": "rows and checks", "inputs": "input preparation", "lookup": "bucket lookup", "rest": "rest"}
STAGE_COLORS = dict(zip((*STAGES, "rest"), (*COLORS, "#bab0ac", "#dddddd"), strict=True))


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
        stages = row["stages"]
        heights = {stage: stages[stage] for stage in STAGES}
        heights["rest"] = max(row["value"] - row["wait_us"] - sum(heights.values()), 0.0)
        base = 0.0
        for stage, height in heights.items():
            first = row is rows[0]
            label = LABELS.get(stage, stage) if first else None
            ax.bar(x, height, width * 0.92, base, color=STAGE_COLORS[stage], label=label)
            base += height
        ax.text(x, base, f" {name}", rotation=90, ha="center", va="bottom", fontsize=7)
    ax.set(xticks=range(len(sizes)), xticklabels=sizes, xlabel="requests", ylabel="microseconds")
    ax.margins(y=0.25)
