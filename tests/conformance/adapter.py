"""What a program is written against: the names that the two libraries do not share.

Most names are the same: a program writes ``d.strategy.run(...)``,
``d.dist.get_replica_context()``, ``d.strategy.extended.update(...)``.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable
from typing import Any

from conformance.results import Raised


class Adapter(abc.ABC):
    """One side, with a strategy of its own for one program.

    Attributes:
        n: the number of replicas.
        strategy: the strategy over all of them.
        dist: `tf.distribute`, or `mpidist`.
        experimental: `tf.distribute.experimental`, or `mpidist.experimental`.
        Aggregation: VariableAggregation.
        Synchronization: VariableSynchronization.
        AutoShardPolicy: of `tf.data.experimental`, or `mpidist.data`.
        Dataset: `tf.data.Dataset`, or `mpidist.data.Dataset`.
        tensorflow: whether this is the side of TensorFlow: for the few programs that
            have to be written in two texts.
        own_replica: a replica of this process: 0, or the rank.
    """

    n: int
    strategy: Any
    dist: Any
    experimental: Any
    Aggregation: Any
    Synchronization: Any
    AutoShardPolicy: Any
    Dataset: Any
    tensorflow: bool
    own_replica: int

    def __init__(self, n: int) -> None:
        self.n = n
        self.failed: list[BaseException] = []

    # --- making -----------------------------------------------------------------------

    @abc.abstractmethod
    def new_strategy(self) -> Any:
        """Make one more strategy over all replicas."""

    @abc.abstractmethod
    def v1_strategy(self) -> Any:
        """Make a strategy of TensorFlow's v1 API, which has more methods."""

    @abc.abstractmethod
    def v1(self, name: str) -> Any:
        """Return a function of TensorFlow's v1 API."""

    @abc.abstractmethod
    def array(self, value: Any, dtype: str = "float32") -> Any:
        """Make a tensor, or an array."""

    @abc.abstractmethod
    def variable(self, value: Any, dtype: str = "float32", **options: Any) -> Any:
        """Make a variable, in whatever context this is; ``value`` may be a function."""

    def in_scope(self, value: Any, dtype: str = "float32", **options: Any) -> Any:
        """Make a variable in the scope of the strategy."""
        with self.strategy.scope():
            return self.variable(value, dtype, **options)

    def on_read(
        self, value: Any, aggregation: str, dtype: str = "float32", **options: Any
    ) -> Any:
        """Make a sync-on-read variable in the scope of the strategy."""
        return self.in_scope(
            value,
            dtype,
            synchronization=self.Synchronization.ON_READ,
            aggregation=self.Aggregation[aggregation],
            **options,
        )

    def per_replica(self, function: Callable[[int], Any]) -> Any:
        """Make a PerReplica of what ``function`` gives for each replica's number."""
        return self.strategy.experimental_distribute_values_from_function(
            lambda context: function(int(context.replica_id_in_sync_group))
        )

    def arrays(self, function: Callable[[int], Any], dtype: str = "float32") -> Any:
        """Make a PerReplica of arrays."""
        return self.per_replica(lambda i: self.array(function(i), dtype))

    def mirrored(self, value: Any, dtype: str = "float32") -> Any:
        """Make a Mirrored of an array."""
        same = self.arrays(lambda _: value, dtype)
        return self.strategy.extended.reduce_to("MEAN", same, same)

    @abc.abstractmethod
    def slices(self, values: Any, indices: Any) -> Any:
        """Make what scatter_* take: float32 rows, and their indices."""

    @abc.abstractmethod
    def sync_on_read_context(self) -> Any:
        """Return `variable_sync_on_read_context`."""

    @abc.abstractmethod
    def distribute(self, dataset: Any, policy: str = "AUTO", **options: Any) -> Any:
        """Distribute a dataset of global batches."""

    @abc.abstractmethod
    def optimizer(self, kind: str, **settings: Any) -> Any:
        """Make an optimizer: of Keras, or of `mpidist.optimizers`."""

    # --- saving -----------------------------------------------------------------------

    @abc.abstractmethod
    def folder(self) -> contextlib.AbstractContextManager[str]:
        """Return a temporary folder, the same one for all replicas."""

    @abc.abstractmethod
    def save(self, folder: str, **objects: Any) -> str:
        """Save a checkpoint of these objects; return its path."""

    @abc.abstractmethod
    def restore(self, path: str, **objects: Any) -> None:
        """Restore objects."""

    @abc.abstractmethod
    def module(self) -> Any:
        """Make a module without variables."""

    # --- computing --------------------------------------------------------------------

    @abc.abstractmethod
    def sum(self, x: Any) -> Any:
        """Return the sum of all elements."""

    @abc.abstractmethod
    def stack(self, x: list[Any]) -> Any:
        """Return arrays of one shape, stacked."""

    @abc.abstractmethod
    def average_loss(self, per_example_loss: Any, **options: Any) -> Any:
        """Call `compute_average_loss`."""

    @abc.abstractmethod
    def clip_by_global_norm(self, grads: list[Any], norm: float) -> Any:
        """Call `clip_by_global_norm`."""

    @abc.abstractmethod
    def convert(self, x: Any) -> Any:
        """Convert to an array, as the functions of the array library do."""

    # --- in replica functions ---------------------------------------------------------

    def replica_id(self) -> int:
        """Return the number of the replica that this runs on."""
        return int(self.dist.get_replica_context().replica_id_in_sync_group)

    def own(self, function: Callable[[int], Any], dtype: str = "float32") -> Any:
        """Return an array of what ``function`` gives for this replica."""
        return self.array(function(self.replica_id()), dtype)

    # --- results ----------------------------------------------------------------------

    @abc.abstractmethod
    def replicas(self, value: Any) -> Any:
        """Show a value, or a nest, as one entry per replica. At program level."""

    @abc.abstractmethod
    def parts(self, results: tuple[Any, ...]) -> Any:
        """Show what `update` with ``group=False`` gives, as one entry per replica."""

    def copies(self, variable: Any) -> Any:
        """Show the copies of a variable, without aggregating them."""
        return self.replicas(variable)

    @abc.abstractmethod
    def coordinator(self, value: Any) -> Any:
        """Show what was noted down in a ``merge_fn``."""

    @abc.abstractmethod
    def numbers(self, value: Any) -> Any:
        """Return the NumPy array of an array or a variable."""

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a replica function, and show what it gives on each replica."""
        return self.replicas(self.strategy.run(function, args=args, kwargs=kwargs))

    def each(self, function: Callable[[], Any]) -> None:
        """Run a replica function for its effect."""

        def without_result() -> None:
            function()

        self.strategy.run(without_result)

    def each_of(self, function: Callable[[Any], Any], element: Any) -> None:
        """The same, with an element of a dataset as the argument."""

        def without_result(x: Any) -> None:
            function(x)

        self.strategy.run(without_result, args=(element,))

    def merge(self, merge_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``merge_fn``; in a replica function."""
        context = self.dist.get_replica_context()
        return context.merge_call(merge_fn, args=args, kwargs=kwargs)

    def kind(self, value: Any) -> str:
        """Return which kind of value this is, by the names that both sides use."""
        names = [base.__name__ for base in type(value).__mro__]
        if "PerReplica" in names:
            return "PerReplica"
        if self.is_variable(value):
            return "variable"
        if "Mirrored" in names:
            return "Mirrored"
        return "plain"

    @abc.abstractmethod
    def is_variable(self, value: Any) -> bool:
        """Return whether this is a variable, or a replica's copy of one."""

    def attempt(self, function: Callable[[], Any], says: str | None = None) -> Any:
        """Return what ``function`` returns, or what it raises.

        Args:
            function: of no arguments.
            says: a part of the message that both sides should have, in any case.
        """
        try:
            return function()
        except Exception as error:
            self.failed.append(error)
            return Raised.of(error, says)

    def refused(self, function: Callable[[], Any], says: str | None = None) -> Any:
        """Return what ``function`` raises, or a text if it raises nothing."""
        result = self.attempt(function, says)
        return result if isinstance(result, Raised) else "accepted"
