"""Fills docs/performance.md from docs/performance/*.json; launch/performance calls it.

Between ``<!-- KIND: WORDS -->`` and ``<!-- end -->`` it puts what the marker asks for:

    table: NAME BENCH     the table of a benchmark from NAME.json
    picture: NAME BENCH   a picture of it, which is drawn
    facts: NAME           machine and software of NAME.json
    model: ARGUMENTS      what `mpidist bench model` prints for the arguments, in which
                          a NAME.json is in the folder of results; and its picture

Where a file is missing, what is there stays.
"""

import contextlib
import io
import re
import sys
from pathlib import Path

from mpidist import _bench, _cli

MARKER = re.compile(
    r"(<!-- (table|picture|facts|model): ([^>]*?) -->\n)(.*?)(<!-- end -->)", re.S
)


def printed(*arguments: str) -> str:
    """Return what the command line prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = _cli.main(arguments)
    if code:
        sys.exit(f"mpidist {' '.join(arguments)} failed")
    return out.getvalue().strip("\n")


def replacement(results: Path, kind: str, words: list[str]) -> str | None:
    """Return the text between two markers; None to leave it."""
    if kind == "model":
        arguments = [str(results / w) if w.endswith(".json") else w for w in words]
        if not all(Path(a).exists() for a in arguments if a.endswith(".json")):
            return None
        picture = results / "model.png"
        text = printed("bench", "model", *arguments, "--plot", str(picture))
        text = text.replace(f"picture: {picture}", "").strip("\n")
        link = f"![predicted times](performance/{picture.name})"
        return f"```text\n{text}\n```\n\n{link}\n"
    name, *rest = words
    path = results / f"{name}.json"
    if not path.exists():
        return None
    record = _bench.read_record(str(path))
    if kind == "facts":
        return f"```text\n{_bench.header_of(record.facts)}\n```\n"
    (bench,) = rest
    if not any(one.bench == bench for one in record.results):
        return None
    if kind == "table":
        return _bench.markdown_of(record, bench)
    picture = results / f"{name}-{bench}.png"
    printed("bench", "show", str(path), bench, "--plot", str(picture))
    return f"![{bench}, {name}](performance/{picture.name})\n"


def main() -> None:
    page = Path(sys.argv[1])
    results = page.with_suffix("")

    def fill(match: re.Match[str]) -> str:
        begin, kind, words, old, end = match.groups()
        text = replacement(results, kind, words.split())
        return f"{begin}{old if text is None else text}{end}"

    text = page.read_text(encoding="utf-8")
    page.write_text(MARKER.sub(fill, text), encoding="utf-8")


main()
