"""README.md and docs/: every code block is run or checked.

A Python block that begins with a comment such as ``# fit.py`` is a program. A console
block after it says how it is started, and what it prints: as a set of lines, or, where
a line is or has ``...`` (any text), as a pattern. Programs that end well share jobs.
Other Python blocks, in docs/ only, have to parse. Every command of a shell block has
to match one of `COMMANDS`. A block that is none of these fails.
"""

from __future__ import annotations

import ast
import configparser
import contextlib
import dataclasses
import functools
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launching import (
    FORKS,
    ROOT,
    outlives_ranks,
    plain_environment,
    run_alone,
    run_command,
    run_in_turn,
    run_ranks,
)
from project.test_documents import environment_variables
from replicas import with_slow

from mpidist import _cli

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
PAGES += sorted((ROOT / "docs" / "guide").glob("*.md"))
PAGES += sorted((ROOT / "docs" / "tutorial").glob("*.md"))
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")
SECONDS = 100  # for one program


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def program(self) -> str:
        """The file name in the first line of a program, or nothing."""
        match = re.match(r"# (\w+\.py)\n", self.text)
        return match[1] if match and self.language == "python" else ""

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}:{self.program or self.language}"


def blocks_of(page: Path, text: str | None = None) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    blocks = []
    opened: tuple[int, str] | None = None
    lines: list[str] = []
    text = page.read_text(encoding="utf-8") if text is None else text
    for number, line in enumerate(text.splitlines(), 1):
        if not line.lstrip().startswith("```"):
            lines.append(line)
            continue
        assert line.startswith("```"), f"{page.name}:{number}: an indented block"
        if opened is None:
            opened, lines = (number, line[3:].strip()), []
        else:
            blocks.append(Block(page, *opened, "\n".join(lines) + "\n"))
            opened = None
    assert opened is None, f"{page.name}: the block of line {opened} has no end"
    return blocks


BLOCKS = {page: blocks_of(page) for page in PAGES}
ALL_BLOCKS = [block for blocks in BLOCKS.values() for block in blocks]


# --- blocks -----------------------------------------------------------------------


@pytest.mark.parametrize("block", ALL_BLOCKS, ids=str)
def test_block(block, tmp_path):
    treat(block, BLOCKS[block.page], tmp_path)


def treat(block: Block, blocks: list[Block], folder: Path) -> None:
    """Run or check one block of a page; fail for one of an unknown kind."""
    language = block.language
    in_readme = block.page == README
    if language == "python":
        ast.parse(block.text, str(block))
        assert block.program or not in_readme, "not a program: it cannot be run"
        if block.program:
            following = blocks[blocks.index(block) + 1 :]
            assert following, f"no block shows how to start {block.program}"
            assert following[0].language == "console"
            assert f" {block.program}\n" in following[0].text
    elif language == "console":
        for command in commands_of(block, blocks, folder):
            do(command)
    elif language == "sh":
        for line in block.text.splitlines():
            if line and not line.startswith("#"):
                do(Command(line, None, {}, folder))
    elif language.startswith("{literalinclude} "):
        assert (block.page.parent / language.split()[1]).is_file()
    elif in_readme or language not in ("text", "{eval-rst}", "{toctree}"):
        pytest.fail(f"{block}: no way is known to treat a {language!r} block")


def commands_with_output(text: str) -> list[tuple[str, list[str]]]:
    """Split a console block at its ``$`` prompts."""
    found: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            assert found, f"output without a command: {line!r}"
            found[-1][1].append(line)
    assert found, "a console block without a command"
    return found


def commands_of(block: Block, blocks: list[Block], folder: Path) -> list[Command]:
    programs = {b.program: b.text for b in blocks if b.program}
    commands = commands_with_output(block.text)
    return [Command(text, output, programs, folder) for text, output in commands]


# --- commands ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Command:
    """A command of a shell block, with the output that the page shows, if any."""

    text: str
    output: list[str] | None
    programs: dict[str, str]
    folder: Path


def do(command: Command) -> None:
    """Run or check a command by the first pattern that it matches."""
    for pattern, action in COMMANDS:
        match = re.fullmatch(pattern, command.text)
        if match is not None:
            action(command, *match.groups())
            return
    pytest.fail(f"no way is known to treat the command {command.text!r}")


def setting_up(command: Command, name: str, arguments: str) -> None:
    """launch/demo and the like install things: look at them, and at their usage."""
    script = ROOT / "launch" / name
    assert os.access(script, os.X_OK)
    usage = ask(str(script), "--help")
    assert usage.startswith(f"Usage: launch/{name}")
    for argument in shlex.split(arguments):
        if argument.startswith("-"):
            assert argument in usage, f"{argument} is not in the usage of {name}"
    if command.output:  # test_examples runs it
        assert name == "demo", "the tests know what launch/demo prints, and no other"


