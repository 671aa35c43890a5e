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
from mpidist._cli import facts
from mpidist._cli.facts import Facts
from mpidist._cli.job import Job
from mpidist._cli.speaking import Parser, let_the_first_speak, say
from mpidist._mpi import library
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
    found = facts_of_job(given.device)
    say(json.dumps(found, indent=1) if given.json else text_of_facts(found))
    if facts.describe_stranger(found["ranks"]):
        let_the_first_speak()
    return 1 if found["problems"] else 0


def facts_of_job(device: str) -> Facts:
    """Return all facts, and of a strategy on a device, on all ranks. Collective."""
    job = Job()
    mine: Facts = {
        "machine": facts.machine_facts(),
        "software": {
            **facts.software_facts(job.mpi),
            "native_core": "present" if _native.available() else "absent",
            "executable": sys.executable,
        },
        "environment": facts.environment_facts(_OTHERS),
        "gpu": facts.gpu_facts(),
        "core": _native.missing,
        "cores": facts.core_use(),
    }
    ranks: list[Facts] = job.comm.allgather(mine)
    nodes = _nodes(job, ranks)
    found: Facts = {
        "software": ranks[0]["software"],
        "launcher": job.from_root(facts.launcher_facts(os.environ)),
        "ranks": job.size,
        "network": facts.measure_network(job),
        "nodes": nodes,
        "open_files": facts.open_file_use(job),
        "mpi_nodes": len(job.near_sizes),
        "crowded": facts.is_crowded(job),
        "native_core": facts.core_facts([one["core"] for one in ranks]),
        "gpu": ranks[0]["gpu"],
        "cuda_aware": library.query_cuda_support(),
        "environment": ranks[0]["environment"],
        "problems": _problems(ranks),
        "strategy": None,
    }
    try:
        strategy = mpidist.MPIStrategy(device=device)
    except (ValueError, TypeError, RuntimeError) as error:  # the same on all ranks
        if not facts.describe_stranger(job.size):  # which says it all
            found["problems"].append(f"MPIStrategy cannot be made: {error}")
    else:
        devices = strategy.extended.worker_devices
        environment = read_environment()
        found["strategy"] = {
            "devices": devices,
            "why_devices": facts.describe_devices(devices, nodes, ranks, device),
            "transports": facts.transport_facts(strategy),
            "guard": group_of(strategy).guard.enabled,
            "stall_seconds": environment.stall_seconds,
            "timeout_seconds": environment.timeout_seconds,
            "bytes_per_pack": environment.bytes_per_pack,
            "abort": environment.abort,
        }
        strategy.close()
    job.free()
    return found


def _nodes(job: Job, ranks: Sequence[Facts]) -> list[Facts]:
    return [
        {
            "host": ranks[node[0]]["machine"]["host"],
            "processor": ranks[node[0]]["machine"]["processor"],
            "gpus": ranks[node[0]]["gpu"]["gpus"],
            "ranks": node,
            "cores": facts.cores_text([ranks[rank]["cores"] for rank in node]),
        }
        for node in job.nodes
    ]


def _problems(ranks: Sequence[Facts]) -> list[str]:
    """Return what is wrong, and what differs between ranks, in sentences."""
    problems = list(filter(None, [facts.describe_stranger(len(ranks))]))
    for kind in ("software", "environment"):
        for rank, one in enumerate(ranks):
            found = facts.differences(one[kind], ranks[0][kind], f"on rank {rank}")
            found.pop("CUDA_VISIBLE_DEVICES", None)
            problems += found.values()
    return problems


def _mpi_text(software: dict[str, str]) -> str:
    threads = software["mpi_threads"]
    text = f"{software['mpi']} (MPI {software['mpi_standard']}), THREAD_{threads}"
    if threads != "MULTIPLE":
        text += ", so calls that are begun (all_reduce_async) are made at once"
    return text


def text_of_facts(found: Facts) -> str:
    """Return the facts as text."""
    software, strategy = found["software"], found["strategy"]
    core = found["native_core"]
    texts: dict[str, list[str]] = {
        "mpidist": [f"{software['mpidist']}, Python {software['python']}"],
        "MPI": [_mpi_text(software)],
        "mpi4py": [software["mpi4py"]],
        "NumPy": [software["numpy"]],
        "native core": list(filter(None, (core["text"], core["advice"]))),
        "launcher": [facts.launcher_text(found["launcher"])],
        "ranks": [_ranks_text(found)],
        "nodes": _node_texts(found["nodes"]),
        "network": found["network"],
        "open files": [facts.open_files_text(found["open_files"])],
        "GPU": [_gpu_text(found)],
    }
    if strategy is not None:
        transports, pack = strategy["transports"], strategy["bytes_per_pack"]
        if not all("device:CPU" in device for device in strategy["devices"]):
            texts["devices"] = strategy["why_devices"]
        ends = "an uncaught exception ends the job" if strategy["abort"] else "off"
        texts |= {
            "host arrays": [transports["host"]["text"]],
            "GPU arrays": [transports["gpu"]["text"]],
            "packs": [f"{pack / 2**20:g} MiB of small arrays"],
            "guard": [_guard_text(strategy)],
            "abort": [ends],
        }
    variables = [f"{k}={v}" for k, v in found["environment"].items()]
    texts["environment"] = variables or ["no variable that mpidist reads"]
    texts["problems"] = found["problems"]
    lines = []
    for name, several in texts.items():
        for i, text in enumerate(several):
            lines.append(f"{'' if i else name:<{_WIDTH}} {text}")
    return "\n".join(lines)


def _gpu_text(found: Facts) -> str:
    gpu = found["gpu"]
    if not gpu["gpus"]:
        return f"none: {gpu['reason']}; arrays are on the host"
    aware = "reports" if found["cuda_aware"] else "does not report"
    return f"{gpu['gpus']}, CuPy {gpu['cupy']}; MPI {aware} that it is CUDA-aware"


def _ranks_text(found: Facts) -> str:
    sizes = [len(node["ranks"]) for node in found["nodes"]]
    text = f"{found['ranks']} on {facts.sizes_text(sizes)}"
    if found["ranks"] == 1:
        started = found["launcher"]["size"] or 1
        hint = f"each of the {started} processes is alone: see problems"
        if started == 1:
            hint = "start more with mpirun -n N mpidist info"
        text += f" ({hint})"
    hosts = [node["host"] for node in found["nodes"]]
    if len(set(hosts)) < len(hosts):
        text += ", of which some have one name; ranks of a node share memory"
    if found["mpi_nodes"] > len(hosts):
        text += f"; MPI takes them for {found['mpi_nodes']}, see mpidist check"
    if found["crowded"]:
        text += ": more ranks than cores, so ranks wait for a core"
    return text


def _node_texts(nodes: Sequence[Facts]) -> list[str]:
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
    return lines


def _guard_text(strategy: Facts) -> str:
    if not strategy["guard"]:
        return "off: ranks that differ may hang, or get wrong data"
    timeout = strategy["timeout_seconds"]
    limit = f"an error after {timeout:g} s" if timeout else "no deadline"
    return f"on; missing ranks are named after {strategy['stall_seconds']:g} s, {limit}"
