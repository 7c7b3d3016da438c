"""Plots of simulations, as PNG or SVG. matplotlib is loaded when the first one is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Fixed, so that one seed gives one file.
_FIXED: dict[Any, Any] = {"svg.hashsalt": "pagedkv", "figure.dpi": 120, "savefig.dpi": 120}
Curves = Mapping[str, Sequence[tuple[float, float]]]


def draw_curves(
    path: Path, curves: Curves, *, x: str, y: str, title: str = "", top: float | None = None, log_x: bool = False
) -> None:
    """Draw lines through points, one for each name."""

    def draw(axes: Axes) -> None:
        for name, points in curves.items():
            axes.plot([point[0] for point in points], [point[1] for point in points], marker="o", label=name, ms=3)
        if log_x:
            axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0, top=top)
        axes.legend(fontsize=8)

    _draw(path, draw, x, y, title)


def draw_bars(
    path: Path, groups: Sequence[str], series: Mapping[str, Sequence[float]], *, y: str, title: str = "", stacked: bool
) -> None:
    """Draw bars for each group, on top of each other or side by side."""

    def draw(axes: Axes) -> None:
        width = 0.6 if stacked else 0.8 / len(series)
        bottoms = [0.0] * len(groups)
        for number, (name, values) in enumerate(series.items()):
            places = [
                place + (0 if stacked else (number - (len(series) - 1) / 2) * width) for place in range(len(groups))
            ]
            axes.bar(places, values, width, bottom=bottoms if stacked else None, label=name)
            bottoms = [bottom + value for bottom, value in zip(bottoms, values, strict=True)]
        axes.set_xticks(range(len(groups)), groups, fontsize=8)
        axes.legend(fontsize=8)

    _draw(path, draw, "", y, title)


def _draw(path: Path, draw: Any, x: str, y: str, title: str) -> None:
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(_FIXED):
        figure: Figure = Figure(figsize=(6.4, 4.0), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        draw(axes)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.set_title(title, fontsize=10)
        axes.grid(visible=True, alpha=0.3)
        # Without the date and the version of the library.
        metadata: dict[str, Any] = {"Date": None} if path.suffix == ".svg" else {"Software": None}
        figure.savefig(path, metadata=metadata)
