"""Runs the benchmarks between virtual hosts; launch/performance calls it.

    between_hosts.py PREFIX SECONDS

writes PREFIX-hosts-HxR.json for H hosts with R ranks each, and the same with "shaped"
for "hosts": 1 Gbit/s and 0.2 ms. PREFIX must not be in /tmp, of which each host has its
own. The hosts are those of tests/hosts.py: Linux namespaces, which take root. Where
there can be none, it says why.
"""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
JOB_SECONDS = 600.0
MBITS, DELAY_MS = 1000, 0.2
SHAPES = ((2, 1), (2, 2), (4, 1), (8, 1), (16, 1))  # hosts, and ranks of each


def main() -> None:
    prefix, seconds = sys.argv[1:]
    problem = why_not()
    if problem:
        print(f"launch: no measurement between hosts: {problem}", file=sys.stderr)
        return
    for shaped in (False, True):
        for count, per_host in SHAPES:
            kind = "shaped" if shaped else "hosts"
            path = f"{prefix}-{kind}-{count}x{per_host}.json"
            measure(count, per_host, path, seconds, shaped=shaped)


def why_not() -> str:
    """Return why there are no hosts here; "" if there are."""
    if importlib.util.find_spec("hosts") is None:
        return "there is no tests/hosts.py"
    import hosts

    return str(hosts.why_not())


def measure(
    count: int, per_host: int, path: str, seconds: str, *, shaped: bool
) -> None:
    """Run one job; its output goes where this process writes."""
    import hosts
    import nodes

    machines = hosts.Hosts(count)
    try:
        done = machines.shape(MBITS, DELAY_MS) if shaped else "plain"
        print(f"launch: {path} ({done})", file=sys.stderr)
        options = ["--seconds", seconds, "--json", path]
        argv = [str(nodes.BENCHMARKS), *nodes.CASES, *options]
        with machines.job(per_host, argv, shown=True) as job:
            status = job.wait(JOB_SECONDS)
        if status:
            sys.exit(f"the benchmarks on {count} hosts ended with status {status}")
    finally:
        machines.close()


main()