def mpirun(command: Command, variables: str, ranks: str, program: str) -> None:
    """Run a program of the page; of others, see that they are there."""
    settings = dict(pair.split("=") for pair in variables.split())
    assert set(settings) <= environment_variables()
    if program not in command.programs:
        assert command.output is None, f"{program} is not a program of this page"
        compile_file(program)
        return
    assert command.output, f"what does {program} print?"
    if shares_a_job(command):
        return
    path = command.folder / program
    path.write_text(command.programs[program], encoding="utf-8")
    env = FORKS | settings
    result = run_ranks(
        int(ranks), [program], timeout=SECONDS, env=env, cwd=command.folder
    )
    compare(command.output, result)


def shares_a_job(command: Command) -> re.Match[str] | None:
    """Match a program of the page that needs no settings and ends well."""
    if ends_badly(command.output or []):
        return None
    return re.fullmatch(r"mpirun -n (\d+) python (\w+\.py)", command.text)


def libraries_of(command: Command) -> set[str]:
    match = shares_a_job(command)
    text = command.programs.get(match[2], "") if match else ""
    return set(re.findall(r"^import (torch|jax)\b", text, re.M))


@pytest.mark.parametrize("with_guests", [False, True])
def test_programs_that_share_jobs(with_guests, tmp_path):
    """The programs for each number of ranks, in as many processes."""
    jobs: dict[int, list[tuple[Command, Path]]] = {}
    needed: set[str] = set()
    for number, block in enumerate(ALL_BLOCKS):
        if block.language != "console":
            continue
        for command in commands_of(block, BLOCKS[block.page], tmp_path / str(number)):
            match, libraries = shares_a_job(command), libraries_of(command)
            if match and bool(libraries) == with_guests:
                needed |= libraries
                command.folder.mkdir(exist_ok=True)
                path = command.folder / match[2]
                path.write_text(command.programs[match[2]], encoding="utf-8")
                jobs.setdefault(int(match[1]), []).append((command, path))
    for name in needed:
        pytest.importorskip(name)
    if needed and not with_slow:  # they take long to import
        pytest.skip("slow: MPIDIST_TEST_SLOW=1, as in CI")
    # A page starts a program on more ranks later, and on one to look at what is there.
    for ranks in sorted(jobs, key=lambda n: n if n > 1 else 99):
        programs = [[path] for _, path in jobs[ranks]]
        results = run_in_turn(ranks, programs, timeout=2 * SECONDS, env=FORKS)
        for (command, _), result in zip(jobs[ranks], results, strict=True):
            compare(command.output or [], result)


def timeline(command: Command, path: str) -> None:
    """Summarize what a program of the block has recorded."""
    done = run_alone("-m", "mpidist", "timeline", path, cwd=command.folder)
    compare(command.output or [], done)


def mpirun_with_options(command: Command, program: str) -> None:
    """See that the program is there; tests/cluster/test_guide.py runs the line."""
    guide = ROOT / "docs/guide/launching.md"
    assert f"\n{command.text}\n" in guide.read_text(encoding="utf-8")
    compile_file(program)


def python_alone(command: Command, program: str) -> None:
    compare(command.output or [], alone(command, program, program))


def pytest_alone(command: Command, program: str) -> None:
    """Run a file of tests of the page; compare how many have passed."""
    options = ["-m", "pytest", "-q", "-p", "pytest_mpidist", "-p", "no:cacheprovider"]
    result = alone(command, program, *options, "-c", os.devnull, program)
    assert command.output == [result.stdout.splitlines()[-1].partition(" in ")[0]]


def alone(command: Command, program: str, *arguments: str) -> Any:
    """Run Python on a program of the page, without mpirun."""
    path = command.folder / program
    path.write_text(command.programs[program], encoding="utf-8")
    base, env = plain_environment(), {"PYTHONPATH": str(ROOT)}
    words = [sys.executable, *arguments]
    return run_alone(*words, base=base, env=env, cwd=command.folder)


def mpidist_run(command: Command, ranks: str, program: str, arguments: str) -> None:
    """Run a quick example; of others, see that they are there and know the options."""
    compile_file(program)
    text = (ROOT / program).read_text(encoding="utf-8")
    for option in re.findall(r"--\S+", arguments):
        assert f'"{option}"' in text, f"{program} has no option {option}"
    if program == "examples/hello.py":
        says_hello(command.text, int(ranks))


