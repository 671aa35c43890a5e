"""The side of TensorFlow: MirroredStrategy on logical CPU devices, in one process."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context as eager_context

from conformance.adapter import Adapter
from conformance.registry import Program
from conformance.results import Described, Raised, Replicas, Result, describe

VERSION = tf.__version__


class TensorFlow(Adapter):
    """MirroredStrategy."""

    dist = tf.distribute
    experimental = tf.distribute.experimental
    Aggregation = tf.VariableAggregation
    Synchronization = tf.VariableSynchronization
    AutoShardPolicy = tf.data.experimental.AutoShardPolicy
    Dataset = tf.data.Dataset
    tensorflow = True
    own_replica = 0

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.strategy = self.new_strategy()

    def new_strategy(self) -> Any:
        # As TensorFlow's own tests do: the strategies of one process would else use
        # the same keys for their collectives, and disturb each other.
        tf.distribute.MirroredStrategy._collective_key_base += 100_000
        return tf.distribute.MirroredStrategy(self._devices())

    def v1_strategy(self) -> Any:
        tf.compat.v1.distribute.MirroredStrategy._collective_key_base += 100_000
        return tf.compat.v1.distribute.MirroredStrategy(self._devices())

    def _devices(self) -> list[str]:
        return [f"CPU:{i}" for i in range(self.n)]

    def v1(self, name: str) -> Any:
        return getattr(tf.compat.v1.distribute, name)

    def array(self, value: Any, dtype: str = "float32") -> Any:
        return tf.constant(value, dtype=dtype)

    def variable(self, value: Any, dtype: str = "float32", **options: Any) -> Any:
        return tf.Variable(value, dtype=dtype, **options)

    def slices(self, values: Any, indices: Any) -> Any:
        return tf.IndexedSlices(self.array(values), tf.constant(indices))

    def sync_on_read_context(self) -> Any:
        return tf.__internal__.distribute.variable_sync_on_read_context()

    def distribute(self, dataset: Any, policy: str = "AUTO", **options: Any) -> Any:
        of_dataset = tf.data.Options()
        of_dataset.experimental_distribute.auto_shard_policy = self.AutoShardPolicy[
            policy
        ]
        return self.strategy.experimental_distribute_dataset(
            dataset.with_options(of_dataset),
            tf.distribute.InputOptions(**options) if options else None,
        )

    def optimizer(self, kind: str, **settings: Any) -> Any:
        return getattr(tf.keras.optimizers, kind)(**settings)

    def folder(self) -> contextlib.AbstractContextManager[str]:
        return tempfile.TemporaryDirectory()

    def save(self, folder: str, **objects: Any) -> str:
        return tf.train.Checkpoint(**objects).save(f"{folder}/checkpoint")

    def restore(self, path: str, **objects: Any) -> None:
        tf.train.Checkpoint(**objects).restore(path).expect_partial()

    def module(self) -> Any:
        return tf.Module()

    def sum(self, x: Any) -> Any:
        return tf.reduce_sum(x)

    def stack(self, x: list[Any]) -> Any:
        return tf.stack(x)

    def average_loss(self, per_example_loss: Any, **options: Any) -> Any:
        return tf.nn.compute_average_loss(per_example_loss, **options)

    def clip_by_global_norm(self, grads: list[Any], norm: float) -> Any:
        return tf.clip_by_global_norm(grads, norm)

    def convert(self, x: Any) -> Any:
        return tf.convert_to_tensor(x)

    def replicas(self, value: Any) -> Any:
        results = self.strategy.experimental_local_results(value)
        if len(results) == 1:
            results = results * self.n
        return Replicas([Described(describe(r, _to_array)) for r in results])

    def parts(self, results: tuple[Any, ...]) -> Any:
        return Replicas(results)

    def coordinator(self, value: Any) -> Any:
        return value

    def numbers(self, value: Any) -> Any:
        return value.numpy()

    def is_variable(self, value: Any) -> bool:
        return isinstance(value, tf.Variable)


def _to_array(x: Any) -> Any:
    return np.asarray(x.numpy()) if isinstance(x, (tf.Tensor, tf.Variable)) else None


def run(programs: list[Program], n: int) -> Iterator[tuple[str, Result, list[str]]]:
    """Run programs on ``n`` logical devices; yield their names and results."""
    _start(n)
    for program in programs:
        side = TensorFlow(n)
        try:
            result = describe(program.function(side), _to_array)
        except Exception as error:
            side.failed.append(error)
            result = describe(Raised.of(error, uncaught=True))
        yield program.name, result, _messages(side)
        # A collective that failed has stopped all collectives of the process.
        if any(isinstance(error, tf.errors.OpError) for error in side.failed):
            _start(n)


def _messages(side: Adapter) -> list[str]:
    return [f"{type(e).__name__}: {e}"[:500] for e in side.failed]


def _start(n: int) -> None:
    eager_context._reset_context()
    cpu = tf.config.list_physical_devices("CPU")[0]
    devices = [tf.config.LogicalDeviceConfiguration() for _ in range(n)]
    tf.config.set_logical_device_configuration(cpu, devices)
    print(f"TensorFlow {VERSION}: {n} logical CPU devices", file=sys.stderr)
