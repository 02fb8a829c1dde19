"""Pictures of ladders: each function returns a matplotlib figure, to be shown in a notebook or saved (`save`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrunner.errors import NotBuiltError
from jaxrunner.ladder.costs import Costs
from jaxrunner.ladder.placement import WAYS, Scheme

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from jaxrunner.ladder.replay import Comparison
    from jaxrunner.ladder.study import Study

COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#9d755d")
FITTED_COLOR = "#222222"
WAY_COLORS = dict(zip(WAYS, ("#4c78a8", "#e45756", "#54a24b", "#f58518", "#999999"), strict=True))
STYLE: dict[str, Any] = {"axes.spines.top": False, "axes.spines.right": False, "font.size": 9, "figure.dpi": 110}


def new_figure(width: float, height: float, panels: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure that belongs to no window. Raises NotBuiltError, naming the extra, where matplotlib is missing."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NotBuiltError("pictures need matplotlib: pip install 'jaxrunner[plots]'") from error
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type, unused-ignore]
        figure = Figure(figsize=(width, height), layout="constrained")
        return figure, list(np.atleast_1d(figure.subplots(1, panels)))


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure; the name's ending says in which format (png, svg, pdf)."""
    figure.savefig(path, dpi=150)


def waste(schemes: Sequence[Scheme], last: int) -> Figure:
    """Padding over the size of a decode batch, one line a ladder: the part of the tokens that ran that was padding."""
    figure, axes = new_figure(9, 1.25 * len(schemes) + 0.8)
    (ax,) = axes
    sizes = np.arange(1, last + 1)
    for row, scheme in enumerate(schemes):
        placed = [scheme.place(n, n, 1, 0) for n in sizes.tolist()]
        part = 1 - sizes / np.array([p.size for p in placed])
        base = len(schemes) - 1 - row
        color = COLORS[row % len(COLORS)]
        ax.fill_between(sizes, base, base + 0.7 * part, step="mid", color=color, alpha=0.75, lw=0)
        ax.axhline(base, color="#cccccc", lw=0.8, zorder=0)
        rungs = sorted({p.size for p in placed if p.way != "eager" and p.size <= last})
        ax.plot(rungs, np.full(len(rungs), base), "|", color="black", ms=4)
        eager = sizes[[p.way == "eager" for p in placed]]
        ax.plot(eager, np.full(len(eager), base + 0.05), ".", color=WAY_COLORS["eager"], ms=2)
        ax.text(1.0, base + 0.76, f" {scheme.name}: {len(rungs)} sizes, {part.mean():.0%} on average", color=color)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter("{x:.0f}")
    ax.set(xlabel="requests that decode", xlim=(1, last), ylim=(-0.1, len(schemes) + 0.1), yticks=[])
    ax.set_title("Padding by batch size (height: part that is padding; ticks: rungs; grey dots: eager)", loc="left")
    ax.spines["left"].set_visible(False)
    return figure


def frontier(study: Study) -> Figure:
    """Cost and waste over the number of buckets: the fitted ladders as a line, every rule as a point."""
    figure, axes = new_figure(9, 3.4, panels=2)
    counts = [o.buckets for o in study.frontier]
    compiled = [p.rule for p, scheme in zip(study.pairs, study.schemes, strict=False) if scheme.made == "compiled"]
    for ax, what, title in zip(axes, ("overhead", "waste"), ("time lost to padding", "padded tokens"), strict=True):
        ax.plot(counts, [getattr(o, what) for o in study.frontier], color=FITTED_COLOR, lw=1.8, label="fitted")
        for i, outcome in enumerate(compiled):
            ax.plot(outcome.buckets, getattr(outcome, what), "o", color=COLORS[i % len(COLORS)], label=outcome.name)
        ax.set(xlabel="buckets", yscale="log", title=title)
        ax.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")
        ax.yaxis.set_minor_formatter(lambda value, _: "")
    axes[0].set_ylabel("part of the time without padding")
    axes[1].set_ylabel("part of all tokens that ran")
    axes[1].legend(frameon=False, fontsize=8)
    figure.suptitle("Judged on the second half, fitted on the first", x=0.01, ha="left", fontsize=10)
    return figure


