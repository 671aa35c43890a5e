"""`mpidist bench`: its arguments, and what it does with the results."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from mpidist import _bench
from mpidist._bench import UsageError
from mpidist._cli._speaking import Parser, launched_rank, say

ABOUT: Final = "time mpidist against raw mpi4py, on these ranks"
_DESCRIPTION: Final = """\
Times mpidist and raw mpi4py in the same processes, in turn, and prints medians, ratios,
GB/s and the share of the speed of a memory copy. Start it on the ranks that you mean:

  mpirun -n 2 mpidist bench
  mpirun -n 4 mpidist bench all_reduce --sizes 4B,64KiB,16MiB --json F.json --plot F.png
  mpirun -n 2 mpidist bench nest train --against torch

what (all of them, if none is named):
  all_reduce   the sum of one contiguous float32 array
  nest         the sum of the gradients of ResNet-50 and of BERT-base, a list of arrays
  merge        empty run and merge_call, reduce of a scalar, update of 20 variables
  gather       arrays of all ranks, concatenated on all
  train        data-parallel steps of a 784-512-512-10 network

and, on one process:
  mpidist bench model   predict times on more ranks (mpidist bench model --help)
  mpidist bench show    tables and pictures of a file that --json wrote
"""
_MODEL: Final = """\
Predicts the time of an all_reduce against ranks and nodes, by an alpha-beta model, from
figures of your cluster: given one by one, or fitted to what `mpidist bench all_reduce
--json` has measured there (on one node; and on several, for the network). Times are
like 2us or 2e-6, bandwidths like 12.5GB/s, or seconds per byte like 8e-11. What is
neither given nor fitted is assumed, and marked so. The formulas are in
docs/performance.md.

  mpidist bench model --alpha 2us --beta 12.5GB/s --ranks-per-node 32
  mpidist bench model --fit one_node.json --fit two_nodes.json --plot model.png
