"""Runs `mpidist bench all_reduce` on two virtual hosts; launch/performance calls it.

    hosts_performance.py PREFIX SECONDS

writes PREFIX-hosts-2x1.json and PREFIX-hosts-2x2.json (1 and 2 ranks on each host), and
the same with "shaped" for "hosts": 1 Gbit/s and 0.2 ms. PREFIX must not be in /tmp,
of which each host has its own. The hosts are those of tests/hosts.py: Linux namespaces,
which take root. Where there can be none, it says why.
"""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
JOB_SECONDS = 240.0
MBITS, DELAY_MS = 1000, 0.2


def main() -> None:
    prefix, seconds = sys.argv[1:]
    problem = why_not()
    if problem:
        print(f"launch: no measurement between hosts: {problem}", file=sys.stderr)
        return
    import hosts

    for kind in ("hosts", "shaped"):
        machines = hosts.Hosts(2)
        try:
            done = machines.shape(MBITS, DELAY_MS) if kind == "shaped" else "plain"
            for per_host in (1, 2):
                path = f"{prefix}-{kind}-2x{per_host}.json"
                print(f"launch: {path} ({done})", file=sys.stderr)
                options = ["--seconds", seconds, "--json", path]
                argv = ["-m", "mpidist", "bench", "all_reduce", *options]
                with machines.job(per_host, argv) as job:
                    status = job.wait(JOB_SECONDS)
                    print(job.output())
                if status:
                    sys.exit(f"mpidist bench on two hosts ended with status {status}")
        finally:
            machines.close()


def why_not() -> str:
    """Return why there are no hosts here; "" if there are."""
    if importlib.util.find_spec("hosts") is None:
        return "there is no tests/hosts.py"
    import hosts

    return str(hosts.why_not())


main()
