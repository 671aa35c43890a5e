"""Records and models as pictures; the only user of matplotlib."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from mpidist._bench._model import Prediction
from mpidist._bench._results import COPY, Record, Result
from mpidist._bench._session import NO_GUARD, OURS, RESIDENT
from mpidist._bench._units import digits, show_seconds, show_size

# Okabe and Ito's colours, which colour-blind people can tell apart.
_COLOURS: Final = {
    "memory": "#999999",
    "mpi4py": "#000000",
    "mpidist": "#0072B2",
    "torch": "#D55E00",
}
_SHADES: Final = ("#0072B2", "#56B4E9", "#009E73", "#CC79A7", "#E69F00")
_OURS: Final = {OURS: 0, NO_GUARD: 1, RESIDENT: 2}  # the others take what comes next
_LINES: Final = ("-", "--", ":", "-.")
_MARKERS: Final = "osD^v"


def missing_matplotlib() -> str | None:
    """Return what to say where matplotlib is not there, else None."""
    if importlib.util.find_spec("matplotlib") is None:
        return (
            "--plot: matplotlib is not installed in this environment; install it with "
            '`pip install "mpidist[examples]"`, or leave the option out'
        )
    return None


def draw(record: Record, path: str) -> list[str]:
    """Draw one picture for each benchmark of a record. Not collective.

    Args:
        record: what was measured.
        path: the file. Where there are several benchmarks, their names are put in
            before its ending: ``f.png`` becomes ``f-all_reduce.png`` and so on.

    Returns:
        The files that were written.
    """
    benches = list(dict.fromkeys(one.bench for one in record.results))
    files = []
    for bench in benches:
        results = [one for one in record.results if one.bench == bench]
        target = Path(path)
        if len(benches) > 1:
            target = target.with_stem(f"{target.stem}-{bench}")
        by_size = bench in ("all_reduce", "gather") and len(results) > 1
        figure = _curves(results) if by_size else _bars(results)
        facts = record.facts
        figure.suptitle(
            f"{bench}, {facts['ranks']} ranks, {facts['software']['mpi']}", fontsize=12
        )
        _save(figure, target)
        files.append(str(target))
    return files


def draw_model(predictions: Sequence[Prediction], title: str, path: str) -> None:
    """Draw predicted times against the number of ranks. Not collective.

    Args:
        predictions: of all sizes, transports and numbers of ranks.
        title: above the picture.
        path: the file.
    """
    sizes = list(dict.fromkeys(one.nbytes for one in predictions))
    figure = _figure(5.0 + 2.2 * (len(sizes) > 1), 4.4)
    axes = figure.add_subplot()
    transports = list(dict.fromkeys(one.transport for one in predictions))
    for i, nbytes in enumerate(sizes):
        for j, transport in enumerate(transports):
            points = [
                (one.ranks, one.seconds)
                for one in predictions
                if one.nbytes == nbytes and one.transport == transport
            ]
            axes.plot(
                *zip(*points, strict=True),
                color=_SHADES[i % len(_SHADES)],
                linestyle=_LINES[j % len(_LINES)],
                marker=_MARKERS[i % len(_MARKERS)],
                markersize=3.5,
                label=f"{show_size(nbytes)}, {transport}",
            )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({one.ranks for one in predictions})
    axes.set_xticks(ticks, [f"{n:,}" for n in ticks], rotation=45)
    axes.minorticks_off()
    _time_axis(axes)
    axes.set_xlabel("ranks")
    axes.set_ylabel("predicted time of an all_reduce")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.suptitle(title, fontsize=11)
    _save(figure, Path(path))


def _curves(results: Sequence[Result]) -> Any:
    figure = _figure(10.0, 4.6)
    times, ratios = figure.subplots(1, 2)
    names = list(dict.fromkeys(name for one in results for name in one.timings))
    baseline = results[0].baseline
    styles = _styles(names)
    for name in names:
        rows = [one for one in results if name in one.timings and one.nbytes]
        at = [one.nbytes for one in rows]
        timings = [one.timings[name] for one in rows]
        times.plot(at, [t.median for t in timings], label=name, **styles[name])
        times.fill_between(
            at,
            [t.lower for t in timings],
            [t.upper for t in timings],
            color=styles[name]["color"],
            alpha=0.12,
            linewidth=0,
        )
        # Of the smallest messages a copy is nothing to compare with.
        if name not in (baseline, COPY):
            ratios.plot(at, [one.ratio(name) for one in rows], **styles[name])
    ratios.axhline(1.0, color=_COLOURS["mpi4py"], linewidth=1.2)
    for axes in (times, ratios):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        sizes = [int(one.nbytes or 1) for one in results]
        axes.set_xticks(sizes, [show_size(n) for n in sizes], rotation=45, ha="right")
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.set_xlabel(
            "bytes" if results[0].bench == "all_reduce" else "bytes gathered"
        )
    _time_axis(times)
    _ratio_axis(ratios, [o.ratio(n) for o in results for n in o.timings if n != COPY])
    times.set_ylabel("time of one call (median; band: quartiles)")
    ratios.set_ylabel(f"time over that of {baseline}")
    figure.legend(
        *times.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=min(len(names), 4),
        fontsize=9,
    )
    return figure


def _bars(results: Sequence[Result]) -> Any:
    rows = sum(len(one.timings) for one in results)
    figure = _figure(8.5, 0.9 + 0.55 * len(results) + 0.27 * rows)
    heights = [len(one.timings) + 1 for one in results]
    all_axes = figure.subplots(len(results), 1, squeeze=False, height_ratios=heights)
    for axes, one in zip(all_axes[:, 0], results, strict=True):
        names = list(one.timings)
        timings = [one.timings[name] for name in names]
        train = one.bench == "train"
        values = [1 / t.median if train else t.median for t in timings]
        styles = _styles(names)
        axes.barh(
            range(len(names)),
            values,
            color=[styles[n]["color"] for n in names],
            height=0.7,
        )
        for i, (name, value) in enumerate(zip(names, values, strict=True)):
            text = f"{digits(value)} steps/s" if train else show_seconds(value)
            if name in one.ours:
                text += f"  ({one.ratio(name):.2f} x the time of {one.baseline})"
            axes.annotate(
                text,
                (value, i),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
        axes.set_yticks(range(len(names)), names, fontsize=9)
        axes.invert_yaxis()
        axes.set_title(one.case, fontsize=10, loc="left")
        axes.set_xlim(0, 1.75 * max(values))
        axes.set_xticks([])
        for side in ("top", "right", "bottom"):
            axes.spines[side].set_visible(False)
    return figure


def _styles(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return how to draw each: a family has a colour, mpidist a shade for each."""
    styles: dict[str, dict[str, Any]] = {}
    seen: dict[str, int] = {}
    others = 0
    for name in names:
        family = name.split(" ")[0].rstrip(",")
        number = seen[family] = seen.get(family, -1) + 1
        colour = _COLOURS.get(family, "#999999")
        if family == "mpidist":
            known = _OURS.get(name)
            place = len(_OURS) + others if known is None else known
            others += known is None
            colour = _SHADES[place % len(_SHADES)]
        styles[name] = {
            "color": colour,
            "linestyle": "-" if family == "mpidist" else _LINES[number % len(_LINES)],
            "marker": _MARKERS[number % len(_MARKERS)] if family == "mpidist" else None,
            "markersize": 4,
            "linewidth": 1.0 if family == "memory" else 1.6,
        }
    return styles


def _time_axis(axes: Any) -> None:
    from matplotlib import ticker

    axes.yaxis.set_major_formatter(
        ticker.FuncFormatter(lambda y, _: show_seconds(y).replace(".00", ""))
    )
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())


def _ratio_axis(axes: Any, ratios: Sequence[float]) -> None:
    marks = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
    low, high = 0.8 * min(ratios), 1.25 * max(ratios)
    shown = [mark for mark in marks if low <= mark <= high]
    axes.set_yticks(shown, [f"{mark:g}" for mark in shown])
    axes.minorticks_off()


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure  # without pyplot: no windows, no state

    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=130)
