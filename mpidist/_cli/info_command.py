"""`mpidist info`: what this job is, and how it communicates."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

import mpidist
from mpidist._base.environment import read_environment
from mpidist._base.errors import format_ranks, ranks_by
from mpidist._cli import facts, system_checks
from mpidist._cli.facts import OK, Facts, Job, attempt
from mpidist._cli.speaking import Parser, say
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
_SHOWN_NODES: Final = 16
_SHOWN: Final = ("native core", "open files", "GPUs")  # of the checks, if all is well
_WIDTH: Final = 12
_PROBE_BYTES: Final = 8 * 2**20
_INTERFACES: Final = Path("/proc/net/dev")  # /sys may be that of another namespace
_SENT: Final = 8  # the column of the bytes sent
_CARDS: Final = Path("/sys/class/infiniband")
_CARD_UNIT: Final = 4  # its counters count words of so many bytes


def info(arguments: Sequence[str]) -> int:
    """Run `mpidist info` with these arguments; return the exit code. Collective."""
    parser = Parser("info", _DESCRIPTION)
    text = 'as for MPIStrategy: "auto" (default), "cpu", "gpu" or "gpu:K"'
    parser.add_argument("--device", default="auto", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(list(arguments))
    job = Job()
    found = _facts_of_job(job, given.device)
    say(json.dumps(found, indent=1) if given.json else _text_of(found))
    job.free()
    return 1 if found["problems"] else 0


def _facts_of_job(job: Job, device: str) -> Facts:
    """Return all facts, and of a strategy on a device, on all ranks. Collective."""
    first = job.facts[0]
    checks = {name: attempt(job, x) for name, x in system_checks.CHECKS.items()}
    found: Facts = {
        "software": first["software"],
        "launcher": first["launcher"],
        "ranks": job.size,
        "network": _measure_network(job),
        "nodes": [
            {
                "host": job.facts[node[0]]["machine"]["host"],
                "processor": job.facts[node[0]]["machine"]["processor"],
                "gpus": job.facts[node[0]]["gpu"]["gpus"],
                "ranks": node,
                "cores": system_checks.cores_text(
                    [job.facts[rank]["cores"] for rank in node]
                ),
            }
            for node in job.nodes
        ],
        "open_files": system_checks.open_file_use(job),
        "mpi_nodes": len(job.near_sizes),
        "crowded": job.crowded,
        "native_core": {
            "missing_on": [k for k, x in enumerate(job.facts) if x["core_missing"]],
            **dataclasses.asdict(checks["native core"]),
        },
        "checks": {name: dataclasses.asdict(found) for name, found in checks.items()},
        "gpu": first["gpu"],
        "cuda_aware": library.query_cuda_support(),
        "environment": first["environment"],
        "problems": _problems(job),
        "strategy": None,
    }
    try:
        strategy = mpidist.MPIStrategy(device=device)
    except (ValueError, TypeError, RuntimeError, OSError) as error:  # on all ranks
        if not job.stranger:  # which says it all
            found["problems"].append(f"MPIStrategy cannot be made: {error}")
        return found
    devices = strategy.extended.worker_devices
    environment = read_environment()
    found["strategy"] = {
        "devices": devices,
        "why_devices": describe_devices(devices, job.nodes, job.facts, device),
        "transports": facts.transport_facts(strategy),
        "guard": group_of(strategy).guard.enabled,
        "stall_seconds": environment.stall_seconds,
        "timeout_seconds": environment.timeout_seconds,
        "bytes_per_pack": environment.bytes_per_pack,
        "abort": environment.abort,
    }
    strategy.close()
    return found


def _problems(job: Job) -> list[str]:
    """Return what is wrong, and what differs between ranks, in sentences."""
    problems = [job.stranger] if job.stranger else []
    for kind in ("software", "environment"):
        for rank, one in enumerate(job.facts):
            found = facts.differences(one[kind], job.facts[0][kind], f"on rank {rank}")
            problems += found.values()
    return problems


# --- as text --------------------------------------------------------------------------


def _text_of(found: Facts) -> str:
    """Return the facts as text: lines under names."""
    software, strategy = found["software"], found["strategy"]
    sizes = [len(node["ranks"]) for node in found["nodes"]]
    more = " (start more with mpirun -n N mpidist info)"
    if sizes != [1] or (found["launcher"]["size"] or 1) > 1:  # see problems
        more = ""
    texts: dict[str, list[str]] = {
        "mpidist": [f"{software['mpidist']}, Python {software['python']}"],
        "MPI": [_mpi_text(software)],
        "mpi4py": [software["mpi4py"]],
        "NumPy": [software["numpy"]],
        "launcher": [launcher_text(found["launcher"])],
        "ranks": [f"{found['ranks']} on {facts.sizes_text(sizes)}{more}"],
        "nodes": _node_texts(found["nodes"]),
        "network": found["network"],
    }
    for name, check in found["checks"].items():
        if check["state"] != OK or name in _SHOWN:
            texts[name] = list(filter(None, (check["text"], check["advice"])))
    if found["gpu"]["gpus"]:
        aware = "reports" if found["cuda_aware"] else "does not report"
        text = f"CuPy {found['gpu']['cupy']}; MPI {aware} that it is CUDA-aware"
        texts["GPUs"].append(text)
    if strategy is not None:
        if not all("device:CPU" in device for device in strategy["devices"]):
            texts["devices"] = strategy["why_devices"]
        ends = "an uncaught exception ends the job" if strategy["abort"] else "off"
        texts |= {
            "host arrays": [strategy["transports"]["host"]["text"]],
            "GPU arrays": [strategy["transports"]["gpu"]["text"]],
            "packs": [f"{strategy['bytes_per_pack'] / 2**20:g} MiB of small arrays"],
            "guard": [_guard_text(strategy)],
            "abort": [ends],
        }
    variables = [f"{k}={v}" for k, v in found["environment"].items()]
    texts["environment"] = variables or ["no variable that mpidist reads"]
    texts["problems"] = found["problems"]
    return "\n".join(
        f"{'' if i else name:<{_WIDTH}} {text}"
        for name, several in texts.items()
        for i, text in enumerate(several)
    )


def _mpi_text(software: dict[str, str]) -> str:
    threads = software["mpi_threads"]
    text = f"{software['mpi']} (MPI {software['mpi_standard']}), THREAD_{threads}"
    if threads != "MULTIPLE":
        text += ", so asynchronous calls (all_reduce_async) are synchronous"
    return text


def launcher_text(found: Facts) -> str:
    """Return the launcher in one line."""
    job, text = found["slurm_job"], "none"
    if found["name"]:
        many = facts.counted(found["size"] or 1, "process", "processes")
        text = f"{found['name']} started {many}"
    if found["slurm_step"] is not None:
        return f"{text}, step {found['slurm_step']} of SLURM job {job}"
    return f"{text}, in SLURM job {job}" if job else text


def _node_texts(nodes: Sequence[Facts]) -> list[str]:
    lines = []
    for number, node in enumerate(nodes[:_SHOWN_NODES]):
        gpus = f", {node['gpus']} GPUs" if node["gpus"] else ""
        name = f"{number}: {node['host']}" if len(nodes) > 1 else node["host"]
        ranks = format_ranks(node["ranks"])
        lines.append(f"{name}: {ranks}, {node['cores']}{gpus}, {node['processor']}")
    if len(nodes) > _SHOWN_NODES:
        lines.append(f"... and {len(nodes) - _SHOWN_NODES} more (--json has all)")
    return lines


def _guard_text(strategy: Facts) -> str:
    if not strategy["guard"]:
        return "off: ranks that differ may hang, or get wrong data"
    timeout = strategy["timeout_seconds"]
    limit = f"an error after {timeout:g} s" if timeout else "no deadline"
    return f"on; missing ranks are named after {strategy['stall_seconds']:g} s, {limit}"


def describe_devices(
    devices: Sequence[str],
    nodes: Sequence[Sequence[int]],
    ranks: Sequence[Facts],
    request: str,
) -> list[str]:
    """Return which device each rank has, and why: a line for each kind of node.

    Args:
        devices: the device of each rank, such as "/rank:0/device:GPU:1".
        nodes: the ranks of each node.
        ranks: of each rank ``gpu`` and ``environment``.
        request: the device that the strategy was asked for.
    """
    lines = []
    for node in nodes:
        names = [devices[rank].rpartition("device:")[2] for rank in node]
        shown = ", ".join(names)
        if len(set(names)) == 1:
            shown = names[0] + (" for all ranks" if len(ranks) > 1 else "")
        seen = [ranks[rank]["environment"].get("CUDA_VISIBLE_DEVICES") for rank in node]
        own = ", ".join(map(str, dict.fromkeys(seen)))
        if request != "auto":
            why = f"--device {request}"
        elif all(name.startswith("CPU") for name in names):
            why = "no GPU is found"
        elif len(set(seen)) > 1:
            why = f"each rank sees its own: CUDA_VISIBLE_DEVICES={own}"
        else:
            count = ranks[node[0]]["gpu"]["gpus"]
            why = f"the rank's number on its node, modulo {count} GPUs that it sees"
            why += f" (CUDA_VISIBLE_DEVICES={own})" if seen[0] is not None else ""
        lines.append(f"{shown}; {why}")
    return _lines_of_nodes(lines)


def _lines_of_nodes(texts: Sequence[str]) -> list[str]:
    """Return each text once, with the numbers of its nodes if there are several."""
    kinds = ranks_by(texts)
    if len(kinds) == 1:
        return list(kinds)
    return [
        f"{format_ranks(nodes).replace('rank', 'node')}: {text}"
        for text, nodes in kinds.items()
    ]


# --- the network ------------------------------------------------------------------


def _measure_network(job: Job) -> list[str]:
    """Return what carries messages between nodes, in words. Collective.

    The first rank of each node sends 8 MiB to that of the next node. What the
    interfaces of the machine have sent meanwhile shows which ones MPI uses, whatever
    its settings say.

    Returns:
        A line for each kind of node; none if there is one node.
    """
    if len(job.nodes) == 1:
        return []
    leaders = [node[0] for node in job.nodes]
    before = _sent()
    job.comm.Barrier()
    if job.rank in leaders:
        node = leaders.index(job.rank)
        data = np.ones((2, _PROBE_BYTES), np.uint8)
        next_node, last_node = leaders[(node + 1) % len(leaders)], leaders[node - 1]
        job.comm.Sendrecv(data[0], next_node, 0, data[1], last_node, 0)
    job.comm.Barrier()
    sent = {name: count - before.get(name, 0) for name, count in _sent().items()}
    names = ", ".join(name for name in sent if sent[name] > _PROBE_BYTES / 4)
    names = names or "no interface of Linux: memory, or a network with its own driver"
    by_rank: list[str] = job.comm.allgather(names)
    return _lines_of_nodes([by_rank[leader] for leader in leaders])


def _sent() -> dict[str, int]:
    """Return how many bytes each interface and InfiniBand card has sent."""
    found: dict[str, int] = {}
    for line in _INTERFACES.read_text().splitlines()[2:]:
        name, _, numbers = line.partition(":")
        found[name.strip()] = int(numbers.split()[_SENT])
    for path in _CARDS.glob("*/ports/*/counters/port_xmit_data"):
        card = path.parts[len(_CARDS.parts)]
        with contextlib.suppress(OSError, ValueError):
            words = int(path.read_text())
            found[card] = found.get(card, 0) + words * _CARD_UNIT
    return found
