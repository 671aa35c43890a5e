"""Facts about the machine and the software, for records and `mpidist info`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from types import ModuleType
from typing import TypedDict

import numpy as np

import mpidist
from mpidist._bench.job import Job
from mpidist._strategy.strategy import group_of


class MachineFacts(TypedDict):
    """One rank's machine."""

    host: str
    processor: str
    cores: int
    cores_for_this_rank: int
    architecture: str
    system: str


class TransportFacts(TypedDict):
    """The transport of one kind of array.

    ``area_bytes`` is the size of its area of shared memory, None if it has none;
    ``text`` is all of it in one line.
    """

    name: str
    reason: str
    area_bytes: int | None
    text: str


def software_facts(mpi: ModuleType) -> dict[str, str]:
    """Return names and versions. Not collective.

    Args:
        mpi: the module ``mpi4py.MPI``.
    """
    name, version = mpi.get_vendor()
    return {
        "mpidist": mpidist.__version__,
        "mpi": f"{name} {'.'.join(map(str, version))}",
        "mpi_library": mpi.Get_library_version().splitlines()[0].rstrip("\0 ,"),
        "mpi_standard": ".".join(map(str, mpi.Get_version())),
        "mpi4py": importlib.metadata.version("mpi4py"),
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def machine_facts() -> MachineFacts:
    """Return facts about this rank's machine. Not collective."""
    return {
        "host": platform.node(),
        "processor": processor_name(),
        "cores": os.cpu_count() or 1,
        "cores_for_this_rank": len(os.sched_getaffinity(0)),
        "architecture": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
    }


def processor_name() -> str:
    """Return for example ``AMD EPYC 7B13``."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                key, _, value = line.partition(":")
                if key.strip() in ("model name", "Model"):
                    return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def is_crowded(job: Job) -> bool:
    """Return whether any node has more ranks than cores. Collective."""
    return not job.everywhere(job.local_size <= (os.cpu_count() or 1))


def transport_facts(strategy: mpidist.Strategy) -> dict[str, TransportFacts]:
    """Return the transport of each kind of array ("host", "gpu"). Not collective."""
    chosen = group_of(strategy).collectives.transports
    facts: dict[str, TransportFacts] = {}
    for kind, transport in (("host", chosen.host), ("gpu", chosen.device)):
        reason = getattr(
            chosen, f"{kind}_reason", chosen.reason if kind == "gpu" else ""
        )
        area = getattr(transport, "area_bytes", None)
        text = transport.name
        if reason:
            # A reason may begin with the name.
            text = reason if reason.startswith(text) else f"{text}: {reason}"
        if area is not None:
            text += f", areas of {area / 2**20:.3g} MiB"
        facts[kind] = {
            "name": transport.name,
            "reason": reason,
            "area_bytes": area,
            "text": text,
        }
    return facts
