"""`mpidist info`: what this job is, and how it communicates."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Final, TypedDict

import mpidist
from mpidist import _bench, _native
from mpidist._base import backend
from mpidist._base.environment import read_environment
from mpidist._base.errors import format_ranks
from mpidist._cli import placement
from mpidist._cli.placement import CoreUse, LauncherFacts
from mpidist._cli.speaking import Parser, let_the_first_speak, say
from mpidist._mpi import launcher, library, versions
from mpidist._strategy.strategy import group_of

ABOUT: Final = "what this job is: ranks, nodes, libraries, transports, settings"
_DESCRIPTION: Final = """\
Shows what mpidist finds on these ranks: MPI, NumPy, CuPy and GPUs; ranks, nodes and
cores; how each kind of array is moved, and why; the guard, its deadlines, and the
environment variables that are set. Include its output in a bug report.

  mpidist info
  mpirun -n 4 mpidist info
  srun -n 4 --mpi=pmix mpidist info --json
"""
# Variables of other programs that change what mpidist does, or how fast.
_OTHERS: Final = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "OMPI_MCA_osc",
    "OMPI_MCA_btl",
    "OMPI_MCA_pml",
    "OMPI_MCA_btl_tcp_if_include",
    "OMPI_MCA_btl_tcp_if_exclude",
    "UCX_TLS",
    "UCX_NET_DEVICES",
    "FI_PROVIDER",
)
_SHOWN_NODES: Final = 16
_WIDTH: Final = 12


class CoreFacts(TypedDict):
    """The ranks that lack the native core, why, and what to do."""

    missing_on: list[int]
    text: str
    advice: str


class GPUFacts(TypedDict):
    """The version of CuPy, and how many GPUs it finds; the reason if none."""

    cupy: str | None
    gpus: int
    reason: str


class RankFacts(TypedDict):
    """What one rank finds."""

    rank: int
    machine: _bench.MachineFacts
    software: dict[str, str]
    environment: dict[str, str]
    gpu: GPUFacts
    core: str
    cores: CoreUse


class NodeFacts(TypedDict):
    """One node, and the ranks on it; ranks of one node share memory."""

    host: str
    processor: str
    gpus: int
    ranks: list[int]
    cores: str


class StrategyFacts(TypedDict):
    """How a strategy communicates."""

    devices: tuple[str, ...]
    why_devices: list[str]
    transports: dict[str, _bench.TransportFacts]
    guard: bool
    stall_seconds: float
    timeout_seconds: float
    bytes_per_pack: int
    abort: bool


class JobFacts(TypedDict):
    """All facts; those of a rank are rank 0's, and differences are problems.

    Ranks of one node share memory. MPI may take them for ranks of several, which is
    what ``mpi_nodes`` counts.
    """

    software: dict[str, str]
    launcher: LauncherFacts
    ranks: int
    network: list[str]
    nodes: list[NodeFacts]
    mpi_nodes: int
    crowded: bool
    native_core: CoreFacts
    gpu: GPUFacts
    cuda_aware: str
    environment: dict[str, str]
    problems: list[str]
    strategy: StrategyFacts | None


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
    if describe_stranger(facts["ranks"]):
        let_the_first_speak()
    return 1 if facts["problems"] else 0


def facts_of_job(device: str) -> JobFacts:
    """Return all facts, on all ranks. Collective.

    Args:
        device: the device of the strategy that is created to find out.
    """
    job = _bench.Job()
    mine: RankFacts = {
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
        "cores": placement.core_use(),
    }
    ranks: list[RankFacts] = job.comm.allgather(mine)
    strategy, problem = _strategy_facts(device, job, ranks)
    facts: JobFacts = {
        "software": ranks[0]["software"],
        "launcher": job.from_root(placement.launcher_facts(os.environ)),
        "ranks": job.size,
        "network": placement.measure_network(job),
        "nodes": _nodes(job, ranks),
        "mpi_nodes": len(job.near_sizes),
        "crowded": _bench.is_crowded(job),
        "native_core": core_facts([one["core"] for one in ranks]),
        "gpu": ranks[0]["gpu"],
        "cuda_aware": library.query_cuda_support(),
        "environment": ranks[0]["environment"],
        "problems": _problems(ranks, job.size),
        "strategy": strategy,
    }
    if problem is not None and not describe_stranger(job.size):  # which says it all
        facts["problems"].append(problem)
    job.free()
    return facts


def _environment() -> dict[str, str]:
    return {
        name: os.environ[name]
        for name in sorted(os.environ)
        if name.startswith("MPIDIST_") or name in _OTHERS
    }


def core_facts(missing: Sequence[str]) -> CoreFacts:
    """Return which ranks lack the native core, why, and what to do.

    Args:
        missing: for each rank, why it lacks the core; "" if it has it.
    """
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


def gpu_facts() -> GPUFacts:
    """Return the version of CuPy, and how many GPUs it finds. Not collective."""
    count, reason = backend.count_gpus()
    version = getattr(sys.modules.get("cupy"), "__version__", None)
    return {"cupy": version, "gpus": count, "reason": reason}


def _nodes(job: _bench.Job, ranks: Sequence[RankFacts]) -> list[NodeFacts]:
    nodes: list[NodeFacts] = []
    for number, first in enumerate(job.first_ranks):
        here = [one for one in ranks if job.node_of[one["rank"]] == number]
        machine = ranks[first]["machine"]
        nodes.append(
            {
                "host": machine["host"],
                "processor": machine["processor"],
                "gpus": ranks[first]["gpu"]["gpus"],
                "ranks": [one["rank"] for one in here],
                "cores": placement.cores_text([one["cores"] for one in here]),
            }
        )
    return nodes


def _problems(ranks: Sequence[RankFacts], size: int) -> list[str]:
    problems = []
    alone = describe_stranger(size)
    if alone:
        problems.append(alone)
    first = ranks[0]
    for one in ranks[1:]:
        problems += _differences(one["rank"], one["software"], first["software"])
    for one in ranks[1:]:
        problems += _differences(one["rank"], one["environment"], first["environment"])
    return list(dict.fromkeys(problems))


def _differences(rank: int, mine: dict[str, str], first: dict[str, str]) -> list[str]:
    """Return the entries of a rank that differ from rank 0's, in sentences."""
    return [
        f"{key} is {first.get(key) or 'not set'} on rank 0, and "
        f"{mine.get(key) or 'not set'} on rank {rank}"
        for key in sorted({*first, *mine} - {"CUDA_VISIBLE_DEVICES"})
        if first.get(key) != mine.get(key)
    ]


