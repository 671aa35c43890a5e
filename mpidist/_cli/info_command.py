"""`mpidist info`: what this job is, and how it communicates."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, Final

import mpidist
from mpidist import _bench, _native
from mpidist._base import backend
from mpidist._base.errors import format_ranks
from mpidist._base.options import read_environment
from mpidist._cli.speaking import Parser, say
from mpidist._mpi import communicator, launcher, versions
from mpidist._strategy.strategy import group_of

ABOUT: Final = "what this job is: ranks, nodes, libraries, transports, settings"
_DESCRIPTION: Final = """\
Shows what mpidist finds on these ranks: MPI, NumPy, CuPy and GPUs; ranks, nodes and
cores; how each kind of array is moved, and why; the guard, its time-outs, and the
environment variables that are set. Put its output into a bug report.

  mpidist info
  mpirun -n 4 mpidist info
  srun -n 4 --mpi=pmix mpidist info --json
"""
# Of others, these change what mpidist does, or how fast.
_OTHERS: Final = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "OMPI_MCA_osc",
    "OMPI_MCA_btl",
    "OMPI_MCA_pml",
    "UCX_TLS",
    "SLURM_JOB_ID",
)
_SHOWN_NODES: Final = 16
_WIDTH: Final = 12


def info(arguments: Sequence[str]) -> int:
    """Run `mpidist info` with these arguments; return the exit code. Collective."""
    parser = Parser(
        prog="mpidist info",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--device",
        default="auto",
        help='as for MPIStrategy: "auto" (default), "cpu", "gpu" or "gpu:K"',
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(list(arguments))
    facts = facts_of_job(given.device)
    if given.json:
        say(json.dumps(facts, indent=1))
    else:
        say(text_of_facts(facts))
    return 1 if facts["problems"] else 0


def facts_of_job(device: str) -> dict[str, Any]:
    """Return all facts, on all ranks. Collective.

    Args:
        device: for the strategy that is made to find out.
    """
    job = _bench.Job()
    mine: dict[str, Any] = {
        "rank": job.rank,
        "machine": _bench.machine_facts(),
        "software": {
            **_bench.software_facts(job.mpi),
            "native_core": "present" if versions.has_core() else "absent",
            "executable": sys.executable,
        },
        "environment": _environment(),
        "gpu": gpu_facts(),
        "core": _native.missing,
    }
    ranks = job.comm.allgather(mine)
    facts: dict[str, Any] = {
        "software": ranks[0]["software"],
        "ranks": job.size,
        "nodes": _nodes(ranks),
        "crowded": _bench.is_crowded(job),
        "native_core": core_facts([one["core"] for one in ranks]),
        "gpu": ranks[0]["gpu"],
        "cuda_aware": communicator.query_cuda_support(),
        "environment": ranks[0]["environment"],
        "problems": _problems(ranks, job.size),
    }
    facts["strategy"], problem = _strategy_facts(device)
    if problem is not None:
        facts["problems"].append(problem)
    job.free()
    return facts


def _environment() -> dict[str, str]:
    return {
        name: os.environ[name]
        for name in sorted(os.environ)
        if name.startswith("MPIDIST_") or name in _OTHERS
    }


def core_facts(missing: Sequence[str]) -> dict[str, Any]:
    """Return which ranks lack the native core, why, and what it means.

    Args:
        missing: for each rank why it has none; "" where it has.
    """
    lacking = [rank for rank, why in enumerate(missing) if why]
    if not lacking:
        return {"missing_on": [], "text": "present", "advice": ""}
    where = "" if len(lacking) == len(missing) else f" on {format_ranks(lacking)}"
    means = "everything goes by MPI, right and slower"
    return {
        "missing_on": lacking,
        "text": f"{missing[lacking[0]]}{where}; {means}",
        "advice": _native.ADVICE,
    }


def gpu_facts() -> dict[str, Any]:
    """Return the version of CuPy, and how many GPUs it finds. Not collective."""
    count, reason = backend._count_gpus()
    version = getattr(sys.modules.get("cupy"), "__version__", None)
    return {"cupy": version, "gpus": count, "reason": reason}


def _nodes(ranks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    nodes: dict[str, dict[str, Any]] = {}
    for one in ranks:
        machine = one["machine"]
        node = nodes.setdefault(
            machine["host"],
            {
                "host": machine["host"],
                "processor": machine["processor"],
                "cores": machine["cores"],
                "gpus": one["gpu"]["gpus"],
                "ranks": [],
                "cores_of_ranks": [],
            },
        )
        node["ranks"].append(one["rank"])
        node["cores_of_ranks"].append(machine["cores_for_this_rank"])
    return list(nodes.values())


def _problems(ranks: Sequence[dict[str, Any]], size: int) -> list[str]:
    problems = []
    alone = describe_stranger(size)
    if alone:
        problems.append(alone)
    for kind in ("software", "environment"):
        for one in ranks[1:]:
            for key in sorted({*ranks[0][kind], *one[kind]}):
                first, other = ranks[0][kind].get(key), one[kind].get(key)
                if key in ("SLURM_JOB_ID", "CUDA_VISIBLE_DEVICES") or first == other:
                    continue
                problems.append(
                    f"{key} is {first or 'not set'} on rank 0, and "
                    f"{other or 'not set'} on rank {one['rank']}"
                )
    return list(dict.fromkeys(problems))


def describe_stranger(size: int) -> str:
    """Return what to say where the launcher started ranks that MPI knows not of.

    Args:
        size: how many ranks MPI knows.

    Returns:
        A text; "" where all is well.
    """
    launch = launcher.find_launch()
    if size > 1 or launch is None or (launch.size or 1) == 1:
        return ""
    version = communicator.mpi_module().Get_library_version()
    return launcher.describe_alone(launch, version)


def _strategy_facts(device: str) -> tuple[dict[str, Any] | None, str | None]:
    """Make a strategy, and see what it chooses; or why not. Collective."""
    try:
        strategy = mpidist.MPIStrategy(device=device)
    except (ValueError, TypeError, RuntimeError) as error:  # the same on all ranks
        return None, f"MPIStrategy cannot be made: {error}"
    environment = read_environment()
    facts = {
        "devices": strategy.extended.worker_devices,
        "transports": _bench.transport_facts(strategy),
        "guard": group_of(strategy).guard.enabled,
        "stall_seconds": environment.stall_seconds,
        "timeout_seconds": environment.timeout_seconds,
        "bytes_per_pack": environment.bytes_per_pack,
        "abort": environment.abort,
    }
    strategy.close()
    return facts, None


def text_of_facts(facts: dict[str, Any]) -> str:
    """Return the facts for a person."""
    software, strategy = facts["software"], facts["strategy"]
    core: dict[str, str] = facts["native_core"]
    lines: list[tuple[str, str]] = [
        ("mpidist", f"{software['mpidist']}, Python {software['python']}"),
        ("MPI", f"{software['mpi']} (MPI {software['mpi_standard']})"),
        ("mpi4py", software["mpi4py"]),
        ("NumPy", software["numpy"]),
        *_under("native core", list(filter(None, map(core.get, ("text", "advice"))))),
        ("GPU", _gpu_text(facts)),
        ("ranks", _ranks_text(facts)),
        *_node_lines(facts["nodes"]),
    ]
    if strategy is not None:
        transports = strategy["transports"]
        lines += [
            ("host arrays", transports["host"]["text"]),
            ("GPU arrays", transports["gpu"]["text"]),
            ("packs", f"{strategy['bytes_per_pack'] / 2**20:g} MiB of small arrays"),
            ("guard", _guard_text(strategy)),
            (
                "abort",
                "an uncaught exception ends the job" if strategy["abort"] else "off",
            ),
        ]
    variables = [f"{k}={v}" for k, v in facts["environment"].items()]
    lines += _under("environment", variables or ["nothing that mpidist reads is set"])
    lines += _under("problems", facts["problems"])
    return "\n".join(f"{name:<{_WIDTH}} {text}" for name, text in lines)


def _under(name: str, texts: Sequence[str]) -> list[tuple[str, str]]:
    return [(name if i == 0 else "", text) for i, text in enumerate(texts)]


def _gpu_text(facts: dict[str, Any]) -> str:
    gpu = facts["gpu"]
    if not gpu["gpus"]:
        return f"none: {gpu['reason']}"
    aware = "says" if facts["cuda_aware"] else "does not say"
    return f"{gpu['gpus']}, CuPy {gpu['cupy']}; the MPI {aware} that it is CUDA-aware"


def _ranks_text(facts: dict[str, Any]) -> str:
    nodes = len(facts["nodes"])
    text = f"{facts['ranks']} on {nodes} node{'s' * (nodes != 1)}"
    if facts["ranks"] == 1:
        text += " (start more with mpirun -n N mpidist info)"
    if facts["crowded"]:
        text += ": more ranks than cores, they wait for each other's core"
    return text


def _node_lines(nodes: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    lines = []
    for node in nodes[:_SHOWN_NODES]:
        ranks = node["ranks"]
        bound = {*node["cores_of_ranks"]}
        few, many = min(bound), max(bound)
        each = f"{few}" if few == many else f"{few} to {many}"
        shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
        gpus = f", {node['gpus']} GPUs" if node["gpus"] else ""
        lines.append(
            f"{node['host']}: {node['cores']} cores{gpus}; "
            f"rank{'s' * (len(ranks) > 1)} {shown}, each on {each} "
            f"core{'s' * (many > 1)}; {node['processor']}"
        )
    if len(nodes) > _SHOWN_NODES:
        lines.append(f"... and {len(nodes) - _SHOWN_NODES} more (--json has all)")
    return _under("nodes", lines)


def _guard_text(strategy: dict[str, Any]) -> str:
    if not strategy["guard"]:
        return "off: ranks that differ may hang, or get wrong data"
    timeout = strategy["timeout_seconds"]
    limit = f"an error after {timeout:g} s" if timeout else "no time-out"
    return f"on; missing ranks are named after {strategy['stall_seconds']:g} s, {limit}"
