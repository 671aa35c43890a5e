"""Checkpoint: saves and restores objects together.

Steps of a save, on all ranks: find the items; agree that all ranks have the same; read
their values (which is collective for some: an ON_READ variable is aggregated, an
iterator may communicate); check that the copies of mirrored variables are equal, and
which states are equal; then rank 0 writes while the others wait for its result.

Steps of a restore: find the items; agree; rank 0 reads everything, verifies it, and
checks that it matches the objects, while the others wait. Only then does anything
change: first the states, because a user's `restore` may raise (then the objects
restored before it get their old state back), then the variables, whose arrays rank 0
sends one at a time.

Errors on rank 0 are raised on all ranks, also with the guard off (`Job.on_rank_0`).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from mpidist._agreement import mismatch
from mpidist._base import backend
from mpidist._base.errors import (
    CheckpointError,
    CollectiveMismatchError,
    format_ranks,
    on_rank,
)
from mpidist._checkpoints import contents, replace, storage
from mpidist._checkpoints.contents import Item, StateItem, VariableItem
from mpidist._checkpoints.job import Job
from mpidist._checkpoints.storage import Order
from mpidist._mpi import job as mpi_job
from mpidist._runtime import context
from mpidist._runtime.group import ReplicaGroup
from mpidist._values.variable import storage_of

_MOST_NAMES: Final = 20  # in a message


@dataclasses.dataclass(frozen=True)
class _Read:
    """The data read from a checkpoint, and the items it is for."""

    job: Job
    by_name: dict[str, Any]
    alike: dict[str, bool]
    arrays: dict[str, Any]  # on rank 0
    order: list[tuple[str, Order]]
    states: dict[str, list[Any]]
    saved_on: int


class Checkpoint:
    """Saves variables, and other state needed to continue a run, as one unit.

    Objects are passed by name. Each can be:

    - a `Variable`. Mirrored ones are saved once; ON_READ ones are aggregated, and
      restored so that reading them returns the saved value;
    - an optimizer: anything with a list ``variables`` of `Variable`;
    - a `numpy.random.Generator` (or its bit generator). One that is the same on all
      ranks is saved once, otherwise one for each rank; `restore` describes what a
      different number of ranks gets;
    - an iterator, or anything with ``state()`` and ``restore(state)``, or with
      ``get_state`` and ``set_state``, or ``state_dict`` and ``load_state_dict``. Its
      state may contain None, bools, numbers, strings, bytes and NumPy arrays, in lists,
      tuples and dicts. State that differs between ranks is saved for each rank. It can
      be restored on a different number of ranks only if the object has
      ``merge_states(states)``, which merges the states of all ranks into one;
    - a list, tuple or dict of these, or another Checkpoint.

    They are also its attributes: ``checkpoint.step``. Creating one does not
    communicate.

    Example::

        checkpoint = mpidist.Checkpoint(weights=weights, optimizer=optimizer, step=step)
        checkpoint.save("run/latest")
        checkpoint.restore("run/latest")

    Args:
        objects: the objects, by name.

    Raises:
        TypeError: if an object cannot be saved; the message suggests an alternative.
    """

    def __init__(self, **objects: Any) -> None:
        """Store the objects by name; nothing is read yet."""
        for name in objects:
            if hasattr(Checkpoint, name):
                raise ValueError(
                    f"Checkpoint: {name!r} is the name of its method; name the object "
                    "something else"
                )
        self._objects = dict(objects)
        items = contents.collect(self._objects, early=True)
        self._nearest = _group_of(items, "Checkpoint") or context.current().group

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_objects"][name]
        except KeyError:
            raise AttributeError(
                f"this Checkpoint has no object {name!r}; it has "
                f"{', '.join(self.__dict__.get('_objects', ())) or 'none'}"
            ) from None

    def __repr__(self) -> str:
        items = contents.collect(self._objects, early=True)
        variables = [item for item in items if isinstance(item, VariableItem)]
        nbytes = sum(item.nbytes for item in variables)
        return (
            f"<mpidist.Checkpoint of {', '.join(self._objects) or 'nothing'}: "
            f"{len(variables)} variables of {nbytes:,} bytes, "
            f"{len(items) - len(variables)} states>"
        )

    def _checkpoint_children(self) -> dict[str, Any]:
        return self._objects

    def save(
        self,
        path: str | os.PathLike[str],
        format: storage.FileFormat = "npz",
    ) -> str:
        """Save all objects to a directory. Collective, at program level.

        At any moment, even if the job is killed, ``path`` contains either the previous
        checkpoint or the new one, complete. Rank 0 writes; the others need no access to
        the file system. Before writing, the copies of each mirrored variable are
        compared.

        Args:
            path: the path of the directory to write, on rank 0. An existing checkpoint
                is replaced; parent directories are created.
            format: the format of the array file: "npz", or "safetensors", which other
                programs can read (it does not support complex numbers).

        Returns:
            The path, as rank 0 has it.

        Raises:
            CollectiveMismatchError: if the copies of a variable differ, naming the
                rank; if the ranks save different objects.
            ValueError: for an ON_READ variable with aggregation NONE.
            FileExistsError: if there is something other than a checkpoint at ``path``.
            OSError: if rank 0 cannot write it. The previous checkpoint stays complete.
            RuntimeError: in a replica function or in ``merge_fn``.
        """
        return self._save(path, format, "Checkpoint.save")[0]

    def _save(
        self,
        path: Any,
        file_format: Any,
        name: str,
        more: str = "",
        after: int = 0,
        then: Callable[[], None] | None = None,
    ) -> tuple[str, int]:
        """Save; return the path and the time in the manifest.

        Args:
            path: the path of the directory.
            file_format: the format of the array file.
            name: the name of the call.
            more: other data that must be the same on all ranks.
            after: the time in the manifest must be later than this, in ns.
            then: a function that rank 0 calls when the checkpoint is complete.
        """
        job, items = self._begin(name, path, more)
        arrays, states = _take(job, items)

        def write() -> tuple[str, int]:
            target = os.fspath(path)
            saved_at = max(time.time_ns(), after + 1)
            storage.check_format(arrays, file_format)

            def write_into(directory: str, number: int) -> None:
                _write(directory, number, arrays, states, job, file_format, saved_at)

            replace.replace(target, write_into)
            if then is not None:
                then()
            return target, saved_at

        return job.on_rank_0(write)

    def restore(self, path: str | os.PathLike[str], partial: bool = False) -> list[str]:
        """Restore all objects from a checkpoint. Collective.

        At program level. Rank 0 reads the checkpoint and sends the data to the others.
        The number of ranks may differ from that at saving. Either all objects are
        restored or, with an error on all ranks, none.

        A random generator that was the same on all ranks is restored to the same state
        on all. If each rank had its own, rank i gets the i-th state. With more ranks
        than before, the additional ones get new streams, which are derived from the
        saved states and independent of them; with fewer, the last ones are dropped.
        From a checkpoint of one rank, all ranks get its state if their generators are
        equal before restoring; otherwise rank 0 gets it, and the others get new
        streams.

        Args:
            path: the path of the directory, on rank 0.
            partial: whether to leave objects that the checkpoint lacks unchanged, and
                to ignore items that only the checkpoint has.

        Returns:
            The names of the restored items, such as "optimizer/momentum".

        Raises:
            FileNotFoundError: if there is no checkpoint at ``path``.
            CheckpointError: if a file is damaged (the message names the file and the
                array), or if names, shapes or dtypes do not match.
            RuntimeError: in a replica function or in ``merge_fn``.
        """
        return self._restore(path, partial, "Checkpoint.restore")

    def _restore(self, path: Any, partial: bool, name: str) -> list[str]:
        return self._put(self._read(path, partial, name))

    def _read(self, path: Any, partial: bool, name: str) -> _Read:
        """Read and verify a checkpoint on rank 0; nothing changes yet. Collective."""
        job, items = self._begin(name, path, f", partial={bool(partial)}")
        alike = _alike_now(job, items)
        arrays: dict[str, Any] = {}  # on rank 0

        def read() -> tuple[list[tuple[str, Order]], dict[str, list[Any]], int]:
            files = storage.Files(os.fspath(path))
            fitting = _fit(items, files, bool(partial), job, alike)
            files.verify_structure()
            order: list[tuple[str, Order]] = []
            for item in fitting:
                if isinstance(item, VariableItem):
                    arrays[item.name] = files.read(item.name, item.variable.dtype)
                    order.append((item.name, files.arrays[item.name].order))
            states = {
                item.name: files.content["states"][item.name]["values"]
                for item in fitting
                if isinstance(item, StateItem)
            }
            return order, states, int(files.content["replicas"])

        order, states, saved_on = job.on_rank_0(read)
        by_name: dict[str, Any] = {item.name: item for item in items}
        return _Read(job, by_name, alike, arrays, order, states, saved_on)

    def _put(self, found: _Read) -> list[str]:
        """Restore the objects from the data read. Collective."""
        job, by_name = found.job, found.by_name
        received = found.order if job.rank else []
        buffer = job.attempt(lambda: _buffer_for(received, by_name))
        _put_states(job, found.states, found.saved_on, by_name, found.alike)
        for variable_name, memory_order in found.order:
            if job.rank == 0:
                x = found.arrays.pop(variable_name)
            else:
                x = _view(buffer, by_name[variable_name], memory_order)
            _send(job, x)
            job.assign(by_name[variable_name], x)
        return sorted([*found.states, *(n for n, _ in found.order)])

    def _job(self, name: str) -> Job:
        return self._find(name)[0]

    def _find(self, name: str) -> tuple[Job, list[Item]]:
        """Find the items, which may have changed, and their strategy."""
        try:
            items = contents.collect(self._objects)
            group = _group_of(items, name)
        except Exception as error:
            Job(self._nearest, name).collectives.invalid(name, error)
        if group is None:
            group = context.current().group
            # Each process restores plain variables by itself.
            saves = name != "Checkpoint.restore"
            if saves and not group.is_mpi and mpi_job.world_size() > 1:
                raise RuntimeError(
                    f"{name}: none of its variables belongs to an MPIStrategy, so it "
                    "is not clear which ranks save together; write "
                    "`with strategy.scope():` around it"
                )
        return Job(group, name), items

    def _begin(self, name: str, path: Any, more: str = "") -> tuple[Job, list[Item]]:
        """Find the items, and check that all ranks have the same."""
        job, items = self._find(name)

        def check() -> None:
            if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
                raise TypeError(
                    f"{name}: expected a path, a str or `os.PathLike`, got {path!r}"
                )
            if name.endswith("save"):
                for item in items:
                    if isinstance(item, VariableItem):
                        item.check()

        job.attempt(check)
        job.agree(f" of {{{', '.join(map(str, items))}}}{more}")
        return job, items


def _group_of(items: list[Item], name: str) -> ReplicaGroup | None:
    """Return the strategy of the variables; None if all are plain variables."""
    found: dict[int, ReplicaGroup] = {}
    for item in items:
        if isinstance(item, VariableItem):
            group = storage_of(item.variable).group
            if group.is_mpi:
                found[id(group)] = group
    if len(found) > 1:
        raise ValueError(
            f"{name}: its variables belong to {len(found)} strategies; make a "
            "Checkpoint for each"
        )
    return next(iter(found.values()), None)


# --- saving -------------------------------------------------------------------------


def _take(
    job: Job, items: list[Item]
) -> tuple[list[tuple[str, Any]], dict[str, list[Any]]]:
    """Return the current arrays and states; on rank 0 those of all ranks."""

    def read() -> tuple[dict[str, Any], dict[str, Any]]:
        arrays: dict[str, Any] = {}
        states: dict[str, Any] = {}
        for item in items:
            if isinstance(item, StateItem):
                states[item.name] = item.encoded()
            elif item.on_read:
                arrays[item.name] = item.variable.read_value()
            else:
                arrays[item.name] = item.variable.values[0]
        return arrays, states

    arrays, states = job.together(read)
    texts = {name: json.dumps(state, sort_keys=True) for name, state in states.items()}
    numbers = [_checksum(x) for x in arrays.values()]
    numbers += [mismatch.fingerprint(text) for text in texts.values()]
    rows = job.same(numbers)
    differing = set()
    if rows is not None:
        for name, column in zip(
            [*arrays, *states], zip(*rows, strict=True), strict=True
        ):
            if len(set(column)) > 1:
                differing.add(name)
                if name in arrays:
                    raise CollectiveMismatchError(_drifted(job, name, column))
    values = {name: [state] for name, state in states.items()}
    if differing:
        own = json.dumps({name: states[name] for name in sorted(differing)})
        everybody = [json.loads(x) for x in job.comm.all_gather_objects(own.encode())]
        for name in differing:
            values[name] = [row[name] for row in everybody]
    return list(arrays.items()), values


def _checksum(x: Any) -> int:
    dtype = x.dtype
    if dtype.kind in "fc" and dtype.char in "gG" and np.finfo(dtype).nmant == 63:
        # The number is ten bytes of sixteen; the rest is uninitialized.
        parts = np.ascontiguousarray(x).reshape(-1).view(np.uint8).reshape(-1, 16)
        x = np.ascontiguousarray(parts[:, :10])
    return mismatch.fingerprint(backend.summarize(x))


def _drifted(job: Job, name: str, column: tuple[int, ...]) -> str:
    """Return the message for a variable whose copies differ; name the minority."""
    groups: dict[int, list[int]] = {}
    for rank, number in enumerate(column):
        groups.setdefault(number, []).append(rank)
    most, *others = sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks[0]))
    odd = sorted(rank for ranks in others for rank in ranks)
    have = "has" if len(odd) == 1 else "have"
    return on_rank(
        job.rank,
        f"{job.name}: the copies of {name!r} are not equal: {format_ranks(odd)} {have} "
        f"another value than {format_ranks(most)}. Nothing was saved. Make the "
        "variable in the scope of the strategy, and change it by its own methods only",
    )


def _write(
    directory: str,
    number: int,
    arrays: list[tuple[str, Any]],
    states: dict[str, list[Any]],
    job: Job,
    file_format: storage.FileFormat,
    saved_at: int,
) -> None:
    name = f"arrays-{number}.{file_format}"
    with open(os.path.join(directory, name), "xb") as file:
        infos, structure = storage.write_arrays(file, arrays, file_format)
        os.fsync(file.fileno())
        size = os.fstat(file.fileno()).st_size
    manifest = storage.make_manifest(
        {
            "replicas": job.size,
            "saved_at_ns": saved_at,
            "file": name,
            "bytes": size,
            "structure_crc32": structure,
            "arrays": {key: vars(info) for key, info in infos.items()},
            "states": {key: {"values": values} for key, values in states.items()},
        }
    )
    with open(os.path.join(directory, storage.MANIFEST), "xb") as file:
        file.write(manifest)
        file.flush()
        os.fsync(file.fileno())


# --- restoring ----------------------------------------------------------------------


def _alike_now(job: Job, items: list[Item]) -> dict[str, bool]:
    """Return for each generator whether it is the same on all ranks. Collective."""
    generators = [x for x in items if isinstance(x, StateItem) and x.kind != "object"]
    if not generators:
        return {}
    texts = [json.dumps(x.encoded(), sort_keys=True) for x in generators]
    rows = job.same([mismatch.fingerprint(text) for text in texts])
    if rows is None:
        return dict.fromkeys((x.name for x in generators), True)
    columns = zip(*rows, strict=True)
    return {
        x.name: len(set(column)) == 1
        for x, column in zip(generators, columns, strict=True)
    }


def _fit(
    items: list[Item],
    files: storage.Files,
    partial: bool,
    job: Job,
    alike: dict[str, bool],
) -> list[Item]:
    """Return the items to restore; raise with a list of those that do not match."""
    states = files.content["states"]
    wrong: list[str] = []
    missing: list[str] = []
    fitting: list[Item] = []
    for item in items:
        if item.name not in files.arrays and item.name not in states:
            missing.append(item.name)
        elif problem := _problem(item, files):
            wrong.append(problem)
        else:
            fitting.append(item)
            if isinstance(item, StateItem):  # which may not support the number of ranks
                values, saved_on = (
                    states[item.name]["values"],
                    files.content["replicas"],
                )
                contents.choose_state(
                    item, values, saved_on, 0, job.size, alike.get(item.name, True)
                )
    names = {item.name for item in items}
    unexpected = [name for name in [*files.arrays, *states] if name not in names]
    if partial and (fitting or not items):
        missing, unexpected = [], []
    if not (wrong or missing or unexpected):
        return fitting
    lines = [f"{job.name}: the checkpoint {files.path!r} does not fit:", *wrong]
    if missing:
        lines.append(f"missing in the checkpoint: {_listed(missing)}")
    if unexpected:
        lines.append(f"only in the checkpoint: {_listed(unexpected)}")
    hints = []
    if unexpected:
        hints.append(
            "An object that makes variables at its first use, such as an optimizer, "
            "must make them before (`optimizer.build(variables)`)."
        )
    if partial:
        hints.append("Nothing of it is among the objects, whatever `partial` says.")
    elif missing or unexpected:
        hints.append("Write `partial=True` to restore what both have.")
    raise CheckpointError(
        "\n  ".join(lines) + "\n" + " ".join([*hints, "Nothing was changed."])
    )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(map(repr, names[:_MOST_NAMES])) + more


def _problem(item: Item, files: storage.Files) -> str:
    """Return the problem with an item's data in the checkpoint, or ""."""
    if isinstance(item, StateItem):
        if item.name in files.arrays:
            return f"{item.name!r}: expected a state, got an array"
        values = files.content["states"][item.name]["values"]
        return contents.check_generator(item, values)
    info = files.arrays.get(item.name)
    if info is None:
        return f"{item.name!r}: expected an array, got a state"
    variable = item.variable
    expected = (variable.dtype.name, tuple(variable.shape))
    if expected == (info.dtype, info.shape):
        return ""
    return (
        f"{item.name!r}: expected {expected[0]} {expected[1]}, got {info.dtype} "
        f"{info.shape}"
    )


