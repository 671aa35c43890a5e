"""A job of the soak: random calls and faults by seed, against a model in NumPy.

All ranks draw the same rounds from the seed. A round is an action: a call or a few, on
variables, an optimizer, a dataset or a checkpoint, with contributions of each rank that
every rank can compute. The model does the same in NumPy for all ranks at once, in
numbers that are exact in any order. Often a round has a fault on a random rank; then it
is also checked what each rank raises, and that the model is still right.

What is in the folder is the checkpoints of the job before, which this one goes on from:
the model is a part of them.

usage: soak_job.py SEED ROUNDS FOLDER ENDING
"""

from __future__ import annotations

import copy
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from launching import NAME_FILES
from replicas import SignalError, context, everywhere, wait_asleep

import mpidist
from mpidist._strategy.strategy import group_of

DEADLINE = 60.0  # seconds: no call is to need it
WAIT = 3.0  # seconds, after which ranks that do not come are taken for waiting
# With its header, in pieces, by the shared memory or not; and nothing at all.
COUNTS = (0, 1, 3, 500, 4097, 40_000, 300_000)
DTYPES = ("float64", "float32", "int64", "int16", "uint8", "complex128")
COMBINE: dict[str, Callable[[Any], Any]] = {
    "SUM": lambda rows: sum(rows[1:], rows[0]),
    "MEAN": lambda rows: sum(rows[1:], rows[0]) / len(rows),
    "MIN": lambda rows: np.minimum.reduce(rows),
    "MAX": lambda rows: np.maximum.reduce(rows),
}
MODULUS = 1024.0  # values stay small, so sums are exact
BATCHES = 4
LARGE = 200_000
KEPT = 2

RAISES = ("raise", "raise after")
USABLE = {
    *("NoneType", "SignalError", "ReplicaError", "CollectiveError"),
    "CollectiveMismatchError",
}
# Of one rank in a call; tests/project/test_fuzz.py has more kinds.
FAULTS = (*RAISES, "differ")


class FaultError(Exception):
    """What a fault raises."""