"""
_LISTS: Final = "comma-separated"


def _list_of(parse: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    def read(text: str) -> tuple[Any, ...]:
        try:
            return tuple(dict.fromkeys(parse(part) for part in text.split(",")))
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def _one(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def _positive(text: str) -> int:
    if not text.strip().isdigit() or int(text) < 1:
        raise ValueError(f"expected a number of at least 1, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    seconds = _bench.parse_seconds(text)
    if seconds <= 0:
        raise ValueError(f"expected a time above 0, got {text!r}")
    return seconds


def _name_in(names: Sequence[str]) -> Callable[[str], str]:
    def check(text: str) -> str:
        if text not in names:
            raise ValueError(f"expected one of {', '.join(names)}, got {text!r}")
        return text

    return check


def _bench_parser() -> Parser:
    parser = Parser(
        prog="mpidist bench",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "what",
        nargs="*",
        metavar="what",
        type=_one(_name_in(tuple(_bench.BENCHES))),
        help="all_reduce, nest, merge, gather, train",
    )
    add(
        "--sizes",
        type=_list_of(_bench.parse_size),
        metavar="LIST",
        help=f"sizes for all_reduce, and per rank for gather, {_LISTS}: 4B,64KiB,1MB",
    )
    add(
        "--models",
        type=_list_of(_name_in(tuple(_bench.MODELS))),
        default=("resnet50", "bert"),
        metavar="LIST",
        help="networks for nest: resnet50, bert, mlp (default: resnet50,bert)",
    )
    add(
        "--packs",
        type=_list_of(_bench.parse_size),
        default=(4 * 2**20, 128 * 2**20),
        metavar="LIST",
        help="further values of bytes_per_pack for nest (default: 4MiB,128MiB)",
    )
    add(
        "--batch",
        type=_one(_positive),
        default=128,
        metavar="ROWS",
        help="rows on each rank in a step of train (default: 128)",
    )
    add(
        "--repeats",
        type=_one(_positive),
        default=31,
        metavar="N",
        help="the most samples of each contestant (default: 31)",
    )
    add(
        "--seconds",
        type=_one(_seconds),
        default=1.0,
        metavar="S",
        help="about how long to measure one size; others in proportion (default: 1)",
    )
    add(
        "--against",
        choices=["torch"],
        help="have PyTorch's gloo take part: all_reduce, coalesced, all_gather, DDP",
    )
    _add_outputs(parser, "results")
    return parser


def _add_outputs(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--json", metavar="FILE", help=f"write the {what} to FILE")
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="draw a picture (.png, .svg or .pdf; needs matplotlib)",
    )


def bench(arguments: Sequence[str]) -> int:
    """Run `mpidist bench` with these arguments; return the exit code. Collective."""
    if arguments[:1] == ["model"]:
        return _model(arguments[1:])
    if arguments[:1] == ["show"]:
        return _show(arguments[1:])
    given = _bench_parser().parse_args(list(arguments))
    job = _bench.Job()
    job.require(_outputs_problem(given) if job.rank == 0 else None)
    options = _bench.Options(
        sizes=given.sizes,
        packs=given.packs,
        models=given.models,
        batch=given.batch,
        effort=_bench.Effort(given.repeats, given.seconds),
        torch=given.against == "torch",
    )
    start = time.monotonic()

    def progress(name: str) -> None:
        if job.rank == 0 and sys.stderr.isatty():
            spent = time.monotonic() - start
            print(f"mpidist bench: {name} ... ({spent:.0f} s)", file=sys.stderr)

    what = list(dict.fromkeys(given.what)) or list(_bench.BENCHES)
    record = _bench.run(job, what, options, progress)
    problem = None
    if job.rank == 0:
        print(_bench.text_of(record), end="", flush=True)
        problem = _write(record, given.json, given.plot)
    job.require(problem)
    job.free()
    return 0


def _write(record: _bench.Record, json: str | None, plot: str | None) -> str | None:
    """Write files; return what went wrong."""
    try:
        if json is not None:
            Path(json).write_text(record.to_json(), encoding="utf-8")
            print(f"results: {json}", flush=True)
        if plot is not None:
            print(f"picture: {', '.join(_bench.draw(record, plot))}", flush=True)
    except OSError as error:
        return f"the results could not be written: {error}"
    return None


def _outputs_problem(given: argparse.Namespace) -> str | None:
    """Return why an output can not be written, before there is one; else None."""
    for option, path in (("--json", given.json), ("--plot", given.plot)):
        if path is None:
            continue
        folder = Path(path).parent
        if not folder.is_dir():
            return f"{option} {path}: there is no folder {folder}"
        if Path(path).is_dir() or not os.access(folder, os.W_OK):
            return f"{option} {path}: can not be written"
    if given.plot is not None:
        if Path(given.plot).suffix not in (".png", ".svg", ".pdf"):
            return f"--plot {given.plot}: the name has to end with .png, .svg or .pdf"
        return _bench.missing_matplotlib()
    return None


def _raise_problem(given: argparse.Namespace) -> None:
    problem = _outputs_problem(given)
    if problem is not None:
        raise UsageError(problem)


# --- without MPI -------------------------------------------------------------------


def _show(arguments: Sequence[str]) -> int:
    parser = Parser(
        prog="mpidist bench show",
        description="Prints the tables of a file that `mpidist bench --json` wrote.",
    )
    parser.add_argument("file", help="what --json wrote")
    parser.add_argument(
        "what",
        nargs="*",
        metavar="what",
        type=_one(_name_in(tuple(_bench.BENCHES))),
        help="which benchmarks (default: all that are in it)",
    )
    parser.add_argument(
        "--markdown", action="store_true", help="print the tables alone, in Markdown"
    )
    parser.add_argument("--plot", metavar="FILE", help="draw the pictures again")
    given = parser.parse_args(list(arguments), argparse.Namespace(json=None))
    _raise_problem(given)
    record = _bench.read_record(given.file)
    if given.what:
        there = {one.bench for one in record.results}
        for name in given.what:
            if name not in there:
                raise UsageError(f"{given.file} has no results of {name}")
        results = [one for one in record.results if one.bench in given.what]
        record = dataclasses.replace(record, results=results)
    if launched_rank():
        return 0  # one is enough
    if given.markdown:
        names = dict.fromkeys(one.bench for one in record.results)
        say("\n".join(_bench.markdown_of(record, name) for name in names).rstrip())
    else:
        say(_bench.text_of(record).rstrip())
    if given.plot is not None:
        say(f"picture: {', '.join(_bench.draw(record, given.plot))}")
    return 0


def _model(arguments: Sequence[str]) -> int:
    parser = Parser(
        prog="mpidist bench model",
        description=_MODEL,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    explained = {
        "alpha": "latency of a message between nodes",
        "beta": "of a node's link to the network",
        "alpha_node": "latency of a message between ranks of a node",
        "beta_node": "between ranks of a node, through MPI",
        "alpha_shared": "an all_reduce of nothing in shared memory",
        "beta_shared": "of a copy in memory while all ranks copy",
        "overhead": "what mpidist adds to a call of MPI",
    }
    assumed = _bench.Parameters()
    for name, text in explained.items():
        rate = name.startswith("beta")
        value = getattr(assumed, name)
        shown = f"{1e-9 / value:g}GB/s" if rate else _bench.show_seconds(value)
        add(
            f"--{name.replace('_', '-')}",
            type=_one(_bench.parse_seconds_per_byte if rate else _bench.parse_seconds),
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
        "--ranks-per-node",
        type=_one(_positive),
        metavar="N",
        help="(default: those of the files of --fit; else 16)",
    )
    add(
        "--ranks",
        type=_one(_positive),
        default=4096,
        metavar="N",
        help="the most ranks to predict for (default: 4096)",
    )
    add(
        "--sizes",
        type=_list_of(_bench.parse_size),
        default=(4, 2**20, 100 * 2**20),
        metavar="LIST",
        help=f"sizes of arrays, {_LISTS} (default: 4B,1MiB,100MiB)",
    )
    _add_outputs(parser, "predictions")
    given = parser.parse_args(list(arguments))
    if given.ranks < 2:
        parser.error("argument --ranks: expected at least 2")
    _raise_problem(given)
    records = [_bench.read_record(path) for path in given.fit]
    if launched_rank():
        return 0
    found = _bench.fit(records, assumed) if records else None
    base = assumed if found is None else found.parameters
    chosen = {k: v for k in explained if (v := getattr(given, k)) is not None}
    parameters = dataclasses.replace(base, **chosen)
    origins = {
        name: "given"
        if name in chosen
        else "fitted"
        if found is not None and name in found.fitted
        else "assumed"
        for name in explained
    }
    local = given.ranks_per_node
    if local is None:
        counts = [one.facts["ranks"] // one.facts["nodes"] for one in records]
        local = max(counts, default=16)
    predictions = _bench.predict(parameters, given.sizes, local, given.ranks)
    say(_bench.model_text(parameters, origins, predictions).rstrip())
    if found is not None:
        errors = ", ".join(f"{k} {v:.0%}" for k, v in found.errors.items())
        say(f"\nmedian distance of the fit from what was measured: {errors}")
    try:
        if given.json is not None:
            text = _bench.model_json(parameters, origins, predictions, found)
            Path(given.json).write_text(text, encoding="utf-8")
            say(f"predictions: {given.json}")
        if given.plot is not None:
            title = f"alpha-beta model, up to {local} ranks on a node"
            _bench.draw_model(predictions, title, given.plot)
            say(f"picture: {given.plot}")
    except OSError as error:
        raise UsageError(f"the predictions could not be written: {error}") from None
    return 0
