"""Lists of hosts and of task counts, as SLURM writes them into environment variables.

The rules are those of ``scontrol show hostnames`` (SLURM 22.05); a test compares both
where SLURM is installed. In addition, text may follow a bracket (``n[1-2]-ib``).
"""

from __future__ import annotations

import itertools
import re
from typing import Final, NoReturn

from mpidist._base.expect import expect

# Text and brackets; else a bracket that is not closed, or one that closes none.
_NAME: Final = re.compile(r"(?:[^][,\s]|\[[^][]*\])+|\[[^][]*\[?|\]")
_RANGE: Final = re.compile(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?")
_COUNT: Final = re.compile(r"\s*(\d+)\s*(?:\(x(\d+)\)\s*)?")
_MOST: Final = 2**16  # of one range, as in SLURM


def expand_hostlist(hostlist: str) -> list[str]:
    """Return the host names of a SLURM host list, in its order.

    ``"n[08-10,12],login"`` means n08, n09, n10, n12 and login. Leading zeros are kept.
    Of several brackets in one name the last varies fastest.

    Args:
        hostlist: such as ``SLURM_STEP_NODELIST``; ``""`` is an empty list.

    Raises:
        TypeError: if it is not a string.
        ValueError: if it is not a host list; the message shows the part that is wrong.
    """
    expected = "a string such as 'n[1-4],m5'"
    expect(isinstance(hostlist, str), "expand_hostlist", expected, hostlist)
    hosts: list[str] = []
    for name in _NAME.findall(hostlist):  # at the commas and blanks outside brackets
        if name.count("[") != name.count("]"):
            _fail(hostlist, f"a bracket without the other one, or in another, {name!r}")
        parts = re.split(r"\[([^]]*)\]", name)  # text, ranges, text, ranges, ..., text
        choices = [
            _numbers(part, hostlist) if number % 2 else [part]
            for number, part in enumerate(parts)
        ]
        hosts += ["".join(chosen) for chosen in itertools.product(*choices)]
    return hosts


def expand_tasks_per_node(tasks_per_node: str) -> list[int]:
    """Return the number of tasks of each node, in the order of the nodes.

    ``"3(x2),2,1"`` means 3, 3, 2 and 1.

    Args:
        tasks_per_node: such as ``SLURM_STEP_TASKS_PER_NODE``; ``""`` is an empty list.

    Raises:
        TypeError: if it is not a string.
        ValueError: if it is not such a list.
    """
    is_text = isinstance(tasks_per_node, str)
    expected = "a string such as '3(x2),2'"
    expect(is_text, "expand_tasks_per_node", expected, tasks_per_node)
    counts: list[int] = []
    for part in tasks_per_node.split(",") if tasks_per_node.strip() else []:
        match = _COUNT.fullmatch(part)
        if match is None or int(match[2] or 1) > _MOST:
            raise ValueError(
                "expand_tasks_per_node: expected counts such as '3(x2),2', got "
                f"{part.strip()!r} in {tasks_per_node!r}"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _numbers(ranges: str, hostlist: str) -> list[str]:
    """Return the numbers in a bracket, each with the zeros that it is written with."""
    found: list[str] = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            _fail(hostlist, f"{part!r}, which is neither a number nor a range")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            _fail(hostlist, f"the range {part!r}, which ends before it begins")
        if int(last) - int(first) >= _MOST:
            _fail(hostlist, f"the range {part!r}, of more than {_MOST} hosts")
        width = len(first)
        found += [f"{k:0{width}d}" for k in range(int(first), int(last) + 1)]
    return found


def _fail(hostlist: str, what: str) -> NoReturn:
    raise ValueError(
        f"expand_hostlist: expected a host list such as 'n[1-4],m5', got {what}, in "
        f"{hostlist!r}"
    )