class Model:
    """What all ranks have, in NumPy.

    Attributes:
        values: of mirrored variables.
        total: the sum over the ranks of an ON_READ variable.
        velocity: of the optimizer of "weights".
        position: in the dataset.
    """

    def __init__(self) -> None:
        self.values = {
            "sum": np.zeros(3),
            "mean": np.zeros((2, 2)),
            "first": np.zeros(()),
            "weights": np.zeros(5),
        }
        self.large = 0.0
        self.total = 0.0
        self.velocity = np.zeros(5)
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "values": {name: x.tolist() for name, x in self.values.items()},
            "numbers": [self.large, self.total, self.position],
            "velocity": self.velocity.tolist(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = {name: np.array(x) for name, x in state["values"].items()}
        self.large, self.total, self.position = state["numbers"]
        self.velocity = np.array(state["velocity"])


class Soak:
    """The strategy of one rank, what is made with it, and the model."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.seed, self.folder = seed, folder
        self.result: Any = None
        self.last_error = ""  # of this rank, as text
        self.model = Model()
        self.counts: Counter[str] = Counter()
        self.saved: list[Model] = []
        self.strategy = self._new_strategy()
        self.rank = self.strategy.replica_id
        self.size = self.strategy.num_replicas_in_sync
        self._make()
        restored = self.manager.restore_or_initialize()
        if restored is not None:
            self.counts["goes on from a checkpoint"] += 1
        self.check("what the job before has saved")
        self.pids = everywhere(os.getpid())

    def _new_strategy(self) -> mpidist.MPIStrategy:
        options = mpidist.experimental.CommunicationOptions(timeout_seconds=DEADLINE)
        return mpidist.MPIStrategy(communication_options=options, device="cpu")

    def _make(self) -> None:
        """Make all objects, with the values of the model."""
        model, strategy = self.model, self.strategy
        aggregations = {"sum": "SUM", "mean": "MEAN", "first": "ONLY_FIRST_REPLICA"}
        with strategy.scope():
            self.variables = {
                name: mpidist.Variable(
                    x, name=name, aggregation=aggregations.get(name, "NONE")
                )
                for name, x in model.values.items()
            }
            self.large = mpidist.Variable(np.full(LARGE, model.large), name="large")
            self.total = mpidist.Variable(
                0.0,
                name="total",
                synchronization="ON_READ",
                aggregation="SUM",
            )
        self.total.assign(model.total)
        self.optimizer = mpidist.optimizers.SGD(0.25, momentum=0.5)
        self.optimizer.build([self.variables["weights"]])
        self.model.velocity[...] = 0
        n = strategy.num_replicas_in_sync
        rows = mpidist.data.Dataset.range(3 * n * BATCHES).batch(3 * n).repeat()
        self.iterator: Any = iter(strategy.experimental_distribute_dataset(rows))
        self.iterator.restore(self.iterator.state() | {"position": model.position})
        # The model itself is replaced by a restore, and never by a save.
        self.checkpoint = mpidist.Checkpoint(
            variables=self.variables,
            large=self.large,
            total=self.total,
            optimizer=self.optimizer,
            iterator=self.iterator,
            model=self,
        )
        self.manager = mpidist.CheckpointManager(
            self.checkpoint, self.folder / "run", KEPT
        )

    def state_dict(self) -> dict[str, Any]:
        return self.model.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state)

    def rebuild(self) -> None:
        """Make a new strategy after one that is unusable."""
        self.strategy.close()
        self.strategy = self._new_strategy()
        self._make()
        self.saved.clear()  # of other objects
        self.counts["new strategies"] += 1

    def check(self, what: str) -> None:
        """Compare everything with the model."""
        model = self.model
        mpidist.check_in_sync([*self.variables.values(), self.large])
        for name, x in model.values.items():
            found = self.variables[name].numpy()
            np.testing.assert_array_equal(found, x, f"{what}: {name}")
        assert (self.large.numpy() == model.large).all(), what
        total = float(self.total.read_value())
        assert abs(total - model.total) < 1e-6, (what, total, model.total)  # of thirds
        assert self.iterator.state()["position"] == model.position, what
        slots = [v for v in self.optimizer.variables if v.shape == (5,)]
        for v in slots:
            np.testing.assert_array_equal(v.numpy(), model.velocity, what)

    # --- a call with a fault --------------------------------------------------

    def outcome(self, call: Callable[[], Any]) -> tuple[Any, list[str]]:
        """Return what a call returns here, and the names of what it raised, by rank."""
        found, name, text = None, "", ""
        try:
            found = call()
        except Exception as error:
            name, text = type(error).__name__, str(error)
            if isinstance(error, mpidist.CollectiveTimeoutError):
                raise  # nobody was to wait in vain
        self.last_error = text
        return found, everywhere(name)

    def run(self, fault: str, where: int, step: Callable[[], Any]) -> bool:
        """Run a step in all replicas, with a fault in one; return whether it counts.

        Args:
            fault: which fault; "": none.
            where: on which rank.
            step: makes the call.
        """
        mine = fault if self.rank == where else ""

        def replica() -> Any:
            if mine == "raise":
                raise FaultError("before the call")
            if fault == "differ":
                context().all_reduce("SUM", np.ones(7 if mine else 3))
            result = step()
            if mine == "raise after":
                raise FaultError("after the call")
            return result

        self.result = None
        found, names = self.outcome(lambda: self.strategy.run(replica))
        if fault:
            self.counts[f"fault: {fault}"] += 1
        if not fault:
            assert names == [""] * self.size, names
            (self.result,) = self.strategy.experimental_local_results(found)
            return True
        if fault == "differ":
            assert names == ["CollectiveMismatchError"] * self.size, names
            return False
        expected = ["ReplicaError"] * self.size
        expected[where] = "FaultError"
        assert names == expected, names
        return fault == "raise after"

    # --- actions --------------------------------------------------------------

    def do_reduce(self, rng: Any, fault: str, where: int) -> None:
        op = str(rng.choice(list(COMBINE)))
        dtype = str(rng.choice(DTYPES))
        if dtype == "complex128" and op in ("MIN", "MAX"):
            dtype = "float64"
        if np.dtype(dtype).kind in "iu" and op == "MEAN":
            dtype = "float32"
        if np.dtype(dtype).kind in "iu" and op == "SUM" and dtype != "int64":
            dtype = "float32"
        counts = rng.choice(COUNTS, int(rng.integers(1, 4)))
        trees = [
            [rng.integers(0, 64, int(n)).astype(dtype) for n in counts]
            for _ in range(self.size)
        ]

        def step() -> Any:
            return context().all_reduce(op, trees[self.rank])

        if self.run(fault, where, step) and self.result is not None:
            for k, found in enumerate(self.result):
                expected = COMBINE[op]([tree[k] for tree in trees])
                np.testing.assert_allclose(found, expected, rtol=1e-6)
                if op != "MEAN":
                    np.testing.assert_array_equal(found, expected)
                assert found.dtype == np.dtype(dtype)

    def do_gather(self, rng: Any, fault: str, where: int) -> None:
        lengths = rng.integers(0, 5, self.size)
        rows = [rng.integers(0, 9, (int(n), 3)) for n in lengths]
        expected = np.concatenate(rows)
        self.run(fault, where, lambda: context().all_gather(rows[self.rank], 0))
        if self.result is not None:
            np.testing.assert_array_equal(self.result, expected)
        per_replica = self.strategy.experimental_distribute_values_from_function(
            lambda context: rows[context.replica_id_in_sync_group]
        )
        found = self.strategy.gather(per_replica, 0)
        np.testing.assert_array_equal(found, expected)

    def do_assign(self, rng: Any, fault: str, where: int) -> None:
        name = str(rng.choice(["sum", "mean", "first"]))
        x = self.model.values[name]
        own = [np.full(x.shape, float(k)) for k in rng.integers(0, 9, self.size)]
        variable = self.variables[name]

        def step() -> None:
            variable.assign(own[self.rank])

        if self.run(fault, where, step):
            op = {"sum": "SUM", "mean": "MEAN"}.get(name)
            new = COMBINE[op](own) if op else own[0]
            if name == "mean":
                new = variable.numpy()  # a third is not exact
                np.testing.assert_allclose(new, COMBINE["MEAN"](own), rtol=1e-12)
            self.model.values[name] = np.array(new)

    def do_metric(self, rng: Any, fault: str, where: int) -> None:
        own = rng.integers(0, 9, self.size).astype(float)

        def step() -> None:
            self.total.assign_add(own[self.rank])

        # Each rank has its own, which a rank that raises before has not changed, and
        # those that raise because of it have.
        if fault:
            fault = "raise after"
        if self.run(fault, where, step):
            self.model.total += own.sum()
        if self.model.total > MODULUS:
            self.total.assign(0.0)
            self.model.total = 0.0

    def do_merge(self, rng: Any, fault: str, where: int) -> None:
        own = [np.full(3, float(k)) for k in rng.integers(0, 9, self.size)]
        new = float(rng.integers(0, 99))
        in_merge = fault == "raise" and bool(rng.integers(2))

        def step() -> Any:
            args = (own[self.rank], new, in_merge)
            return context().merge_call(_merge, (self, *args))

        if in_merge:
            names = self.outcome(lambda: self.strategy.run(step))[1]
            assert names == ["FaultError"] * self.size, names
            self.counts["fault: raise in merge_fn"] += 1
        elif self.run(fault, where, step):
            if self.result is not None:
                np.testing.assert_array_equal(self.result, COMBINE["SUM"](own))
            self.model.values["sum"] = self.model.values["sum"] % 64 + COMBINE["SUM"](
                own
            )
            self.model.large = new

    def do_update(self, rng: Any, fault: str, where: int) -> None:
        value = float(rng.integers(0, 99))
        bad = fault == "raise" and self.rank == where

        def update(variable: mpidist.Variable, x: float) -> None:
            variable.assign(np.full(LARGE, x))
            if bad:
                raise FaultError("in an update")

        names = self.outcome(
            lambda: self.strategy.extended.update(self.large, update, args=(value,))
        )[1]
        if fault != "raise":
            assert names == [""] * self.size, names
            self.model.large = value
            return
        assert all(name in ("FaultError", "ReplicaError") for name in names), names
        self.counts["fault: raise in an update"] += 1
        found = float(self.large.numpy()[0])
        assert found in (value, self.model.large)  # and equal on all: see `check`
        self.model.large = found

    def do_apply(self, rng: Any, fault: str, where: int) -> None:
        own = [rng.integers(-3, 4, 5).astype(float) for _ in range(self.size)]
        weights = self.variables["weights"]

        def step() -> None:
            self.optimizer.apply_gradients([(own[self.rank], weights)])

        model = self.model
        if self.run(fault, where, step):
            model.velocity = 0.5 * model.velocity + COMBINE["SUM"](own)
            weights_now = model.values["weights"] - 0.25 * model.velocity
            model.values["weights"] = weights_now
        # Each step takes a bit more: not too many of them.
        found = [v for v in self.optimizer.variables if v.shape == (5,)]
        for v in (weights, *found):
            v.assign(np.round(v.numpy() % 64))
        model.velocity = np.round(model.velocity % 64)
        model.values["weights"] = np.round(model.values["weights"] % 64)

    def do_input(self, rng: Any, fault: str, where: int) -> None:
        for _ in range(int(rng.integers(1, 4))):
            batch = next(self.iterator)
            (mine,) = self.strategy.experimental_local_results(batch)
            first = self.model.position % BATCHES * 3 * self.size + 3 * self.rank
            np.testing.assert_array_equal(mine, np.arange(first, first + 3))
            self.model.position += 1
        ones = np.ones(3)
        self.run(fault, where, lambda: context().all_reduce("SUM", ones))

    def do_save(self, rng: Any, fault: str, where: int) -> None:
        """Save, with a disk that is full, or by a path that is another on one rank.

        Rank 0's path counts then.
        """
        full = self.rank == 0 and fault in RAISES
        before = self.manager.latest_checkpoint
        fsync = os.fsync
        if full:
            os.fsync = _no_space
        try:
            names = self.outcome(self.manager.save)[1]
        finally:
            os.fsync = fsync
        if fault in RAISES:
            assert names == ["OSError"] * self.size, names
            assert self.manager.latest_checkpoint == before
            self.counts["fault: full disk"] += 1
        else:
            assert names == [""] * self.size, names
            self.saved = [*self.saved, copy.deepcopy(self.model)][-KEPT:]
        if fault == "differ":
            self.counts["fault: another path"] += 1
            other = "x" if self.rank == where else ""
            name = f"{self.folder}/y{'x' if where == 0 else ''}"
            path, names = self.outcome(
                lambda: self.checkpoint.save(f"{self.folder}/y{other}")
            )
            assert names == [""] * self.size, names
            assert path == name, (path, name)

    def do_restore(self, rng: Any, fault: str, where: int) -> None:
        if not self.saved:
            return
        which = int(rng.integers(len(self.saved)))
        path = self.manager.checkpoints[which - len(self.saved)]
        if fault:
            number = int(rng.integers(2))
            if self.rank == 0:
                damaged = Path(path) / ("manifest.json", "")[number]
                if number:
                    (damaged,) = Path(path).glob("arrays-*")
                data = damaged.read_bytes()
                at = int(rng.integers(len(data)))
                wrong = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
                damaged.write_bytes(wrong)
            else:
                rng.integers(1)
            names = self.outcome(lambda: self.checkpoint.restore(path))[1]
            assert names == ["CheckpointError"] * self.size, names
            self.counts["fault: flipped bit"] += 1
            self.check("after a restore that was refused")
            if self.rank == 0:
                damaged.write_bytes(data)
            everywhere(None)
        self.checkpoint.restore(path)
        expected = self.saved[which]
        assert self.model.state_dict() == expected.state_dict()

    # --- faults of processes --------------------------------------------------

    def do_stop(self, rng: Any, fault: str, where: int) -> None:
        """One rank is stopped for a moment; the result is right all the same."""
        helper = (where + 1) % self.size
        seconds = float(rng.uniform(0.0, 0.4))
        if self.rank == helper:
            threading.Thread(
                target=_continue, args=(self.pids[where], seconds), daemon=True
            ).start()
        for _ in range(3):
            if self.rank == where:
                os.kill(os.getpid(), signal.SIGSTOP)
                where = -1  # once
            self.do_reduce(rng, "", 0)

    def do_signal(self, rng: Any, fault: str, where: int) -> None:
        """A signal's exception at a random time; a new strategy if it is unusable."""
        delay = float(rng.uniform(0.0005, 0.05))
        error: BaseException | None = None
        try:
            try:
                if self.rank == where:
                    _armed.append(1)
                    signal.setitimer(signal.ITIMER_REAL, delay)
                self._without_state(rng, 12)
            finally:
                _armed.clear()
        except (SignalError, mpidist.CollectiveError) as raised:
            error = raised
        last = self._meet(error)
        names = everywhere(type(error).__name__)
        texts = everywhere(f"{type(last).__name__}: {last}")
        broken = everywhere(bool(group_of(self.strategy).guard.broken))
        assert len(set(broken)) == 1, (broken, names, texts)
        if broken[0]:
            for one in texts:
                assert "was interrupted by SignalError " in one, (names, texts)
            self.rebuild()
        else:
            # Between two calls; in a function of the user's, which is told as any other
            # exception; or when all was done.
            assert set(names) <= USABLE, names
            assert texts == ["NoneType: None"] * self.size, (names, texts)
            others = {*names[:where], *names[where + 1 :]}
            assert "NoneType" not in others or others == {"NoneType"}, names
        self.counts[f"signals: {'unusable' if broken[0] else 'usable'}"] += 1

    def _meet(self, error: BaseException | None) -> mpidist.CollectiveError | None:
        """Meet the other ranks after a signal; return what the next call raises.

        They may be in a call that this rank has left between two calls, so they have
        not been told: then it makes another call than they.
        """
        from mpi4py import MPI

        request = MPI.COMM_WORLD.Ibarrier()
        end = time.monotonic() + WAIT
        left = not isinstance(error, SignalError)
        while not left and time.monotonic() < end:
            left = request.Test()
            time.sleep(0.001)
        if not left and self._reduces() is None:
            # They were only slow, and this was the call that they make below.
            wait_asleep(request)
            return None
        wait_asleep(request)
        return self._reduces()

    def _reduces(self) -> mpidist.CollectiveError | None:
        try:
            total = self.strategy.reduce("SUM", self.strategy.run(_one), axis=None)
        except mpidist.CollectiveError as error:
            return error
        assert total == self.size
        return None

    def _without_state(self, rng: Any, count: int) -> None:
        """Make calls that change nothing of the model."""
        for _ in range(count):
            n = int(rng.choice(COUNTS))
            self.strategy.run(lambda n=n: context().all_reduce("SUM", np.ones(n)))
            self.strategy.run(lambda: context().merge_call(_reduce, (np.ones(3),)))
            self.strategy.extended.update(self.large, _nothing)
            float(self.total.read_value())

    # --- rounds and the end ---------------------------------------------------

    def round(self, number: int) -> None:
        rng = np.random.default_rng([self.seed, number])
        action = str(rng.choice(ACTIONS, p=WEIGHTS))
        fault, where = "", int(rng.integers(self.size))
        if rng.random() < 0.4:
            fault = str(rng.choice(FAULTS))
        what = f"round {number}: {action}, {fault or 'no fault'} on rank {where}"
        if self.rank == 0:
            (self.folder / "progress").write_text(what)
        try:
            getattr(self, f"do_{action}")(rng, fault, where)
            if fault or action in ("stop", "signal", "restore") or number % 8 == 0:
                self.check("afterwards")
        except BaseException as error:
            error.add_note(f"[{what}, rank {self.rank}; before: {self.last_error!r}]")
            raise
        self.counts[action] += 1

    def end(self, ending: str) -> None:
        """End the job in one way; the supervisor knows how that looks."""
        rng = np.random.default_rng([self.seed, 10**9])
        where = int(rng.integers(self.size))
        if ending == "killed" and self.rank == where:
            threading.Thread(
                target=_kill_myself, args=(float(rng.uniform(0, 0.5)), self.folder)
            ).start()
        number = 0
        while ending == "killed":
            number += 1
            self._without_state(rng, 2)
            self.model.large = float(number)
            self.large.assign(np.full(LARGE, float(number)))
            self.manager.save()

        def leave() -> Any:
            if self.rank == where and ending == "raises":
                raise FaultError("the end")
            if self.rank == where and ending == "exits":
                sys.exit(7)
            return context().all_reduce("SUM", 1.0)

        self.strategy.run(leave)
        assert ending == "ends"


def _merge(
    strategy: mpidist.Strategy, soaks: Any, own: Any, new: Any, raises: Any
) -> Any:
    (soak, *_) = strategy.experimental_local_results(soaks)
    (value, *_) = strategy.experimental_local_results(new)
    total = strategy.reduce("SUM", own, axis=None)
    if any(strategy.experimental_local_results(raises)):
        raise FaultError("in merge_fn")
    strategy.extended.update(soak.variables["sum"], _add, args=(total,))
    strategy.extended.update(soak.large, _fill, args=(value,))
    return total


def _add(variable: mpidist.Variable, x: Any) -> None:
    variable.assign(variable.numpy() % 64 + x)


def _fill(variable: mpidist.Variable, x: Any) -> None:
    variable.assign(np.full(LARGE, float(x)))


def _reduce(strategy: mpidist.Strategy, x: Any) -> Any:
    return strategy.reduce("SUM", x, axis=None)


def _nothing(variable: mpidist.Variable) -> None:
    pass


def _one() -> float:
    return 1.0


def _no_space(fd: int) -> None:
    raise OSError(28, os.strerror(28))


def _continue(pid: int, seconds: float) -> None:
    """Wait until a process is stopped; continue it after a moment."""
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)
    time.sleep(seconds)
    os.kill(pid, signal.SIGCONT)


