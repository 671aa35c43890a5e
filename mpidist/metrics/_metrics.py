"""The base of the metrics, and sums and means of values."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Self

import numpy as np
from numpy.typing import DTypeLike

from mpidist._agreement.mismatch import Call
from mpidist._base import backend, checksums, guests, nest
from mpidist._base.expect import as_row_weights, expect
from mpidist._base.types import HostArray, Nest, Shape
from mpidist._runtime import context, dispatch
from mpidist._values.distributed import Mirrored, is_per_replica
from mpidist._values.variable import Variable, storage_of

_PER_REPLICA: Final = (
    "update it in the function that you pass to `strategy.run`, or write "
    "`strategy.gather(values, axis=0)`"
)

_CAPITAL: Final = re.compile("(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")

_COMPARED: Final = (bool, int, float, str, np.generic, np.ndarray, type(None))

_MASKED: Final = "write `x.filled(value)`, and give what is masked a weight of 0"


def _array(values: Nest, call: str) -> HostArray:
    """Return real numbers, in an array of any library or a list, as NumPy's."""
    what = "an array, as each replica has one"
    expect(not is_per_replica(values), call, what, values, _PER_REPLICA)
    masked = backend.is_masked(values)
    expect(not masked, call, "an array without a mask", values, _MASKED)
    kind = guests.kind_of(values)
    x: Any = backend.of_lists(values, call)
    if kind is not None:
        x = guests.as_stored(values, kind, call)
        x = x.host() if isinstance(x, guests.DeviceCopy) else x
    elif isinstance(values, (Mirrored, Variable)):
        x, _ = backend.as_array(values, call)
    x = backend.to_host(x)
    expect(backend.number_kind(x.dtype) in "biuf", call, "real numbers", values)
    return x.astype(np.float32) if guests.is_bfloat16(x.dtype) else x


