"""Facts about ranks, machines and libraries, for `info`, `check` and `bench`."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

import mpidist
from mpidist import _native
from mpidist._base import gpus
from mpidist._base.errors import format_ranks
from mpidist._cli.job import Job
from mpidist._mpi import launcher, library
from mpidist._strategy.strategy import group_of

Facts: TypeAlias = dict[str, Any]
"""What `mpidist info --json` prints, or a part of it."""


def software_facts(mpi: ModuleType) -> dict[str, str]:
    """Return names and versions. Not collective."""
    name, version = mpi.get_vendor()
    return {
        "mpidist": mpidist.__version__,
        "mpi": f"{name} {'.'.join(map(str, version))}",
        "mpi_library": mpi.Get_library_version().splitlines()[0].rstrip("\0 ,"),
        "mpi_standard": ".".join(map(str, mpi.Get_version())),
        "mpi_threads": library.thread_level(),
        "mpi4py": importlib.metadata.version("mpi4py"),
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def machine_facts() -> Facts:
    """Return facts about this rank's machine. Not collective."""
    return {
        "host": platform.node(),
        "processor": _processor_name(),
        "cores": os.cpu_count() or 1,
        "cores_for_this_rank": len(os.sched_getaffinity(0)),
        "architecture": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
    }


def _processor_name() -> str:
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


def transport_facts(strategy: mpidist.Strategy) -> dict[str, Facts]:
    """Return the transport of each kind of array ("host", "gpu"). Not collective.

    ``area_bytes`` is the size of its area of shared memory, None if it has none;
    ``text`` is all of it in one line.
    """
    chosen = group_of(strategy).collectives.resources.transports
    facts: dict[str, Facts] = {}
    for kind, transport in (("host", chosen.host), ("gpu", chosen.device)):
        reason = getattr(
            chosen, f"{kind}_reason", chosen.reason if kind == "gpu" else ""
        )
        name, area = transport.name, getattr(transport, "area_bytes", None)
        text = name
        if reason:
            text = reason if reason.startswith(name) else f"{name}: {reason}"
        if area is not None:
            text += f", areas of {area / 2**20:.3g} MiB"
        facts[kind] = {
            "name": name,
            "reason": reason,
            "area_bytes": area,
            "text": text,
        }
    return facts


def core_facts(missing: Sequence[str]) -> Facts:
    """Return which ranks lack the native core, given why each does (or "")."""
    lacking = [rank for rank, why in enumerate(missing) if why]
    if not lacking:
        return {"missing_on": [], "text": "present", "advice": ""}
    where = "" if len(lacking) == len(missing) else f" on {format_ranks(lacking)}"
    means = "everything goes by MPI, correctly but more slowly"
    return {
        "missing_on": lacking,
        "text": f"{missing[lacking[0]]}{where}; {means}",
        "advice": _native.ADVICE,
    }


def gpu_facts() -> Facts:
    """Return the version of CuPy, and how many GPUs it finds. Not collective."""
    count, reason = gpus.count_gpus()
    version = getattr(sys.modules.get("cupy"), "__version__", None)
    return {"cupy": version, "gpus": count, "reason": reason}


def describe_stranger(size: int) -> str:
    """Return a message if the launcher started ranks that MPI does not know of.

    Returns:
        The message; "" if MPI knows all ranks.
    """
    launch = launcher.find_launch()
    if size > 1 or launch is None or (launch.size or 1) == 1:
        return ""
    version = library.mpi_module().Get_library_version()
    return launcher.describe_alone(launch, version)
