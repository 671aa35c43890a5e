"""`mpidist bench`: its arguments, and the output of its results."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from mpidist import _bench
from mpidist._bench import UsageError
from mpidist._cli.speaking import (
    Parser,
    for_argparse,
    launched_rank,
    positive_seconds,
    say,
)

ABOUT: Final = "time mpidist against raw mpi4py, on these ranks"
_DESCRIPTION: Final = """\
Times raw mpi4py and mpidist alternately in the same processes, after comparing both
results with the correct one, and prints one table: work, bytes, raw, mpidist, their
ratio, and the project's aim for such ranks. Start it on the ranks to measure:

  mpirun -n 2 mpidist bench
  mpirun -n 4 mpidist bench all_reduce --sizes 4B,64KiB,16MiB --json F.json

NAME (default: all):
  all_reduce   the sum of one float32 array             raw: Allreduce in place
  nest         the gradients of ResNet-50 and of        raw: pack, Allreduce in place,
               BERT-base, plain and in buffers_like          unpack
  small_nest   20 arrays of 1 KiB in one call           raw: the same
  all_gather   an array of each rank, on all            raw: Allgather
  run          an empty function                        raw: Barrier
  merge_call   an empty merge_fn                        raw: Barrier, Bcast
  reduce       the sum of a Python number               raw: Allreduce
  update       sums of gradients, and the update of     raw: for each Allreduce,
               20 variables in merge_fn                      multiply, subtract
  elastic      a training step with a commit            raw: the step without it
               a commit of 4 variables                  raw: copies of the arrays

and, on one process:
  mpidist bench model   predict times on more ranks (mpidist bench model --help)
"""
_MODEL: Final = """\
Predicts the time of an all_reduce on more ranks and nodes, by an alpha-beta model, from
figures of your cluster: given as options, or fitted to measurements of `mpidist bench
all_reduce --json` (on one node; and on several, for the network). Write times as 2us or
2e-6, bandwidths as 12.5GB/s, or seconds per byte as 8e-11. Figures that are neither
given nor fitted are assumed, and marked so. The formulas are in docs/performance.md.

  mpidist bench model --alpha 2us --beta 12.5GB/s --ranks-per-node 32
  mpidist bench model --fit one_node.json --fit two_nodes.json
  mpidist bench model --fit one_node.json --fit two_nodes.json --check four_nodes.json
