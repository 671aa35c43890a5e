"""The native core under sanitizers, and with fences left out on purpose.

``tests/_native/stress.c`` is compiled with the core, without Python; its ranks are
threads of one process. ThreadSanitizer and AddressSanitizer must find nothing, and
nothing may be suppressed. With --long single orderings and waits are taken out of the
core: each must be found, by ThreadSanitizer or by wrong results.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import platform
import shutil
import subprocess
import tempfile

import pytest
from replicas import slow

ROOT = pathlib.Path(__file__).parents[2]
NATIVE = ROOT / "mpidist" / "_native"
STRESS = ROOT / "tests" / "_native" / "stress.c"
SOURCES = ("channel.c", "algorithms.c", "payload.c")
FLAGS = ("-std=c11", "-g", "-Wall", "-Wextra", "-ffp-contract=off")
THREADS = ("-O1", "-fsanitize=thread")
ADDRESSES = (
    "-O1",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
    "-fno-omit-frame-pointer",
)
PLAIN = ("-O2",)
COMPILERS = [name for name in ("gcc", "clang") if shutil.which(name)]
BUILDS = tempfile.TemporaryDirectory(prefix="mpidist-stress-")
RUN_SECONDS = 1.5
# A mutation is found in less than a second; but the machine may be busy.
FIND_SECONDS = 60

# The compiler has 300 seconds, and so has what it makes.
pytestmark = [
    pytest.mark.timeout(700),
    pytest.mark.skipif(not COMPILERS, reason="neither gcc nor clang is there"),
]


@dataclasses.dataclass(frozen=True)
class Tools:
    """A compiler and its flags; what is put before the programs that it makes."""

    compiler: str
    flags: tuple[str, ...]
    prefix: tuple[str, ...] = ()


def run(*command: str, seconds: float = 300) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "TSAN_OPTIONS": "halt_on_error=1 exitcode=66",
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=seconds,
        env=environment,
        check=False,
    )


@functools.cache
def tools(compiler: str, flags: tuple[str, ...]) -> Tools | str:
    """Return what to compile and run with, or why programs with these flags do not."""
    folder = pathlib.Path(tempfile.mkdtemp(dir=BUILDS.name))
    source, program = folder / "main.c", folder / "main"
    source.write_text("int main(void) { return 0; }\n")
    made = run(compiler, *flags, "-pthread", str(source), "-o", str(program))
    if made.returncode:
        return f"{compiler} lacks the runtime of {flags[-1]}: {made.stderr:.200}"
    # Some versions of ThreadSanitizer need less random addresses than some systems'.
    setarch = ("setarch", platform.machine(), "-R")
    for prefix in ((), setarch) if shutil.which("setarch") else ((),):
        ran = run(*prefix, str(program))
        if ran.returncode == 0:
            return Tools(compiler, flags, prefix)
    return f"programs of {compiler} {flags[-1]} do not run: {ran.stderr:.200}"


@functools.cache
def kernels(made_with: Tools) -> str:
    """Return the object file of the kernels, which no mutation changes."""
    path = pathlib.Path(tempfile.mkdtemp(dir=BUILDS.name)) / "kernels.o"
    source = str(NATIVE / "kernels.c")
    flags = (*made_with.flags, *FLAGS)
    made = run(made_with.compiler, *flags, "-c", source, "-o", str(path))
    assert made.returncode == 0, made.stderr
    return str(path)


def build(made_with: Tools, native: pathlib.Path = NATIVE) -> str:
    """Return the program."""
    path = pathlib.Path(tempfile.mkdtemp(dir=BUILDS.name)) / "stress"
    sources = [str(STRESS), *(str(native / name) for name in SOURCES)]
    made = run(
        made_with.compiler,
        *made_with.flags,
        *FLAGS,
        f"-I{native}",
        *sources,
        kernels(made_with),
        "-pthread",
        "-lm",
        "-o",
        str(path),
    )
    assert made.returncode == 0, made.stderr
    assert native != NATIVE or "warning" not in made.stderr, made.stderr
    return str(path)


def needed(compiler: str, flags: tuple[str, ...]) -> Tools:
    found = tools(compiler, flags)
    if isinstance(found, str):
        pytest.skip(found)
    return found


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize(
    "flags",
    [pytest.param(PLAIN, marks=slow), THREADS, ADDRESSES],
    ids=["plain", "thread", "address"],
)
def test_nothing_is_found(compiler: str, flags: tuple[str, ...]) -> None:
    made_with = needed(compiler, flags)
    seed = "1"  # other seeds: tests/_native/stress.c says how
    ran = run(*made_with.prefix, build(made_with), seed, str(RUN_SECONDS))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "all right" in ran.stdout
    assert not ran.stderr


# --- what is left out on purpose ------------------------------------------------------

RELAXED = "memory_order_relaxed"
FLAT_STORE = "    atomic_store(&mine->step, step);\n"
TREE_ARRIVES = "  if (atomic_fetch_add(&group->arrivals, 1) + 1"
SEEN = "  return (int32_t)(atomic_load_explicit(word, memory_order_acquire)"
POSTED = "  atomic_store(&common->posted, ++ch->messages);\n"
WAITS = "    if ((p || !begun) && (status = md_wait(ch))) return status;\n"
LAST_WAIT = "  if (pieces && (status = md_wait(ch))) return status;\n"
SLOT = "  return &ch->parts[rank]->header[number & 1];\n"
SPREAD_WAITS = "  md_publish(ch);\n  return md_wait(ch);\n}\n"


def relaxed_store(line: str) -> str:
    return line.replace("atomic_store(", "atomic_store_explicit(").replace(
        ");\n", f", {RELAXED});\n"
    )


# One of each kind: what it is, the file, what stands there, and what is put there.
MUTATIONS = {
    "flat: the step is published before what it says": (
        *("channel.c", FLAT_STORE),
        relaxed_store(FLAT_STORE),
    ),
    "a step is seen before what it says": (
        *("channel.c", SEEN),
        SEEN.replace("memory_order_acquire", RELAXED),
    ),
    "tree: a rank arrives before its data": (
        *("channel.c", TREE_ARRIVES),
        TREE_ARRIVES.replace("add(", "add_explicit(").replace("1)", f"1, {RELAXED})"),
    ),
    "one slot for headers": (
        *("channel.h", SLOT),
        SLOT.replace("number & 1", "0 * number"),
    ),
    "a message is posted before its bytes": (
        *("channel.c", POSTED),
        relaxed_store(POSTED),
    ),
    "pieces are reduced before all have copied in": ("algorithms.c", WAITS, ""),
    "a call returns before all have reduced": ("algorithms.c", LAST_WAIT, ""),
    "a gather returns before all have written": (
        *("algorithms.c", SPREAD_WAITS),
        "  md_publish(ch);\n  return MD_OK;\n}\n",
    ),
}


@slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_what_is_left_out_is_found(name: str, tmp_path: pathlib.Path) -> None:
    made_with = needed(COMPILERS[0], THREADS)
    for path in NATIVE.glob("*.[ch]"):
        shutil.copy(path, tmp_path)
    file, old, new = MUTATIONS[name]
    text = (tmp_path / file).read_text()
    assert text.count(old) == 1, f"{file} does not have {old!r} once"
    (tmp_path / file).write_text(text.replace(old, new))
    program = build(made_with, tmp_path)
    arguments = ["1", str(FIND_SECONDS)]
    ran = run(*made_with.prefix, program, *arguments, seconds=2 * FIND_SECONDS + 60)
    assert ran.returncode in (1, 3, 66), "nothing was found"
    output = ran.stdout + ran.stderr
    signs = ("ThreadSanitizer: data race", "round ", "ranks wait forever")
    assert any(sign in output for sign in signs), output
