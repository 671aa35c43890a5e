"""The benchmarks of calls and steps: merge and train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

import mpidist
from mpidist._bench import _torch
from mpidist._bench._contest import Contestant
from mpidist._bench._job import Job
from mpidist._bench._raw import Descent, PackedAllReduce
from mpidist._bench._session import NO_GUARD, OURS, RESIDENT, Replicas, Session
from mpidist._bench._shapes import small

RAW: Final = "mpi4py"
PACKED: Final = "mpi4py packed"
ALONE: Final = "no communication"
_VARIABLES: Final = 20
_NUMBERS: Final = 50_000
_RATE: Final = 2.0**-10  # exact in float32, as the sums are
_ANSWER: Final = 42
_CLASSES: Final = 10


def merge(session: Session) -> None:
    """Time calls that move little, and the update pattern. Collective."""
    _empty_run(session)
    _empty_merge_call(session)
    _reduce_a_scalar(session)
    for dtype in (np.float32, np.float64):
        _update(session, dtype)


def _empty_run(session: Session) -> None:
    comm = session.job.comm

    def contestant(name: str, replicas: Replicas) -> Contestant:
        run = replicas.strategy.run
        return Contestant(name, lambda: run(_nothing), lambda result: result is None)

    session.contest(
        "merge",
        "empty run (Barrier)",
        [
            Contestant(RAW, comm.Barrier, lambda result: result is None),
            contestant(OURS, session.replicas),
            contestant(NO_GUARD, session.unguarded),
        ],
        baseline=RAW,
        seconds=0.5,
    )


def _nothing() -> None:
    pass


def _answer(strategy: Any) -> int:
    return _ANSWER


def _empty_merge_call(session: Session) -> None:
    comm, rank = session.job.comm, session.job.rank
    message = np.zeros(1, np.int64)

    def raw() -> Any:
        comm.Barrier()  # all replicas stop
        if rank == 0:
            message[0] = _ANSWER
        comm.Bcast(message, 0)  # and learn what rank 0 found
        return message[0]

    def right(result: Any) -> bool:
        return bool(result == _ANSWER)

    def contestant(name: str, replicas: Replicas) -> Contestant:
        return Contestant(
            name, lambda: replicas.merge_call(_answer), right, replicas.within
        )

    session.contest(
        "merge",
        "empty merge_call (Barrier, Bcast)",
        [
            Contestant(RAW, raw, right),
            contestant(OURS, session.replicas),
            contestant(NO_GUARD, session.unguarded),
        ],
        baseline=RAW,
        seconds=0.5,
    )


def _reduce_a_scalar(session: Session) -> None:
    job = session.job
    send, receive = np.array([job.rank + 1.0]), np.empty(1)
    total = job.size * (job.size + 1) / 2

    def raw() -> Any:
        job.comm.Allreduce(send, receive, job.mpi.SUM)
        return receive[0]

    def right(result: Any) -> bool:
        return bool(result == total)

    def contestant(name: str, replicas: Replicas) -> Contestant:
        strategy = replicas.strategy
        value = strategy.run(lambda: float(strategy.replica_id + 1))
        return Contestant(name, lambda: strategy.reduce("SUM", value, None), right)

    session.contest(
        "merge",
        "reduce of a scalar (Allreduce)",
        [
            Contestant(RAW, raw, right),
            contestant(OURS, session.replicas),
            contestant(NO_GUARD, session.unguarded),
        ],
        baseline=RAW,
        seconds=0.5,
    )


def _update(session: Session, dtype: Any) -> None:
    job = session.job
    gradients = [session.pattern(_NUMBERS, dtype) for _ in range(_VARIABLES)]
    after = -dtype(_RATE) * session.pattern_sum(_NUMBERS, dtype)

    def right(result: Any) -> bool:
        return all(np.array_equal(np.asarray(one), after) for one in result)

    def by_hand(packed: bool) -> Contestant:
        variables = [np.zeros(_NUMBERS, dtype) for _ in range(_VARIABLES)]
        descend = Descent(job, variables, _RATE, packed=packed)

        def call() -> Any:
            descend(gradients)
            return variables

        return Contestant(f"{RAW} packed" if packed else RAW, call, right)

    def ours(name: str, replicas: Replicas) -> Contestant:
        with replicas.strategy.scope():
            variables = [
                mpidist.Variable(np.zeros(_NUMBERS, dtype)) for _ in range(_VARIABLES)
            ]

        def merge_fn(strategy: Any, *per_replica: Any) -> None:
            pairs = list(zip(per_replica, variables, strict=True))
            totals = strategy.extended.batch_reduce_to("SUM", pairs)
            for variable, total in zip(variables, totals, strict=True):
                strategy.extended.update(variable, _subtract, args=(total,))

        def call() -> Any:
            replicas.merge_call(merge_fn, tuple(gradients))
            return variables

        return Contestant(name, call, right, replicas.within)

    session.contest(
        "merge",
        f"update of {_VARIABLES} x {_NUMBERS // 1000}k {np.dtype(dtype).name}",
        [
            by_hand(packed=False),
            by_hand(packed=True),
            ours(OURS, session.replicas),
            ours(NO_GUARD, session.unguarded),
        ],
        baseline=RAW,
        nbytes=_VARIABLES * gradients[0].nbytes,
        facts={"dtype": np.dtype(dtype).name, "variables": _VARIABLES},
    )


def _subtract(variable: Any, total: Any) -> None:
    variable.assign_sub(_RATE * total)


# --- train ------------------------------------------------------------------------


class _Network:
    """A perceptron with ReLU and softmax cross-entropy, in float32; in NumPy."""

    def __init__(self, parameters: Sequence[Any], gradients: Sequence[Any]) -> None:
        """Keep the arrays: the weights (inputs, outputs) and biases, in turn."""
        self.parameters = list(parameters)
        self.gradients = list(gradients)

    def backward(self, x: Any, y: Any, rows: int) -> float:
        """Write the gradients of the summed loss over ``rows``; return that loss.

        Args:
            x: float32 (rows of this rank, inputs).
            y: int64 (rows of this rank,), the classes.
            rows: what the sum over this rank's rows is divided by.
        """
        weights, biases = self.parameters[0::2], self.parameters[1::2]
        layers = [x]
        for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
            values = layers[-1] @ weight
            values += bias
            layers.append(np.maximum(values, 0, out=values))
        logits = layers[-1] @ weights[-1]
        logits += biases[-1]
        logits -= logits.max(axis=1, keepdims=True)
        probabilities = np.exp(logits)
        sums = probabilities.sum(axis=1, keepdims=True)
        each = np.arange(len(y))
        loss = float((np.log(sums[:, 0]) - logits[each, y]).sum()) / rows
        delta = np.divide(probabilities, sums, out=probabilities)
        delta[each, y] -= 1
        delta /= rows
        for i in range(len(weights) - 1, -1, -1):
            np.matmul(layers[i].T, delta, out=self.gradients[2 * i])
            delta.sum(axis=0, out=self.gradients[2 * i + 1])
            if i:
                delta = delta @ weights[i].T
                delta *= layers[i] > 0
        return loss


def _batch(rank: int, rows: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(rank)
    x = rng.standard_normal((rows, small()[0][0]), np.float32)
    return x, rng.integers(0, _CLASSES, rows)


def _initial() -> list[Any]:
    rng = np.random.default_rng(2**20)
    parameters = []
    for shape in small():
        scale = np.float32((2 / shape[0]) ** 0.5 if len(shape) == 2 else 0)
        parameters.append(scale * rng.standard_normal(shape, np.float32))
    return parameters


def _after_a_step(ranks: Sequence[int], rows: int, rate: float) -> list[Any]:
    """Return the parameters after one step on the rows of these ranks together."""
    parameters = _initial()
    network = _Network(parameters, [np.empty_like(p) for p in parameters])
    both = [_batch(rank, rows) for rank in ranks]
    x, y = (np.concatenate([pair[i] for pair in both]) for i in (0, 1))
    network.backward(x, y, len(y))
    for p, g in zip(parameters, network.gradients, strict=True):
        p -= np.float32(rate) * g
    return parameters


def train(session: Session) -> None:
    """Time data-parallel steps of a 784-512-512-10 network. Collective."""
    job, rows = session.job, session.options.batch
    rate = 0.01
    x, y = _batch(job.rank, rows)
    together = _after_a_step(range(job.size), rows, rate)
    alone = _after_a_step([job.rank], rows, rate)

    def near(expected: list[Any]) -> Any:
        def check(result: Any) -> bool:
            return all(
                np.allclose(np.asarray(r), e, rtol=1e-4, atol=1e-5)
                for r, e in zip(result, expected, strict=True)
            )

        return check

    contestants = [
        Contestant(ALONE, _Alone(x, y, rate).step, near(alone)),
        Contestant(PACKED, _ByHand(job, x, y, rate).step, near(together)),
    ]
    for name, replicas in ((OURS, session.replicas), (NO_GUARD, session.unguarded)):
        step = _Reduced(replicas, x, y, rate, job.size).step
        contestants.append(Contestant(name, step, near(together), replicas.within))
    with_sgd = _Optimized(session.replicas, x, y, rate, job.size)
    contestants.append(
        Contestant(
            f"{OURS}, SGD", with_sgd.step, near(together), session.replicas.within
        )
    )
    window = session.resident([np.zeros_like(p) for p in _initial()])
    if window is not None:
        resident = _Reduced(session.replicas, x, y, rate, job.size, window)
        contestants.append(
            Contestant(RESIDENT, resident.step, near(together), session.replicas.within)
        )
    if session.gloo is not None:
        gloo = session.gloo
        for name, distributed, after in (
            (f"torch, {ALONE}", False, alone),
            ("torch DDP", True, together),
        ):
            step = gloo.trainer(_initial(), x, y, rate, distributed=distributed)
            right = near(after)
            contestants.append(
                Contestant(
                    name,
                    step,
                    lambda model, right=right: right(  # type: ignore[misc]
                        _torch.Gloo.parameters_of(model)
                    ),
                )
            )
    count = sum(p.size for p in together)
    session.contest(
        "train",
        f"784-512-512-10, {rows} rows per rank",
        contestants,
        baseline=PACKED,
        seconds=5.0,
        facts={"dtype": "float32", "parameters": count, "rows_per_rank": rows},
    )


class _Alone:
    """Steps of this rank by itself: what computing costs."""

    def __init__(self, x: Any, y: Any, rate: float) -> None:
        self.x, self.y, self.rate = x, y, np.float32(rate)
        parameters = _initial()
        self.network = _Network(parameters, [np.empty_like(p) for p in parameters])
        self._scratch = [np.empty_like(p) for p in parameters]

    def step(self) -> list[Any]:
        """Make one step, and return the parameters."""
        network = self.network
        network.backward(self.x, self.y, len(self.y))
        return self.descend(network.gradients)

    def descend(self, gradients: Sequence[Any]) -> list[Any]:
        """Subtract gradients times the rate."""
        parameters = self.network.parameters
        for p, g, s in zip(parameters, gradients, self._scratch, strict=True):
            np.multiply(g, self.rate, out=s)
            np.subtract(p, s, out=p)
        return self.network.parameters


class _ByHand(_Alone):
    """Steps with a careful pack, Allreduce, unpack."""

    def __init__(self, job: Job, x: Any, y: Any, rate: float) -> None:
        super().__init__(x, y, rate)
        self._rows = len(y) * job.size
        self._reduce = PackedAllReduce(job, self.network.gradients)

    def step(self) -> list[Any]:
        network = self.network
        network.backward(self.x, self.y, self._rows)
        self._reduce(network.gradients, network.gradients)
        return self.descend(network.gradients)


class _Reduced(_Alone):
    """Steps with `ReplicaContext.all_reduce` of the list of gradients."""

    def __init__(
        self,
        replicas: Replicas,
        x: Any,
        y: Any,
        rate: float,
        ranks: int,
        gradients: Sequence[Any] | None = None,
    ) -> None:
        super().__init__(x, y, rate)
        self._rows = len(y) * ranks
        self._replicas = replicas
        if gradients is not None:
            self.network.gradients = list(gradients)

    def step(self) -> list[Any]:
        network = self.network
        network.backward(self.x, self.y, self._rows)
        return self.descend(self._replicas.all_reduce(network.gradients))


class _Optimized:
    """Steps with mirrored variables and `mpidist.optimizers.SGD`."""

    def __init__(
        self, replicas: Replicas, x: Any, y: Any, rate: float, ranks: int
    ) -> None:
        self._x, self._y, self._rows = x, y, len(y) * ranks
        with replicas.strategy.scope():
            self._variables = [mpidist.Variable(p) for p in _initial()]
            self._optimizer = mpidist.optimizers.SGD(learning_rate=rate)
        values = [v.numpy() for v in self._variables]
        self._network = _Network(values, [np.empty_like(v) for v in values])

    def step(self) -> list[Any]:
        """Make one step, and return the variables."""
        network = self._network
        network.parameters = [v.value() for v in self._variables]
        network.backward(self._x, self._y, self._rows)
        self._optimizer.apply_gradients(
            zip(network.gradients, self._variables, strict=True)
        )
        return self._variables
