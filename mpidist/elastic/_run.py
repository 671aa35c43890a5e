"""`run`: calls a training again, on the replicas that are left, when some have died."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any, Final, TypeAlias, TypeVar, overload

from mpidist._agreement.mismatch import Call
from mpidist._agreement.sections import SectionResult, run_section
from mpidist._base import reporting, shuffle_seeds, threads
from mpidist._base.environment import Environment, read_environment
from mpidist._base.errors import ReplicaLostError, chain
from mpidist._base.expect import as_int, expect
from mpidist._mpi import library, survival
from mpidist._strategy.mpi_strategy import MPIStrategy
from mpidist._strategy.strategy import group_of
from mpidist.elastic import _members
from mpidist.elastic._members import (
    HOW_TO_GO_ON,
    FinishedError,
    Member,
    NobodyLeftError,
    Placement,
    Role,
    Round,
)
from mpidist.elastic._state import State, StateStorage, storage_of_state

_R = TypeVar("_R")
# Any: of the communicator, an `mpi4py.MPI.Comm`.
_MakeStrategy: TypeAlias = Callable[[Any], MPIStrategy]
_MOST_IDLE_ROUNDS: Final = 2


@overload
def run(
    train: Callable[[Any, State], _R],
    state: State,
    *,
    min_replicas: int = 1,
    make_strategy: _MakeStrategy = MPIStrategy,
) -> _R: ...
@overload
def run(
    train: Callable[[Any, State], _R],
    state: State,
    *,
    min_replicas: int = 1,
    spares: int,
    make_strategy: _MakeStrategy = MPIStrategy,
) -> _R | None: ...
def run(
    train: Callable[[Any, State], _R],
    state: State | None = None,
    *,
    min_replicas: int = 1,
    spares: int = 0,
    make_strategy: Callable[[Any], MPIStrategy] = MPIStrategy,
) -> _R | None:
    """Run a training that continues when replicas die. Collective: all ranks call it.

    ``train(strategy, state)`` is an ordinary program, which calls ``state.commit()`` at
    the boundaries of its steps. When the process of a replica dies, the calls of all
    others end in `ReplicaLostError`, which passes through ``train`` to here. The
    surviving replicas get a new strategy, the objects of ``state`` are created again
    with the values of the last commit, the same on all, and ``train`` is called again:
    it begins where ``state`` says. A commit takes effect on all replicas or on none.

    The others share the work of replicas that have died: the size of global batches
    does not change. If processes wait as spares, these take the places of the dead.
    Rank 0 of the new strategy is the lowest replica that is left, or the spare in its
    place.

    It needs Open MPI 5, started by ``mpirun --with-ft ulfm`` (``mpidist run
    --elastic``). Without that it is an ordinary run on all ranks, which ends with the
    job when a rank dies; a warning says so once. ``mpidist run --restarts`` starts such
    a job again, from the last checkpoint of ``State(directory=...)``.

    Args:
        train: called with a strategy and the state. An exception other than that of a
            loss ends the run.
        state: a `State`. If it has no commit yet, it begins with the newest checkpoint
            of its directory; otherwise, in a second run, with its last commit: values
            set since then are lost.
        min_replicas: with fewer replicas than this the run ends with an error. The same
            on all ranks.
        spares: how many processes, the last ranks of the job, sleep until they are
            needed. The same on all ranks.
        make_strategy: creates the strategy for a communicator (an `mpi4py.MPI.Comm`;
            None for replicas that are threads, see `mpidist.testing`), such as
            ``functools.partial(mpidist.MPIStrategy, device="cpu")``.

    Returns:
        What ``train`` returns; None on a spare that was not needed. The strategy is
        closed: mirrored variables of the state can still be read.

    Raises:
        RuntimeError: on each surviving replica, if they are fewer than
            ``min_replicas``; on each spare, if all replicas have died; on all replicas,
            if the training fails twice as if replicas had died, but none has.
        TypeError, ValueError: if an argument is invalid.

    Example::

        def build(strategy):
            return {"weights": mpidist.Variable(np.zeros(2))}


        def train(strategy, state):
            while state.step < 3:
                state.weights.assign_add(np.ones(2))
                state.step += 1
                state.commit()
            return state.weights.numpy()


        state = mpidist.elastic.State(build, step=0)
        mpidist.elastic.run(train, state)  # array([3., 3.])
    """
    call, expected = "elastic.run", "`train` to be a function of a strategy and a state"
    expect(callable(train), call, expected, train)
    expected = "`state` to be a `mpidist.elastic.State`"
    if state is None:  # as Horovod's, a decorator
        raise TypeError(
            f"{call}: expected `train` and `state`, got `train` alone: it is no "
            "decorator; define `train(strategy, state)`, and write "
            "`mpidist.elastic.run(train, state)` where Horovod's programs call "
            "`train(state)`"
        )
    expect(isinstance(state, State), call, expected, state)
    expected = "`make_strategy` to be a function of a communicator"
    expect(callable(make_strategy), call, expected, make_strategy)
    as_int(call, "min_replicas", min_replicas, least=1)
    as_int(call, "spares", spares, least=0)
    storage = storage_of_state(state)
    if threads.current() is not None or not survival.is_on():
        return _run_once(train, state, storage, min_replicas, make_strategy)
    _check_size(library.world_size(), min_replicas, spares)
    return _Survivor(storage, min_replicas, spares, make_strategy).run(train, state)


def _run_once(
    train: Callable[[Any, State], _R],
    state: State,
    storage: StateStorage,
    min_replicas: int,
    make_strategy: _MakeStrategy,
) -> _R:
    """Run the training in a job that ends when one of its processes dies."""
    alone = threads.current() is None
    comm = library.mpi_module().COMM_WORLD if alone else None
    strategy = _made(make_strategy, comm)
    size = strategy.num_replicas_in_sync
    _check_size(size, min_replicas, 0)
    if size > 1 and alone and strategy.replica_id == 0:
        _say_that_it_ends()
    # The commit is that of an earlier run, if there is one. None can be lost.
    everybody = list(range(size))
    placement = Placement(everybody, everybody, [True] * size, storage.number, 0)
    _begin(storage, strategy, lambda: True, placement)
    result = _call(train, strategy, state)
    storage.commit_last()
    strategy.close()
    group_of(strategy).guard.close(_ENDED)
    return result


def _check_size(ranks: int, min_replicas: int, spares: int) -> None:
    if ranks - spares < min_replicas:
        raise ValueError(
            f"elastic.run: expected at least min_replicas={min_replicas} ranks and "
            f"spares={spares}, got {ranks} ranks; start more, or write smaller numbers"
        )


def _made(make_strategy: _MakeStrategy, comm: Any) -> MPIStrategy:
    strategy = make_strategy(comm)
    what, hint = "a strategy from `make_strategy`", "write `return MPIStrategy(comm)`"
    expect(isinstance(strategy, MPIStrategy), "elastic.run", what, strategy, hint)
    return strategy


def _begin(
    storage: StateStorage,
    strategy: MPIStrategy,
    vote: Callable[[], bool],
    placement: Placement,
) -> None:
    """Make the objects of a strategy, with the values of a commit or checkpoint."""
    storage.begin(strategy, vote)
    if placement.commit:
        storage.put_back(placement.commit, placement.has, placement.places)
    else:
        storage.restore_from_disk()
    # What is put back becomes a commit of these replicas; spares have it then, too.
    storage.commit("elastic.run, at its beginning")


def _call(train: Callable[[Any, State], _R], strategy: MPIStrategy, state: State) -> _R:
    """Call the training; wait until it has ended on all replicas.

    If it raises on one, all raise: a program that catches that must not leave the
    others waiting.
    """

    def body(section: SectionResult) -> _R:
        section.kind = "raised"
        return train(strategy, state)

    return run_section(
        group_of(strategy).guard, Call("elastic.run, the end of `train`"), body
    )


@dataclasses.dataclass
class _Survivor:
    """This process, in a run that goes on when others die."""

    _storage: StateStorage
    _min_replicas: int
    _spares: int
    _make_strategy: _MakeStrategy
    _role: Role = Role.STARTING
    _round: Round | None = None
    _strategy: weakref.ref[MPIStrategy] | None = None
    _first: int = 0  # the commit with which the last round began
    _idle: int = 0  # rounds without a death, and without another commit

    def __post_init__(self) -> None:
        self._shuffles = list(shuffle_seeds.position())

    def run(self, train: Callable[[Any, State], _R], state: State) -> _R | None:
        problem = ""
        while True:
            try:
                current = self._meet(problem)
            except FinishedError:
                return None
            if current.replicas is None:
                self._role = Role.RUNNING
                if current.wait_as_spare():
                    continue
                return None
            try:
                result = self._take_part(current, train, state)
            except BaseException as error:
                if not _is_loss(error, current):
                    current.leave()
                    raise
                # Not the exception: its frames keep all arrays of `train`.
                problem = f"{type(error).__name__}: {error}"
            else:
                self._finish(current)
                return result
            try:
                current.give_up()
                self._close(_LOST)
                self._storage.end(
                    "it belongs to a strategy of which a replica was lost. `elastic."
                    "run` has made it anew; take it from `state` in each call of "
                    "`train`"
                )
            except BaseException:
                current.leave()
                raise

    def _meet(self, problem: str) -> Round:
        """Begin the next round, with all processes that live."""
        storage, before = self._storage, self._round
        member = Member(
            self._role,
            storage.number,
            storage.claim,
            wanted=library.world_size() - self._spares,
            settings=self._min_replicas * (1 << 31) + self._spares,
        )
        try:
            current = _members.meet(before, member, _timeout())
        except (FinishedError, NobodyLeftError, ValueError):
            raise  # on all
        except BaseException:
            if before is not None:
                before.leave()
            raise
        self._round = current
        placement = current.placement
        size = len(placement.places)
        if size < self._min_replicas:
            left = "1 replica is" if size == 1 else f"{size} replicas are"
            raise RuntimeError(
                f"elastic.run: {left} left, fewer than min_replicas="
                f"{self._min_replicas}{HOW_TO_GO_ON}"
            )
        if before is not None:
            nobody = before.all.Get_size() == current.all.Get_size()
            same = placement.commit <= self._first
            self._idle = self._idle + 1 if nobody and same else 0
            if self._idle >= _MOST_IDLE_ROUNDS and current.replicas is not None:
                current.leave()
                raise RuntimeError(
                    "elastic.run: `train` fails as if a replica had died, but none "
                    "has. Perhaps it uses a strategy, a dataset or an iterator of an "
                    "earlier call; use its arguments `strategy` and `state` for all of "
                    f"them. It raised {problem}"
                )
            if current.replicas is not None and current.replicas.Get_rank() == 0:
                lost = _members.lost(before, current)
                _say(_members.describe(placement, len(before.placement.ranks), lost))
        return current

    def _take_part(
        self, current: Round, train: Callable[[Any, State], _R], state: State
    ) -> _R:
        storage, placement = self._storage, current.placement
        strategy = _made(self._make_strategy, current.replicas)
        self._strategy = weakref.ref(strategy)
        self._role = Role.RUNNING if placement.commit else Role.STARTING
        # Datasets are made anew, here and on spares, and must be shuffled alike.
        shuffle_seeds.position()[:] = self._shuffles
        _begin(storage, strategy, current.vote, placement)
        self._first = storage.number
        self._role = Role.RUNNING
        result = _call(train, strategy, state)
        storage.commit_last()
        if not current.vote():  # not all have come to the end of its checkpoint
            text = "elastic.run: a replica has died in the last checkpoint"
            raise ReplicaLostError(text, (), "elastic.run")
        return result

    def _close(self, why: str) -> None:
        strategy = None if self._strategy is None else self._strategy()
        self._strategy = None
        if strategy is None:
            return
        try:
            strategy.close()
        except ReplicaLostError:  # of which it had not heard; now it is local
            strategy.close()
        group_of(strategy).guard.close(why)

    def _finish(self, current: Round) -> None:
        """End the run: all replicas have agreed that they have finished."""
        self._close(_ENDED)
        self._role = Role.FINISHED
        if current.placement.spares:
            with contextlib.suppress(FinishedError):
                self._meet("")


_ENDED: Final = (
    "`elastic.run` has ended, and closed this strategy; make its calls in `train`, "
    "such as an evaluation at the end"
)
_LOST: Final = (
    "a replica of this strategy was lost; use the argument `strategy` of each call of "
    "`train`"
)


def _is_loss(error: BaseException, current: Round) -> bool:
    """Return whether an error is due to the death of a replica."""
    if not isinstance(error, Exception):
        return False  # the program ends
    losses = functools.partial(survival.losses, current.replicas)
    for cause in chain(error):
        lost = survival.losses_behind(cause, losses)
        if isinstance(cause, ReplicaLostError) or lost is not None:
            return True
    # A program may raise an error of its own in place of ours.
    return bool(survival.failed_ranks(current.replicas))


def _timeout() -> float:
    """Return for how many seconds ranks wait for each other; 0: forever."""
    try:
        return read_environment().timeout_seconds
    except ValueError:  # which all ranks learn from the strategy
        return Environment().timeout_seconds


@functools.cache
def _say_that_it_ends() -> None:
    _say(
        "this MPI ends the job when a rank dies; write `mpidist run --elastic` with "
        "Open MPI 5, or `mpidist run --restarts N` and State(directory=...)"
    )


def _say(text: str) -> None:
    reporting.say(f"mpidist.elastic: {text}")
