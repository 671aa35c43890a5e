"""How long an all_reduce takes on other numbers of ranks: an alpha-beta model.

A message of n bytes takes alpha + n beta (R. W. Hockney, "The Communication Challenge
for MPP: Intel Paragon and Meiko CS-2", Parallel Computing 20 (3), 1994). From it follow
the times of the algorithms that MPI libraries choose from (R. Thakur, R. Rabenseifner
and W. Gropp, "Optimization of Collective Communication Operations in MPICH", Int. J.
High Perform. Comput. Appl. 19 (1), 2005, section 4.5, with p ranks):

- recursive doubling: log2(p) (alpha + n beta)
- Rabenseifner (reduce-scatter, then allgather): 2 log2(p) alpha + 2 (p-1)/p n beta
- ring: 2 (p-1) alpha + 2 (p-1)/p n beta

The cost of adding is part of beta, which is taken from all-reduces. Here N nodes have
r ranks each, p = N r, ranks are numbered node by node, and the r ranks of a node share
its link to the network. "on" is between the ranks of a node, "net" between nodes:

- recursive doubling: log2(r) (alpha_on + n beta_on)
  + log2(N) (alpha_net + r n beta_net)
- Rabenseifner, nearest first: 2 log2(r) alpha_on + 2 (r-1)/r n beta_on
  + 2 log2(N) alpha_net + 2 (N-1)/N n beta_net
- ring: 2 (p-1) messages of n/p bytes, each as slow as the slower of alpha_on + n/p
  beta_on and alpha_net + n/p beta_net; one rank of each node uses the link

Three transports are predicted:

- *mpi4py*: `Allreduce` of hand-written code: the fastest of the three.
- *direct*: the same, the header of 64 bytes by recursive doubling before it, and the
  time that mpidist takes around it (overhead).
- *shared*: alpha_shared + c(r) n beta_shared on a node, where beta_shared is the time
  to copy a byte in memory while all ranks copy: every rank copies all but its own
  slice in, reads r slices and writes one, and copies that to all others:
  c(r) = 2 (r-1)/r + (r+1)/(2 r). Of at most 32 KiB each rank copies all of it in, and
  adds up all: c(r) = 1 + 3 (r-1)/2. On several nodes it copies the result out as a
  whole, c(r) = (r-1)/r + (r+1)/(2 r) + 1; and before that each rank all-reduces its
  slice with the ranks of the same number on the other nodes, n bytes for each link: the
  fastest of log2(N) (alpha_net + n beta_net), 2 log2(N) alpha_net + 2 (N-1)/N n
  beta_net, and 2 (N-1) alpha_net + 2 (N-1)/N n beta_net. The header goes over the
  network too then.

log2 is rounded up. The model knows neither congestion nor ranks that come late.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from mpidist._bench._job import UsageError
from mpidist._bench._results import Record, Result
from mpidist._bench._tables import align
from mpidist._bench._units import digits, show_seconds, show_size

HEADER_BYTES: Final = 64
_SMALL_BYTES: Final = 32 * 1024
_ROUNDS: Final = 20
_RAW: Final = "mpi4py in place"
_OURS: Final = "mpidist"
TRANSPORTS: Final = ("mpi4py", "direct", "shared")


@dataclasses.dataclass(frozen=True)
class Parameters:
    """The figures of a cluster. What is not given is a plain assumption.

    Attributes:
        alpha: seconds for a message between nodes, however short.
        beta: seconds per byte over a node's link to the network.
        alpha_node: seconds for a message between ranks of a node.
        beta_node: seconds per byte between ranks of a node, by MPI.
        alpha_shared: seconds for an all_reduce of nothing in shared memory, the header
            and mpidist's own time included.
        beta_shared: seconds to copy one byte in memory while all ranks copy.
        overhead: seconds that mpidist adds to a call of MPI, besides the header.
    """

    alpha: float = 2e-6
    beta: float = 1 / 12.5e9
    alpha_node: float = 1e-6
    beta_node: float = 1 / 4e9
    alpha_shared: float = 8e-6
    beta_shared: float = 1 / 8e9
    overhead: float = 10e-6


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The time of one all_reduce.

    Attributes:
        ranks: in all.
        nodes: that they are on.
        nbytes: of the array.
        transport: "mpi4py", "direct" or "shared".
        seconds: the predicted time.
        algorithm: the fastest one over messages; "" where there are none.
    """

    ranks: int
    nodes: int
    nbytes: int
    transport: str
    seconds: float
    algorithm: str


