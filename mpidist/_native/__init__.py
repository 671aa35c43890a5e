"""The native core: how the ranks of one node meet and reduce, in C11.

- ``channel``: steps, headers and messages in memory that ranks share, and waiting;
- ``kernels``: n arrays of one dtype, in rank order, into m destinations;
- ``algorithms``: all-reduce of small nests, and of large ones piece by piece;
  broadcast;
- ``binding.h``, ``py_*`` and ``core``: the binding, which is all that knows Python.

It is optional: `core` is None if it was not built or does not load. All data then moves
by MPI, with the same results, but slower.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import pathlib
import warnings
import zlib
from typing import Any, Final, NamedTuple, TypeAlias

ADVICE: Final = (
    "install a C compiler and Python's headers (Debian, Ubuntu: `apt install gcc "
    "python3-dev`; conda: `conda install c-compiler`), then mpidist again: `pip "
    "install --force-reinstall --no-deps`"
)
"""What to do if it is missing."""

core: Any = None
"""The extension module; None if it was not built or does not load."""

# Objects of the extension module, which has no types.
Memory: TypeAlias = Any
"""The memory that the ranks of a node share, with the buffer protocol."""
Channel: TypeAlias = Any
"""Where the ranks of a node meet: `mpidist._agreement.channel.Channel` and steps."""
Between: TypeAlias = Any
"""Where ranks meet that share no memory: `mpidist._agreement.channel.Channel`."""
Pool: TypeAlias = Any
"""The slots of a rank's arena."""
Reduce: TypeAlias = Any
"""All-reduces of nests of one layout."""
Gather: TypeAlias = Any
"""All-gathers of nests of one layout."""
ArrayCall: TypeAlias = Any
"""Looks up and runs the plans of small arrays; see ``py_calls.c``."""


class ReduceLeaf(NamedTuple):
    """What `Reduce` needs to know of a leaf.

    Attributes:
        dtype: kind and bytes, as in "f8"; "bf2" for bfloat16.
        operation: as of `COMBINE` in `reduce_op`; a mean is a sum with a divisor.
        shape: of the leaf.
        divisor: of a mean; 0: none.
    """

    dtype: str
    operation: str
    shape: tuple[int, ...]
    divisor: int


missing = ""
"""Why the core is missing; "" if it is there."""


def available() -> bool:
    """Return whether the core was built and loads."""
    return core is not None


class DefaultFloatState:
    """The floating-point state of a new program, in this thread, for a ``with`` block.

    Sums that ranks make in different states have different bits. Without the core the
    state stays as it is.
    """

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before: tuple[int, int] | None = None
        if core is not None:
            self._before = core.enter_default_state()

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            core.leave_default_state(*self._before)


def why_missing(folder: pathlib.Path, error: Exception) -> str:
    """Return why a folder's extension module does not load, in a few words."""
    suffixes = importlib.machinery.EXTENSION_SUFFIXES
    found = sorted(path.name for path in folder.glob("_core.*") if path.suffix != ".c")
    if any(name.removeprefix("_core") in suffixes for name in found):
        return f"{type(error).__name__}: {error}"
    if found:
        return f"it was built for another Python: {', '.join(found)}"
    return "it was not built"


def is_stale(found: Any, folder: pathlib.Path) -> bool:
    """Return whether an extension module was built from other sources than a folder's.

    Those of an installed package, and of a checkout after ``pip install -e .``, are
    beside it. One that was built by hand (-1), or beside files that cannot be read,
    is not checked.
    """
    expected = 0
    try:
        for path in sorted(folder.glob("[!.]*.[ch]")):  # no lock file of an editor
            expected = zlib.crc32(path.read_bytes(), expected)
    except OSError:
        return False
    return expected != 0 and getattr(found, "CHECKSUM", 0) not in (expected, -1)


_FOLDER: Final = pathlib.Path(__file__).parent

try:
    core = importlib.import_module("mpidist._native._core")
except Exception as error:  # also of a file for another machine or Python
    missing = f"no native core: {why_missing(_FOLDER, error)}"
else:
    if is_stale(core, _FOLDER):
        missing = (
            f"no native core: {core.__file__} was built from other sources than those "
            "beside it; rebuild it: `pip install -e .` in the checkout"
        )
        core = None
        warnings.warn(
            f"mpidist: {missing}. Until then everything goes by MPI, and is slower",
            RuntimeWarning,
            stacklevel=2,
        )
