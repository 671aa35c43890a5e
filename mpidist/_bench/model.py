"""An alpha-beta model: how long an all_reduce takes on other numbers of ranks.

A message of n bytes takes alpha + n beta (R. W. Hockney, "The Communication Challenge
for MPP: Intel Paragon and Meiko CS-2", Parallel Computing 20 (3), 1994). This gives the
times of the algorithms that MPI libraries choose from (R. Thakur, R. Rabenseifner and
W. Gropp, "Optimization of Collective Communication Operations in MPICH", Int. J. High
Perform. Comput. Appl. 19 (1), 2005, section 4.5), here for N nodes with r ranks each,
numbered node by node, whose r ranks share the node's link. docs/performance.md has the
formulas as a table. The cost of adding is part of beta. The model ignores congestion
and late ranks.

A time is linear in the figures of a cluster: *terms* are the factors, by name. The
prediction is the time of the fastest of several algorithms, each with its own terms.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from mpidist._base.types import HostArray
from mpidist._bench.job import UsageError
from mpidist._bench.table import Record, align
from mpidist._bench.units import digits, show_seconds, show_size

FIGURES: Final = {
    "alpha": "latency of a message between nodes",
    "beta": "bandwidth of a node's link to the network",
    "alpha_node": "latency of a message between ranks of a node, through MPI",
    "beta_node": "bandwidth between ranks of a node, through MPI",
    "alpha_shared": "time of an empty all_reduce in shared memory",
    "beta_shared": "bandwidth of a copy in memory while all ranks copy",
    "overhead": "what mpidist adds to an MPI call",
}
Figures = dict[str, float]
Terms = dict[str, float]
ASSUMED: Final[Figures] = {
    "alpha": 2e-6,
    "beta": 1 / 12.5e9,
    "alpha_node": 1e-6,
    "beta_node": 1 / 4e9,
    "alpha_shared": 3e-6,
    "beta_shared": 1 / 8e9,
    "overhead": 10e-6,
}
_HEADER_BYTES: Final = 64
_SMALL_BYTES: Final = 32 * 1024
_ROUNDS: Final = 20


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The times of one all_reduce, in seconds.

    Attributes:
        ranks: the number of all ranks.
        nodes: the number of nodes.
        nbytes: the bytes of the array.
        mpi4py: the time of a plain `Allreduce`.
        mpidist: the time of mpidist.
    """

    ranks: int
    nodes: int
    nbytes: int
    mpi4py: float
    mpidist: float


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One all_reduce, in seconds: as it was measured, and by the model.

    Attributes:
        ranks: the number of all ranks.
        nodes: the number of nodes.
        nbytes: the bytes of the array.
        mpi4py: the time of a plain `Allreduce`: measured, predicted.
        mpidist: the time of mpidist: measured, predicted.
    """

    ranks: int
    nodes: int
    nbytes: int
    mpi4py: tuple[float, float]
    mpidist: tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Point:
    """One measured time, with ``local`` ranks on each node."""

    nodes: int
    local: int
    nbytes: int
    seconds: float


def _steps(n: int) -> int:
    return math.ceil(math.log2(n))


def mpi_algorithms(
    nodes: int, local: int, nbytes: int, figures: Figures
) -> list[Terms]:
    """Return the algorithms of an `Allreduce`: doubling, Rabenseifner's, ring."""
    a, b, ranks = _steps(local), _steps(nodes), nodes * local
    around = 2 * (ranks - 1), 2 * (ranks - 1) / ranks * nbytes
    rings = [{"alpha": around[0], "beta": around[1]}] * (nodes > 1)
    rings += [{"alpha_node": around[0], "beta_node": around[1]}] * (local > 1)
    slowest = max(rings, key=lambda terms: _seconds(terms, figures), default={})
    return [
        {
            "alpha_node": a,
            "beta_node": a * nbytes,
            "alpha": b,
            "beta": b * local * nbytes,
        },
        {
            "alpha_node": 2 * a,
            "beta_node": 2 * (local - 1) / local * nbytes,
            "alpha": 2 * b,
            "beta": 2 * (nodes - 1) / nodes * nbytes,
        },
        slowest,
    ]


def shared_algorithms(
    nodes: int, local: int, nbytes: int, figures: Figures
) -> list[Terms]:
    """Return the algorithms of mpidist if the ranks of a node share memory.

    On a node, each rank copies all but its slice in, reduces its slice, and copies the
    other slices out; small arrays are copied in whole, and every rank adds up all of
    them. Between nodes, the slices are reduced by messages, after a header.
    """
    small = nbytes <= _SMALL_BYTES
    slices = (local - 1) / local + (local + 1) / (2 * local)
    out = (local - 1) / local if nodes == 1 else 1.0
    copies = 1 + 3 * (local - 1) / 2 if small else slices + out
    node: Terms = {"alpha_shared": 1, "beta_shared": copies * nbytes}
    if nodes == 1:
        return [node]
    header = _steps(nodes)
    both = 2 * (nodes - 1) / nodes * nbytes
    between = [
        (header, header * nbytes),
        (2 * header, both),
        (2 * (nodes - 1), both),
    ]
    return [
        {**node, "alpha": alpha + header, "beta": beta + header * _HEADER_BYTES}
        for alpha, beta in between
    ]


