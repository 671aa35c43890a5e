"""Runs the tests for several ranks on virtual hosts; for `launch/test-hosts`.

    on_hosts.py 2x2 [--local-folders] [--junitxml FILE] [arguments for pytest]
    on_hosts.py 3+1 ...

2x2 are two hosts of two ranks each, 3+1 two hosts of three and one. The hosts share one
folder for the temporary files of tests, as those of a cluster do; with
``--local-folders`` each has its own.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import shutil
import signal
import sys
from collections.abc import Sequence

import hosts
import launching

JOB_SECONDS = 3000.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ranks")
    parser.add_argument("--local-folders", action="store_true")
    parser.add_argument("--junitxml")
    options, rest = parser.parse_known_args()
    counts = ranks_of_hosts(options.ranks)
    reason = hosts.why_not()
    if reason:
        sys.exit(reason)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    machines = hosts.Hosts(len(counts))
    try:
        local = options.local_folders
        with pytest_on(machines, counts, rest, local=local, shown=True) as job:
            status = job.wait(JOB_SECONDS)
        if options.junitxml:
            with contextlib.suppress(FileNotFoundError):  # rank 0 came to no end
                shutil.copy(machines.folder / "report.0.xml", options.junitxml)
        return status
    finally:
        machines.close()


def pytest_on(
    machines: hosts.Hosts,
    counts: Sequence[int],
    arguments: Sequence[str],
    *,
    local: bool = False,
    shown: bool = False,
) -> contextlib.AbstractContextManager[hosts.Job]:
    """Run pytest on hosts; each rank writes ``report.RANK.xml`` to their folder.

    Args:
        machines: the hosts.
        counts: how many ranks each has.
        arguments: for pytest; files from the root of the repository.
        local: whether each host has its own temporary files.
        shown: whether its output goes where this process writes.
    """
    env = {"PY_COLORS": "0"}
    if not local:
        env["PYTEST_DEBUG_TEMPROOT"] = str(machines.folder)
    rank = "OMPI_COMM_WORLD_RANK" if hosts.is_open_mpi() else "PMI_RANK"
    report = f"--junitxml={machines.folder}/report.${rank}.xml"  # pytest expands it
    argv = ["-m", "pytest", "-p", "no:cacheprovider", "--with-mpi", report]
    argv += [f"--rootdir={launching.ROOT}", *arguments]
    return machines.job(counts, argv, env=env, cwd=launching.ROOT, shown=shown)


def ranks_of_hosts(text: str) -> list[int]:
    """Return how many ranks each host has: "2x2" is [2, 2], "3+1" is [3, 1]."""
    if found := re.fullmatch(r"(\d+)x(\d+)", text):
        return [int(found[2])] * int(found[1])
    if re.fullmatch(r"\d+(\+\d+)*", text):
        return [int(word) for word in text.split("+")]
    sys.exit(f"hosts and their ranks are written 2x2 or 3+1, not {text!r}")


if __name__ == "__main__":
    sys.exit(main())
