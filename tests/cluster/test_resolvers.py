"""ClusterSpec, and the resolvers that do not ask a batch system."""

import json

import pytest

from mpidist.cluster import (
    ClusterResolver,
    ClusterSpec,
    MPIClusterResolver,
    SimpleClusterResolver,
    TFConfigClusterResolver,
    TPUClusterResolver,
    UnionResolver,
)

CLUSTER = {"worker": ["a:1", "b:1"], "ps": ["c:2"]}
TF_CONFIG = {"cluster": CLUSTER, "task": {"type": "worker", "index": 1}}


def simple(cluster, **more):
    return SimpleClusterResolver(ClusterSpec(cluster), **more)


# --- ClusterSpec ------------------------------------------------------------------


def test_a_spec_returns_what_it_was_given():
    spec = ClusterSpec(CLUSTER)
    assert spec.jobs == ["worker", "ps"]
    assert spec.as_dict() == CLUSTER
    assert (spec.num_tasks("worker"), spec.task_indices("worker")) == (2, [0, 1])
    assert spec.task_address("worker", 1) == "b:1"
    assert spec.job_tasks("ps") == ["c:2"]
    assert spec == ClusterSpec(spec) == ClusterSpec(dict(CLUSTER))
    assert spec != ClusterSpec({"worker": ["a:1"]})
    assert spec != CLUSTER
    assert bool(spec)
    assert not ClusterSpec({})
    assert repr(spec) == f"ClusterSpec({CLUSTER})"


def test_some_tasks_of_a_job_may_be_unknown():
    spec = ClusterSpec({"worker": {"3": "d", 1: "b"}, "none": []})
    assert spec.task_indices("worker") == [1, 3]
    assert spec.as_dict() == {"worker": {1: "b", 3: "d"}, "none": {}}
    assert spec.job_tasks("worker") == [None, "b", None, "d"]
    assert ClusterSpec({"w": {1: "b", 0: "a"}}).as_dict() == {"w": ["a", "b"]}


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        (["a"], "expected a dict of lists of addresses"),
        ({"w": "a"}, "tasks of job 'w' to be a list or dict of addresses, got 'a'"),
        ({"w": [1]}, "to be addresses, got 1 for task 0"),
        ({"w": {"x": "a"}}, "to be numbered from 0, got 'x'"),
        ({3: ["a"]}, "expected names of jobs, got 3"),
    ],
)
def test_what_is_no_cluster(cluster, message):
    with pytest.raises(TypeError, match=message):
        ClusterSpec(cluster)


def test_tasks_that_are_not_there():
    spec = ClusterSpec(CLUSTER)
    for ask in (spec.num_tasks, spec.task_indices, spec.job_tasks):
        with pytest.raises(ValueError, match="No such job in cluster: 'chief'; it has"):
            ask("chief")
    with pytest.raises(ValueError, match="No task with index 2 in job 'worker'"):
        spec.task_address("worker", 2)


# --- resolvers --------------------------------------------------------------------


def test_the_simple_one():
    resolver = simple(
        CLUSTER, master="m", task_type="ps", task_id=0, environment="e",
        num_accelerators={"GPU": 2}, rpc_layer="grpc",
    )  # fmt: skip
    assert resolver.cluster_spec().as_dict() == CLUSTER
    assert (resolver.task_type, resolver.task_id) == ("ps", 0)
    assert (resolver.environment, resolver.rpc_layer) == ("e", "grpc")
    assert resolver.master() == "grpc://m"
    assert resolver.master("worker", 0) == "grpc://a:1"
    assert resolver.master("worker", 0, rpc_layer="x") == "x://a:1"
    assert resolver.num_accelerators("worker", 1) == {"GPU": 2}
    assert resolver.num_accelerators()["TPU"] == 0
    resolver.task_type, resolver.task_id = "worker", 1
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    plain = simple(CLUSTER)
    assert (plain.master(), plain.num_accelerators(), plain.task_id) == ("", {}, None)
    with pytest.raises(TypeError, match="expected `cluster_spec` to be a"):
        SimpleClusterResolver(CLUSTER)
    with pytest.raises(TypeError, match="`master` to be a string"):
        simple(CLUSTER, master=1)


