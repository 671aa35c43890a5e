"""`State`: what a training has to keep when replicas die, and its commits."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from mpidist._base.errors import ReplicaLostError, on_rank
from mpidist._base.expect import as_int, as_path, expect
from mpidist._base.remedies import missing_name
from mpidist._checkpoints import Checkpoint, CheckpointManager, contents
from mpidist._checkpoints.collective_call import CollectiveCall
from mpidist._checkpoints.guest_items import Held
from mpidist._checkpoints.items import Item, VariableItem
from mpidist._runtime import interruptions
from mpidist._runtime.group import ReplicaGroup
from mpidist._strategy.strategy import Strategy, group_of
from mpidist._values.variable import Variable, storage_of
from mpidist.elastic import _commits, _epochs
from mpidist.elastic._commits import Commit
from mpidist.elastic._members import Claim

_KEPT_ON_DISK: Final = 2
_Vote: TypeAlias = Callable[[], bool]


class StateStorage:
    """What a `State` holds; for `mpidist.elastic.run`.

    Attributes:
        build: makes the objects that belong to a strategy.
        values: the plain values, by name.
        given: the objects that belong to no strategy, by name.
        made: the objects that ``build`` has made for the current strategy.
        newest: the newest commit.
        previous: the one before it, until the next commit uses its memory.
    """

    def __init__(
        self,
        build: Callable[..., Mapping[str, Any]] | None,
        directory: str | os.PathLike[str] | None,
        every: int,
        objects: Mapping[str, Any],
    ) -> None:
        """Sort the objects into plain values and others."""
        self.build = build
        self.values: dict[str, Any] = {}
        self.given: dict[str, Any] = {}
        self.made: dict[str, Any] = {}
        self.newest: Commit | None = None
        self.previous: Commit | None = None
        self._directory, self._every = directory, every
        self._manager: CheckpointManager | None = None
        self._items: list[Item] = []
        self._group: ReplicaGroup | None = None
        self._vote: _Vote | None = None
        for name, value in objects.items():
            _check_name(name)
            if contents.is_plain(name, value):
                self.values[name] = value
            else:
                self.given[name] = value
        for item in contents.checked(self.given):
            if isinstance(item, VariableItem):
                raise TypeError(
                    f"State: {item.name!r} is a variable. Variables belong to a "
                    "strategy, and each time that replicas have died there is a new "
                    "one, so they are made anew: make them in the function `build`, "
                    "`State(build)`, which returns a dict of objects by name"
                )

    # --- the objects of a strategy ------------------------------------------------

    def begin(self, strategy: Strategy, vote: _Vote) -> None:
        """Make the objects of a strategy. Collective.

        Args:
            strategy: the strategy.
            vote: returns whether all replicas live and have come to it. Collective.

        Raises:
            TypeError, ValueError: if ``build`` does not make what it should.
        """
        self._group, self._vote = group_of(strategy), vote
        call = CollectiveCall(self._group, "elastic.run")
        self._manager, self.made = None, {}
        if self.build is not None:
            build = self.build
            made = call.together(lambda: build(strategy))
            self.made = call.attempt(lambda: self._check_made(made))
        held = {name: Held(self.values, name) for name in self.values}
        objects = {**self.given, **self.made, **held}
        items = call.attempt(lambda: contents.collect(objects))
        for item in items:
            if isinstance(item, VariableItem):
                call.attempt(item.check)
        self._items = items
        call.agree(f", with a State of {{{', '.join(map(str, items))}}}")
        if self._directory is not None:
            with call.scope():
                self._manager = CheckpointManager(
                    Checkpoint(**objects), self._directory, max_to_keep=_KEPT_ON_DISK
                )

    def _check_made(self, made: Any) -> dict[str, Any]:
        expect(
            isinstance(made, Mapping) and all(type(key) is str for key in made),
            "State",
            "`build` to return a dict of objects by name",
            made,
            "such as {'weights': weights}",
        )
        for name, value in made.items():
            _check_name(name)
            if name in self.values or name in self.given:
                raise ValueError(
                    f"State: `build` and the keyword arguments both have {name!r}"
                )
            if contents.is_plain(name, value):
                raise TypeError(
                    f"State: `build` returned {name!r}: {value!r:.80}, a plain value. "
                    f"It would be the same again after each loss; write `State(build, "
                    f"{name}={value!r:.20})`, and `state.{name} = ...` to change it"
                )
        return {name: _epochs.wrap(name, value) for name, value in made.items()}

    def restore_from_disk(self) -> None:
        """Restore the newest checkpoint, if there is one. Collective.

        Its state becomes that of the next commit.
        """
        if self._manager is not None and self._group is not None:
            with CollectiveCall(self._group, "elastic.run").scope():
                self._manager.restore_or_initialize()

    def put_back(self, number: int, has: list[bool], places: list[int]) -> None:
        """Set all objects to a commit. Collective.

        Args:
            number: of the commit.
            has: for each replica whether it has the commit.
            places: for each replica its number among those that made the commit.
        """
        assert self._group is not None
        call = CollectiveCall(self._group, "elastic.run, going back to a commit")
        commit = self._find(number)
        if not all(has):
            commit = _commits.share(call, commit, has)
        assert commit is not None
        self.newest, self.previous = commit, None
        _commits.put(call, self._items, commit, places)

    def end(self, why: str) -> None:
        """Make the objects of this strategy unusable, and forget them.

        Args:
            why: what a use of one of its variables says.
        """
        group, self._group, self._vote = self._group, None, None
        self.made, self._items, self._manager = {}, [], None
        if group is None:
            return
        for value in group.registry.values():
            if isinstance(value, Variable):
                storage_of(value).retire(why)

    # --- commits ------------------------------------------------------------------

    @property
    def number(self) -> int:
        """The number of the newest commit that this process has made; 0 for none."""
        newest = self.newest
        return 0 if newest is None or newest.place < 0 else newest.number

    def claim(self, number: int) -> Claim:
        """Return what this process has of a commit."""
        commit = self._find(number)
        return Claim(-1, 0) if commit is None else Claim(commit.place, commit.size)

    def _find(self, number: int) -> Commit | None:
        for commit in (self.newest, self.previous):
            if commit is not None and commit.number == number and commit.place >= 0:
                return commit
        return None

    def commit_last(self) -> None:
        """Make the commit at the end of a run, and a checkpoint of it. Collective."""
        _epochs.stay_open(self.made)  # of a loop that ``train`` has returned from
        self.commit("elastic.run, after `train` has returned", last=True)

    @interruptions.tells("State.commit")
    def commit(self, name: str, *, last: bool = False) -> None:
        """Make a commit, and a checkpoint if it is time for one. Collective.

        Args:
            name: of the call.
            last: whether there is a checkpoint of this one in any case.

        Raises:
            ReplicaLostError: if a replica has died; nothing was committed then.
        """
        if self._group is None or self._vote is None:
            raise RuntimeError(
                f"{name}: the state is not in use; call it in the function that "
                "`mpidist.elastic.run(train, state)` calls"
            )
        call = CollectiveCall(self._group, name)
        number = 1 + (0 if self.newest is None else self.newest.number)
        reused, self.previous = self.previous, None
        made = _commits.take(call, self._items, number, self.values.keys(), reused)
        # Nothing is applied before this: it ends on all replicas in the same way.
        if not self._vote():
            why = f"{call.name}: a replica has died; nothing is committed"
            raise ReplicaLostError(on_rank(call.rank, why), (), call.name)
        self.newest, self.previous = made, self.newest
        if self._manager is not None and (last or number % self._every == 0):
            with call.scope():
                self._manager.save()

    def object(self, name: str) -> Any:
        """Return the object or value of a name.

        Raises:
            AttributeError: if there is none.
        """
        for objects in (self.values, self.made, self.given):
            if name in objects:
                return objects[name]
        names = ", ".join([*self.values, *self.given, *self.made]) or "nothing"
        later = ""
        if self.build is not None and not self.made:
            later = "; what `build` makes is there in the function that `run` calls"
        message = f"this State has no attribute {name!r}; it has {names}{later}"
        raise missing_name("State", message, name)


class State:
    """What a training keeps when replicas die: objects and values by name.

    Objects that belong to a strategy are created by ``build(strategy)``, which is
    called in the scope of each new strategy, and returns them by name: variables,
    optimizers (after a call of their `build`, so that they have their variables),
    distributed datasets and iterators, and dicts and lists of these. A variable cannot
    outlive its strategy, which is a group of processes of which one has died.
    `mpidist.elastic.run` therefore creates all of them again, with the values of the
    last commit; the old ones raise an error when they are used. Write ``state.weights``
    where it is needed, and keep no reference to it from one call of ``train`` to the
    next.

    Everything else is passed by keyword: plain values, which are the same on all
    replicas, and objects that do not belong to a strategy: ``numpy.random.Generator``,
    modules and optimizers of torch, and all others that a `mpidist.Checkpoint` accepts.
    A plain value is anything made of None, bools, numbers, strings, bytes and NumPy
    arrays in lists, tuples and dicts, or a pytree of JAX arrays; it is read and set as
    an attribute: ``state.epoch += 1``. Names that were not passed cannot be set, since
    they would not be kept.

    After a loss:

    - a mirrored variable has its committed value again, on all replicas;
    - an ON_READ variable is combined in each commit, as reading does, and has that
      value again, as after `Variable.assign`; so the contribution of a dead replica is
      not lost;
    - modules and optimizers of torch have the committed tensors again, in place;
      buffers that differ between the replicas become those of the first of them, if
      another number of replicas goes on;
    - generators that are the same on all replicas stay the same. If they differ, each
      surviving replica keeps its own, and a spare gets that of the replica that it
      replaces (each commit then exchanges them);
    - a loop over a distributed dataset continues at its position, split over the
      surviving replicas (see the guide), and so does an iterator. Inputs that differ
      between replicas (`Strategy.distribute_datasets_from_function`) are refused, since
      no other replica could read the input of one that has died.

    Example::

        def build(strategy):
            weights = mpidist.Variable(np.zeros(10))
            optimizer = mpidist.optimizers.SGD(0.1, momentum=0.9)
            optimizer.build([weights])
            batches = strategy.experimental_distribute_dataset(dataset)
            return {"weights": weights, "optimizer": optimizer, "batches": batches}


        state = mpidist.elastic.State(build, epoch=0, directory="run")

    Args:
        build: see above. The dataset in it must be one that can be read again.
        directory: where checkpoints are written, on rank 0, as by a
            `mpidist.CheckpointManager` that keeps two; None: nowhere. `run` restores
            the newest one when it begins, so a job that is started again continues.
        every: the number of commits from one checkpoint to the next. One is also made
            at the end of the run.
        objects: the values and objects, by name.

    Raises:
        TypeError: for a variable, and for an object that cannot be saved.
        ValueError: for a name that `State` or `Checkpoint` uses.
    """

    _storage: StateStorage

    def __init__(
        self,
        build: Callable[..., Mapping[str, Any]] | None = None,
        /,
        *,
        directory: str | os.PathLike[str] | None = None,
        every: int = 100,
        **objects: Any,
    ) -> None:
        """Keep the values; ``build`` is called by `mpidist.elastic.run`."""
        expect(
            build is None or callable(build),
            "State",
            "`build` to be a function of a strategy that returns a dict of objects",
            build,
            "pass values by keyword",
        )
        as_int("State", "every", every, least=1)
        if directory is not None:
            directory = as_path("State", directory)
        object.__setattr__(
            self, "_storage", StateStorage(build, directory, every, objects)
        )

    def commit(self) -> None:
        """Keep a copy of everything in memory, agreed by all replicas. Collective.

        At program level, in the function that `mpidist.elastic.run` calls, at a
        boundary of steps. If replicas die before all have agreed, the commit has no
        effect. It costs a header, an agreement and a copy of the variables, which needs
        twice their memory in addition; each ``every`` commits also a checkpoint.

        Raises:
            ReplicaLostError: if a replica has died. Let it pass: `run` catches it.
            CollectiveMismatchError: if a plain value differs between the replicas; or
                the states of an object differ and cannot be merged.
            OSError: if the checkpoint cannot be written.
        """
        self._storage.commit("State.commit")

    @property
    def commits(self) -> int:
        """How many commits this state has had; not those of an earlier job."""
        newest = self._storage.newest
        return 0 if newest is None else newest.number

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"a State has no attribute {name!r}")
        return self._storage.object(name)

    def __setattr__(self, name: str, value: Any) -> None:
        values = self._storage.values
        if name in values:
            values[name] = value
            return
        problem = (
            "would not be kept, since the state was made without it; write "
            f"`State(..., {name}=...)`"
        )
        if name in self._storage.given or name in self._storage.made:
            problem = (
                "is an object, and cannot be replaced; change it by its own methods, "
                "such as `assign`"
            )
        raise AttributeError(f"State: {name!r} {problem}")

    def __repr__(self) -> str:
        storage = self._storage
        values = ", ".join(f"{key}={x!r:.40}" for key, x in storage.values.items())
        others = ", ".join([*storage.given, *storage.made])
        return f"<mpidist.elastic.State of {others or 'no objects'}; {values}>"


def storage_of_state(state: State) -> StateStorage:
    """Return what a state holds, for what runs it."""
    return state._storage


def _check_name(name: str) -> None:
    if name.startswith("_") or hasattr(State, name) or hasattr(Checkpoint, name):
        raise ValueError(
            f"State: {name!r} cannot be the name of an object; name it something else"
        )