"""


@for_argparse
def _sizes(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(_bench.parse_size(part) for part in text.split(",")))


@for_argparse
def _positive(text: str) -> int:
    if not text.strip().isdigit() or int(text) < 1:
        raise ValueError(f"expected a number of at least 1, got {text!r}")
    return int(text)


@for_argparse
def _name(text: str) -> str:
    if text not in _bench.BENCHES:
        names = ", ".join(_bench.BENCHES)
        raise ValueError(f"expected one of {names}, got {text!r}")
    return text


def _bench_parser() -> Parser:
    parser = Parser(
        prog="mpidist bench",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", type=_name, help="a benchmark, see above")
    add(
        "--sizes",
        type=_sizes,
        metavar="LIST",
        help="sizes of the arrays of all_reduce and all_gather: 4B,64KiB,1MB",
    )
    effort = parser.add_mutually_exclusive_group()
    effort.add_argument(
        "--seconds",
        type=positive_seconds,
        default=1.0,
        metavar="S",
        help="about how long to measure a row; networks: five times that (default: 1)",
    )
    effort.add_argument(
        "--quick",
        action="store_true",
        help="at most three samples of each: shows that it works, not how fast",
    )
    add("--json", metavar="FILE", help="write the results to FILE, with quartiles")
    return parser


def bench(arguments: Sequence[str]) -> int:
    """Run `mpidist bench` with these arguments; return the exit code. Collective."""
    if arguments[:1] == ["model"]:
        return _model(arguments[1:])
    given = _bench_parser().parse_args(list(arguments))
    job = _bench.Job()
    job.require(_file_problem(given.json) if job.rank == 0 else None)
    effort = _bench.QUICK if given.quick else _bench.Effort(given.seconds)
    start = time.monotonic()

    def progress(name: str) -> None:
        if job.rank == 0 and sys.stderr.isatty():
            spent = time.monotonic() - start
            print(f"mpidist bench: {name} ... ({spent:.0f} s)", file=sys.stderr)

    names = list(dict.fromkeys(given.names)) or list(_bench.BENCHES)
    record = _bench.run(job, names, given.sizes, effort, progress)
    problem = None
    if job.rank == 0:
        print(_bench.text_of(record), end="", flush=True)
        problem = _write(given.json, record.to_json)
    job.require(problem)
    job.free()
    return 0


def _file_problem(path: str | None) -> str | None:
    """Return why a file cannot be written; None if it can, or if there is none."""
    if path is None:
        return None
    folder = Path(path).parent
    if not folder.is_dir():
        return f"--json {path}: there is no folder {folder}"
    if Path(path).is_dir() or not os.access(folder, os.W_OK):
        return f"--json {path}: cannot be written"
    return None


def _write(path: str | None, text: Callable[[], str]) -> str | None:
    """Write a file, if one was requested; return what went wrong."""
    if path is None:
        return None
    try:
        Path(path).write_text(text(), encoding="utf-8")
    except OSError as error:
        return f"--json {path}: cannot be written: {error}"
    say(f"\nwritten: {path}")
    return None


# --- the model, without MPI --------------------------------------------------------


def _model_parser() -> Parser:
    parser = Parser(
        prog="mpidist bench model",
        description=_MODEL,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    for name, text in _bench.FIGURES.items():
        rate, value = name.startswith("beta"), _bench.ASSUMED[name]
        shown = f"{1e-9 / value:g}GB/s" if rate else _bench.show_seconds(value)
        add(
            f"--{name.replace('_', '-')}",
            type=for_argparse(
                _bench.parse_seconds_per_byte if rate else _bench.parse_seconds
            ),
            metavar="BANDWIDTH" if rate else "TIME",
            help=f"{text} (if not fitted: {shown})",
        )
    add(
        "--fit",
        action="append",
        default=[],
        metavar="FILE",
        help="fit what is not given to the all_reduce results in FILE; may be repeated",
    )
    add(
        "--check",
        action="append",
        default=[],
        metavar="FILE",
        help="compare with the all_reduce results in FILE, instead of predicting for "
        "more ranks; may be repeated",
    )
    add(
        "--ranks-per-node",
        type=_positive,
        metavar="N",
        help="ranks on each node (default: as in the files of --fit, else 16)",
    )
    add(
        "--ranks",
        type=_positive,
        default=4096,
        metavar="N",
        help="the largest number of ranks (default: 4096)",
    )
    add(
        "--sizes",
        type=_sizes,
        default=(4, 2**20, 100 * 2**20),
        metavar="LIST",
        help="sizes of arrays (default: 4B,1MiB,100MiB)",
    )
    add("--json", metavar="FILE", help="write the predictions to FILE")
    return parser


def _model(arguments: Sequence[str]) -> int:
    parser = _model_parser()
    given = parser.parse_args(list(arguments))
    if given.ranks < 2:
        parser.error("argument --ranks: expected at least 2")
    _raise(_file_problem(given.json))
    records = [_bench.read_record(path) for path in given.fit]
    measured = [_bench.read_record(path) for path in given.check]
    if launched_rank():
        return 0  # one process computes and prints
    fitted, errors = _bench.fit(records) if records else ({}, {})
    chosen = {k: v for k in _bench.FIGURES if (v := getattr(given, k)) is not None}
    figures = {**_bench.ASSUMED, **fitted, **chosen}
    origins = {
        **dict.fromkeys(_bench.ASSUMED, "assumed"),
        **dict.fromkeys(fitted, "fitted"),
        **dict.fromkeys(chosen, "given"),
    }
    counts = [one.facts["ranks"] // one.facts["nodes"] for one in records]
    local = given.ranks_per_node or max(counts, default=16)
    comparisons = _bench.compare(figures, measured)
    predictions = []
    if measured:
        text = _bench.comparison_text(figures, origins, comparisons)
    else:
        predictions = _bench.predict(figures, given.sizes, local, given.ranks)
        text = _bench.model_text(figures, origins, predictions)
    say(text.rstrip())
    if errors:
        text = ", ".join(f"{k} {v:.0%}" for k, v in errors.items())
        say(f"\nmedian distance of the fit from what was measured: {text}")
    whole = {
        "format": "mpidist-bench-model",
        "version": 2,
        "figures": figures,
        "origins": origins,
        "fit_errors": errors,
        "predictions": [dataclasses.asdict(one) for one in predictions],
        "comparisons": [dataclasses.asdict(one) for one in comparisons],
    }
    _raise(_write(given.json, lambda: json.dumps(whole, indent=1) + "\n"))
    return 0


def _raise(problem: str | None) -> None:
    if problem is not None:
        raise UsageError(problem)
