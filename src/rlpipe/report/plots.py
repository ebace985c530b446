"""Plots as SVG that stands inside a page: the same numbers give the same bytes, and no text of a policy or user is drawn.

The colours are Okabe and Ito's, which the colour-blind can tell apart (https://jfly.uni-koeln.de/color/).
"""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlpipe.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#999999"
STATUS_COLOURS = (BLUE, ORANGE, "#56B4E9", "#F0E442", RED, GREY)
"""By place in `rlpipe.trajectory.STATUSES`."""
STYLE = {
    "svg.hashsalt": "rlpipe",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#e4e4e4",
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}
SIZE = (5.2, 2.9)
"""Inches; the page scales it."""
DISTINCT = 12
"""So many different values or fewer get a bar each."""


def lengths(values: np.ndarray, statuses: np.ndarray, names: Sequence[str]) -> str:
    """Histogram of completion lengths, one colour a status."""

    def draw(axes: Axes) -> None:
        present = [code for code in range(len(names)) if (statuses == code).any()]
        edges = _edges(values.astype(float), whole=True)
        parts = [values[statuses == code] for code in present]
        axes.hist(parts, bins=edges, stacked=True, color=[STATUS_COLOURS[code] for code in present], label=[names[code] for code in present], rwidth=0.9)
        axes.set(xlabel="completion length (tokens)", ylabel="trajectories")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3)

    return _svg(draw, "Histogram of completion lengths")


def rewards(values: np.ndarray) -> str:
    """Histogram of the total rewards, `[n]` finite."""

    def draw(axes: Axes) -> None:
        _bars_or_histogram(axes, values, BLUE)
        axes.set(xlabel="reward of a trajectory", ylabel="trajectories")

    return _svg(draw, "Histogram of rewards")


def group_rewards(means: np.ndarray) -> str:
    """Histogram of the groups' mean rewards, `[g]` finite."""

    def draw(axes: Axes) -> None:
        _bars_or_histogram(axes, means, GREEN)
        axes.set(xlabel="mean reward of a group", ylabel="groups")

    return _svg(draw, "Histogram of the mean reward of each group")


def shares(counts: Mapping[str, int], unit: str, colours: Sequence[str]) -> str:
    """One horizontal bar a kind."""

    def draw(axes: Axes) -> None:
        names = list(counts)[::-1]
        bars = axes.barh(names, [counts[name] for name in names], color=list(colours)[: len(names)][::-1], height=0.62)
        axes.bar_label(bars, [f"{counts[name]:,}" for name in names], padding=4)
        axes.set(xlabel=unit, xlim=(0, max(1, *counts.values()) * 1.12))
        axes.grid(visible=True, axis="x")
        axes.grid(visible=False, axis="y")

    return _svg(draw, f"Number of {unit} of each kind")


def accuracies(values: Mapping[str, float]) -> str:
    """One bar a policy or metric, from 0 to 1."""

    def draw(axes: Axes) -> None:
        colours = [GREY if name.startswith("champion") else BLUE if name.startswith("this") else GREEN for name in values]
        bars = axes.bar(list(values), list(values.values()), color=colours, width=0.55)
        axes.bar_label(bars, [f"{value:.3f}" for value in values.values()], padding=3)
        axes.set(ylabel="share of held-out tasks solved", ylim=(0, 1.08), yticks=[0, 0.25, 0.5, 0.75, 1])

    return _svg(draw, "Share of held-out tasks solved")


def _bars_or_histogram(axes: Axes, values: np.ndarray, colour: str) -> None:
    distinct, counts = np.unique(values, return_counts=True)
    if len(distinct) > DISTINCT:
        axes.hist(values, bins=_edges(values), color=colour, rwidth=0.92)
        return
    width = 0.7 * float(np.diff(distinct).min()) if len(distinct) > 1 else 0.2
    axes.bar(distinct, counts, width=width, color=colour)
    axes.set_xticks(distinct, [f"{value:.3g}" for value in distinct])


def _edges(values: np.ndarray, *, whole: bool = False) -> list[float]:
    """Edges of at most 30 bins; of whole numbers, each bin is the same number of them wide."""
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    if whole:
        width = max(1, int(np.ceil((high - low + 1) / 30)))
        return [float(edge) for edge in np.arange(low - 0.5, high + width, width)]
    return [float(edge) for edge in np.linspace(low, high, 21)]


def _svg(draw: Callable[[Axes], None], alt: str) -> str:
    """The drawing as an `<svg>` element; `alt` is what a screen reader says."""
    figure_class, context = _matplotlib()
    with context(["default", STYLE]):
        figure = figure_class(figsize=SIZE, layout="constrained")
        draw(figure.add_subplot())
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    _, start, drawing = buffer.getvalue().partition("<svg ")
    return f'{start}role="img" aria-label="{alt}" {drawing}'


def _matplotlib() -> tuple[Any, Any]:
    """matplotlib's Figure, which needs no closing and no display, and its style context.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        with _writable_config():
            from matplotlib import style
            from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("reports need matplotlib, which is not installed", got=str(error), do="pip install 'rlpipe[kubeflow]'") from error
    return Figure, style.context


@contextmanager
def _writable_config() -> Iterator[None]:
    """Gives matplotlib a folder of its own while it is imported, where the home folder is missing or cannot be written."""
    home = Path(os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~"))
    if "MPLCONFIGDIR" in os.environ or os.access(home, os.W_OK):
        yield
        return
    with tempfile.TemporaryDirectory(prefix="rlpipe-matplotlib-") as folder:
        os.environ["MPLCONFIGDIR"] = folder
        try:
            yield
        finally:
            del os.environ["MPLCONFIGDIR"]
