"""Whether a checkpoint fits the objects, and which state each rank gets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from mpidist._base.errors import CheckpointError, damaged_checkpoint
from mpidist._base.types import HostArray
from mpidist._checkpoints import generators
from mpidist._checkpoints.collective_call import CollectiveCall
from mpidist._checkpoints.contents import Item
from mpidist._checkpoints.generators import SavedState
from mpidist._checkpoints.state_items import StateItem
from mpidist._checkpoints.state_json import State
from mpidist._checkpoints.storage import CheckpointFiles

_MOST_NAMES: Final = 20  # in a message


def fit(
    call: CollectiveCall,
    items: list[Item],
    files: CheckpointFiles,
    saved: dict[str, SavedState],
    partial: bool,
) -> list[Item]:
    """Return the items to restore; raise with a list of those that do not match."""
    arrays = files.manifest.arrays
    wrong: list[str] = []
    missing: list[str] = []
    fitting: list[Item] = []
    for item in items:
        if item.name not in arrays and item.name not in saved:
            missing.append(item.name)
        elif problem := _problem(item, files):
            wrong.append(problem)
        else:
            fitting.append(item)
            if isinstance(item, StateItem):  # which may not support the number of ranks
                generators.check_count(item, saved[item.name], call.size)
    names = {item.name for item in items}.union(files.manifest.of_states(saved))
    unexpected = [name for name in [*arrays, *saved] if name not in names]
    if partial and (fitting or not items):
        missing, unexpected = [], []
    if not (wrong or missing or unexpected):
        return fitting
    lines = [f"{call.name}: the checkpoint {files.path!r} does not fit:", *wrong]
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


def _problem(item: Item, files: CheckpointFiles) -> str:
    """Return the problem with an item's data in the checkpoint, or ""."""
    manifest = files.manifest
    if isinstance(item, StateItem):
        if item.name not in manifest.states:
            return f"{item.name!r}: expected a state, got an array"
        try:
            return item.refuse(manifest.states[item.name])
        except Exception as error:
            raise damaged_checkpoint(
                f"{files.manifest_path} is malformed, although its checksum is right: "
                f"the entry ['states'][{item.name!r}] is not the state of a generator: "
                f"{type(error).__name__}: {error}"
            ) from error
    part = manifest.arrays.get(item.name)
    if part is None:
        return f"{item.name!r}: expected an array, got a state"
    variable = item.variable
    expected = (variable.dtype.name, tuple(variable.shape))
    if expected == (part.dtype, part.shape):
        return ""
    return (
        f"{item.name!r}: expected {expected[0]} {expected[1]}, got {part.dtype} "
        f"{part.shape}"
    )


def choose(
    call: CollectiveCall,
    items: Mapping[str, Item],
    saved: Mapping[str, SavedState],
    arrays: Mapping[str, HostArray],
) -> list[tuple[StateItem, State]]:
    """Return what this rank's objects are to be set to.

    Args:
        call: the call that restores them.
        items: the items, by name.
        saved: their states.
        arrays: the arrays of the states, which take their memory.

    Raises:
        CheckpointError: if states do not fit the objects of this rank.
    """
    chosen = []
    wrong: list[str] = []
    for name, state in saved.items():
        item = items[name]
        assert isinstance(item, StateItem)
        value = generators.choose_state(item, state, arrays, call.rank, call.size)
        chosen.append((item, value))
        if problem := item.misfit(value):
            wrong.append(problem)
    if wrong:
        lines = "\n  ".join([f"{call.name}: the checkpoint does not fit:", *wrong])
        raise CheckpointError(f"{lines}\nNothing was changed.")
    return chosen
