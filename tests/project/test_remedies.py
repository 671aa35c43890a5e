"""What to write instead of names that mpidist does not have: the tables, walked."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launching import ROOT, run_python

import mpidist
from mpidist._base.hints import add_hint
from mpidist._base.remedies import tables

ATTRIBUTES, KEYWORDS = tables()["names"], tables()["keywords"]
MODULES = (
    mpidist,
    mpidist.cluster,
    mpidist.data,
    mpidist.experimental,
    mpidist.losses,
    mpidist.metrics,
    mpidist.optimizers,
)


@pytest.fixture
def owner_of(tmp_path: Path) -> Callable[[str], Any]:
    """Return the module or an object of the class that a table is for."""
    made: dict[str, Callable[[], Any]] = {
        "Strategy": mpidist.get_strategy,
        "StrategyExtended": lambda: mpidist.get_strategy().extended,
        "ReplicaContext": mpidist.get_replica_context,
        "PerReplica": lambda: mpidist.PerReplica([1.0]),
        "Variable": lambda: mpidist.Variable(1.0),
        "Dataset": lambda: mpidist.data.Dataset.range(3),
        "Module": mpidist.Module,
        "Optimizer": lambda: mpidist.optimizers.Adam(0.1),
        "Checkpoint": mpidist.Checkpoint,
        "CheckpointManager": lambda: mpidist.CheckpointManager(
            mpidist.Checkpoint(), tmp_path
        ),
        "RestoreStatus": lambda: mpidist.RestoreStatus([]),
        "CheckpointReader": lambda: mpidist.load_checkpoint(
            mpidist.Checkpoint(w=mpidist.Variable(1.0)).save(tmp_path / "saved")
        ),
        "State": lambda: mpidist.elastic.State(epoch=0),
        # Without its signal handlers, which are not asked.
        "PreemptionCheckpointHandler": lambda: object.__new__(
            mpidist.experimental.PreemptionCheckpointHandler
        ),
    }

    def find(name: str) -> Any:
        return made[name]() if name in made else importlib.import_module(name)

    return find


def texts() -> Iterator[tuple[str, str, str]]:
    """Yield each text of the tables, with where it is."""
    for owner, names in ATTRIBUTES.items():
        for name, remedy in names.items():
            yield owner, name, remedy
    for call, keywords in KEYWORDS.items():
        for name, keyword in keywords.items():
            yield call, name, keyword["write"]


GUESTS = ("mpidist.torch", "mpidist.jax")  # in with_torch, with_jax
OWNERS = [owner for owner in ATTRIBUTES if not owner.startswith(GUESTS)]
OWNERS += ["Dataset"]  # whose names are those of its module
METHODS = {"assert_cardinality", "cardinality", "take_while", "unbatch"}


@pytest.mark.parametrize("owner", OWNERS)
def test_every_remedy_is_raised_by_what_it_names(owner, owner_of):
    found = owner_of(owner)
    for name, remedy in ATTRIBUTES.get(owner, ATTRIBUTES["mpidist.data"]).items():
        if f"{owner}.{name}" in sys.modules:
            continue  # imported by another test
        if owner == "Dataset" and name in METHODS:
            continue
        with pytest.raises(AttributeError) as caught:
            getattr(found, name)
        assert f"; {remedy} (more: `mpidist docs " in str(caught.value)
        assert caught.value.name == name
        assert not hasattr(found, name)
        assert name not in dir(found)


@pytest.mark.parametrize("owner", OWNERS)
def test_other_names_are_as_always_in_python(owner, owner_of):
    found = owner_of(owner)
    for name in ("nothing_of_this_name", "__nothing__", "__getstate_of_nothing__"):
        with pytest.raises(AttributeError, match=rf"has no \w+ '{name}'(; it has|$)"):
            getattr(found, name)
    assert getattr(found, "nothing", 3) == 3


def test_the_tables_are_read_at_the_first_error():
    program = (
        "import numpy, mpidist\n"
        "from mpidist._base.remedies import tables\n"
        "variable = mpidist.Variable(1.0)\n"
        "numpy.asarray(mpidist.Variable([1.0])), hasattr(variable, '__nothing__')\n"
        "print(tables.cache_info().currsize)\n"
        "hasattr(variable, 'assign_later')\n"
        "print(tables.cache_info().currsize)\n"
        "tables.cache_clear()\n"
        "mpidist.Variable(1.0, use_resource=None)\n"  # is looked up, too
        "print(tables.cache_info().currsize)\n"
    )
    assert run_python("-c", program).split() == ["0", "1", "1"]


def test_shared_texts_are_in_their_places():
    assert all(not text.startswith("=") for _, _, text in texts())


def test_calls_that_explain_keywords_have_a_table():
    for path in (ROOT / "mpidist").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert set(re.findall(r'explain_keywords\("(.+)"\)', text)) <= KEYWORDS.keys()


def test_the_tables_name_what_there_is():
    for owner, name, text in texts():
        where = f"{owner} {name}: {text}"
        assert re.search(r"`[^`]+`", text), where
        assert text.count("`") % 2 == 0, where
        for dotted in re.findall(r"\bmpidist((?:\.\w+)+)", text):
            value: Any = mpidist
            for part in dotted.split(".")[1:]:
                if f"{value.__name__}.{part}" in ("mpidist.torch", "mpidist.jax"):
                    break  # which are not loaded by `import mpidist`
                assert hasattr(value, part), where
                value = getattr(value, part)


CALLS: dict[str, Callable[..., Any]] = {
    "Variable": lambda **kw: mpidist.Variable(1.0, **kw),
    "SGD": lambda **kw: mpidist.optimizers.SGD(0.1, **kw),
    "Adam": lambda **kw: mpidist.optimizers.Adam(0.1, **kw),
    "AdamW": lambda **kw: mpidist.optimizers.AdamW(0.1, **kw),
    "SparseCategoricalCrossentropy": (
        lambda **kw: mpidist.losses.SparseCategoricalCrossentropy(**kw)
    ),
    "AUC": lambda **kw: mpidist.metrics.AUC(**kw),
    "Adagrad": lambda **kw: mpidist.optimizers.Adagrad(0.1, **kw),
    "RMSprop": lambda **kw: mpidist.optimizers.RMSprop(0.1, **kw),
}
for _name, _table in KEYWORDS.items():
    if "top_k" in _table:  # of counts above thresholds, and what comes from these
        CALLS[_name] = functools.partial(getattr(mpidist.metrics, _name), 0.5)
WITH_MPI = {"MPIStrategy"}  # in test_tensorflow_names.py
OF_GUESTS = {call for call in KEYWORDS if call.startswith("mpidist.")}  # in with_torch
BY_HINTS = {call for call in KEYWORDS if call.startswith(("Replica", "Strategy"))}


@pytest.mark.parametrize(
    "call", sorted(KEYWORDS.keys() - WITH_MPI - OF_GUESTS - BY_HINTS)
)
def test_every_keyword_says_what_to_write_or_is_ignored(call, owner_of):
    saved = owner_of("CheckpointReader").path
    checkpoint = mpidist.Checkpoint(w=mpidist.Variable(1.0))
    folder = str(Path(saved).parent)
    calls = CALLS | {
        "Checkpoint.save": lambda **kw: checkpoint.save(saved, **kw),
        "Checkpoint.restore": lambda **kw: checkpoint.restore(saved, **kw),
        "CheckpointManager": lambda **kw: mpidist.CheckpointManager(
            checkpoint, folder, **kw
        ),
        "CheckpointManager.save": lambda **kw: mpidist.CheckpointManager(
            checkpoint, folder
        ).save(**kw),
    }
    make = calls[call]
    for name, keyword in KEYWORDS[call].items():
        make(**{name: None})
        make(**{name: keyword.get("default")})
        if keyword.get("ignored"):
            make(**{name: "anything"})
            continue
        with pytest.raises(TypeError) as caught:
            make(**{name: 0.125})
        message = f"{call}: got an unexpected keyword argument {name!r}; "
        assert message + keyword["write"] in str(caught.value)
    with pytest.raises(TypeError, match="unexpected keyword argument 'nothing'"):
        make(nothing=1)


def note_on(call: Callable[[], Any]) -> str:
    """Return the note on the TypeError of a call, or ""."""
    with pytest.raises(TypeError) as caught:
        call()
    add_hint(caught.value)
    return "".join(getattr(caught.value, "__notes__", ()))


@pytest.mark.parametrize("call", sorted(BY_HINTS))
def test_keywords_of_calls_in_hot_paths(call, owner_of):
    owner, _, method = call.partition(".")
    for name, keyword in KEYWORDS[call].items():
        called = getattr(owner_of(owner), method)
        note = note_on(lambda name=name, f=called: f("SUM", np.ones(2), **{name: 0}))
        assert note.startswith(f"mpidist: {keyword['write']} (more: ")


@pytest.mark.parametrize(
    ("call", "note"),
    [
        ("strategy.gather(1)", "Strategy.gather(value, axis)"),
        ("ctx.all_gather(1)", "ReplicaContext.all_gather(value, axis, options=None)"),
        ("strategy.reduce(1)", "Strategy.reduce(reduce_op, value, axis)"),
        (
            "data.Dataset.range(3).batch()",
            "Dataset.batch(batch_size, drop_remainder=False, num_parallel_calls=None, "
            "deterministic=None, name=None)",
        ),
        (
            "data.Dataset.from_tensor_slices()",
            "Dataset.from_tensor_slices(tensors, name=None)",
        ),
        (
            "losses.MeanSquaredError(reduc=1)",
            "(reduction='sum_over_batch_size', name=None, dtype=None)",
        ),
        (
            "metrics.Precision(threshold=1)",
            "Precision(thresholds=None, name=None, dtype=None)",
        ),
        (
            "compute_average_loss(batch_size=1)",
            "compute_average_loss(per_example_loss, sample_weight=None, "
            "global_batch_size=None)",
        ),
        ("global_batch_size()", ""),
        ("Trainer().reduce()", ""),
        ("(lambda x: x)()", ""),
        ("int(1, 2, 3)", ""),
    ],
)
def test_calls_that_python_refuses(call, note):
    class Trainer:
        def reduce(self, axis):
            pass

    names = {**vars(mpidist), "Trainer": Trainer, "strategy": mpidist.get_strategy()}
    names["ctx"] = mpidist.get_replica_context()
    if not note:  # of the program, by a name of mpidist's
        exec("def global_batch_size(x): pass", names)
    added = note_on(lambda: eval(call, names))
    what = "the arguments of such a class are" if note[:1] == "(" else "call it as"
    assert added == (note and f"mpidist: {what} `{note}`")


def test_protocols_are_not_disturbed():
    """Pickle, copy and inspect ask for names with two underscores."""
    variable = mpidist.Variable([1.0, 2.0])
    assert copy.deepcopy(variable).numpy().tolist() == [1.0, 2.0]
    for module in MODULES:
        assert inspect.getmodule(module.__getattr__) is not None
        assert inspect.getdoc(module)
        assert not hasattr(module, "__path_of_nothing__")
        namespace: dict[str, Any] = {}
        exec(f"from {module.__name__} import *", namespace)
        assert set(module.__all__) <= namespace.keys()
    parameters = inspect.signature(mpidist.Variable).parameters
    assert list(parameters)[:2] == ["initial_value", "trainable"]
    assert "learning_rate" in inspect.signature(mpidist.optimizers.SGD).parameters
    strategy = mpidist.get_strategy()
    for value in (strategy, strategy.extended, mpidist.PerReplica([1.0])):
        with pytest.raises(TypeError):
            pickle.dumps(value)
        assert callable(inspect.unwrap(type(value)))


# --- the tables of docs/porting.md ------------------------------------------------

# In the first column, but no names of an object of TensorFlow.
NO_NAMES = {
    "TF_CONFIG",  # a variable of the environment
    "copy.deepcopy(v)",  # Python's
    "next",
    "tf.random.Generator",  # the remedy is that of `random`
    "tf.random.set_seed(seed)",  # in the script for search and replace
    "v[1:3].assign(x)",
}
WITHOUT_NAMES = {"Dtypes and operations"}


def names_in_porting() -> Iterator[tuple[str, str]]:
    """Yield the section and the name, for each in the first column of a table."""
    section = ""
    for line in (ROOT / "docs/porting.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            section = line.lstrip("# ")
        if not line.startswith("| ") or section in WITHOUT_NAMES:
            continue
        first = line.split(" | ")[0].removeprefix("| ")
        if first.startswith(("ON_", "---")):
            continue  # of the table of effects
        for span in re.findall(r"`([^`]+)`", first):
            match = re.match(r"([A-Za-z_](?:[\w.]*\w)?)", span)
            is_module = re.fullmatch(r"tf(\.\w+)*\.(nn|distribute)|tf|merge_fn", span)
            if match and span not in NO_NAMES and not is_module:
                yield section, match[1]


def exists(name: str) -> bool:
    last = name.rpartition(".")[2]
    owners: list[Any] = list(MODULES)
    for module in MODULES:
        owners += [getattr(module, public) for public in module.__all__]
    calls = [owner.__init__ for owner in owners if inspect.isclass(owner)]
    calls += [mpidist.optimizers.Optimizer.apply_gradients]
    return any(hasattr(owner, last) for owner in owners) or any(
        last in inspect.signature(call).parameters for call in calls
    )


def is_explained(name: str) -> bool:
    """Return whether a remedy of the tables has this name."""
    last = name.rpartition(".")[2]
    return any(last == known for _, known, _ in texts())


def test_every_name_in_porting_exists_or_says_what_to_write():
    names = list(names_in_porting())
    assert len(names) > 150
    missing = [
        f"{section}: {name}"
        for section, name in names
        if not exists(name) and not is_explained(name)
    ]
    assert not missing


def test_a_room_that_cannot_be_imported_says_why(tmp_path, monkeypatch):
    """Which another name of it then says again, until it can be imported."""
    package, room = tmp_path / "lazy_package", tmp_path / "lazy_package" / "room.py"
    package.mkdir()
    text = "from mpidist._base.remedies import publish\n{}publish(__name__{})\n"
    later = text.format("", ', later={"room": ("found",)}')
    (package / "__init__.py").write_text(later)
    room.write_text("import no_such_library")
    monkeypatch.syspath_prepend(tmp_path)
    lazy = importlib.import_module("lazy_package")
    for name in ("room", "found"):
        with pytest.raises(ModuleNotFoundError, match="no_such_library"):
            getattr(lazy, name)
    room.write_text(text.format("def found(): pass\n", ""))
    assert {"found", "room"} <= {*dir(lazy), *lazy.__all__}
    assert (lazy.found is lazy.room.found, lazy.found.__module__) == (
        True,
        "lazy_package",
    )
    for name in ("lazy_package", "lazy_package.room"):
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("base", [mpidist.optimizers.SGD, mpidist.Checkpoint])
def test_the_error_of_a_users_property_is_shown(base):
    class Mine(base):
        @property
        def rate(self):
            return [].no_such_name

    with pytest.raises(AttributeError, match="'list' object has no attribute 'no_such"):
        Mine().rate  # noqa: B018
    with pytest.raises(AttributeError, match="'other'"):
        Mine().other  # noqa: B018