@functools.cache  # several pages begin with it
def says_hello(text: str, ranks: int) -> None:
    words = [sys.executable, "-m", *shlex.split(text)]
    result = run_command(words, SECONDS, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("hello from replica") == ranks


def elastic_run(command: Command, program: str) -> None:
    """Run a program of the page that outlives a rank."""
    if not outlives_ranks():
        pytest.skip("this MPI does not outlive ranks")
    (command.folder / program).write_text(command.programs[program], encoding="utf-8")
    words = [sys.executable, "-m", *shlex.split(command.text)]
    done = run_command(words, SECONDS, cwd=command.folder)
    # As a terminal shows it, but for what the libevent of mpirun sometimes says.
    messages = re.sub(r"(?m)^\[warn\] Epoll .*\n", "", done.stderr)
    done.stdout, done.stderr = messages + done.stdout, ""
    compare(command.output or [], done)


def srun(command: Command, kind: str, program: str) -> None:
    """See that the program is there, and the kind one that the scripts look for."""
    compile_file(program)
    script = (ROOT / "launch/slurm/srun.sbatch").read_text(encoding="utf-8")
    assert f"({kind})" in script


def sbatch(command: Command, options: str, script: str, program: str | None) -> None:
    """See that both are there; tests/slurm runs the scripts."""
    if script == "job.sbatch":  # which the line before has printed
        return
    assert program is not None
    compile_file(program)
    assert "#SBATCH" in (ROOT / script).read_text(encoding="utf-8")


def print_script(command: Command, arguments: str) -> None:
    printed = io.StringIO()  # without starting a process, which takes longer
    with contextlib.redirect_stdout(printed):
        assert _cli.main(["sbatch", *shlex.split(arguments)]) == 0
    assert printed.getvalue().startswith("#!/usr/bin/env bash\n")


def pip_install(command: Command, extras: str | None) -> None:
    known = set(SETUP["options.extras_require"])
    assert set((extras or "").split(",")) - {""} <= known


def export(command: Command, name: str) -> None:
    assert name in environment_variables()


def pytest_in_venv(command: Command, arguments: str) -> None:
    """See that its files are there and its markers are declared."""
    for argument in shlex.split(arguments):
        if argument.startswith("tests/"):
            assert (ROOT / argument).exists()
    for markers in re.findall(r'-m "([^"]*)"', arguments):
        known = "mpi replicas " + SETUP["tool:pytest"]["markers"]
        for marker in set(re.findall(r"\w+", markers)) - {"and", "or", "not"}:
            assert re.search(rf"\b{marker}\b", known)


def command_line(command: Command, arguments: str) -> None:
    """See that there is such a sub-command, and that it knows the options."""
    assert command.output is None, f"who checks what {command.text!r} prints?"
    words = shlex.split(arguments)
    path = words[:1]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.raises(SystemExit):
        _cli.main([*path, "--help"])
    usage = printed.getvalue()
    assert usage.startswith(f"usage: mpidist {' '.join(path)} ")
    for word in words[len(path) :]:
        if word.startswith("-"):
            assert f" {word}" in usage, f"{word} is not in the usage of {path}"
        elif path == ["bench"] and "_" in word:
            assert word in usage


def benchmarks(command: Command, names: str) -> None:
    """See that launch/benchmarks has them; test_benchmarks.py runs it."""
    text = (ROOT / "launch/benchmarks/__main__.py").read_text(encoding="utf-8")
    for name in names.split():
        assert f"`{name}`" in text


def is_there(command: Command, path: str) -> None:
    """See that there is such a file; test_benchmarks.py runs it."""
    assert (ROOT / path).exists()


COMMANDS: list[tuple[str, Callable[..., None]]] = [
    (
        r"launch/(demo|docs|test|test-hosts|soak|gpu-check|conformance|performance|build-cuda-openmpi)"
        r"((?: \S+)*)",
        setting_up,
    ),
    (r"mpidist sbatch (.*) > job.sbatch", print_script),
    (
        r"mpidist run (?:--restarts \d+ )?-n (\d+) (\S+\.py)((?: --\S+ \S+)*)",
        mpidist_run,
    ),
    (r"mpidist run --elastic -n \d+ (\S+\.py)", elastic_run),
    (r".venv/bin/mpidist run -n \d+ -m pytest (.*)", pytest_in_venv),
    (r"mpidist timeline (run\.json)", timeline),
    (
        r"(?:(?:mpirun|srun) (?:--with-ft ulfm )?(?:-\S+ (?:\d+ )?)*)?mpidist (.*)",
        command_line,
    ),
    (r"((?:MPIDIST_\w+=\S+ )*)mpirun -n (\d+) python (\S+\.py)", mpirun),
    (r"mpirun (?:--with-ft ulfm )?-n \d+ python launch/benchmarks (.*)", benchmarks),
    (r"python (launch/benchmarks/nodes.py) .*", is_there),
    (r"mpirun -.* python (examples/hello\.py)", mpirun_with_options),
    (r"python (\S+\.py)", python_alone),
    (r"python -m pytest -q (\S+\.py)", pytest_alone),
    (r"srun -n \d+ --mpi=(\w+) python (\S+\.py)", srun),
    (r"sbatch ((?:--\S+ \d+ )*)(\S+\.sbatch)(?: (\S+\.py))?", sbatch),
    (r'pip install -e (?:\.|"\.\[([\w,]+)\]")', pip_install),
    (r"export (MPIDIST_\w+)=\S+", export),
    (r".venv/bin/python -m pytest (.*)", pytest_in_venv),
]


def ask(*command: str) -> str:
    """Return what a quick command prints; fail if it fails."""
    result = run_alone(*command, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return result.stdout


def compile_file(program: str) -> None:
    path = ROOT / program
    ast.parse(path.read_text(encoding="utf-8"), program)


# --- output -----------------------------------------------------------------------


def ends_badly(output: list[str]) -> bool:
    return any("ending the job" in line for line in output)


def compare(expected: list[str], result: subprocess.CompletedProcess[str]) -> None:
    """Compare what a page shows with what the ranks printed."""
    failed = result.returncode != 0
    assert failed == ends_badly(expected), result.stdout + result.stderr
    if any("..." in line for line in expected):
        both = f"{result.stdout}\n{result.stderr}"
        shown = "\n".join(expected) + "\n"
        pattern = pattern_of(general(shown, shown))
        assert re.search(pattern, general(both, shown)), (
            f"expected:\n{shown}\nprinted:\n{both}"
        )
        return
    assert result.stderr == ""
    # Ranks print in any order, and some launchers mix a line with the end of another.
    rest = result.stdout
    for line in sorted(expected, key=len, reverse=True):
        assert line in rest, f"{line!r} is not in:\n{result.stdout}"
        rest = rest.replace(line, "", 1)
    assert rest.strip() == "", f"not in the page: {rest!r}"


def pattern_of(shown: str) -> str:
    """Return a regular expression: ``...`` is any text, on a line of its own lines."""
    pattern = ""
    for line in shown.splitlines():
        if line == "...":
            pattern += r"(?:.*\n)*?"
        else:
            pattern += ".*".join(map(re.escape, line.split("..."))) + "\n"
    return f"(?m:^){pattern}"


def general(text: str, shown: str) -> str:
    """Take out of a text which rank printed, how long it took, and Open MPI's notes."""
    # The launcher may put them before what a rank wrote earlier.
    text = re.sub(r"-{20,}\n.*?-{20,}\n[ \0]*", "", text, flags=re.S)
    text = re.sub(r"\[rank \d+\]", "[rank #]", text)
    text = re.sub(r"within [\d.]+ s\b", "within # s", text)
    if "[rank " in shown:  # raised by all ranks
        raised = re.compile(r"^mpidist: rank \d+ raised", re.M)
        text = raised.sub("mpidist: rank # raised", text)
    return text


# --- the test itself ----------------------------------------------------------------


NOTE = f"{'-' * 74}\nMPI_ABORT was invoked\n\n{'-' * 74}\n"


@pytest.mark.parametrize(
    ("shown", "printed", "code", "good"),
    [
        (["a", "b", "b"], "b\na\nb\n", 0, True),
        (["a", "b"], "ba\n\n", 0, True),
        (["a", "b"], "a\nb\nc\n", 0, False),
        (["a", "b"], "a\n", 0, False),
        (["a", "a"], "a\n", 0, False),
        (["a"], "a\n", 1, False),
        (["x", "...", "z"], "w\nx\n1\n2\nz\n", 0, True),
        (["x", "...", "z"], "x\nz\n", 0, True),
        (["x", "...", "z"], "xy\nz\n", 0, False),
        (["x ... z"], "x y z\n", 0, True),
        (["x ... z"], "x y\n", 0, False),
        (["ending the job", "..."], "ending the job\n", 1, True),
        (["ending the job", "..."], f"{NOTE}\0ending the job\n{NOTE}", 1, True),
        (["ending the job", "..."], "ending the job\n", 0, False),
    ],
)
def test_the_comparison_itself(shown, printed, code, good):
    result = subprocess.CompletedProcess([], code, printed, "")
    if good:
        compare(shown, result)
    else:
        with pytest.raises(AssertionError):
            compare(shown, result)
