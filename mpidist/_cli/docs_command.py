"""`mpidist docs`: the documentation, as installed. It needs no MPI."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from mpidist._cli.speaking import Parser, UsageError, say

ABOUT: Final = "print a page of the documentation, such as porting"
_DESCRIPTION: Final = """\
Prints a page of the documentation, as Markdown; without a name, the names of
all pages.

  mpidist docs porting | less
  mpidist docs port.sed > port.sed
  mpidist docs guide/torch > torch.md
"""
_PACKAGE: Final = Path(__file__).parents[1]


def docs(arguments: Sequence[str]) -> int:
    """Run `mpidist docs` with these arguments; return the exit code.

    Raises:
        UsageError: if there is no page of this name, or no pages were installed.
    """
    parser = Parser("docs", _DESCRIPTION)
    parser.add_argument("name", metavar="NAME", nargs="?", help="the name of a page")
    name = parser.parse_args(arguments).name
    pages = _pages()
    if not pages:
        raise UsageError(
            f"this installation has no pages: neither {_PACKAGE / '_docs'}, nor "
            f"{_PACKAGE.with_name('docs')}"
        )
    if name is None:
        width = max(map(len, pages))
        say("\n".join(f"{key:<{width}}  {_title(x)}" for key, x in pages.items()))
        return 0
    name = name.removeprefix("docs/").removesuffix(".md")
    found = pages.get(name) or {path.stem: path for path in pages.values()}.get(name)
    if found is None:
        close = difflib.get_close_matches(name, pages, 1)
        hint = f"; did you mean `mpidist docs {close[0]}`?" if close else ";"
        raise UsageError(f"no page {name!r}{hint} `mpidist docs` lists all")
    say(found.read_text(encoding="utf-8").rstrip())
    return 0


def _pages() -> dict[str, Path]:
    """Return the pages by name: of the package, or of the checkout that it is in."""
    for folder in (_PACKAGE / "_docs", _PACKAGE.with_name("docs")):
        if (folder / "porting.md").exists():
            paths = sorted([*folder.rglob("*.md"), folder / "port.sed"])
            pages = {str(x.relative_to(folder)).removesuffix(".md"): x for x in paths}
            # Not those that Sphinx fills.
            return {
                name: page
                for name, page in pages.items()
                if not name.startswith(("_build/", "api", "index"))
            }
    return {}


def _title(page: Path) -> str:
    with page.open(encoding="utf-8") as lines:
        return next((x[2:].strip() for x in lines if x.startswith("# ")), "")