def bucket_costs(costs: Sequence[Costs]) -> Figure:
    """Step time and time to make a bucket over its size: measured points and the lines between them."""
    figure, axes = new_figure(9, 3.4, panels=2)
    for i, cost in enumerate(costs):
        color = COLORS[i % len(COLORS)]
        for curve, style, kind in ((cost.decode, "-", "decode"), (cost.mixed, "--", "ragged")):
            sizes = np.unique(np.geomspace(1, curve.sizes[-1], 200).round())
            axes[0].plot(sizes, curve(sizes) * 1e3, style, color=color, lw=1.3, label=f"{cost.name}, {kind}")
            axes[0].plot(curve.sizes, np.array(curve.values) * 1e3, ".", color=color, ms=5)
        if cost.make is not None:
            axes[1].plot(cost.make.sizes, cost.make.values, "o-", color=color, lw=1, label=cost.name)
        elif cost.graph_seconds is not None:
            axes[1].axhline(cost.graph_seconds, color=color, lw=1.3, label=f"{cost.name}, one CUDA graph")
    axes[0].set(xscale="log", yscale="log", xlabel="tokens of the bucket", ylabel="ms", title="a step without its keys")
    axes[1].set(xscale="log", yscale="log", xlabel="tokens of the bucket", ylabel="s", title="to make it")
    for ax in axes:
        if ax.get_legend_handles_labels()[0]:
            ax.legend(frameon=False, fontsize=7)
    return figure


def comparison(compared: Comparison) -> Figure:
    """Padding's part of the time for each ladder, and how its steps ran."""
    figure, axes = new_figure(9, 0.32 * len(compared.outcomes) + 1.1, panels=2)
    names = [o.name for o in compared.outcomes]
    axes[0].barh(names, [o.overhead for o in compared.outcomes], color=COLORS[0])
    axes[0].xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes[0].set_title("time lost to padding", loc="left")
    left = np.zeros(len(names))
    for way in WAYS:
        parts = np.array([o.ways[way] / o.steps for o in compared.outcomes])
        if parts.any():
            axes[1].barh(names, parts, left=left, color=WAY_COLORS[way], label=way)
        left += parts
    axes[1].set(yticks=[], xlim=(0, 1), xticks=[0, 0.5, 1])
    axes[1].set_title("how steps ran", loc="left")
    axes[1].legend(frameon=False, ncols=5, fontsize=7, loc="upper left", bbox_to_anchor=(0.0, -0.08))
    for ax in axes:
        ax.invert_yaxis()
    return figure


def load(study: Study) -> Figure:
    """The load over time, and how often each batch size ran in either half."""
    figure, axes = new_figure(9, 2.8, panels=2)
    for steps, color, name in ((study.first, COLORS[0], "first half"), (study.second, COLORS[1], "second half")):
        axes[0].plot(steps.start_s, steps.num_reqs, color=color, lw=0.6, label=name)
        edges = np.arange(1, study.limits.max_num_seqs + 2)
        counts, _ = np.histogram(steps.num_reqs, bins=edges)
        axes[1].step(edges[:-1], counts / len(steps), where="mid", color=color, lw=1, label=name)
    axes[0].set(xlabel="s", ylabel="requests in a step", title="the load")
    axes[1].set(xlabel="requests in a step", ylabel="part of the steps", title="how often")
    axes[1].legend(frameon=False, fontsize=8)
    return figure


def timeline(spans: Sequence[Mapping[str, Any]]) -> Figure:
    """One step: a bar for each span, host above device. spans: `lane`, `span`, `start_us` and `us`, as a benchmark's
    `timeline/...` rows have them."""
    figure, axes = new_figure(9, 2.2)
    (ax,) = axes
    lanes = list(dict.fromkeys(span["lane"] for span in spans))
    names = list(dict.fromkeys(span["span"] for span in spans))
    for span in spans:
        color = COLORS[names.index(span["span"]) % len(COLORS)]
        label = f"{span['span']} {span['us']:.0f} us"
        ax.barh(lanes.index(span["lane"]), span["us"], left=span["start_us"], color=color, height=0.6, label=label)
    ax.set(yticks=range(len(lanes)), yticklabels=lanes, xlabel="us from the begin of the step")
    ax.invert_yaxis()
    ax.legend(frameon=False, fontsize=7, ncols=4, loc="lower left", bbox_to_anchor=(0, 1.0))
    return figure


def timeline_spans(costs: Costs) -> list[Mapping[str, Any]]:
    """The spans of the step that the benchmark recorded beside the buckets; empty if it did not."""
    return [row for row in costs.rows if "span" in row and row.get("us") is not None]
