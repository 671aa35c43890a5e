"""A second mapping of shared memory, which stays when the first one goes.

MPI unmaps the memory of a window when it frees it, and what is left in `MPI_Finalize`
(Open MPI does, MPICH does not), while a program may still read results that are in it:
reading them would end it. So what arrays view is mapped once more, which only `unmap`
undoes, and the window can go at once.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any, Final

_MAY_MOVE: Final = 1
_FAILED: Final = ctypes.c_void_p(-1).value


def map_again(places: list[tuple[int, int]]) -> list[tuple[int, int]] | None:
    """Map pieces of shared memory a second time.

    Args:
        places: for each its address, and the number of its bytes.

    Returns:
        The same of the second mappings; None where the system can not do this.
    """
    try:
        libc: Any = ctypes.CDLL(None, use_errno=True)
        remap = libc.mremap  # of Linux: a size of 0 leaves the first mapping as it is
    except (AttributeError, OSError):
        return None
    remap.restype = ctypes.c_void_p
    remap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
    made: list[tuple[int, int]] = []
    for address, nbytes in places:
        shift = address % mmap.PAGESIZE
        found = remap(address - shift, 0, nbytes + shift, _MAY_MOVE)
        if found is None or found == _FAILED:
            unmap(made)
            return None
        made.append((found + shift, nbytes))
    return made


def unmap(places: list[tuple[int, int]]) -> None:
    """Undo what `map_again` did."""
    undo: Any = ctypes.CDLL(None).munmap
    undo.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    for address, nbytes in places:
        shift = address % mmap.PAGESIZE
        undo(address - shift, nbytes + shift)