def _kill_myself(seconds: float, folder: Path) -> None:
    time.sleep(seconds)
    (folder / "killed").write_text(repr(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


_armed: list[int] = []


def _handler(number: int, frame: FrameType | None) -> None:
    if _armed:
        _armed.clear()
        raise SignalError


_OFTEN: dict[str, int] = {
    **dict.fromkeys(("reduce", "merge", "assign", "apply"), 6),
    **dict.fromkeys(("gather", "metric", "update", "input"), 4),
    **dict.fromkeys(("save", "restore", "signal"), 2),
    "stop": 1,
}
ACTIONS = list(_OFTEN)
WEIGHTS = np.array(list(_OFTEN.values())) / sum(_OFTEN.values())
ENDINGS: tuple[Literal["ends", "killed", "raises", "exits"], ...]
ENDINGS = ("ends", "killed", "raises", "exits")


def main() -> None:
    seed, rounds, folder, ending = sys.argv[1:]
    exec(NAME_FILES)
    signal.signal(signal.SIGALRM, _handler)
    soak = Soak(int(seed), Path(folder))
    for number in range(int(rounds)):
        soak.round(number)
    soak.check("at the end")
    if soak.rank == 0:
        print(json.dumps(soak.counts), flush=True)
    soak.end(ending)


if __name__ == "__main__":
    main()
