"""Runs benchmarks, and makes their record."""

from __future__ import annotations

import dataclasses
import datetime
import os
from collections.abc import Callable, Sequence
from typing import Any, Final

from mpidist._bench import _moving, _steps
from mpidist._bench._job import Job
from mpidist._bench._machine import (
    is_crowded,
    machine_facts,
    software_facts,
    transport_facts,
)
from mpidist._bench._results import Record
from mpidist._bench._session import Options, Session, check_torch

BENCHES: Final[dict[str, Callable[[Session], None]]] = {
    "all_reduce": _moving.all_reduce,
    "nest": _moving.nest,
    "merge": _steps.merge,
    "gather": _moving.gather,
    "train": _steps.train,
}


def run(
    job: Job,
    benches: Sequence[str],
    options: Options,
    progress: Callable[[str], None] = lambda text: None,
) -> Record:
    """Run benchmarks one after the other. Collective.

    Args:
        job: the ranks.
        benches: names in `BENCHES`.
        options: the same on all ranks.
        progress: called on all ranks with the name of what begins.

    Raises:
        UsageError: if PyTorch was asked for and is missing.
        WrongResultError: if a call gave a wrong result.
    """
    if options.torch:
        check_torch(job)
    session = Session(job, options)
    facts = _facts(session, benches)
    for name in benches:
        progress(name)
        BENCHES[name](session)
    # Not after an exception, which may be that of one rank: closing waits for all.
    session.close()
    return Record(facts, session.results, session.notes)


def _facts(session: Session, benches: Sequence[str]) -> dict[str, Any]:
    job = session.job
    crowded = is_crowded(job)
    if crowded:
        session.note(
            "There are more ranks than cores: ranks wait for a core, and times depend "
            "on when they get one."
        )
    if job.size == 1:
        session.note("One rank: nothing is communicated; start it with mpirun -n 2.")
    if job.size > 1 and "OMP_NUM_THREADS" not in os.environ:
        session.note(
            "OMP_NUM_THREADS is not set: the threads of NumPy's BLAS of all ranks may "
            "share the cores (train)."
        )
    software = software_facts(job.mpi)
    if session.gloo is not None:
        software["torch"] = str(session.gloo.torch.__version__)
    strategy = session.strategy
    variables = {
        k: v for k, v in sorted(os.environ.items()) if k.startswith("MPIDIST_")
    }
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "ranks": job.size,
        "nodes": job.nodes,
        "crowded": crowded,
        "machine": machine_facts(),
        "software": software,
        "transports": transport_facts(strategy),
        "bytes_per_pack": strategy._collectives.options.bytes_per_pack
        or strategy._collectives._environment.bytes_per_pack,
        "environment": variables,
        "benches": list(benches),
        "options": dataclasses.asdict(session.options),
    }