class Metric:
    """The base of all metrics; derive from it as from Keras's.

    Create variables in ``__init__`` by `add_weight`; ``update_state`` adds to them, and
    ``result`` computes with them. In ``result`` their values are the sums over all
    replicas.

    Args:
        name: of the metric; names of its variables begin with it. None: that of the
            class, as Keras writes it: ``"mean_squared_error"``.
        dtype: accepted and ignored.
    """

    _made: functools.partial[Self]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Note the arguments, for `get_config`."""
        self = super().__new__(cls)
        self._made = functools.partial(cls, *args, **kwargs)
        return self

    def __init__(self, name: str | None = None, dtype: object = None) -> None:
        call = type(self).__name__
        hint = "write other settings as `keyword=value`; arrays are for `update_state`"
        expect(isinstance(name, str | None), call, "`name` to be a string", name, hint)
        self.name: str = name or _CAPITAL.sub("_", type(self).__name__).lower()
        self._weights: list[Variable] = []

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        owner = next(base for base in cls.__mro__ if "result" in vars(base))
        if owner is cls or not issubclass(owner, Metric):  # or it has been done there
            cls.result = _of_all_replicas(cls.result)  # type: ignore[assignment]

    def add_weight(
        self,
        shape: Shape | str = (),
        initializer: str | None = "zeros",
        dtype: DTypeLike = np.float64,
        name: str | None = None,
    ) -> Variable:
        """Create an ON_READ variable: each replica has its own part of a sum.

        Collective in a scope, as is `Variable`.

        Args:
            shape: of the variable. A string is its ``name``, as in Keras 2.
            initializer: "zeros", or None.
            dtype: of the variable.
            name: of the variable; the metric's is put before it.

        Raises:
            ValueError: for another initializer.
        """
        call, fits = f"{type(self).__name__}.add_weight", initializer in ("zeros", None)
        if isinstance(shape, str):
            name, shape = shape, ()
        what, hint = '`initializer` to be "zeros"', "add the initial value in `result`"
        expect(fits, call, what, initializer, hint, error=ValueError)
        current = context.current()
        if not self._weights and current.coordinator is None:
            current.group.guard.agree(Call(self._described()))
        made = Variable(
            np.zeros(shape, dtype),
            shape=shape,  # which the ranks compare
            name=f"{self.name}/{name or len(self._weights)}",
            synchronization="ON_READ",
            aggregation="SUM",
        )
        self._weights.append(made)
        return made

    def _described(self) -> str:
        """Return the class, and what ranks compare of the arguments of those here."""
        kind, settings = type(self), []
        if kind.__module__.startswith(__package__):
            made = self.get_config()
            for name, parameter in self._parameters().items():
                x = made.get(name, parameter.default)
                if all(isinstance(leaf, _COMPARED) for leaf in nest.flatten(x)[0]):
                    settings.append(f"{name}={x}")
        return f"{kind.__name__}({', '.join(settings)})"

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that it was made with, by name, for `from_config`."""
        given = zip(self._parameters(), self._made.args, strict=False)
        return dict(given) | self._made.keywords

    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        # Not of the class: Python before 3.11.4 takes those of `__new__`.
        return inspect.signature(self.__init__).parameters  # type: ignore[misc]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Return a new metric, without values, from what `get_config` returned."""
        return cls(**config)

    @property
    def variables(self) -> list[Variable]:
        """The variables, and those of metrics among its attributes, also in lists."""
        leaves = nest.flatten([*vars(self).values()])[0]
        parts = (x for x in leaves if isinstance(x, Metric))
        found = [*self._weights, *(v for part in parts for v in part.variables)]
        return list({id(v): v for v in found}.values())

    @property
    def _call(self) -> str:
        return f"{type(self).__name__}.update_state"

    def _add(self, compute: Callable[[], Iterable[Any]]) -> None:
        """Add to each variable what a function returns, which raises on all ranks."""
        call, group = self._call, storage_of(self._weights[0]).group
        current = context.current().group
        if context.has_strategy() and group is not current:
            raise RuntimeError(
                f"{call}: {self.name!r} was not made in the scope of {current}, so "
                "each rank would have a result of its own; make it in `with "
                "strategy.scope():`"
            )
        alone = context.is_in_replica(group)
        with contextlib.nullcontext() if alone else dispatch.checking(group, call):
            sums = [*compute()]
        if not alone and context.current().coordinator is None:
            # All of them, before the first variable changes.
            texts = (checksums.summarize_value(x, call) for x in sums)
            group.guard.agree(Call(f"{call} with sums = {', '.join(texts)}"))
        # A class derived from this one may have made more.
        for variable, x in zip(self._weights, sums, strict=False):
            variable.assign_add(x)

    def update_state(self, *args: Any, **kwargs: Any) -> None:
        """Add a batch; the arguments depend on the class.

        Collective in cross-replica context, but not in a replica function.
        """
        raise NotImplementedError

    def result(self) -> Any:
        """Return the value over all replicas. Collective."""
        raise NotImplementedError

    def __call__(self, *args: Nest, **kwargs: Nest) -> Any:
        """Call `update_state`, and return `result`, which is collective."""
        self.update_state(*args, **kwargs)
        return self.result()

    def reset_state(self) -> None:
        """Set all variables to 0. Collective, except in a replica function."""
        for variable in self.variables:
            variable.assign(np.zeros(variable.shape, variable.dtype))

    def reset_states(self) -> None:
        """Call `reset_state`. Collective, except in a replica function."""
        self.reset_state()


