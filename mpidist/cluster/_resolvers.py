"""The resolvers of tf.distribute that do not ask a batch system."""

from __future__ import annotations

import abc
import json
import os
from collections.abc import Mapping

from mpidist._base import backend
from mpidist.cluster._spec import ClusterSpec


class ClusterResolver(abc.ABC):
    """Where the processes of a job are, and which of them this one is.

    The base class, with the names of ``tf.distribute.cluster_resolver``. A subclass
    defines `cluster_spec` and `master`.
    """

    _task_type: str | None = None
    _task_id: int | None = None

    @abc.abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Return the addresses of all tasks, as they are now."""

    @abc.abstractmethod
    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return the address of a task, with its protocol; "" if there is none."""

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> dict[str, int]:
        """Return how many GPUs a task has: ``{"GPU": 2}``, or ``{}``.

        Here: those that CuPy finds in this process, whatever the arguments are.
        """
        count, _ = backend.count_gpus()
        return {"GPU": count} if count else {}

    @property
    def environment(self) -> str:
        """The name of the environment; ""."""
        return ""

    @property
    def task_type(self) -> str | None:
        """The job of this process, such as "worker"; None if it is not known."""
        return self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """The number of this process in its job; None if it is not known."""
        return self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id


def with_protocol(address: str, rpc_layer: str | None) -> str:
    """Return ``grpc://address``, or the address alone without a protocol."""
    return f"{rpc_layer}://{address}" if rpc_layer else address


class SimpleClusterResolver(ClusterResolver):
    """A resolver that returns what it is given.

    Args:
        cluster_spec: the addresses of all tasks.
        master: what `master` returns without a task.
        task_type: the job of this process.
        task_id: its number in the job.
        environment: returned by `environment`.
        num_accelerators: returned by `num_accelerators`, such as ``{"GPU": 2}``.
        rpc_layer: the protocol that `master` puts before an address.

    Raises:
        TypeError: if ``cluster_spec`` is not a `ClusterSpec`, or ``master`` not a
            string.
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: Mapping[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        """Check the arguments, and keep them."""
        if not isinstance(cluster_spec, ClusterSpec):
            raise TypeError(
                "SimpleClusterResolver: expected `cluster_spec` to be a `mpidist."
                f"cluster.ClusterSpec`, got {cluster_spec!r:.80}"
            )
        if not isinstance(master, str):
            raise TypeError(
                f"SimpleClusterResolver: expected `master` to be a string, got "
                f"{master!r:.80}"
            )
        self._cluster_spec = cluster_spec
        self._master = master
        self._task_type = task_type
        self._task_id = task_id
        self._environment = environment
        self._num_accelerators = dict(num_accelerators or {})
        self.rpc_layer: str | None = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Return the ClusterSpec that was given."""
        return self._cluster_spec

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return the address of a task, or the ``master`` that was given.

        Raises:
            ValueError: if there is no such task.
        """
        address = self._master
        if task_type is not None and task_id is not None:
            address = self._cluster_spec.task_address(task_type, task_id)
        return with_protocol(address, rpc_layer or self.rpc_layer)

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> dict[str, int]:
        """Return what was given; ``{}`` if nothing was."""
        return dict(self._num_accelerators)

    @property
    def environment(self) -> str:
        """The name that was given."""
        return self._environment


class TFConfigClusterResolver(ClusterResolver):
    """Reads the environment variable ``TF_CONFIG``, at each call.

    For programs that get their cluster this way from a platform. Without the variable
    the cluster is empty, and the task None. The variable is JSON::

        {
            "cluster": {"worker": ["host0:1234", "host1:1234"]},
            "task": {"type": "worker", "index": 0},
        }

    Args:
        task_type: overrides that of the variable.
        task_id: overrides that of the variable.
        rpc_layer: the protocol that `master` puts before an address; overrides that of
            the variable.
        environment: overrides that of the variable.
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        """Keep the arguments."""
        self._task_type = task_type
        self._task_id = task_id
        self._rpc_layer = rpc_layer
        self._environment = environment

    @property
    def task_type(self) -> str | None:
        """The job of this process; None if the variable does not say."""
        if self._task_type is not None:
            return self._task_type
        found = _section("task").get("type")
        return None if found is None else str(found)

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """The number of this process in its job; None if the variable does not say."""
        if self._task_id is not None:
            return self._task_id
        found = _section("task").get("index")
        return None if found is None else int(str(found))

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def environment(self) -> str:
        """The name of the environment; "" if the variable does not say."""
        if self._environment is not None:
            return self._environment
        return str(_tf_config().get("environment", ""))

    @property
    def rpc_layer(self) -> str | None:
        """The protocol; None if the variable does not say."""
        if self._rpc_layer is not None:
            return self._rpc_layer
        found = _tf_config().get("rpc_layer")
        return None if found is None else str(found)

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Return the addresses of all tasks; none if the variable is not set.

        Raises:
            ValueError: if the variable is not JSON of this form.
            TypeError: if the cluster in it is not a valid ClusterSpec.
        """
        return ClusterSpec(_section("cluster"))

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return the address of a task, by default of this one.

        It is the ``session_master`` of the variable, if that has one, and "" if there
        are fewer than two tasks.

        Raises:
            ValueError: if there is no such task, or the variable is wrong.
        """
        given = _tf_config().get("session_master")
        if given is not None:
            return str(given)
        spec = self.cluster_spec()
        if sum(spec.num_tasks(job) for job in spec.jobs) < 2:
            return ""
        job = self.task_type if task_type is None else task_type
        number = self.task_id if task_id is None else task_id
        if job is None or number is None:
            raise ValueError(
                "TFConfigClusterResolver.master: TF_CONFIG does not say which task "
                'this process is; add "task": {"type": ..., "index": ...} to it, or '
                "pass task_type and task_id"
            )
        return with_protocol(
            spec.task_address(job, number), rpc_layer or self.rpc_layer
        )


