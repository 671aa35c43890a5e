"""The plan of a distributed dataset, as text to check before a run."""

from __future__ import annotations

import textwrap
from typing import Final

from mpidist._base import nest
from mpidist.data._distributed_sources import DatasetSource
from mpidist.data._feed import Feed
from mpidist.data._records import AutoShardPolicy
from mpidist.data._stage import open_from

# With more batches only the first is described: each must be opened to count rows.
_MOST_BATCHES: Final = 100_000
# With more replicas than this, replicas with the same numbers share a table row.
_MOST_PLACES: Final = 16
_WIDTH: Final = 92
Cells = list[str | int]


def describe_feed(feed: Feed) -> str:
    """Return the text of `DistributedDataset.describe`."""
    plural = "" if feed.replicas == 1 else "s"
    lines = [f"DistributedDataset #{feed.number} on {feed.replicas} replica{plural}"]

    def fact(name: str, text: str) -> None:
        first, *more = textwrap.wrap(text, _WIDTH - 18) or [""]
        lines.append(f"  {name:<16}{first}")
        lines.extend(" " * 18 + line for line in more)

    fact("input", feed.source.text)
    fact("elements", _elements(feed))
    if feed.policy is None:
        fact("steps", _own_steps(feed))
        fact("rows", _own_rows(feed))
        fact("uneven ends", "a rank without rows gets empty arrays until all are done")
        return "\n".join(lines)
    sizes = _batch_sizes(feed)
    fact("global batches", _batches(feed, sizes))
    fact("split", _rule(feed))
    fact("reading", _reading(feed))
    if idle := _idle(feed):
        fact("note", idle)
    table = _table(feed, sizes)
    if table:
        where = " [from:to]" if feed.replicas <= _MOST_PLACES else ""
        lines += ["", f"  rows of each replica{where}", *table]
    return "\n".join(lines)


def _elements(feed: Feed) -> str:
    spec = feed.spec.nest() if feed.spec is not None else feed.source.spec
    if spec is None:
        return "not known before the first is read"
    leaves, structure = nest.flatten(spec)
    return structure.render([str(leaf) for leaf in leaves])


def _own_rows(feed: Feed) -> str:
    if isinstance(feed.source, DatasetSource) and feed.source.by_file:
        return (
            f"FILE: each replica opens 1 of {feed.replicas} inputs of the "
            f"`interleave`; this one takes {feed.source.batch_size} rows in a step"
        )
    return "each rank reads its own input, and its replica gets all of it"


def _own_steps(feed: Feed) -> str:
    count = feed.source.cardinality()
    if count == -1:
        return "without end"
    if count == -2:
        return "as many as the longest input of a rank has"
    return f"{count} on this rank; all ranks make as many as the longest input has"


def _batch_sizes(feed: Feed) -> dict[int, int] | None:
    """Return the number of batches of each size in an epoch, or None."""
    source = feed.source
    if (
        not isinstance(source, DatasetSource)
        or source.reads_whole
        or not source.stage.indexed
        or not 0 <= source.cardinality() <= _MOST_BATCHES
    ):
        return None
    sizes: dict[int, int] = {}
    for opened in open_from(source.stage, (0,), 0):
        sizes[opened.rows] = sizes.get(opened.rows, 0) + 1
    return sizes


def _batches(feed: Feed, sizes: dict[int, int] | None) -> str:
    count, size = feed.source.cardinality(), feed.source.batch_size
    if sizes:
        ordered = sorted(sizes.items(), reverse=True)
        parts = " and ".join(f"{number} of {rows} rows" for rows, number in ordered)
        total = sum(rows * number for rows, number in ordered)
        return f"{parts} an epoch: {total} rows"
    many = {-1: "without end", -2: "their number is not known"}.get(
        count, f"{count} an epoch"
    )
    each = "of as many rows as the first has" if size is None else f"of {size} rows"
    return f"{each}, {many}"


def _rule(feed: Feed) -> str:
    policy = feed.policy.name if feed.policy is not None else ""
    if feed.policy is AutoShardPolicy.OFF:
        return (
            f"{policy}: by a plan for the full batch, in pieces that differ by one row "
            "at most; a partial batch fills them in order"
        )
    return (
        f"{policy}: each batch as it comes, in pieces of ceil(rows / {feed.replicas})"
    )


def _reading(feed: Feed) -> str:
    source = feed.source
    ahead = f"; a thread reads {source.depth} ahead" if source.depth else ""
    if isinstance(source, DatasetSource) and not source.reads_whole:
        if source.stage.indexed:
            return f"each rank reads the rows of its replica, and no others{ahead}"
        return (
            "each rank goes through all elements, and keeps the rows of its replica"
            f"{ahead}"
        )
    why = ""
    if isinstance(source, DatasetSource):
        why = f", because of {source.stage.whole}"
    many = f", 1 of {feed.replicas} parts" if feed.replicas > 1 else ""
    return (
        f"each rank reads whole batches, and keeps the rows of its replica{many}{why}"
    )


def _idle(feed: Feed) -> str:
    """Return a text if replicas get nothing, even of a full batch."""
    size = feed.source.batch_size
    if not size:
        return ""
    busy = sum(_count(feed, size, replica) > 0 for replica in range(feed.replicas))
    if busy == feed.replicas:
        return ""
    what = f"{feed.replicas - busy} of {feed.replicas} replicas never get a row"
    if size < feed.replicas:
        return f"{what}; take batches of {feed.replicas} rows or more"
    return (
        f'{what}; take a multiple of {feed.replicas} rows, or auto_shard_policy="OFF"'
    )


def _table(feed: Feed, sizes: dict[int, int] | None) -> list[str]:
    """Return a row for each replica, or group of replicas with the same numbers."""
    full = feed.source.batch_size
    if full is None:
        return []
    shown = [full] + [
        rows for rows in sorted(sizes or (), reverse=True) if rows != full
    ]
    shown = shown[:3]
    head = ["replica", *(f"of {rows} rows" for rows in shown)]
    if sizes:
        head.append("in an epoch")
    rows: list[tuple[int, Cells]] = []
    for replica in range(feed.replicas):
        cells: Cells = [_range(feed, size, replica) for size in shown]
        if sizes:
            cells.append(
                sum(
                    number * _count(feed, size, replica)
                    for size, number in sizes.items()
                )
            )
        rows.append((replica, cells))
    if feed.replicas > _MOST_PLACES:
        # Positions always differ; the number of rows of each is what matters to users.
        rows = [
            (replica, [c.split(" ")[0] if isinstance(c, str) else c for c in cells])
            for replica, cells in rows
        ]
    table = [head]
    for first, last, cells in _grouped(rows):
        name = str(first) if first == last else f"{first}-{last}"
        table.append([name, *map(str, cells)])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  " + "  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True))
        for row in table
    ]


def _grouped(rows: list[tuple[int, Cells]]) -> list[tuple[int, int, Cells]]:
    groups: list[tuple[int, int, Cells]] = []
    for replica, cells in rows:
        if groups and groups[-1][2] == cells:
            groups[-1] = (groups[-1][0], replica, cells)
        else:
            groups.append((replica, replica, cells))
    return groups


def _count(feed: Feed, rows: int, replica: int) -> int:
    start, stop = feed.split(rows, replica)
    return stop - start


def _range(feed: Feed, rows: int, replica: int) -> str:
    start, stop = feed.split(rows, replica)
    if start == stop:
        return "0"
    return f"{stop - start} [{start}:{stop}]"
