"""`mpidist info`: what this job is, and how it communicates."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Final

import mpidist
from mpidist import _native
from mpidist._base.environment import read_environment
from mpidist._base.errors import format_ranks
from mpidist._cli import placement
from mpidist._cli.facts import (
    Facts,
    core_facts,
    describe_stranger,
    gpu_facts,
    is_crowded,
    machine_facts,
    software_facts,
    transport_facts,
)
from mpidist._cli.job import Job
from mpidist._cli.speaking import Parser, let_the_first_speak, say
from mpidist._mpi import library, versions
from mpidist._strategy.strategy import group_of

ABOUT: Final = "what this job is: ranks, nodes, libraries, transports, settings"
_DESCRIPTION: Final = """\
Shows what mpidist finds on these ranks: MPI, NumPy, CuPy and GPUs; ranks,
nodes and cores; how each kind of array is moved, and why; the guard, its
deadlines, and the environment variables that are set. Include its output in a
bug report.

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


def info(arguments: Sequence[str]) -> int:
    """Run `mpidist info` with these arguments; return the exit code. Collective."""
    parser = Parser("info", _DESCRIPTION)
    text = 'as for MPIStrategy: "auto" (default), "cpu", "gpu" or "gpu:K"'
    parser.add_argument("--device", default="auto", help=text)
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


def facts_of_job(device: str) -> Facts:
    """Return all facts, and of a strategy on a device, on all ranks. Collective."""
    job = Job()
    mine: Facts = {
        "rank": job.rank,
        "machine": machine_facts(),
        "software": {
            **software_facts(job.mpi),
            "native_core": "present" if versions.has_core() else "absent",
            "executable": sys.executable,
        },
        "environment": {
            name: os.environ[name]
            for name in sorted(os.environ)
            if name.startswith("MPIDIST_") or name in _OTHERS
        },
        "gpu": gpu_facts(),
        "core": _native.missing,
        "cores": placement.core_use(),
    }
    ranks: list[Facts] = job.comm.allgather(mine)
    nodes = _nodes(job, ranks)
    strategy, problem = _strategy_facts(device, nodes, ranks)
    facts: Facts = {
        "software": ranks[0]["software"],
        "launcher": job.from_root(placement.launcher_facts(os.environ)),
        "ranks": job.size,
        "network": placement.measure_network(job),
        "nodes": nodes,
        "open_files": placement.open_file_use(job),
        "mpi_nodes": len(job.near_sizes),
        "crowded": is_crowded(job),
        "native_core": core_facts([one["core"] for one in ranks]),
        "gpu": ranks[0]["gpu"],
        "cuda_aware": library.query_cuda_support(),
        "environment": ranks[0]["environment"],
        "problems": _problems(ranks),
        "strategy": strategy,
    }
    if problem is not None and not describe_stranger(job.size):  # which says it all
        facts["problems"].append(problem)
    job.free()
    return facts


def _nodes(job: Job, ranks: Sequence[Facts]) -> list[Facts]:
    nodes: list[Facts] = []
    for number, first in enumerate(job.first_ranks):
        here = [one for one in ranks if job.node_of[one["rank"]] == number]
        nodes.append(
            {
                "host": ranks[first]["machine"]["host"],
                "processor": ranks[first]["machine"]["processor"],
                "gpus": ranks[first]["gpu"]["gpus"],
                "ranks": [one["rank"] for one in here],
                "cores": placement.cores_text([one["cores"] for one in here]),
            }
        )
    return nodes


def _problems(ranks: Sequence[Facts]) -> list[str]:
    """Return what is wrong, and what differs between ranks, in sentences."""
    problems = list(filter(None, [describe_stranger(len(ranks))]))
    for kind in ("software", "environment"):
        first = ranks[0][kind]
        for one in ranks[1:]:
            problems += [
                f"{key} is {first.get(key) or 'not set'} on rank 0, and "
                f"{one[kind].get(key) or 'not set'} on rank {one['rank']}"
                for key in sorted({*first, *one[kind]} - {"CUDA_VISIBLE_DEVICES"})
                if first.get(key) != one[kind].get(key)
            ]
    return list(dict.fromkeys(problems))


def _strategy_facts(
    device: str, nodes: Sequence[Facts], ranks: Sequence[Facts]
) -> tuple[Facts | None, str | None]:
    """Create a strategy; return its choices, or why there is none. Collective."""
    try:
        strategy = mpidist.MPIStrategy(device=device)
    except (ValueError, TypeError, RuntimeError) as error:  # the same on all ranks
        return None, f"MPIStrategy cannot be made: {error}"
    environment = read_environment()
    devices = strategy.extended.worker_devices
    facts: Facts = {
        "devices": devices,
        "why_devices": placement.describe_devices(devices, nodes, ranks, device),
        "transports": transport_facts(strategy),
        "guard": group_of(strategy).guard.enabled,
        "stall_seconds": environment.stall_seconds,
        "timeout_seconds": environment.timeout_seconds,
        "bytes_per_pack": environment.bytes_per_pack,
        "abort": environment.abort,
    }
    strategy.close()
    return facts, None


def _mpi_text(software: dict[str, str]) -> str:
    threads = software["mpi_threads"]
    text = f"{software['mpi']} (MPI {software['mpi_standard']}), THREAD_{threads}"
    if threads != "MULTIPLE":
        text += ", so calls that are begun (all_reduce_async) are made at once"
    return text


def text_of_facts(facts: Facts) -> str:
    """Return the facts as text."""
    software, strategy = facts["software"], facts["strategy"]
    core = facts["native_core"]
    lines: list[tuple[str, str]] = [
        ("mpidist", f"{software['mpidist']}, Python {software['python']}"),
        ("MPI", _mpi_text(software)),
        ("mpi4py", software["mpi4py"]),
        ("NumPy", software["numpy"]),
        *_under("native core", list(filter(None, (core["text"], core["advice"])))),
        ("launcher", placement.launcher_text(facts["launcher"])),
        ("ranks", _ranks_text(facts)),
        *_node_lines(facts["nodes"]),
        *_under("network", facts["network"]),
        ("open files", placement.open_files_text(facts["open_files"])),
        ("GPU", _gpu_text(facts)),
    ]
    if strategy is not None:
        transports, devices = strategy["transports"], strategy["devices"]
        on_host = all("device:CPU" in device for device in devices)
        lines += [
            *_under("devices", [] if on_host else strategy["why_devices"]),
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


def _gpu_text(facts: Facts) -> str:
    gpu = facts["gpu"]
    if not gpu["gpus"]:
        return f"none: {gpu['reason']}; arrays are on the host"
    aware = "reports" if facts["cuda_aware"] else "does not report"
    return f"{gpu['gpus']}, CuPy {gpu['cupy']}; MPI {aware} that it is CUDA-aware"


def _ranks_text(facts: Facts) -> str:
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


def _node_lines(nodes: Sequence[Facts]) -> list[tuple[str, str]]:
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


def _guard_text(strategy: Facts) -> str:
    if not strategy["guard"]:
        return "off: ranks that differ may hang, or get wrong data"
    timeout = strategy["timeout_seconds"]
    limit = f"an error after {timeout:g} s" if timeout else "no deadline"
    return f"on; missing ranks are named after {strategy['stall_seconds']:g} s, {limit}"
