"""Public names: listed, documented, and said to be collective where they are."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import typing
from collections.abc import Iterator
from typing import Any

import pytest

import mpidist
from mpidist import (
    cluster,
    data,
    elastic,
    experimental,
    losses,
    metrics,
    nest,
    optimizers,
    summary,
    testing,
)

PREFIXES = {
    mpidist: "",
    cluster: "cluster.",
    data: "data.",
    elastic: "elastic.",
    experimental: "experimental.",
    losses: "losses.",
    metrics: "metrics.",
    nest: "nest.",
    optimizers: "optimizers.",
    summary: "summary.",
    testing: "testing.",
}

# Every rank, or every replica, has to call these; the others any rank by itself. By the
# module or class that they are in.
COLLECTIVE = {
    "": """CheckpointManager MPIStrategy MirroredStrategy MultiWorkerMirroredStrategy
        Variable check_in_sync checkpoints_iterator compute_average_loss
        global_batch_size maybe_merge_call timeline""",
    "Checkpoint": "restore save sync wait",
    "CheckpointManager": "restore_or_initialize save sync",
    "CollectiveAllReduce": "batch_reduce_implementation reduce_implementation",
    "CrossDeviceOps": """batch_reduce batch_reduce_implementation broadcast
        broadcast_implementation reduce reduce_implementation""",
    "DistributedDataset": "reduce",
    "DistributedIterator": "get_next get_next_as_optional initialize restore",
    "HierarchicalCopyAllReduce": "batch_reduce_implementation",
    "MPIStrategy": "close",
    "MultiStepContext": "set_last_step_output set_non_tensor_output",
    "NcclAllReduce": "batch_reduce_implementation",
    "ReductionToOneDevice": "reduce_implementation",
    "ReplicaContext": """all_gather all_gather_async all_reduce all_reduce_async
        merge_call""",
    "Strategy": """buffers_like distribute_datasets_from_function
        experimental_distribute_dataset experimental_distribute_datasets_from_function
        experimental_distribute_values_from_function experimental_run
        experimental_run_v2 gather make_dataset_iterator make_input_fn_iterator reduce
        run""",
    "StrategyExtended": """batch_reduce_to broadcast_to call_for_each_replica
        experimental_run_steps_on_iterator read_var reduce_to update update_non_slot""",
    "Variable": """assign assign_add assign_sub scatter_add scatter_div scatter_max
        scatter_min scatter_mul scatter_sub scatter_update""",
    "elastic": "State.commit run",
    "experimental": "PreemptionCheckpointHandler",
    "experimental.PreemptionCheckpointHandler": "run save_checkpoint_if_preempted",
    "metrics": """AUC.result FBetaScore.result FalseNegatives.result
        FalsePositives.result IoU.result Mean.result Mean.update_state
        Metric.update_state
        Metric.add_weight Metric.reset_state Metric.reset_states Metric.result
        Precision.result PrecisionAtRecall.result R2Score.result Recall.result
        RecallAtPrecision.result RootMeanSquaredError.result
        SensitivityAtSpecificity.result SpecificityAtSensitivity.result Sum.result
        TrueNegatives.result TruePositives.result""",
    "optimizers.Optimizer": "apply_gradients build",
    "testing.ThreadGroup": "all_gather barrier broadcast split",
}


def public_objects() -> Iterator[tuple[str, Any]]:
    """Yield the public classes and functions, by the name that users write."""
    for module, prefix in PREFIXES.items():
        for name in module.__all__:
            if prefix and name in mpidist.__all__:
                continue  # `mpidist.data` has some that are in `mpidist` itself
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isfunction(value):
                yield prefix + name, value


def public_members() -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties of the public classes.

    Each under the class that a user meets first: one that is inherited from another
    public class is not repeated, one from a private class is.
    """
    public = {value for _, value in public_objects()}
    for class_name, kind in public_objects():
        if not inspect.isclass(kind):
            continue
        names = {name for c in kind.__mro__ for name in vars(c)}
        for name in sorted(names):
            if name.startswith("_"):
                continue
            owner = next(c for c in kind.__mro__ if name in vars(c))
            if owner.__module__.split(".")[0] != "mpidist":
                continue  # of the standard library or NumPy
            if owner is not kind and owner in public:
                continue
            value = inspect.getattr_static(kind, name)
            if isinstance(value, (classmethod, staticmethod)):
                value = value.__func__
            if isinstance(value, functools.cached_property):
                value = property(value.func)
            if inspect.isfunction(value) or isinstance(value, property):
                yield f"{class_name}.{name}", value


