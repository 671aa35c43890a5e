"""Fills the pages on performance from docs/performance/*.json.

launch/performance calls it with the folder docs/. The pages are docs/performance.md and
docs/performance/tables.md. Between ``<!-- KIND: WORDS -->`` and
``<!-- end -->`` it puts what the marker asks for:

    table: NAME...        the rows of all NAME.json, side by side
    picture: FILE NAME... all_reduce of them, drawn to FILE.png
    facts: NAME...        machine and software of each
    model: ARGUMENTS      what `mpidist bench model` prints for the arguments, in which
                          a NAME.json is in the folder of results; and its picture
    check: ARGUMENTS      the same without a picture, for arguments with --check

Names without a file are left out; if none has one, what is there stays.
"""

import contextlib
import io
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import draw_performance

from mpidist import _bench, _cli

MARKER = re.compile(
    r"(<!-- (table|picture|facts|model|check): ([^>]*?) -->\n)(.*?)(<!-- end -->)", re.S
)
PICTURES = "performance"  # the folder of results, as docs/performance.md links to it
Records = Sequence[_bench.Record]


def table_of(records: Records) -> str:
    """Return a table in Markdown: raw, mpidist, ratio of each record, and the aim."""
    rows: dict[tuple[str, str], dict[int, list[str]]] = {}
    for i, record in enumerate(records):
        for row in record.rows:
            work, size, *rest = _bench.cells_of(row)
            rows.setdefault((work, size), {})[i] = rest
    names = [record.facts["software"]["mpi"] for record in records]
    lines = [head_of(names), ["---", *["---:"] * (3 * len(names) + 2)]]
    for (work, size), cells in rows.items():
        aims = {one[3] for one in cells.values()}
        times = [c for i in range(len(names)) for c in cells.get(i, [""] * 4)[:3]]
        lines.append([work, size, *times, ", ".join(sorted(aims))])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def head_of(names: Sequence[str]) -> list[str]:
    of_each = [[f"{name}: raw", "mpidist", "ratio"] for name in names]
    return ["work", "bytes", *(cell for one in of_each for cell in one), "aim"]


def facts_of(records: Records) -> str:
    texts = [_bench.header_of(record.facts) for record in records]
    notes = dict.fromkeys(note for record in records for note in record.notes)
    return "```text\n" + "\n\n".join([*texts, *notes]) + "\n```\n"


def model_of(results: Path, kind: str, words: Sequence[str]) -> str | None:
    """Return what the model prints; None if a file that it needs is missing."""
    arguments = [str(results / w) if w.endswith(".json") else w for w in words]
    if not all(Path(a).exists() for a in arguments if a.endswith(".json")):
        return None
    path, out = results / "model.json", io.StringIO()
    written = ["--json", str(path)] if kind == "model" else []
    with contextlib.redirect_stdout(out):
        if _cli.main(["bench", "model", *arguments, *written]):
            sys.exit(f"mpidist bench model {' '.join(arguments)} failed")
    text = out.getvalue().replace(f"written: {path}", "").strip("\n")
    block = f"```text\n{text}\n```\n"
    if kind == "check":
        return block
    draw_performance.model(path, path.with_suffix(".png"))
    return f"{block}\n![predicted times]({PICTURES}/model.png)\n"


def replacement(results: Path, kind: str, words: list[str]) -> str | None:
    """Return the text between two markers; None to leave it."""
    if kind in ("model", "check"):
        return model_of(results, kind, words)
    target = words.pop(0) if kind == "picture" else ""
    paths = [results / f"{name}.json" for name in words]
    records = [_bench.read_record(str(path)) for path in paths if path.exists()]
    if not records:
        return None
    if kind == "table":
        return table_of(records)
    if kind == "facts":
        return facts_of(records)
    draw_performance.all_reduce(records, results / f"{target}.png")
    return f"![all_reduce, {', '.join(words)}]({PICTURES}/{target}.png)\n"


def main() -> None:
    docs = Path(sys.argv[1])
    results = docs / "performance"

    def fill(match: re.Match[str]) -> str:
        begin, kind, words, old, end = match.groups()
        text = replacement(results, kind, words.split())
        return f"{begin}{old if text is None else text}{end}"

    for page in (docs / "performance.md", results / "tables.md"):
        text = page.read_text(encoding="utf-8")
        page.write_text(MARKER.sub(fill, text), encoding="utf-8")


main()
