"""The pictures of docs/performance.md, by matplotlib; fill.py calls it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import ticker
from matplotlib.figure import Figure  # without pyplot: no windows, no state

from mpidist._base.names import show_seconds
from mpidist._cli.measuring import show_size

# The colours of Okabe and Ito, which colour-blind people can distinguish.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")
RATIOS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)


def all_reduce(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw times and ratios against the size of the array."""
    figure = Figure(figsize=(10.0, 4.6), layout="constrained")
    times, ratios = figure.subplots(1, 2)
    found = []
    for record, colour in zip(records, COLOURS, strict=False):
        rows = [row for row in record["rows"] if row["bench"] == "all_reduce"]
        sizes = [row["nbytes"] for row in rows]
        found += [row["ratio"] for row in rows]
        name = record["software"]["mpi"]
        for side, line in (("raw", "--"), ("ours", "-")):
            timings = [row[side] for row in rows]
            label = f"{name}, {'raw mpi4py' if side == 'raw' else 'mpidist'}"
            medians = [t["median"] for t in timings]
            times.plot(sizes, medians, line, color=colour, label=label)
            quartiles = [t["lower"] for t in timings], [t["upper"] for t in timings]
            times.fill_between(sizes, *quartiles, color=colour, alpha=0.12, lw=0)
        of_rows = [row["ratio"] for row in rows]
        ratios.plot(sizes, of_rows, color=colour, marker="o", ms=4)
    ratios.axhline(1.0, color="#000000", linewidth=1.0)
    for axes in (times, ratios):
        scale(axes, sizes)
    times.yaxis.set_major_formatter(
        ticker.FuncFormatter(lambda y, _: show_seconds(y).replace(".00", ""))
    )
    times.yaxis.set_minor_formatter(ticker.NullFormatter())
    times.set_ylabel("time of one call (median; band: quartiles)")
    ratios.set_yticks(RATIOS, [f"{mark:g}" for mark in RATIOS])
    ratios.set_ylim(0.8 * min(found), 1.25 * max(found))
    ratios.set_ylabel("time of mpidist over that of raw mpi4py")
    figure.legend(loc="outside lower center", ncols=3, fontsize=9)
    figure.suptitle(f"all_reduce, {records[0]['ranks']} ranks", fontsize=12)
    figure.savefig(path, dpi=130)


def scale(axes: Any, sizes: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [show_size(n) for n in sizes], rotation=45, ha="right")
    axes.minorticks_off()
    axes.grid(alpha=0.3)