OBJECTS = dict(public_objects())
MEMBERS = dict(public_members())
CALLABLES = OBJECTS | {k: v for k, v in MEMBERS.items() if inspect.isfunction(v)}


@pytest.mark.parametrize("module", PREFIXES, ids=lambda m: m.__name__)
def test_type_checkers_find_the_public_names(module):
    """They take an imported name for public if it is written `name as name`."""
    found = set()
    body = ast.parse(inspect.getsource(module)).body
    for_types = [x for node in body if isinstance(node, ast.If) for x in node.body]
    for node in [*body, *for_types]:
        if isinstance(node, ast.ImportFrom):
            found |= {one.asname for one in node.names}
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {ast.unparse(target) for target in node.targets}
    public = {name for name in found if name and name[0].isalpha()}
    if module is mpidist:
        public.add("__version__")
    assert module.__all__ == sorted(public)


def test_public_objects_claim_the_public_name():
    for name, value in OBJECTS.items():
        prefix = name.rpartition(".")[0]
        found = getattr(mpidist, prefix) if prefix else mpidist
        assert value.__module__ == found.__name__, name
        # What it calls itself is where it is found, an older name of it aside.
        assert getattr(found, value.__qualname__) is value, name


def test_public_objects_have_a_docstring():
    for name, value in (OBJECTS | MEMBERS).items():
        doc = inspect.getdoc(value)
        assert doc, f"{name} has no docstring"
        if inspect.isclass(value):
            assert vars(value).get("__doc__"), f"{name} has only its parent's docstring"
        first = doc.splitlines()[0]
        assert first.endswith("."), f"{name}: {first!r} is no sentence"
        assert len(first) <= 79, f"{name}: {first!r} is longer than a line"


def whole_doc(name: str) -> str:
    """Return a docstring, with that of the method which it sends its reader to."""
    doc = inspect.getdoc(CALLABLES[name])
    other = re.search(r"see `(\w+)`", doc)
    if other is not None:
        doc += inspect.getdoc(CALLABLES[f"{name.rpartition('.')[0]}.{other[1]}"])
    return doc


def test_collective_callables_say_so_and_others_do_not():
    said = {x for x in CALLABLES if re.search(r"\bCollective\b", whole_doc(x))}
    assert said == {
        f"{owner}.{name}".lstrip(".")
        for owner, names in COLLECTIVE.items()
        for name in names.split()
    }


def test_signatures_show_no_addresses():
    for name, value in CALLABLES.items():
        try:
            signature = str(inspect.signature(value))
        except ValueError:  # of an enum, or a class in C
            continue
        assert not re.search(r"<object|0x[0-9a-f]", signature), name


def test_types_of_public_names_can_be_read():
    for name, value in (OBJECTS | MEMBERS).items():
        if isinstance(value, property):
            value = value.fget
        hints = typing.get_type_hints(value)
        assert inspect.isclass(value) or "return" in hints, name


def test_types_of_a_users_class_can_be_read():
    class Mine(metrics.Mean):
        last: Iterator[int]

    hints = typing.get_type_hints(Mine)
    assert hints["last"] == Iterator[int]
    assert hints["_made"] == functools.partial[typing.Self]


def test_errors_are_runtime_errors():
    for name in mpidist.__all__:
        if name.endswith("Error"):
            error = getattr(mpidist, name)
            assert issubclass(error, RuntimeError)
            # A checkpoint is damaged, whoever reads it.
            if error is not mpidist.CheckpointError:
                assert issubclass(error, mpidist.CollectiveError)
