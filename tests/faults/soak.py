"""The soak: job after job of random calls and faults, on ranks; see `soak_job`.

A job is drawn from its seed: its rounds, by which route it reduces, and how it ends: by
itself, by SIGKILL of a rank while it saves, by an exception that nobody catches, or by
sys.exit. The next one goes on from its newest checkpoint. After each it is checked how
the launcher ended it, and how soon, and that nothing of it is left in /dev/shm.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
import uuid
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from faults.soak_job import ENDINGS
from launching import FILES, left_over, run_ranks

JOB = Path(__file__).with_name("soak_job.py")
ROUTES = ("", "shared", "direct")
SOON = 20.0  # seconds, from the kill to the end of the job: machines have more to do


class SoakError(Exception):
    """A job did not end as it should have."""


def run_job(seed: int, ranks: int, rounds: int, folder: Path) -> Counter[str]:
    """Run a job; return how often it did what.

    Raises:
        SoakError: if something was wrong.
    """
    rng = random.Random(seed)
    ending, route = rng.choice(ENDINGS), rng.choice(ROUTES)
    killed = folder / "killed"
    killed.unlink(missing_ok=True)
    files = uuid.uuid4().hex
    what = f"seed {seed}, {ranks} ranks, {rounds} rounds, {route or 'any'} route"
    try:
        result = run_ranks(
            ranks,
            [JOB, str(seed), str(rounds), folder, ending],
            timeout=60 + 2 * rounds,
            env={"MPIDIST_IMPLEMENTATION": route, FILES: files},
        )
    except TimeoutError as error:
        progress = (folder / "progress").read_text()
        raise SoakError(f"{what}: no end, in {progress}\n{error}") from None
    ended = time.time()
    text = f"{what}, which {ending}: exit code {result.returncode}\n"
    text += f"--- stdout\n{result.stdout}\n--- stderr\n{result.stderr}"
    if not result.stdout.startswith("{"):
        raise SoakError(text)
    counts: Counter[str] = Counter(json.loads(result.stdout.partition("\n")[0]))
    tracebacks = result.stderr.count("Traceback (most recent call last)")
    good = {
        "ends": result.returncode == 0 and result.stderr == "",
        "killed": result.returncode != 0 and killed.exists(),
        "raises": result.returncode != 0
        and tracebacks == 1
        and "FaultError: the end" in result.stderr,
        "exits": result.returncode == 7 and tracebacks == 0,
    }
    if not good[ending]:
        raise SoakError(text)
    if ending == "killed":
        seconds = ended - float(killed.read_text())
        if seconds > SOON:
            raise SoakError(f"{text}\nIt ended {seconds:.1f} s after the kill")
    if left := left_over(files):
        raise SoakError(f"{text}\nLeft in /dev/shm: {left}")
    return counts + Counter({f"job {ending}": 1, "rounds": rounds})


def soak(
    seed: int, ranks: int, rounds: int, jobs: int | None, seconds: float
) -> Counter[str]:
    """Run jobs until there are so many, or the time is up; return the counts."""
    end = time.monotonic() + seconds
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        done = 0
        while done < jobs if jobs is not None else time.monotonic() < end:
            counts += run_job(seed + done, ranks, rounds, Path(folder))
            done += 1
    return counts


def main() -> int:
    """Run the soak of the command line; return 1 if something was wrong."""
    parser = argparse.ArgumentParser(prog="launch/soak")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=80)
    given = parser.parse_args()
    print(f"launch: the first job has --seed {given.seed}", file=sys.stderr, flush=True)
    start = time.monotonic()
    try:
        counts = soak(given.seed, given.ranks, given.rounds, given.jobs, given.seconds)
    except SoakError as error:
        print(error)
        print("\nAgain from the job before: its --seed less 1, and --jobs 2")
        return 1
    for name in sorted(counts):
        print(f"{counts[name]:8d}  {name}")
    print(f"{time.monotonic() - start:.0f} s, nothing wrong")
    return 0


if __name__ == "__main__":
    sys.exit(main())