def direct_algorithms(
    nodes: int, local: int, nbytes: int, figures: Figures
) -> list[Terms]:
    """Return the algorithms of mpidist by MPI."""
    algorithms = mpi_algorithms(nodes, local, nbytes, figures)
    return [{**terms, "overhead": 1} for terms in algorithms]


Algorithms = Callable[[int, int, int, Figures], list[Terms]]


def _seconds(terms: Terms, figures: Figures) -> float:
    return sum(factor * figures[name] for name, factor in terms.items())


def _fastest(algorithms: list[Terms], figures: Figures) -> Terms:
    return min(algorithms, key=lambda terms: _seconds(terms, figures))


def _time(
    algorithms: Algorithms, figures: Figures, nodes: int, local: int, nbytes: int
) -> float:
    terms = _fastest(algorithms(nodes, local, nbytes, figures), figures)
    return _seconds(terms, figures)


def predict(
    figures: Figures, sizes: Sequence[int], ranks_per_node: int, most_ranks: int
) -> list[Prediction]:
    """Predict times for 2, 4, 8 ... ranks; nodes are filled one after the other.

    Args:
        figures: the figures of the cluster, by the names of `FIGURES`.
        sizes: the sizes of arrays, in bytes.
        ranks_per_node: the most ranks on a node.
        most_ranks: the largest number of ranks.
    """
    found = []
    for power in range(1, most_ranks.bit_length()):
        ranks = 2**power
        nodes = -(-ranks // ranks_per_node)
        local = -(-ranks // nodes)
        ours = direct_algorithms if local == 1 else shared_algorithms
        for nbytes in sizes:
            raw, own = (
                _time(algorithms, figures, nodes, local, nbytes)
                for algorithms in (mpi_algorithms, ours)
            )
            found.append(Prediction(ranks, nodes, nbytes, raw, own))
    return found


def fit(records: Sequence[Record]) -> tuple[Figures, dict[str, float]]:
    """Fit the figures to what ``mpidist bench all_reduce`` measured.

    Minimises the squares of the relative errors, without negative figures. The fit is
    repeated with the algorithm that the figures so far make the fastest for each size,
    until that no longer changes. Records of one node give the figures of a node,
    records of several nodes those of the network. Runs with more ranks than cores are
    left out.

    Returns:
        The figures that the records determine; and for "mpi4py", "shared" and "direct"
        the median relative distance of the model from the measurements.

    Raises:
        UsageError: if no record has results of at least two ranks.
    """
    raw = _points(records, "raw", ("shared", "direct"))
    if not raw:
        raise UsageError(
            "--fit: no results of all_reduce on two ranks or more; make them with "
            "`mpirun -n 2 mpidist bench all_reduce --json F`"
        )
    names = ["alpha_node", "beta_node"] * any(q.local > 1 for q in raw)
    names += ["alpha", "beta"] * any(q.nodes > 1 for q in raw)
    groups: list[tuple[str, list[Point], Algorithms, list[str]]] = [
        ("mpi4py", raw, mpi_algorithms, names),
        (
            *("shared", _points(records, "ours", ("shared",)), shared_algorithms),
            ["alpha_shared", "beta_shared"],
        ),
        (
            "direct",
            _points(records, "ours", ("direct",)),
            direct_algorithms,
            ["overhead"],
        ),
    ]
    figures, fitted, errors = dict(ASSUMED), {}, {}
    for title, points, algorithms, wanted in groups:
        if points:
            fitted.update(_fit_group(points, algorithms, wanted, figures))
            figures.update(fitted)
            distances = [
                abs(
                    _time(algorithms, figures, q.nodes, q.local, q.nbytes) / q.seconds
                    - 1
                )
                for q in points
            ]
            errors[title] = float(np.median(distances))
    return fitted, errors


def compare(figures: Figures, records: Sequence[Record]) -> list[Comparison]:
    """Compare the model with what ``mpidist bench all_reduce`` measured.

    Raises:
        UsageError: if a record has no results of at least two ranks with cores.
    """
    found = []
    for record in records:
        both = ("shared", "direct")
        raw, own = (_points([record], side, both) for side in ("raw", "ours"))
        if not raw:
            raise UsageError(
                "--check: no results of all_reduce on two ranks or more, with a core "
                "for each; make them with `mpirun -n 2 mpidist bench all_reduce "
                "--json F`"
            )
        name = record.facts["transports"]["host"]["name"]
        ours = shared_algorithms if name == "shared" else direct_algorithms
        for one, other in zip(raw, own, strict=True):
            where = (one.nodes, one.local, one.nbytes)
            found.append(
                Comparison(
                    one.nodes * one.local,
                    one.nodes,
                    one.nbytes,
                    (one.seconds, _time(mpi_algorithms, figures, *where)),
                    (other.seconds, _time(ours, figures, *where)),
                )
            )
    return found


def _points(
    records: Sequence[Record], side: str, transports: tuple[str, ...]
) -> list[Point]:
    found = []
    for record in records:
        facts = record.facts
        ranks, nodes = facts["ranks"], facts["nodes"]
        if ranks < 2 or ranks % nodes or facts["crowded"]:
            continue
        if facts["transports"]["host"]["name"] in transports:
            found += [
                Point(nodes, ranks // nodes, one.nbytes, getattr(one, side).median)
                for one in record.rows
                if one.bench == "all_reduce" and one.nbytes is not None
            ]
    return found


def _fit_group(
    points: Sequence[Point],
    algorithms: Algorithms,
    names: Sequence[str],
    start: Figures,
) -> Figures:
    """Return the figures with these names that fit the points best."""
    figures, before = dict(start), None
    for _ in range(_ROUNDS):
        chosen = [
            _fastest(algorithms(q.nodes, q.local, q.nbytes, figures), figures)
            for q in points
        ]
        if chosen == before:
            break
        before = chosen
        known = {**figures, **dict.fromkeys(names, 0.0)}
        seconds = np.array([q.seconds for q in points])
        rest = seconds - np.array([_seconds(terms, known) for terms in chosen])
        rows = np.array([[terms.get(k, 0.0) for k in names] for terms in chosen])
        solution = _not_negative(rows / seconds[:, None], rest / seconds)
        figures.update(zip(names, map(float, solution), strict=True))
    return {name: figures[name] for name in names}


def _not_negative(matrix: HostArray, target: HostArray) -> HostArray:
    """Return the least squares solution without negative entries.

    There are few unknowns: it is the best over all choices of which are zero.
    """
    unknowns = matrix.shape[1]
    best, least = np.zeros(unknowns), np.inf
    for count in range(1, unknowns + 1):
        for columns in itertools.combinations(range(unknowns), count):
            scale = np.abs(matrix[:, columns]).max(axis=0)
            scale[scale == 0] = 1.0
            part, *_ = np.linalg.lstsq(matrix[:, columns] / scale, target, rcond=None)
            candidate = np.zeros(unknowns)
            candidate[list(columns)] = part / scale
            error = float(((matrix @ candidate - target) ** 2).sum())
            if (part >= 0).all() and error < least:
                best, least = candidate, error
    return best


def comparison_text(
    figures: Figures, origins: dict[str, str], comparisons: Sequence[Comparison]
) -> str:
    """Return figures and comparisons as tables; see `model_text`.

    A ratio is that of the predicted time to the measured one.
    """
    above = ["ranks", "nodes", "bytes", "mpi4py", "", "", "mpidist", "", ""]
    below = ["", "", "", *("measured", "predicted", "ratio") * 2]
    table = [above, below]
    for one in comparisons:
        line = [f"{one.ranks:,}", f"{one.nodes:,}", show_size(one.nbytes)]
        for measured, predicted in (one.mpi4py, one.mpidist):
            line += [show_seconds(measured), show_seconds(predicted)]
            line.append(f"{predicted / measured:.2f}")
        table.append(line)
    title = "an all_reduce: measured, and predicted by the figures"
    return f"{align(_figure_rows(figures, origins), 1)}\n\n{title}\n{align(table, 2)}\n"


def model_text(
    figures: Figures, origins: dict[str, str], predictions: Sequence[Prediction]
) -> str:
    """Return figures and predictions as tables.

    Args:
        figures: the figures of the cluster.
        origins: the origin of each figure: "given", "fitted", "assumed".
        predictions: the predictions for all sizes and numbers of ranks.
    """
    sizes = list(dict.fromkeys(one.nbytes for one in predictions))
    above, below = ["ranks", "nodes"], ["", ""]
    for nbytes in sizes:
        above += [show_size(nbytes), ""]
        below += ["mpi4py", "mpidist"]
    table = [above, below]
    for i in range(0, len(predictions), len(sizes)):
        line = predictions[i : i + len(sizes)]
        times = [t for one in line for t in (one.mpi4py, one.mpidist)]
        head = [f"{line[0].ranks:,}", f"{line[0].nodes:,}"]
        table.append([*head, *map(show_seconds, times)])
    title = "predicted times of an all_reduce"
    return f"{align(_figure_rows(figures, origins), 1)}\n\n{title}\n{align(table, 2)}\n"


def _figure_rows(figures: Figures, origins: dict[str, str]) -> list[list[str]]:
    rows = [["figure", "value", "", "from"]]
    for name, value in figures.items():
        option = f"--{name.replace('_', '-')}"
        shown, unit = show_seconds(value), "s"
        if name.startswith("beta"):
            shown = f"{digits(1e-9 / value)} GB/s" if value else "no time"
            unit = "s/B"
        rows.append([option, shown, f"{value:.3g} {unit}", origins[name]])
    return rows
