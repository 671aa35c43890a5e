"""``python -m tests.faults``: run the fault matrix, and print it with its verdicts.

Each test runs as in the suite: under mpirun on three ranks, or, if it starts jobs of
its own, in one process. Arguments are the mpiruns to use; without, that of this Python.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT), str(ROOT / "tests")]

from faults.matrix import CASES, table  # noqa: E402
from launching import find_mpirun, rank_environment  # noqa: E402

RANKS = 3
FEWER = 2  # for the tests that are for two ranks


def run(python: str, mpirun: str) -> dict[str, str]:
    """Return the verdict of each test: "ok" and the seconds, or what failed."""
    tests = sorted({case.test for case in CASES})
    pytest = [
        python,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-o",
        "timeout=90",
    ]
    jobs = [
        [*pytest, "-m", "not mpi and not gpu", *tests],
        *(
            [mpirun, "-n", str(n), *pytest, "--with-mpi", "-m", "mpi", *tests]
            for n in (RANKS, FEWER)
        ),
    ]
    seconds: defaultdict[str, float] = defaultdict(float)
    count: defaultdict[str, int] = defaultdict(int)
    failed: defaultdict[str, int] = defaultdict(int)
    with tempfile.TemporaryDirectory() as folder:
        for number, job in enumerate(jobs):
            if number == len(jobs) - 1:  # what is skipped with more ranks
                job = [*job[: -len(tests)], *(x for x in tests if x not in count)]
                if job[-1] == "mpi":
                    break
            report = Path(folder) / f"{number}.xml"
            env = rank_environment()
            env["PYTEST_ADDOPTS"] = f"--junitxml={report}"
            env["PATH"] = f"{Path(mpirun).parent}:{env['PATH']}"
            subprocess.run(job, cwd=ROOT, env=env, stdout=sys.stderr, check=False)
            for item in ElementTree.parse(report).iter("testcase"):
                file = item.get("classname", "").replace(".", "/") + ".py"
                test = f"{file}::{item.get('name', '').partition('[')[0]}"
                if item.find("skipped") is None:
                    count[test] += 1
                    seconds[test] += float(item.get("time", 0))
                    failed[test] += any(item.find(x) is not None for x in _BAD)
    return {
        test: f"{failed[test]} of {count[test]} failed"
        if failed[test]
        else f"ok, {count[test]} in {seconds[test]:.1f} s"
        for test in count
    }


_BAD = ("failure", "error")


def main() -> int:
    """Run the matrix with each MPI; return 1 if something failed."""
    verdicts: dict[str, dict[str, str]] = {}
    for mpirun in sys.argv[1:] or [find_mpirun()]:
        beside = Path(mpirun).with_name("python")
        python = str(beside) if beside.exists() else sys.executable
        code = "from mpi4py import MPI; print(MPI.get_vendor()[0])"
        name = subprocess.check_output([python, "-c", code], text=True).strip()
        start = time.monotonic()
        verdicts[name] = run(python, mpirun)
        print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr)
    print(table(verdicts), end="")
    known = {case.test for case in CASES}
    return int(
        any(
            set(found) < known or any("failed" in text for text in found.values())
            for found in verdicts.values()
        )
    )


if __name__ == "__main__":
    sys.exit(main())