# A time is linear in the parameters. A term is the factor of each of them.
Terms = dict[str, float]


def _steps(n: int) -> int:
    return max(0, math.ceil(math.log2(n)))


def _message_terms(
    nodes: int, local: int, nbytes: int, parameters: Parameters
) -> dict[str, Terms]:
    """Return the terms of the algorithms of an all-reduce by MPI over all ranks."""
    p, a, b = nodes * local, _steps(local), _steps(nodes)
    rings = []
    if nodes > 1:
        rings.append({"alpha": 2 * (p - 1), "beta": 2 * (p - 1) / p * nbytes})
    if local > 1:
        rings.append({"alpha_node": 2 * (p - 1), "beta_node": 2 * (p - 1) / p * nbytes})
    return {
        "recursive doubling": {
            "alpha_node": a,
            "beta_node": a * nbytes,
            "alpha": b,
            "beta": b * local * nbytes,
        },
        "Rabenseifner": {
            "alpha_node": 2 * a,
            "beta_node": 2 * (local - 1) / local * nbytes,
            "alpha": 2 * b,
            "beta": 2 * (nodes - 1) / nodes * nbytes,
        },
        "ring": max(rings, key=lambda terms: _seconds(terms, parameters)),
    }


def _slice_terms(nodes: int, nbytes: int) -> dict[str, Terms]:
    """Return the terms of all slices of a node at once, between nodes."""
    b, share = _steps(nodes), 2 * (nodes - 1) / nodes * nbytes
    return {
        "recursive doubling": {"alpha": b, "beta": b * nbytes},
        "Rabenseifner": {"alpha": 2 * b, "beta": share},
        "ring": {"alpha": 2 * (nodes - 1), "beta": share},
    }


def _header_terms(nodes: int, local: int, parameters: Parameters) -> Terms:
    terms = _message_terms(nodes, local, HEADER_BYTES, parameters)
    return terms["recursive doubling"]


def _shared_terms(nodes: int, local: int, nbytes: int) -> Terms:
    others = (local - 1) / local
    out = others if nodes == 1 else 1
    copies = others + (local + 1) / (2 * local) + out
    if nbytes <= _SMALL_BYTES:
        copies = 1 + 3 * (local - 1) / 2
    return {"alpha_shared": 1, "beta_shared": copies * nbytes}


def _seconds(terms: Terms, parameters: Parameters) -> float:
    values = dataclasses.asdict(parameters)
    return float(sum(factor * values[name] for name, factor in terms.items()))


def _fastest(choices: dict[str, Terms], parameters: Parameters) -> tuple[str, float]:
    times = {name: _seconds(terms, parameters) for name, terms in choices.items()}
    name = min(times, key=times.__getitem__)
    return name, times[name]


def all_reduce_seconds(
    parameters: Parameters, transport: str, nodes: int, local: int, nbytes: int
) -> tuple[float, str]:
    """Return the time of an all_reduce, and the algorithm over messages.

    Args:
        parameters: of the cluster.
        transport: one of `TRANSPORTS`.
        nodes: how many.
        local: ranks on each of them.
        nbytes: of the array.
    """
    if nodes * local == 1:
        return (0.0 if transport == "mpi4py" else parameters.overhead), ""
    if transport == "shared" and local > 1:
        on_node = _seconds(_shared_terms(nodes, local, nbytes), parameters)
        if nodes == 1:
            return on_node, ""
        name, between = _fastest(_slice_terms(nodes, nbytes), parameters)
        header = _seconds(_header_terms(nodes, 1, parameters), parameters)
        return on_node + between + header, name
    name, payload = _fastest(
        _message_terms(nodes, local, nbytes, parameters), parameters
    )
    if transport == "mpi4py":
        return payload, name
    header = _seconds(_header_terms(nodes, local, parameters), parameters)
    return payload + header + parameters.overhead, name


