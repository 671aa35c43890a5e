"""The resolvers of tf.distribute that do not ask a batch system."""

from __future__ import annotations

import abc
import collections
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from mpidist._base import gpus
from mpidist._base.expect import expect
from mpidist.cluster._spec import ClusterSpec


class ClusterResolver(abc.ABC):
    """Where the processes of a job are, and which of them this one is.

    The base class, with the names of ``tf.distribute.cluster_resolver``. A subclass
    defines `cluster_spec`.

    Attributes:
        task_type: the job of this process, such as "worker"; None if it is not known.
        task_id: the number of this process in its job; None if it is not known.
        rpc_layer: the protocol that `master` puts before an address; None: none.
        environment: the name of the environment; "" if it has none.
    """

    task_type: str | None = None
    task_id: int | None = None
    rpc_layer: str | None = None
    environment: str = ""

    @abc.abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Return the addresses of all tasks, as they are now."""

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Return the address of a task, with its protocol, such as "grpc://host0:80".

        Args:
            task_type: default: that of this process.
            task_id: default: that of this process.
            rpc_layer: the protocol; default: the attribute.

        Returns:
            The address; "" if it is not known which task this process is.

        Raises:
            ValueError: if there is no such task.
        """
        return self._master(task_type, task_id, rpc_layer or self.rpc_layer)

    def _master(self, job: str | None, task: int | None, layer: str | None) -> str:
        job = self.task_type if job is None else job
        task = self.task_id if task is None else task
        spec = self.cluster_spec()  # that of SLURM sets both
        job = self.task_type if job is None else job
        task = self.task_id if task is None else task
        if job is None or task is None:
            return ""
        return _with_protocol(spec.task_address(job, task), layer)

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> dict[str, int]:
        """Return how many GPUs a task has: ``{"GPU": 2}``, or ``{}``.

        Unless a subclass overrides it, these are the GPUs that CuPy finds in this
        process, whatever the arguments are. ``config_proto`` is ignored. The dict
        returns 0 for other names.
        """
        return collections.defaultdict(int, self._accelerators(task_id))

    def _accelerators(self, task_id: int | None) -> dict[str, int]:
        count, _ = gpus.count_gpus()
        return {"GPU": count} if count else {}


def _with_protocol(address: str, layer: str | None) -> str:
    return f"{layer}://{address}" if layer else address


class SimpleClusterResolver(ClusterResolver):
    """A resolver that returns what it is given.

    Args:
        cluster_spec: the addresses of all tasks.
        master: what `master` returns without a task.
        task_type: the job of this process.
        task_id: its number in the job.
        environment: the attribute.
        num_accelerators: returned by `num_accelerators`, such as ``{"GPU": 2}``.
        rpc_layer: the attribute.

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
        call, expected = "SimpleClusterResolver", "`mpidist.cluster.ClusterSpec`"
        is_spec = isinstance(cluster_spec, ClusterSpec)
        expect(is_spec, call, f"`cluster_spec` to be a {expected}", cluster_spec)
        expect(isinstance(master, str), call, "`master` to be a string", master)
        self._cluster_spec = cluster_spec
        self._default_master = master
        self._num_accelerators = dict(num_accelerators or {})
        self.task_type = task_type
        self.task_id = task_id
        self.environment = environment
        self.rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Return the ClusterSpec that was given."""
        return self._cluster_spec

    def _master(self, job: str | None, task: int | None, layer: str | None) -> str:
        if job is None or task is None:
            return _with_protocol(self._default_master, layer)
        return super()._master(job, task, layer)

    def _accelerators(self, task_id: int | None) -> dict[str, int]:
        return dict(self._num_accelerators)


def _assigned_or(name: str, otherwise: Callable[[Any], object], where: str) -> Any:
    """Return a property: what was assigned, or else what a function says."""

    def get(resolver: ClusterResolver) -> object:
        given = vars(resolver).get(f"_{name}")
        return otherwise(resolver) if given is None else given

    def assign(resolver: ClusterResolver, value: object) -> None:
        vars(resolver)[f"_{name}"] = value

    return property(get, assign, doc=f"The value {where}, or the one assigned.")


def _of_tf_config(*keys: str, kind: type, default: object = None) -> Any:
    """Return a property: what was assigned, or else what ``TF_CONFIG`` says.

    Args:
        keys: where it stands in the variable.
        kind: its type.
        default: if the variable does not say.
    """
    *section, key = keys

    def find(_: object) -> object:
        found = (_section(*section) if section else _tf_config()).get(key)
        return default if found is None else kind(found)

    return _assigned_or(key, find, "in ``TF_CONFIG``")


def _of_first(name: str) -> Any:
    """Return a property: what was assigned, or else that of the first resolver now."""
    return _assigned_or(
        name, lambda union: getattr(union._resolvers[0], name), "of the first resolver"
    )