def _of_all_replicas(result: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(result)
    def read(self: Any) -> Any:
        with context.variable_sync_on_read_context():
            # A variable is read here, as outside it is this replica's part.
            return nest.map_structure(_read, result(self))

    return read


def _read(x: Nest) -> Any:
    return x.numpy()[()] if isinstance(x, Variable) else x


class Sum(Metric):
    """The sum of all values since the last reset, on all replicas together.

    Args:
        name: of the metric; names of its variables begin with it.
        dtype: accepted and ignored.

    Attributes:
        total: the sum of the values: an ON_READ variable of dtype float64.
    """

    def __init__(self, name: str | None = None, dtype: object = None) -> None:
        super().__init__(name)
        self.total: Variable = self.add_weight(name="total")

    def update_state(self, values: Nest, sample_weight: Nest = None) -> None:
        """Add values, times their weights; otherwise as `Mean.update_state`."""

        def compute() -> tuple[float]:
            x = _array(values, self._call).astype(np.float64)
            w = _weights(sample_weight, x.shape, self._call)
            return (float(_weighted(x, w).sum()),)

        self._add(compute)

    def result(self) -> Any:
        """Return the sum, a float64. Collective."""
        return np.float64(self.total.value())


class Mean(Metric):
    """The mean of all rows since the last reset, on all replicas together.

    The value of a row, which is a part of the first axis, is the mean of its values; as
    in Keras 3.

    Args:
        name: of the metric; names of its variables begin with it.
        dtype: accepted and ignored.

    Attributes:
        total: the sum of the rows: an ON_READ variable of dtype float64.
        count: their number, or the sum of their weights.

    Example, on two replicas::

        with strategy.scope():
            mean = mpidist.metrics.Mean()
        strategy.run(lambda: mean.update_state([1.0 + strategy.replica_id]))
        mean.result()  # np.float64(1.5)
    """

    def __init__(self, name: str | None = None, dtype: object = None) -> None:
        super().__init__(name)
        self.total: Variable = self.add_weight(name="total")
        self.count: Variable = self.add_weight(name="count")

    def update_state(self, values: Nest, sample_weight: Nest = None) -> None:
        """Add values.

        In a replica function each replica adds its own, without communication.
        Collective in cross-replica context: values that are the same on all ranks are
        added once.

        Args:
            values: a number or an array.
            sample_weight: an array with a weight for each row or each value; 0 leaves
                it out, as is a row without values. Or a number, which is that of the
                mean of all rows together.

        Raises:
            TypeError: for a PerReplica, and what is not an array of real numbers.
            ValueError: if the shapes do not match.
            RuntimeError: if it was made outside the scope of this strategy.
        """
        call = self._call
        self._add(lambda: _sums_of_rows(_array(values, call), sample_weight, call))

    def result(self) -> Any:
        """Return the mean, a float64; 0 if there are no values. Collective."""
        total, count = float(self.total), float(self.count)
        return np.float64(total / count if count else 0.0)


class PairMetric(Metric):
    """The base of metrics of labels and predictions."""

    def update_state(
        self, y_true: Nest, y_pred: Nest, sample_weight: Nest = None
    ) -> None:
        """Add a batch: labels and predictions; otherwise as `Mean.update_state`."""
        array = functools.partial(_array, call=self._call)
        self._add(lambda: self._sums(array(y_true), array(y_pred), sample_weight))

    def _sums(
        self, true: HostArray, pred: HostArray, sample_weight: Nest
    ) -> Iterable[Any]:
        """Return what is added to each variable."""
        raise NotImplementedError


def _weights(sample_weight: Nest, shape: Shape, call: str) -> HostArray:
    """Return weights, with axes of length 1 for missing ones; a number as it is."""
    if sample_weight is None:
        return np.ones((1,) * len(shape))
    w = _array(sample_weight, call).astype(np.float64)
    return as_row_weights(call, w, shape) if w.ndim else w


def _each_weight(sample_weight: Nest, shape: Shape, call: str) -> HostArray:
    """Return the weight of each element: that of its row, or 1."""
    return np.broadcast_to(_weights(sample_weight, shape, call), shape)


def _weighted(x: HostArray, w: HostArray) -> HostArray:
    """Return the products; 0 for a weight of 0, also of what is not finite."""
    return np.where(w == 0, 0.0, x) * w


def _sums_of_rows(x: HostArray, sample_weight: Nest, call: str) -> tuple[float, float]:
    """Return the sum over the rows of the mean of each, and that of their weights.

    As Keras 3 (reduce_to_samplewise_values in keras/src/metrics/reduction_metrics.py):
    a number as the weight is that of all rows together.
    """
    x, w = x.astype(np.float64), _weights(sample_weight, x.shape, call)
    if not x.size:
        return 0.0, 0.0
    rows = x.shape[0] if x.ndim else 1
    in_a_row = x.size // rows
    w = w if w.ndim else w / rows
    total = np.broadcast_to(w, x.shape).sum()
    return float(_weighted(x, w).sum()) / in_a_row, float(total) / in_a_row


def _largest(scores: HostArray, axis: int = -1) -> HostArray:
    """Return the place of the largest score, of which NaN is none, as in TensorFlow."""
    place: HostArray = np.where(np.isnan(scores), -np.inf, scores).argmax(axis)
    return place


def _of_shape(true: HostArray, shape: Shape, call: str) -> HostArray:
    """Return labels with the shape of what they are compared with.

    Only axes of length 1 may differ. NumPy would compare shape (n,) and (n, 1) as n * n
    pairs.
    """
    own, other = ([n for n in s if n != 1] for s in (true.shape, shape))
    what = f"`y_true` of shape {shape}, as `y_pred` has"
    expect(own == other, call, what, true, error=ValueError)
    return true.reshape(shape)
