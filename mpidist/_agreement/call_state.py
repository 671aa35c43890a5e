"""The call that a rank is in: what messages about a wait say, and what calls need.

It is the base of `guard.Guard`. With the native core it is a type of the core, whose
`ArrayCall` reads and sets the attributes without Python: a small all-reduce of an array
takes 0.6 us, to which Python's attributes would add 0.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpidist import _native
from mpidist._agreement.mismatch import Call

if TYPE_CHECKING or _native.core is None:

    class CallState:
        """The call that a rank is in.

        Attributes:
            timeout_seconds: how long a call that names no others waits; 0: forever.
            sequence: the number of headers that have completed; the same on all ranks.
            blocked: whether a call may not begin before it has been checked.
            _cut_off: whether an exception came in the middle of a call of the core.
        """

        _call: Call  # the call that this rank is in, or made last
        _previous_call: Call  # the one before
        _timeout: float  # how long this rank waits for the others in it
        timeout_seconds: float
        sequence: int
        blocked: bool
        _cut_off: bool = False

else:
    CallState = _native.core.CallState
