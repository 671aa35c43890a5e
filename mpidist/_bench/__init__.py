"""The benchmark behind `mpidist bench`: raw mpi4py and mpidist in the same run.

Each benchmark is one function, which adds rows to the table. It contains the
hand-written code and the code with mpidist, checks the results of both, and measures
them alternately (`timing`). The aims are in `aims`. launch/lib makes the pictures and
the tables of the documentation.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Sequence
from typing import Final

from mpidist._bench import calls, collectives, nests, training
from mpidist._bench.aims import Aim as Aim
from mpidist._bench.aims import aim_of as aim_of
from mpidist._bench.job import Job as Job
from mpidist._bench.job import UsageError as UsageError
from mpidist._bench.job import WrongResultError as WrongResultError
from mpidist._bench.machine import MachineFacts as MachineFacts
from mpidist._bench.machine import TransportFacts as TransportFacts
from mpidist._bench.machine import is_crowded as is_crowded
from mpidist._bench.machine import machine_facts as machine_facts
from mpidist._bench.machine import software_facts as software_facts
from mpidist._bench.machine import transport_facts as transport_facts
from mpidist._bench.model import ASSUMED as ASSUMED
from mpidist._bench.model import FIGURES as FIGURES
from mpidist._bench.model import Prediction as Prediction
from mpidist._bench.model import compare as compare
from mpidist._bench.model import comparison_text as comparison_text
from mpidist._bench.model import fit as fit
from mpidist._bench.model import model_text as model_text
from mpidist._bench.model import predict as predict
from mpidist._bench.session import Session as Session
from mpidist._bench.shapes import MODELS as MODELS
from mpidist._bench.table import COLUMNS as COLUMNS
from mpidist._bench.table import Facts as Facts
from mpidist._bench.table import Record as Record
from mpidist._bench.table import Row as Row
from mpidist._bench.table import align as align
from mpidist._bench.table import cells_of as cells_of
from mpidist._bench.table import header_of as header_of
from mpidist._bench.table import read_record as read_record
from mpidist._bench.table import text_of as text_of
from mpidist._bench.timing import QUICK as QUICK
from mpidist._bench.timing import Effort as Effort
from mpidist._bench.timing import Timing as Timing
from mpidist._bench.timing import measure as measure
from mpidist._bench.units import parse_seconds as parse_seconds
from mpidist._bench.units import parse_seconds_per_byte as parse_seconds_per_byte
from mpidist._bench.units import parse_size as parse_size
from mpidist._bench.units import show_seconds as show_seconds
from mpidist._bench.units import show_size as show_size

BENCHES: Final[dict[str, Callable[[Session], None]]] = {
    "all_reduce": collectives.all_reduce,
    "nest": nests.nest,
    "small_nest": nests.small_nest,
    "all_gather": collectives.all_gather,
    "run": calls.run,
    "merge_call": calls.merge_call,
    "reduce": calls.reduce,
    "update": calls.update,
    "elastic": training.run,
}


def run(
    job: Job,
    names: Sequence[str],
    sizes: Sequence[int] | None,
    effort: Effort,
    progress: Callable[[str], None] = lambda name: None,
) -> Record:
    """Run benchmarks one after the other. Collective.

    Args:
        job: the ranks.
        names: names of `BENCHES`.
        sizes: sizes in bytes for all_reduce and all_gather; None: the defaults.
        effort: how long to measure.
        progress: called on all ranks with the name of each benchmark as it begins.

    Raises:
        WrongResultError: if a call gave a wrong result.
    """
    session = Session(job, sizes, effort)
    facts = _facts(session)
    for name in names:
        progress(name)
        BENCHES[name](session)
    # Not after an exception, which one rank may have alone: closing waits for all.
    session.close()
    return Record(facts, session.rows, session.notes)


def _facts(session: Session) -> Facts:
    job = session.job
    crowded = is_crowded(job)
    if crowded:
        session.note(
            "There are more ranks than cores: ranks wait for a core, and times depend "
            "on when they get one."
        )
    if job.size == 1:
        session.note("One rank: nothing is communicated; start it with mpirun -n 2.")
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "ranks": job.size,
        "nodes": job.nodes,
        "crowded": crowded,
        "machine": machine_facts(),
        "software": software_facts(job.mpi),
        "transports": transport_facts(session.strategy),
        "environment": {
            k: v for k, v in sorted(os.environ.items()) if k.startswith("MPIDIST_")
        },
    }