def describe_stranger(size: int) -> str:
    """Return a message if the launcher started ranks that MPI does not know of.

    Args:
        size: the number of ranks that MPI knows.

    Returns:
        The message; "" if MPI knows all ranks.
    """
    launch = launcher.find_launch()
    if size > 1 or launch is None or (launch.size or 1) == 1:
        return ""
    version = library.mpi_module().Get_library_version()
    return launcher.describe_alone(launch, version)


def _strategy_facts(
    device: str, job: _bench.Job, ranks: Sequence[RankFacts]
) -> tuple[StrategyFacts | None, str | None]:
    """Create a strategy; return its choices, or why there is none. Collective."""
    try:
        strategy = mpidist.MPIStrategy(device=device)
    except (ValueError, TypeError, RuntimeError) as error:  # the same on all ranks
        return None, f"MPIStrategy cannot be made: {error}"
    environment = read_environment()
    facts: StrategyFacts = {
        "devices": strategy.extended.worker_devices,
        "why_devices": placement.describe_devices(
            job.node_of,
            strategy.extended.worker_devices,
            [one["gpu"]["gpus"] for one in ranks],
            [one["environment"].get("CUDA_VISIBLE_DEVICES") for one in ranks],
            device,
        ),
        "transports": _bench.transport_facts(strategy),
        "guard": group_of(strategy).guard.enabled,
        "stall_seconds": environment.stall_seconds,
        "timeout_seconds": environment.timeout_seconds,
        "bytes_per_pack": environment.bytes_per_pack,
        "abort": environment.abort,
    }
    strategy.close()
    return facts, None