def _put_states(
    job: Job,
    states: dict[str, list[Any]],
    saved_on: int,
    by_name: dict[str, Any],
    alike: dict[str, bool],
) -> None:
    """Restore all states; if one raises, set the others back to their old state."""
    before: list[tuple[StateItem, Any]] = []
    try:
        for name, values in states.items():
            item: StateItem = by_name[name]
            before.append((item, job.together(item.get)))

            def put(item: StateItem = item, values: list[Any] = values) -> None:
                item.set(
                    contents.choose_state(
                        item,
                        values,
                        saved_on,
                        job.rank,
                        job.size,
                        alike.get(item.name, True),
                    )
                )

            job.together(put)
    except Exception as error:
        for item, old in reversed(before):
            try:
                job.together(functools.partial(item.set, old))
            except Exception as again:
                error.add_note(
                    f"{item.name!r} did not take its old state back either: {again}"
                )
        raise


def _buffer_for(order: list[tuple[str, Order]], by_name: dict[str, Any]) -> Any:
    sizes = [by_name[name].nbytes for name, _ in order]
    return np.empty(max(sizes, default=0), np.uint8)


def _view(buffer: Any, item: VariableItem, order: Order) -> Any:
    variable = item.variable
    raw = buffer[: item.nbytes]
    x = raw.view(variable.dtype) if raw.size else np.empty(0, variable.dtype)
    return x.reshape(tuple(variable.shape), order=order)


def _send(job: Job, x: Any) -> None:
    """Send an array of rank 0 to the others, which have memory for it."""
    raw = backend.as_bytes(x if x.flags.c_contiguous else x.T)
    if raw.size:
        job.comm.broadcast(raw, 0)
