"""The pictures of docs/performance.md, by matplotlib; fill_performance.py calls it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import ticker
from matplotlib.figure import Figure  # without pyplot: no windows, no state

from mpidist import _bench

# The colours of Okabe and Ito, which colour-blind people can distinguish.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
RATIOS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)


def all_reduce(records: Sequence[_bench.Record], path: Path) -> None:
    """Draw times, and ratios with the aims, against the size of the array."""
    figure = Figure(figsize=(10.0, 4.6), layout="constrained")
    times, ratios = figure.subplots(1, 2)
    for record, colour in zip(records, COLOURS, strict=False):
        rows = [row for row in record.rows if row.bench == "all_reduce"]
        sizes = [row.nbytes for row in rows]
        name = record.facts["software"]["mpi"]
        for side, line in (("raw", "--"), ("ours", "-")):
            timings = [getattr(row, side) for row in rows]
            label = f"{name}, {'raw mpi4py' if side == 'raw' else 'mpidist'}"
            medians = [t.median for t in timings]
            times.plot(sizes, medians, line, color=colour, label=label)
            quartiles = [t.lower for t in timings], [t.upper for t in timings]
            times.fill_between(sizes, *quartiles, color=colour, alpha=0.12, lw=0)
        ratios.plot(sizes, [row.ratio for row in rows], color=colour, marker="o", ms=4)
        aims = [row.aim.factor if row.aim else None for row in rows]
    if all(aims):
        ratios.step(sizes, aims, color="#999999", ls=":", where="mid", label="aim")
    ratios.axhline(1.0, color="#000000", linewidth=1.0)
    for axes in (times, ratios):
        scale(axes, sizes, [_bench.show_size(n) for n in sizes])
    time_axis(times, "time of one call (median; band: quartiles)")
    ratios.set_yticks(RATIOS, [f"{mark:g}" for mark in RATIOS])
    found = [row.ratio for r in records for row in r.rows if row.bench == "all_reduce"]
    ratios.set_ylim(0.8 * min(found), 1.25 * max(found))
    ratios.set_ylabel("time of mpidist over that of raw mpi4py")
    figure.legend(loc="outside lower center", ncols=3, fontsize=9)
    figure.suptitle(f"all_reduce, {records[0].facts['ranks']} ranks", fontsize=12)
    figure.savefig(path, dpi=130)


def model(source: Path, path: Path) -> None:
    """Draw the times that `mpidist bench model --json` predicted, against ranks."""
    rows = json.loads(source.read_text(encoding="utf-8"))["predictions"]
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = figure.add_subplot()
    for nbytes, colour in zip(
        dict.fromkeys(row["nbytes"] for row in rows), COLOURS, strict=False
    ):
        those = [row for row in rows if row["nbytes"] == nbytes]
        for name, line in (("mpi4py", "--"), ("mpidist", "-")):
            label = f"{_bench.show_size(nbytes)}, {name}"
            ranks = [row["ranks"] for row in those]
            axes.plot(ranks, [r[name] for r in those], line, color=colour, label=label)
    scale(axes, ranks, [f"{n:,}" for n in ranks])
    time_axis(axes, "predicted time of an all_reduce")
    axes.set_xlabel("ranks")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=130)


def scale(axes: Any, marks: Sequence[int], names: Sequence[str]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(marks, names, rotation=45, ha="right")
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def time_axis(axes: Any, label: str) -> None:
    axes.yaxis.set_major_formatter(
        ticker.FuncFormatter(lambda y, _: _bench.show_seconds(y).replace(".00", ""))
    )
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    axes.set_ylabel(label)
