"""The states of iterators: whether what `restore` gets can be one.

They come from checkpoints, so from files, which anyone may have changed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, Final

FORMAT: Final = 1

Entries = Mapping[str, Callable[[Any], bool]]


def check_state(call: str, state: object, entries: Entries) -> dict[str, Any]:
    """Return a state in which all entries are as they have to be.

    Args:
        call: the name of the call, for the message.
        state: what the program passed.
        entries: for each name whether a value of it can be.

    Raises:
        ValueError: if it is something else.
    """
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(
            f"{call}: expected the result of an iterator's `state()`, got "
            f"{state!r:.200}"
        )
    for name, fits in entries.items():
        if not fits(state.get(name)):
            raise ValueError(
                f"{call}: expected the result of an iterator's `state()`, got one in "
                f"which {name!r} is {state.get(name)!r:.80}"
            )
    return state


def is_count(x: object) -> bool:
    """Return whether ``x`` is an integer from 0 on, of 64 bits."""
    if isinstance(x, bool) or not hasattr(x, "__index__"):
        return False
    return 0 <= operator.index(x) < 2**63