class TFConfigClusterResolver(ClusterResolver):
    """Reads the environment variable ``TF_CONFIG``, at each call.

    For programs that get their cluster this way from a platform. Without the variable
    the cluster is empty, and the task None. The variable is JSON::

        {
            "cluster": {"worker": ["host0:1234", "host1:1234"]},
            "task": {"type": "worker", "index": 0},
        }

    As in TensorFlow `master` is the ``session_master`` of the variable, if that has
    one, and "" if there are fewer than two tasks. It raises a ValueError if it is not
    known which task this process is.

    Args:
        task_type: the job of this process; here and below None means the value in the
            variable.
        task_id: the number of this process in its job.
        rpc_layer: the protocol that `master` puts before an address.
        environment: the name of the environment.
    """

    task_type: Any = _of_tf_config("task", "type", kind=str)
    task_id: Any = _of_tf_config("task", "index", kind=int)
    rpc_layer: Any = _of_tf_config("rpc_layer", kind=str)
    environment: Any = _of_tf_config("environment", kind=str, default="")

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        """Keep the arguments."""
        self.task_type = task_type
        self.task_id = task_id
        self.rpc_layer = rpc_layer
        self.environment = environment

    def cluster_spec(self) -> ClusterSpec:
        """Return the addresses of all tasks; none if the variable is not set.

        Raises:
            ValueError: if the variable is not JSON of this form.
            TypeError: if the cluster in it is not a valid ClusterSpec.
        """
        return ClusterSpec(_section("cluster"))

    def _master(self, job: str | None, task: int | None, layer: str | None) -> str:
        given = _tf_config().get("session_master")
        if given is not None:
            return str(given)
        spec = self.cluster_spec()
        if sum(spec.num_tasks(job) for job in spec.jobs) < 2:
            return ""
        address = super()._master(job, task, layer)
        if not address:
            raise ValueError(
                "TFConfigClusterResolver.master: TF_CONFIG does not say which task "
                'this process is; add "task": {"type": ..., "index": ...} to it, or '
                "pass task_type and task_id"
            )
        return address


def _tf_config() -> dict[str, Any]:
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


def _section(name: str) -> dict[str, Any]:
    found = _tf_config().get(name, {})
    if not isinstance(found, dict):
        raise ValueError(f"TF_CONFIG: expected {name!r} to be an object, got {found!r}")
    return found


class TPUClusterResolver:
    """Raises the ValueError that tells programs of TensorFlow: there is no TPU."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Raise a ValueError."""
        raise ValueError(
            "TPUClusterResolver: there are no TPUs here; write `mpidist.MPIStrategy()`"
        )

    @classmethod
    def connect(cls, *args: object, **kwargs: object) -> TPUClusterResolver:
        """Raise a ValueError."""
        return cls()


class UnionResolver(ClusterResolver):
    """Several resolvers as one.

    The tasks of a job that several have are combined: lists are concatenated, dicts
    merged by index. All else is taken from the first resolver.

    Args:
        cluster_resolvers: at least one.
        rpc_layer: overrides that of the first resolver.
        task_type: overrides that of the first resolver.
        task_id: overrides that of the first resolver.

    Raises:
        TypeError: if one of them is not a `ClusterResolver`.
        ValueError: if there are no resolvers.
    """

    task_type: Any = _of_first("task_type")
    task_id: Any = _of_first("task_id")
    rpc_layer: Any = _of_first("rpc_layer")
    environment: Any = _of_first("environment")

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
            is_one = isinstance(resolver, ClusterResolver)
            expected = "each argument to be a ClusterResolver"
            expect(is_one, "UnionResolver", expected, resolver)
        self._resolvers = cluster_resolvers
        self.task_type = task_type
        self.task_id = task_id
        self.rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Return the addresses of all tasks of all resolvers.

        Raises:
            KeyError: if two dicts of one job have the same index.
        """
        joined: dict[str, list[str] | dict[int, str]] = {}
        for resolver in self._resolvers:
            for job, tasks in resolver.cluster_spec().as_dict().items():
                before = joined.get(job) or []
                if isinstance(before, list) and isinstance(tasks, list):
                    joined[job] = before + tasks
                else:
                    one, other = _by_index(before), _by_index(tasks)
                    for index in one.keys() & other.keys():
                        raise KeyError(
                            f"UnionResolver: job {job!r} has two tasks {index}"
                        )
                    joined[job] = one | other
        return ClusterSpec(joined)

    def _master(self, job: str | None, task: int | None, layer: str | None) -> str:
        if job is None or task is None:
            return self._resolvers[0].master(rpc_layer=layer)
        return super()._master(job, task, layer)

    def _accelerators(self, task_id: int | None) -> dict[str, int]:
        return self._resolvers[0].num_accelerators(None, task_id)


def _by_index(tasks: list[str] | dict[int, str]) -> dict[int, str]:
    return tasks if isinstance(tasks, dict) else dict(enumerate(tasks))
