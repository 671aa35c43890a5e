"""`mpidist info`: what this job is, and how it communicates."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

import mpidist
from mpidist._base.environment import read_environment
from mpidist._base.errors import format_ranks, ranks_by
from mpidist._cli import facts, system_checks
from mpidist._cli.facts import FAILED, OK, Facts, Job, attempt
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
    lines, problems = _describe(job, given.device)
    if given.json:
        found = {"problems": problems, "lines": lines, "ranks": job.facts}
        say(json.dumps(found, indent=1))
    else:
        lines["problems"] = problems
        say(
            "\n".join(
                f"{'' if i else name:<{_WIDTH}} {text}"
                for name, texts in lines.items()
                for i, text in enumerate(texts)
            )
        )
    job.free()
    return 1 if problems else 0


def _describe(job: Job, device: str) -> tuple[dict[str, list[str]], list[str]]:
    """Return the lines to print, by their names, and the problems. Collective.

    Args:
        job: the ranks.
        device: of the strategy that is described.
    """
    software, environment = job.facts[0]["software"], job.facts[0]["environment"]
    checks = {name: attempt(job, x) for name, x in system_checks.CHECKS.items()}
    problems = [job.stranger] if job.stranger else []
    problems += [found.text for found in checks.values() if found.state == FAILED]
    alone = job.size == 1 and not job.stranger
    more = " (start more with mpirun -n N mpidist info)" if alone else ""
    lines = {
        "mpidist": [f"{software['mpidist']}, Python {software['python']}"],
        "MPI": [_mpi_text(software)],
        "mpi4py": [software["mpi4py"]],
        "NumPy": [software["numpy"]],
        "launcher": [job.facts[0]["launcher"]],
        "ranks": [f"{job.size} on {facts.sizes_text(list(map(len, job.nodes)))}{more}"],
        "nodes": _node_lines(job),
        "network": _measure_network(job) + system_checks.tcp_settings(job),
    }
    for name, found in checks.items():
        if found.state != OK or name in _SHOWN:
            lines[name] = list(filter(None, (found.text, found.advice)))
    gpu = job.facts[0]["gpu"]
    if gpu["gpus"]:
        aware = "reports" if library.query_cuda_support() else "does not report"
        text = f"CuPy {gpu['cupy']}; MPI {aware} that it is CUDA-aware"
        lines["GPUs"].append(text)
    lines |= _strategy_lines(job, device, problems)
    variables = [f"{k}={v}" for k, v in environment.items()]
    lines["environment"] = variables or ["no variable that mpidist reads"]
    return lines, problems


def _strategy_lines(job: Job, device: str, problems: list[str]) -> dict[str, list[str]]:
    """Return how a strategy moves arrays, waits and ends; or add a problem. Collective.

    Args:
        job: the ranks.
        device: of the strategy.
        problems: those that were found.
    """
    try:
        strategy = mpidist.MPIStrategy(device=device)
    except (ValueError, TypeError, RuntimeError, OSError) as error:  # on all ranks
        if not job.stranger:  # which says it all
            problems.append(f"MPIStrategy cannot be made: {error}")
        return {}
    lines, settings = {}, read_environment()
    devices = strategy.extended.worker_devices
    if not all("device:CPU" in one for one in devices):
        lines["devices"] = describe_devices(devices, job.nodes, job.facts, device)
    moved = facts.transport_facts(strategy)
    guard = "off: ranks that differ may hang, or get wrong data"
    if group_of(strategy).guard.enabled:
        timeout, stall = settings.timeout_seconds, settings.stall_seconds
        limit = f"an error after {timeout:g} s" if timeout else "no deadline"
        guard = f"on; missing ranks are named after {stall:g} s, {limit}"
    ends = "an uncaught exception ends the job" if settings.abort else "off"
    strategy.close()
    return lines | {
        "host arrays": [moved["host"]["text"]],
        "GPU arrays": [moved["gpu"]["text"]],
        "packs": [f"{settings.bytes_per_pack / 2**20:g} MiB of small arrays"],
        "guard": [guard],
        "abort": [ends],
    }


def _mpi_text(software: dict[str, str]) -> str:
    threads = software["mpi_threads"]
    text = f"{software['mpi']} (MPI {software['mpi_standard']}), THREAD_{threads}"
    if threads != "MULTIPLE":
        text += ", so asynchronous calls (all_reduce_async) are synchronous"
    return text


def _node_lines(job: Job) -> list[str]:
    lines = []
    for number, node in enumerate(job.nodes[:_SHOWN_NODES]):
        ranks = [job.facts[rank]["machine"] for rank in node]
        host, processor = ranks[0]["host"], ranks[0]["processor"]
        gpus = job.facts[node[0]]["gpu"]["gpus"]
        name = f"{number}: {host}" if len(job.nodes) > 1 else host
        cores = system_checks.cores_of(ranks)[1] + (f", {gpus} GPUs" if gpus else "")
        lines.append(f"{name}: {format_ranks(node)}, {cores}, {processor}")
    if len(job.nodes) > _SHOWN_NODES:
        lines.append(f"... and {len(job.nodes) - _SHOWN_NODES} more (--json has all)")
    return lines


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