def predict(
    parameters: Parameters,
    sizes: Sequence[int],
    ranks_per_node: int,
    most_ranks: int,
) -> list[Prediction]:
    """Predict the times of all transports, for 2, 4, 8 ... ranks.

    Nodes are filled one after the other.

    Args:
        parameters: of the cluster.
        sizes: of arrays, in bytes.
        ranks_per_node: the most ranks on a node.
        most_ranks: where to end.
    """
    predictions = []
    p = 2
    while p <= most_ranks:
        nodes = -(-p // ranks_per_node)
        local = -(-p // nodes)
        for nbytes in sizes:
            for transport in TRANSPORTS:
                seconds, name = all_reduce_seconds(
                    parameters, transport, nodes, local, nbytes
                )
                predictions.append(
                    Prediction(p, nodes, nbytes, transport, seconds, name)
                )
        p *= 2
    return predictions


# --- parameters from measurements ---------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Fit:
    """Parameters that were fitted.

    Attributes:
        parameters: with those that the measurements say nothing of as they were.
        fitted: the names of those that the measurements gave.
        errors: for each transport, the median of how far the model is from what was
            measured, as a share of it.
    """

    parameters: Parameters
    fitted: tuple[str, ...]
    errors: dict[str, float]


@dataclasses.dataclass(frozen=True)
class _Point:
    nodes: int
    local: int
    nbytes: int
    seconds: float


def fit(records: Sequence[Record], start: Parameters) -> Fit:
    """Fit the parameters to what ``mpidist bench all_reduce`` measured.

    Least squares of the relative errors, not negative; which algorithm MPI takes for
    a size is the one that is fastest by the parameters found so far, until that does
    not change. Records of one node give the parameters of a node, records of several
    nodes those of the network.

    Args:
        records: at least one, with results of all_reduce, of two ranks or more.
        start: parameters for what the records say nothing of.

    Raises:
        UsageError: where no record has such results.
    """
    raw = _points(records, _RAW, "")
    if not raw:
        raise UsageError(
            "--fit: no results of all_reduce on two ranks or more; make them with "
            "`mpirun -n 2 mpidist bench all_reduce --json F`"
        )
    several = any(point.nodes > 1 for point in raw)
    on_node = any(point.local > 1 for point in raw)
    names = ["alpha_node", "beta_node"] * on_node + ["alpha", "beta"] * several
    parameters = _fit_terms(
        raw,
        start,
        names,
        lambda q, one: _message_terms(q.nodes, q.local, q.nbytes, one),
    )
    fitted = list(names)
    errors = {"mpi4py": _error(raw, parameters, "mpi4py")}
    shared = _points(records, _OURS, "shared")
    if shared:

        def terms(q: _Point, one: Parameters) -> dict[str, Terms]:
            whole = _shared_terms(1, q.local, q.nbytes)
            if q.nodes == 1:
                return {"": whole}
            header = _header_terms(q.nodes, 1, one)
            return {
                name: {
                    key: whole.get(key, 0) + header.get(key, 0) + between.get(key, 0)
                    for key in (*whole, *header, *between)
                }
                for name, between in _slice_terms(q.nodes, q.nbytes).items()
            }

        parameters = _fit_terms(
            shared, parameters, ["alpha_shared", "beta_shared"], terms
        )
        fitted += ["alpha_shared", "beta_shared"]
        errors["shared"] = _error(shared, parameters, "shared")
    direct = _points(records, _OURS, "direct")
    if direct:
        extra = []
        for q in direct:
            if q.nbytes <= _SMALL_BYTES:
                known = dataclasses.replace(parameters, overhead=0.0)
                predicted = all_reduce_seconds(
                    known, "direct", q.nodes, q.local, q.nbytes
                )
                extra.append(max(0.0, q.seconds - predicted[0]))
        if extra:
            parameters = dataclasses.replace(
                parameters, overhead=float(np.median(extra))
            )
            fitted.append("overhead")
        errors["direct"] = _error(direct, parameters, "direct")
    return Fit(parameters, tuple(fitted), errors)


def _points(records: Sequence[Record], name: str, transport: str) -> list[_Point]:
    """Return the measured times of a contestant, in runs that used a transport."""
    points = []
    for record in records:
        facts = record.facts
        ranks, nodes = facts["ranks"], facts["nodes"]
        if ranks < 2 or ranks % nodes or record.facts["crowded"]:
            continue
        if transport and facts["transports"]["host"]["name"] != transport:
            continue
        points += [
            _Point(nodes, ranks // nodes, one.nbytes, one.timings[name].median)
            for one in record.results
            if _is_all_reduce(one) and name in one.timings and one.nbytes is not None
        ]
    return points


def _is_all_reduce(result: Result) -> bool:
    return result.bench == "all_reduce"


def _fit_terms(
    points: Sequence[_Point],
    start: Parameters,
    names: Sequence[str],
    terms_of: Callable[[_Point, Parameters], dict[str, Terms]],
) -> Parameters:
    parameters, chosen_before = start, None
    for _ in range(_ROUNDS):
        rows, targets, chosen = [], [], []
        for point in points:
            choices = terms_of(point, parameters)
            name, _seconds_of_it = _fastest(choices, parameters)
            terms = choices[name]
            known = {k: v for k, v in terms.items() if k not in names}
            rest = point.seconds - _seconds(known, parameters)
            rows.append([terms.get(k, 0.0) / point.seconds for k in names])
            targets.append(rest / point.seconds)
            chosen.append(name)
        solution = _not_negative(np.array(rows), np.array(targets))
        values = dict(zip(names, map(float, solution), strict=True))
        parameters = dataclasses.replace(parameters, **values)
        if chosen == chosen_before:
            break
        chosen_before = chosen
    return parameters


def _not_negative(matrix: Any, target: Any) -> Any:
    """Return the least squares solution without negative entries.

    Of few unknowns: the best over all choices of which are zero.
    """
    unknowns = matrix.shape[1]
    best, least = np.zeros(unknowns), np.inf
    for count in range(1, unknowns + 1):
        for columns in itertools.combinations(range(unknowns), count):
            scale = np.abs(matrix[:, columns]).max(axis=0)
            scale[scale == 0] = 1.0
            part, *_ = np.linalg.lstsq(matrix[:, columns] / scale, target, rcond=None)
            if (part < 0).any():
                continue
            candidate = np.zeros(unknowns)
            candidate[list(columns)] = part / scale
            error = float(((matrix @ candidate - target) ** 2).sum())
            if error < least:
                best, least = candidate, error
    return best


def _error(points: Sequence[_Point], parameters: Parameters, transport: str) -> float:
    errors = []
    for q in points:
        model, _ = all_reduce_seconds(parameters, transport, q.nodes, q.local, q.nbytes)
        errors.append(abs(model / q.seconds - 1))
    return float(np.median(errors))


# --- what is shown ---------------------------------------------------------------


def model_text(
    parameters: Parameters,
    origins: dict[str, str],
    predictions: Sequence[Prediction],
) -> str:
    """Return parameters and predictions as tables.

    Args:
        parameters: of the cluster.
        origins: where each parameter is from: "given", "fitted", "assumed".
        predictions: of all sizes, transports and numbers of ranks.
    """
    rows = [["parameter", "value", "", "from"]]
    for name, value in dataclasses.asdict(parameters).items():
        option = f"--{name.replace('_', '-')}"
        if name.startswith("beta"):
            speed = f"{digits(1e-9 / value)} GB/s" if value else "no time"
            rows.append([option, speed, f"{value:.3g} s/B", origins[name]])
        else:
            rows.append([option, show_seconds(value), f"{value:.3g} s", origins[name]])
    parts = [align(rows, heads=1)]
    sizes = list(dict.fromkeys(one.nbytes for one in predictions))
    table = [["ranks", "nodes"], ["", ""]]
    for nbytes in sizes:
        table[0] += [show_size(nbytes), "", ""]
        table[1] += list(TRANSPORTS)
    keys = dict.fromkeys((one.ranks, one.nodes) for one in predictions)
    times = {(o.ranks, o.nbytes, o.transport): o.seconds for o in predictions}
    for ranks, nodes in keys:
        row = [f"{ranks:,}", f"{nodes:,}"]
        for nbytes in sizes:
            row += [show_seconds(times[ranks, nbytes, name]) for name in TRANSPORTS]
        table.append(row)
    parts.append("predicted times of an all_reduce\n" + align(table, heads=2))
    return "\n\n".join(parts) + "\n"


def model_json(
    parameters: Parameters,
    origins: dict[str, str],
    predictions: Sequence[Prediction],
    found: Fit | None,
) -> str:
    """Return parameters and predictions as JSON, in seconds and bytes."""
    whole = {
        "format": "mpidist-bench-model",
        "version": 1,
        "parameters": dataclasses.asdict(parameters),
        "origins": origins,
        "fit_errors": None if found is None else found.errors,
        "predictions": [dataclasses.asdict(one) for one in predictions],
    }
    return json.dumps(whole, indent=1) + "\n"