def text_of_facts(facts: JobFacts) -> str:
    """Return the facts as text."""
    software, strategy = facts["software"], facts["strategy"]
    core = facts["native_core"]
    lines: list[tuple[str, str]] = [
        ("mpidist", f"{software['mpidist']}, Python {software['python']}"),
        ("MPI", f"{software['mpi']} (MPI {software['mpi_standard']})"),
        ("mpi4py", software["mpi4py"]),
        ("NumPy", software["numpy"]),
        *_under("native core", list(filter(None, (core["text"], core["advice"])))),
        ("launcher", placement.launcher_text(facts["launcher"])),
        ("ranks", _ranks_text(facts)),
        *_node_lines(facts["nodes"]),
        *_under("network", facts["network"]),
        ("GPU", _gpu_text(facts)),
    ]
    if strategy is not None:
        transports = strategy["transports"]
        lines += [
            *_under("devices", _device_texts(strategy)),
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
    lines += _under("environment", variables or ["no variable that mpidist reads"])
    lines += _under("problems", facts["problems"])
    return "\n".join(f"{name:<{_WIDTH}} {text}" for name, text in lines)


def _under(name: str, texts: Sequence[str]) -> list[tuple[str, str]]:
    return [(name if i == 0 else "", text) for i, text in enumerate(texts)]


def _gpu_text(facts: JobFacts) -> str:
    gpu = facts["gpu"]
    if not gpu["gpus"]:
        return f"none: {gpu['reason']}; arrays are on the host"
    aware = "reports" if facts["cuda_aware"] else "does not report"
    return f"{gpu['gpus']}, CuPy {gpu['cupy']}; MPI {aware} that it is CUDA-aware"


def _ranks_text(facts: JobFacts) -> str:
    sizes = [len(node["ranks"]) for node in facts["nodes"]]
    text = f"{facts['ranks']} on {placement.sizes_text(sizes)}"
    if facts["ranks"] == 1:
        started = facts["launcher"]["size"] or 1
        hint = f"each of the {started} processes is alone: see problems"
        if started == 1:
            hint = "start more with mpirun -n N mpidist info"
        text += f" ({hint})"
    hosts = [node["host"] for node in facts["nodes"]]
    if len(set(hosts)) < len(hosts):
        text += ", of which some have one name; ranks of a node share memory"
    if facts["mpi_nodes"] > len(hosts):
        text += f"; MPI takes them for {facts['mpi_nodes']}, see mpidist check"
    if facts["crowded"]:
        text += ": more ranks than cores, so ranks wait for a core"
    return text


def _node_lines(nodes: Sequence[NodeFacts]) -> list[tuple[str, str]]:
    lines = []
    for number, node in enumerate(nodes[:_SHOWN_NODES]):
        gpus = f", {node['gpus']} GPUs" if node["gpus"] else ""
        name = f"{number}: {node['host']}" if len(nodes) > 1 else node["host"]
        lines.append(
            f"{name}: {format_ranks(node['ranks'])}, {node['cores']}{gpus}, "
            f"{node['processor']}"
        )
    if len(nodes) > _SHOWN_NODES:
        lines.append(f"... and {len(nodes) - _SHOWN_NODES} more (--json has all)")
    return _under("nodes", lines)


def _device_texts(strategy: StrategyFacts) -> list[str]:
    if all("device:CPU" in device for device in strategy["devices"]):
        return []
    return strategy["why_devices"]


def _guard_text(strategy: StrategyFacts) -> str:
    if not strategy["guard"]:
        return "off: ranks that differ may hang, or get wrong data"
    timeout = strategy["timeout_seconds"]
    limit = f"an error after {timeout:g} s" if timeout else "no deadline"
    return f"on; missing ranks are named after {strategy['stall_seconds']:g} s, {limit}"