def test_tf_config(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", json.dumps(TF_CONFIG))
    resolver = TFConfigClusterResolver()
    assert resolver.cluster_spec().as_dict() == CLUSTER
    assert (resolver.task_type, resolver.task_id) == ("worker", 1)
    assert (resolver.rpc_layer, resolver.environment) == (None, "")
    assert resolver.master() == "b:1"
    assert resolver.master("ps", 0, "grpc") == "grpc://c:2"
    other = TFConfigClusterResolver("ps", 0, "http", "e")
    assert (other.task_type, other.task_id, other.environment) == ("ps", 0, "e")
    assert other.master() == "http://c:2"
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "worker", 0, "grpc"
    assert resolver.master() == "grpc://a:1"
    # It is read at each call.
    monkeypatch.setenv("TF_CONFIG", json.dumps({**TF_CONFIG, "rpc_layer": "r"}))
    assert TFConfigClusterResolver().master() == "r://b:1"
    session = {**TF_CONFIG, "session_master": "grpc://s:3"}
    monkeypatch.setenv("TF_CONFIG", json.dumps(session))
    assert TFConfigClusterResolver().master("ps", 0) == "grpc://s:3"
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": CLUSTER}))
    with pytest.raises(ValueError, match="does not say which task this process is"):
        TFConfigClusterResolver().master()
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"worker": ["a"]}}))
    assert TFConfigClusterResolver().master() == ""


def test_tf_config_that_is_missing_or_wrong(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    resolver = TFConfigClusterResolver()
    assert resolver.cluster_spec() == ClusterSpec({})
    assert (resolver.task_type, resolver.task_id, resolver.master()) == (None, None, "")
    for text, message in (
        ("{", "TF_CONFIG is not JSON"),
        ("[1]", "TF_CONFIG: expected a JSON object"),
        ('{"cluster": [1]}', "TF_CONFIG: expected 'cluster' to be an object"),
    ):
        monkeypatch.setenv("TF_CONFIG", text)
        with pytest.raises(ValueError, match=message):
            resolver.cluster_spec()


def test_a_union_joins_lists_and_dicts():
    first = simple({"worker": ["a"]}, master="m", task_type="worker", task_id=3,
                   num_accelerators={"GPU": 1}, rpc_layer="r")  # fmt: skip
    second = simple({"worker": ["b"], "ps": {1: "c"}})
    third = simple({"ps": {2: "d"}}, num_accelerators={"GPU": 9})
    union = UnionResolver(first, second, third)
    spec = union.cluster_spec()
    assert spec.as_dict() == {"worker": ["a", "b"], "ps": {1: "c", 2: "d"}}
    assert (union.task_type, union.task_id, union.rpc_layer) == ("worker", 3, "r")
    assert union.num_accelerators() == {"GPU": 1}
    assert union.master() == "r://m"
    assert union.master("ps", 2) == "r://d"
    first.task_id = 4  # that of SLURM is known after cluster_spec
    assert union.task_id == 4
    # TensorFlow loses a 0 here.
    assert UnionResolver(first, task_id=0, rpc_layer="x").task_id == 0
    twice = UnionResolver(second, simple({"ps": {1: "z"}}))
    with pytest.raises(KeyError, match="job 'ps' has two tasks 1"):
        twice.cluster_spec()
    with pytest.raises(ValueError, match="at least one ClusterResolver"):
        UnionResolver()
    with pytest.raises(TypeError, match="expected each argument to be a Cluster"):
        UnionResolver(first, "b")


def test_there_is_no_tpu():
    for make in (TPUClusterResolver, TPUClusterResolver.connect):
        with pytest.raises(ValueError, match=r"write `mpidist\.MPIStrategy\(\)`"):
            make("local")


def test_a_resolver_of_ones_own_has_the_defaults():
    class Own(ClusterResolver):
        def cluster_spec(self):
            return ClusterSpec({"worker": ["here"]})

        def master(self, task_type=None, task_id=None, rpc_layer=None):
            return "here"

    own = Own()
    assert (own.task_type, own.task_id, own.environment) == (None, None, "")
    assert own.num_accelerators().keys() <= {"GPU"}
    own.task_id = 2
    assert own.task_id == 2
    with pytest.raises(TypeError, match="abstract"):
        ClusterResolver()


def test_nodes_of_one_name_are_different_nodes():
    devices = tuple(f"/rank:{rank}/device:CPU:0" for rank in range(4))
    resolver = MPIClusterResolver(("n",) * 4, 1, devices, (0, 1, 1, 0))
    assert resolver.nodes == (0, 1, 1, 0)
    assert resolver.local_ranks == (0, 0, 1, 1)
    assert "task 1 of 4, on 2 nodes (n)" in repr(resolver)
    assert MPIClusterResolver(("a", "b", "a"), 0, devices[:3]).nodes == (0, 1, 0)
    assert resolver.master("worker", 3, "grpc") == "grpc://n"
    assert resolver.get_task_info() == ("worker", 1)
