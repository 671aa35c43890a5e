"""`ClusterSpec`: the addresses of the tasks of each job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

Tasks: TypeAlias = Sequence[str] | Mapping[int, str] | Mapping[str, str]
"""Addresses of the tasks of a job: in order, or by index (also written as text)."""


class ClusterSpec:
    """The addresses of the tasks of each job.

    This is ``tf.train.ClusterSpec`` without protocol buffers. Two are equal if their
    jobs, indices and addresses are.

    Args:
        cluster: for each job a list of addresses, or a dict of them by task index, for
            a job of which some tasks are not known; or a ClusterSpec.

    Raises:
        TypeError: for anything else; the message names the job.
    """

    def __init__(self, cluster: Mapping[str, Tasks] | ClusterSpec) -> None:
        """Check the addresses, and copy them."""
        self._tasks: dict[str, dict[int, str]] = {}
        if isinstance(cluster, ClusterSpec):
            cluster = cluster._tasks
        if not isinstance(cluster, Mapping):
            raise TypeError(
                "ClusterSpec: expected a dict of lists of addresses, such as "
                f"{{'worker': ['host0', 'host1']}}, got {cluster!r:.80}"
            )
        for job, tasks in cluster.items():
            if not isinstance(job, str):
                raise TypeError(f"ClusterSpec: expected names of jobs, got {job!r}")
            self._tasks[job] = _tasks_of(job, tasks)

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs, in the order in which they were given."""
        return list(self._tasks)

    def num_tasks(self, job_name: str) -> int:
        """Return the number of known tasks of a job.

        Raises:
            ValueError: if there is no such job.
        """
        return len(self._of(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Return the indices of the known tasks of a job, in order.

        Raises:
            ValueError: if there is no such job.
        """
        return sorted(self._of(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Return the address of a task.

        Raises:
            ValueError: if there is no such job or task.
        """
        try:
            return self._of(job_name)[task_index]
        except KeyError:
            raise ValueError(
                f"No task with index {task_index!r} in job {job_name!r}; it has "
                f"{self.task_indices(job_name)}"
            ) from None

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Return the addresses of the tasks 0, 1, 2, ... of a job.

        Returns:
            The addresses; None for a task that is not known.

        Raises:
            ValueError: if there is no such job.
        """
        tasks = self._of(job_name)
        return [tasks.get(index) for index in range(max(tasks, default=-1) + 1)]

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """Return the addresses of each job: a dict if some tasks are not known."""
        found: dict[str, list[str] | dict[int, str]] = {}
        for job in self.jobs:
            tasks = dict(sorted(self._tasks[job].items()))
            dense = list(tasks) == list(range(len(tasks))) and tasks
            found[job] = list(tasks.values()) if dense else tasks
        return found

    def _of(self, job_name: str) -> dict[int, str]:
        try:
            return self._tasks[job_name]
        except KeyError:
            raise ValueError(
                f"No such job in cluster: {job_name!r}; it has {self.jobs}"
            ) from None

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ClusterSpec):
            return self._tasks == other._tasks
        return NotImplemented

    def __repr__(self) -> str:
        return f"ClusterSpec({self.as_dict()})"


def _tasks_of(job: str, tasks: Tasks) -> dict[int, str]:
    wanted = f"ClusterSpec: expected the tasks of job {job!r} to be"
    if isinstance(tasks, Sequence) and not isinstance(tasks, (str, bytes)):
        tasks = dict(enumerate(tasks))
    if not isinstance(tasks, Mapping):
        raise TypeError(f"{wanted} a list or dict of addresses, got {tasks!r:.80}")
    found: dict[int, str] = {}
    for index, address in tasks.items():
        if not str(index).isdigit():
            raise TypeError(f"{wanted} numbered from 0, got {str(index)!r}")
        if not isinstance(address, str):
            raise TypeError(f"{wanted} addresses, got {address!r} for task {index}")
        found[int(index)] = address
    return found
