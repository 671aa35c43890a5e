"""Checkpoint: the objects that are saved and restored together; RestoreStatus."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from mpidist._base.remedies import (
    explain_attributes,
    explain_keywords,
    is_own_attribute,
    missing_name,
)
from mpidist._checkpoints import contents
from mpidist._checkpoints.items import VariableItem
from mpidist._checkpoints.restore import Restore
from mpidist._checkpoints.restoring import listed, unnoticed
from mpidist._checkpoints.saved_objects import SavedObjects
from mpidist._checkpoints.storage import FileFormat
from mpidist._runtime.interruptions import tells
from mpidist._values.variable import storage_of


class Checkpoint:
    """Saves variables, and other state needed to continue a run, as one unit.

    Objects are passed by name. Each can be:

    - a `Variable`. Mirrored ones are saved once; ON_READ ones are aggregated, and
      restored so that reading them returns the saved value;
    - an optimizer: anything with a list ``variables`` of `Variable`. Before it has any,
      `save` saves its iterations, and values that were restored and wait for them;
    - a `numpy.random.Generator` (or its bit generator). One that is the same on all
      ranks is saved once, otherwise one for each rank; `restore` describes what a
      different number of ranks gets;
    - an iterator, or anything with ``state()`` and ``restore(state)``, or with
      ``get_state`` and ``set_state``, or ``state_dict`` and ``load_state_dict``. Its
      state may contain None, bools, numbers, strings, bytes, NumPy arrays and tensors
      of torch and JAX, in lists, tuples and dicts. State that differs between ranks is
      saved for each rank. It can be restored on a different number of ranks only if the
      object has ``merge_states(states)``, which merges the states of all ranks into
      one;
    - a module, optimizer, scheduler, `torch.Generator`, ``GradScaler`` or tensor of
      torch. Parameters and the states of optimizers must be the same on all ranks;
      buffers, such as the running means of batch norm, are saved for each rank if they
      differ, and on another number of ranks all get those of rank 0;
    - a pytree of JAX arrays, such as parameters or a state of optax. It cannot be
      changed in place: set it before you save, ``checkpoint.params = params``, and read
      it after a restore, ``params = checkpoint.params``;
    - a list, tuple or dict of these (but of pytrees), or another Checkpoint.

    They are also its attributes: ``checkpoint.step``. Setting one replaces or adds an
    object. Creating one does not communicate.

    Example::

        with strategy.scope():
            weights = mpidist.Variable(np.ones(2))
        checkpoint = mpidist.Checkpoint(weights=weights)
        checkpoint.save("run/latest")
        weights.assign([5.0, 6.0])
        checkpoint.restore("run/latest")
        weights.numpy()  # array([1., 1.])

    Args:
        objects: the objects, by name.

    Raises:
        TypeError: if an object cannot be saved; the message suggests an alternative.
            The states of objects with ``state_dict`` and of pytrees are looked at now,
            those of others when they are saved.
    """

    def __init__(self, *root: NoReturn, **objects: Any) -> None:
        """Store the objects by name; nothing is read yet."""
        if root:
            raise TypeError(
                "Checkpoint: expected objects by name, got one without; write "
                "`mpidist.Checkpoint(model=model)`"
            )
        for name in objects:
            if hasattr(Checkpoint, name):
                raise ValueError(
                    f"Checkpoint: {name!r} is the name of its method; give the object "
                    "another name"
                )
        self._objects = SavedObjects(objects)

    def __getattr__(self, name: str) -> Any:
        objects = self.__dict__.get("_objects")
        by_name = {} if objects is None else objects.by_name
        if name in by_name:
            return by_name[name]
        if is_own_attribute(self, name):
            return object.__getattribute__(self, name)
        names = ", ".join(by_name) or "none"
        message = f"this Checkpoint has no object {name!r}; it has {names}"
        raise missing_name("Checkpoint", message, name)

    def __setattr__(self, name: str, value: Any) -> None:
        objects = self.__dict__.get("_objects")
        is_own = name.startswith("_") or hasattr(type(self), name)
        # A subclass may have attributes that are not saved.
        if (
            is_own
            or objects is None
            or not (type(self) is Checkpoint or name in objects.by_name)
        ):
            object.__setattr__(self, name, value)
        else:
            objects.add(name, value)

    def __repr__(self) -> str:
        items = contents.collect(self._objects.by_name, "skip")
        variables = [item for item in items if isinstance(item, VariableItem)]
        nbytes = sum(storage_of(item.variable).array.nbytes for item in variables)
        return (
            f"<mpidist.Checkpoint of {', '.join(self._objects.by_name) or 'nothing'}: "
            f"{len(variables)} variables of {nbytes:,} bytes, "
            f"{len(items) - len(variables)} states>"
        )

    def __checkpoint_objects__(self) -> Mapping[str, object]:
        """Return the objects by name."""
        return self._objects.by_name

    def __when_attached__(self, call: Callable[[bool], None]) -> None:
        """Have a function called before and after something is attached."""
        self._objects.__when_attached__(call)

    @tells("Checkpoint.save", operator.attrgetter("_objects.group"))
    @explain_keywords("Checkpoint.save")
    def save(
        self,
        path: str | os.PathLike[str],
        format: FileFormat = "npz",
        wait: bool = True,
    ) -> str:
        """Save all objects to a directory. Collective, at program level.

        At any moment, even if the job is killed, ``path`` contains either the previous
        checkpoint or the new one, complete. Rank 0 writes; the others need no access to
        the file system. Before writing, the copies of each mirrored variable are
        compared.

        Args:
            path: the path of the directory to write; that of rank 0 counts, and others
                may pass one of their own. An existing checkpoint is replaced; parent
                directories are created.
            format: the format of the array file: "npz", or "safetensors", which other
                programs can read (it does not support complex numbers).
            wait: False: return as soon as rank 0 has a copy of everything, which a
                thread of it writes while the program goes on. The checkpoint is found
                when it is complete. `wait`, the next save or restore with this
                strategy, `MPIStrategy.close` and the end of the program wait for it;
                there all ranks raise what the thread has raised. A program that ends by
                an uncaught exception does not wait: the checkpoint before it stays.

        Returns:
            The path of rank 0.

        Raises:
            CollectiveMismatchError: if the copies of a variable differ, or those of a
                parameter of a module, naming the rank; if the ranks save different
                objects.
            ValueError: for an ON_READ variable with aggregation NONE.
            FileExistsError: if there is something other than a checkpoint at ``path``.
            OSError: if rank 0 cannot write it. The previous checkpoint stays complete.
            RuntimeError: in a replica function or in ``merge_fn``.
        """
        return self._objects.save(path, format, "Checkpoint.save", wait=bool(wait))

    @tells("Checkpoint.wait", operator.attrgetter("_objects.group"))
    def wait(self) -> None:
        """Wait for a save with ``wait=False`` by this strategy. Collective.

        At program level; it returns at once if there is none, or it was waited for.

        Raises:
            OSError: if rank 0 could not write it. The previous checkpoint is complete.
            RuntimeError: in a replica function or in ``merge_fn``.
        """
        self._objects.call("Checkpoint.wait").wait_for_save()

    sync = wait  # the name in TensorFlow

    @tells("Checkpoint.restore", operator.attrgetter("_objects.group"))
    @explain_keywords("Checkpoint.restore")
    def restore(
        self, path: str | os.PathLike[str] | None, partial: bool = False
    ) -> RestoreStatus:
        """Restore all objects from a checkpoint. Collective.

        At program level. Rank 0 reads the checkpoint and sends the data to the others.
        The number of ranks may differ from that at saving. Either all objects are
        restored or, with an error on all ranks, none. An optimizer that has no
        variables yet restores them when it makes them, in `build` or the first
        ``apply_gradients``, which raise if they do not match. One that was saved before
        it had any begins anew, with its iterations: its slots are zero.

        A random generator that was the same on all ranks is restored to the same state
        on all. If each rank had its own, rank i gets the i-th state. With more ranks
        than before, the additional ones get new streams, which are derived from the
        saved states and independent of them; with fewer, the last ones are dropped.
        From a checkpoint of one rank, all ranks get its state if their generators are
        equal before restoring; otherwise rank 0 gets it, and the others get new
        streams.

        Args:
            path: the path of the directory; that of rank 0 counts. None, such as the
                ``latest_checkpoint`` of a `CheckpointManager` that has none: nothing is
                restored.
            partial: whether to leave objects that the checkpoint lacks unchanged, and
                to keep what only the checkpoint has for objects that are attached
                later: to a `Module` or a `Checkpoint` that was restored. They get their
                value in that assignment, which is collective then, and raises the same
                errors.

        Returns:
            The names of the restored items, such as "optimizer/momentum", with the
            methods of TensorFlow's status object.

        Raises:
            FileNotFoundError: if there is no checkpoint at ``path``.
            CheckpointError: if a file is damaged (the message names the file and the
                array), or if names, shapes or dtypes do not match.
            RuntimeError: in a replica function or in ``merge_fn``.
        """
        restore = self._objects.read(path, partial, "Checkpoint.restore")
        return RestoreStatus() if restore is None else RestoreStatus(*restore())


def objects_of(checkpoint: Checkpoint) -> SavedObjects:
    """Return the objects of a checkpoint, for what saves and restores them."""
    return checkpoint._objects


@explain_attributes
class RestoreStatus(list[str]):
    """The names of the restored items, as `Checkpoint.restore` returns them.

    A list, with the methods of TensorFlow's status object. Without ``partial`` all
    objects and the whole checkpoint are restored when `Checkpoint.restore` returns,
    except optimizers that have no variables yet. Objects that are attached later are
    not in the list. Not collective.

    Args:
        names: the names.
        restore: what was not restored; None: the path was None.
    """

    def __init__(
        self, names: Iterable[str] = (), restore: Restore | None = None
    ) -> None:
        super().__init__(names)
        self._restore = restore

    def expect_partial(self) -> RestoreStatus:
        """Return this status. Write ``restore(path, partial=True)`` for its effect."""
        return self

    def initialize_or_restore(self, session: object = None) -> None:
        """Do nothing: `Checkpoint.restore` has restored."""

    def assert_consumed(self) -> RestoreStatus:
        """Return this status if everything in the checkpoint was restored by now.

        Raises:
            AssertionError: if something has not; if an optimizer has not made its
                variables yet; and as `assert_existing_objects_matched`.
        """
        rest = self._rest()
        self.assert_existing_objects_matched()
        if left := sorted(rest.names | rest.lost):
            _fail(
                f"only in the checkpoint: {listed(left)}; `partial=True` leaves it for "
                "objects that are attached later"
            )
        if waiting := rest.unbuilt():
            _fail(
                f"{waiting[0]!r} restores its variables when it makes them, in its "
                "first `apply_gradients`; write `optimizer.build(variables)` before "
                "`restore`, or `assert_existing_objects_matched()`"
            )
        return self

    def assert_existing_objects_matched(self) -> RestoreStatus:
        """Return this status if all objects were restored that exist now.

        Raises:
            AssertionError: if the checkpoint lacks one; if one was attached to a list,
                a dict or another object that tells nothing; if the path was None.
        """
        late, missing = self._rest().missing()
        if late:
            _fail(unnoticed(late))
        if missing:
            _fail(f"missing in the checkpoint: {listed(missing)}")
        return self

    def assert_nontrivial_match(self) -> RestoreStatus:
        """Return this status if the checkpoint has something for the objects.

        Raises:
            AssertionError: if it has nothing, and if the path was None.
        """
        if not self._rest().matches():
            _fail("nothing in the checkpoint has the name of one of the objects")
        return self

    def _rest(self) -> Restore:
        if self._restore is None:
            _fail(
                "the path was None, so nothing was restored; write `if path:` around "
                "this call"
            )
        return self._restore


def _fail(message: str) -> NoReturn:
    raise AssertionError(f"Checkpoint.restore: {message}")
