"""``python tests/conformance``: run one side, or write the report."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

# Started as a folder: make the packages beside it importable, not the files in it.
sys.path[0] = str(Path(__file__).resolve().parents[1])


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for side in ("tensorflow", "mpidist"):
        one = commands.add_parser(side, help=f"run programs under {side}")
        one.add_argument("n", type=int, help="number of replicas")
        one.add_argument("file", type=Path, help="JSON lines to write")
        one.add_argument("names", nargs="*", help="programs; by default all")
    report = commands.add_parser("report", help="run both sides and write the page")
    report.add_argument(
        "page", type=Path, nargs="?", help="default: docs/conformance.md"
    )
    report.add_argument("--folder", type=Path, help="keep the results here")
    look = commands.add_parser("compare", help="run both sides; print what differs")
    look.add_argument("names", nargs="*", help="words in names; by default all")
    look.add_argument("-n", type=int, action="append", help="number of replicas")
    look.add_argument("--folder", type=Path, help="keep the results here")
    arguments = parser.parse_args()
    if arguments.command == "report":
        from conformance import report as reporting

        sys.exit(reporting.write(arguments.page, arguments.folder) > 0)
    elif arguments.command == "compare":
        from conformance import report as reporting

        sizes = arguments.n or [2]
        sys.exit(reporting.compare(arguments.names, sizes, arguments.folder) > 0)
    else:
        run_side(arguments)


def run_side(arguments: argparse.Namespace) -> None:
    """Run programs on one side; write a line of JSON for each as it ends."""
    from conformance.programs import PROGRAMS

    programs = [PROGRAMS[name] for name in arguments.names or PROGRAMS]
    if arguments.command == "tensorflow":
        from conformance import on_tensorflow

        version = on_tensorflow.VERSION
        results = on_tensorflow.run(programs, arguments.n)
    else:
        from conformance import on_mpidist

        version = on_mpidist.VERSION
        results = on_mpidist.run(programs)
        if not on_mpidist.is_first():
            for _ in results:
                pass
            return
    with arguments.file.open("w", encoding="utf-8") as file:
        print(json.dumps({"version": version, "n": arguments.n}), file=file)
        for name, result, messages in results:
            line = {"name": name, "result": result, "messages": messages}
            print(json.dumps(line), file=file, flush=True)


if __name__ == "__main__":
    main()
