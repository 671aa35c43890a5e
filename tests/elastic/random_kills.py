"""Trainings of which 1 to 3 ranks are killed at random: what they are, how they end."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any, NamedTuple

from tests import launching

PROGRAM = Path(__file__).with_name("killed_training.py")
SECONDS = 60.0
CRASH = "ompi_comm_revoke_local"
"""Of Open MPI 5.0.11, if it learns of a death while it makes a communicator: with many
other processes on the machine in one of a hundred jobs. All ranks crash."""

# From the moment, up to so many seconds later: about as long as each takes.
_LATEST = {"start": 0.4, "step": 0.5, "loss": 0.5, "end": 0.05}


class Ended(NamedTuple):
    """How a job has ended: its exit code, what its ranks said, and its stderr."""

    code: int
    rows: list[dict[str, Any]]
    errors: str

    @property
    def killed(self) -> list[int]:
        """The ranks that were killed."""
        return sorted(row["killed"] for row in self.rows if "killed" in row)

    @property
    def finished(self) -> list[dict[str, Any]]:
        """What the ranks said that have come to the end of the training."""
        return [row for row in self.rows if "right" in row]


def train(
    ranks: int,
    settings: dict[str, Any],
    options: tuple[str, ...] = launching.ULFM,
    seconds: float = SECONDS,
) -> Ended:
    """Run `killed_training`."""
    arguments = [PROGRAM, json.dumps(settings)]
    done = launching.run_ranks(ranks, arguments, timeout=seconds, options=options)
    return Ended(done.returncode, rows_of(done.stdout), done.stderr)


def rows_of(output: str) -> list[dict[str, Any]]:
    """Return what ranks have said in their output."""
    found = re.findall(r"\{\".*?\}(?=\n|\{|$)", output)
    return [json.loads(row) for row in found]


def draw(seed: int) -> tuple[int, dict[str, Any]]:
    """Return a number of ranks, and the settings of the training."""
    rng = random.Random(seed)
    ranks = rng.randint(3, 5)
    spares = rng.choice([0, 0, 1, ranks - 3])
    # At least one that is no spare stays: nobody else has the state.
    kills = rng.randint(1, min(3, ranks - spares - 1))
    stays = rng.randrange(ranks - spares)
    victims = rng.sample([rank for rank in range(ranks) if rank != stays], kills)
    settings: dict[str, Any] = {
        "spares": spares,
        "epochs": rng.randint(2, 5),
        "extra": rng.choice([800, 80_000, 800_000]),
        "pause": rng.choice([0.0, 0.0, 0.005]),
        "after_vote": rng.random() < 0.5,
        "kill_after": {},
        "kill_from": {},
        "kill_in_vote": {},
    }
    for victim in map(str, victims):
        moment = rng.choice([*_LATEST, "step", "vote"])
        if moment == "vote":
            settings["kill_in_vote"][victim] = rng.randint(1, 30)
        else:
            settings["kill_from"][victim] = moment
            settings["kill_after"][victim] = rng.uniform(0.0, _LATEST[moment])
    return ranks, settings


def problem_of(job: Ended, ranks: int) -> str:
    """Return what is wrong with how a job has ended; "" if nothing is."""
    if job.code:
        return f"it has ended with code {job.code}"
    ended = {row["rank"] for row in job.rows if "right" in row or "spare" in row}
    if missing := set(range(ranks)) - ended - set(job.killed):
        return f"ranks {missing} were not killed, and have come to no end"
    if wrong := [row for row in job.finished if not row["right"]]:
        return f"wrong: {wrong}"
    numbers = sorted(row["replica"] for row in job.finished)
    sizes = {row["size"] for row in job.finished}
    if len(sizes) != 1 or len({*numbers}) < len(numbers):
        return f"different replicas: {job.finished}"
    return ""
