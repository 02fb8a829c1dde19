"""Drawing for the notebooks: small arrays as lines of boxes, with padding in grey."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Rectangle

COLORS = ["#4c78a8", "#f58518", "#54a24b", "#b279a2"]
"""One for each request of the batch."""
PADDING = "#e4e4e4"
TOTAL = "#999999"
"""Colour of the entry of query_start_loc that is the number of live tokens."""


def style() -> None:
    """Small type and no frames."""
    plt.rcParams.update({"figure.dpi": 110, "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})


def strips(arrays: Mapping[str, tuple[Sequence[Any], Sequence[str]]], title: str, size: float = 0.62) -> None:
    """One line of boxes for each array: name -> (values, colour of each box). Boxes of padding are hatched.

    size: width of a box in inches.
    """
    longest = max(len(values) for values, _ in arrays.values())
    _, ax = plt.subplots(figsize=(size * longest + 1.9, 0.42 * len(arrays) + 0.5))
    for y, (name, (values, colors)) in enumerate(arrays.items()):
        ax.text(-0.2, y + 0.45, name, ha="right", va="center", family="monospace")
        for x, (value, color) in enumerate(zip(values, colors, strict=True)):
            pad = color == PADDING
            look: dict[str, Any] = {"facecolor": color, "edgecolor": "white", "alpha": 1 if pad else 0.55}
            ax.add_patch(Rectangle((x, y), 1, 0.9, hatch="///" if pad else None, **look))
            ax.text(x + 0.5, y + 0.45, str(value), ha="center", va="center", color="#777777" if pad else "black")
    ax.set(xlim=(0, longest), ylim=(len(arrays), 0))
    ax.set_title(title, loc="left")
    ax.axis("off")
    plt.show()


def token_colors(query_start_loc: Any, num_reqs: int, num_tokens: int) -> list[str]:
    """The colour of each flat token: that of its request, or of padding."""
    request = np.searchsorted(np.asarray(query_start_loc)[1 : num_reqs + 1], np.arange(num_tokens), side="right")
    return [COLORS[r] if r < num_reqs else PADDING for r in request]