class UnionResolver(ClusterResolver):
    """Several resolvers as one.

    The tasks of a job that several have are joined: lists one after the other, dicts
    by index. All else is that of the first resolver.

    Args:
        cluster_resolvers: at least one.
        rpc_layer: overrides that of the first resolver.
        task_type: overrides that of the first resolver.
        task_id: overrides that of the first resolver.

    Raises:
        TypeError: if one of them is not a `ClusterResolver`.
        ValueError: if there are no resolvers.
    """

    def __init__(
        self,
        *cluster_resolvers: ClusterResolver,
        rpc_layer: str | None = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        """Check the arguments, and keep them."""
        if not cluster_resolvers:
            raise ValueError("UnionResolver: at least one ClusterResolver is required")
        for resolver in cluster_resolvers:
            if not isinstance(resolver, ClusterResolver):
                raise TypeError(
                    "UnionResolver: expected each argument to be a ClusterResolver, "
                    f"got {resolver!r:.80}"
                )
        first = cluster_resolvers[0]
        self._resolvers = cluster_resolvers
        self._task_type = first.task_type if task_type is None else task_type
        self._task_id = first.task_id if task_id is None else task_id
        if rpc_layer is None:
            rpc_layer = getattr(first, "rpc_layer", None)
        self.rpc_layer: str | None = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Return the addresses of all tasks of all resolvers.

        Raises:
            KeyError: if two dicts of one job have the same index.
        """
        joined: dict[str, list[str] | dict[int, str]] = {}
        for resolver in self._resolvers:
            for job, tasks in resolver.cluster_spec().as_dict().items():
                before = joined.get(job)
                if not before:
                    joined[job] = tasks
                elif isinstance(before, list) and isinstance(tasks, list):
                    joined[job] = before + tasks
                else:
                    joined[job] = _joined(job, _by_index(before), _by_index(tasks))
        return ClusterSpec(joined)

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return the address of a task, by default the master of the first resolver.

        Raises:
            ValueError: if there is no such task.
        """
        layer = rpc_layer or self.rpc_layer
        if task_type is not None and task_id is not None:
            address = self.cluster_spec().task_address(task_type, task_id)
            return with_protocol(address, layer)
        return self._resolvers[0].master(rpc_layer=layer)

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> dict[str, int]:
        """Return the GPUs of a task, from the first resolver."""
        return self._resolvers[0].num_accelerators(task_type, task_id, config_proto)

    @property
    def environment(self) -> str:
        """That of the first resolver."""
        return self._resolvers[0].environment


def _by_index(tasks: list[str] | dict[int, str]) -> dict[int, str]:
    return tasks if isinstance(tasks, dict) else dict(enumerate(tasks))


def _joined(job: str, tasks: dict[int, str], more: dict[int, str]) -> dict[int, str]:
    for index in more:
        if index in tasks:
            raise KeyError(f"UnionResolver: job {job!r} has two tasks {index}")
    return {**tasks, **more}


def _tf_config() -> dict[str, object]:
    text = os.environ.get("TF_CONFIG", "") or "{}"
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(
            f"TF_CONFIG is not JSON: {error}; it is {text!r:.80}"
        ) from None
    if not isinstance(found, dict):
        raise ValueError(f"TF_CONFIG: expected a JSON object, got {text!r:.80}")
    return found


def _section(name: str) -> dict[str, list[str]]:
    found = _tf_config().get(name, {})
    if not isinstance(found, dict):
        raise ValueError(f"TF_CONFIG: expected {name!r} to be an object, got {found!r}")
    return found
