"""The native core under sanitizers while calls are begun: two threads of a rank use it.

It is built as the extension that it is, with a sanitizer, which is loaded into ranks
before Python. Python and MPI know nothing of it: ThreadSanitizer sees their locks, and
of memory what the core touches. With Open MPI it does not get through MPI_Init.
"""

import shutil
import subprocess
import sys
import sysconfig

import numpy as np
import pytest
from _native.test_native_stress import ADDRESSES, NATIVE, ROOT, THREADS, needed
from launching import mpi_vendor, run_ranks
from replicas import rarely

pytestmark = [
    pytest.mark.core,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not shutil.which("gcc"), reason="no gcc"),
]

PROGRAM = """
import numpy as np
import mpidist
from mpidist import _native

strategy = mpidist.MPIStrategy()
rank = strategy.replica_id
assert _native.core.__file__.startswith(FOLDER)


def step(number):
    ctx = mpidist.get_replica_context()
    handles = []
    for n in (1, 7, 300, 20_000, 300_000):
        x = np.full(n, rank + number, np.float32)
        handles.append(ctx.all_reduce_async("SUM", x))
        nest = {"a": np.ones(n), "b": [np.ones(3, np.float16)]}
        handles.append(ctx.all_reduce_async("MEAN", nest))
        handles.append(ctx.all_gather_async(np.ones((n, 2), np.int32), 0))
        handles[0].done()
    if number % 2:  # a call that is made waits for them
        assert ctx.all_reduce("SUM", 1) == 2
    found = [handle.result() for handle in handles]
    assert (found[12] == 2 * number + 1).all()
    assert found[14].shape == (600_000, 2)


def differ():
    ctx = mpidist.get_replica_context()
    bad = ctx.all_reduce_async("SUM", np.ones(3 + rank))
    ctx.all_reduce_async("SUM", np.ones(3))
    bad.result()


for number in range(10):
    strategy.run(step, args=(number,))
for _ in range(3):
    try:
        strategy.run(differ)
    except mpidist.CollectiveMismatchError:
        continue
    raise SystemExit("no error")
strategy.close()
print("right", flush=True)
"""


@pytest.mark.parametrize(
    "flags", [THREADS, rarely(ADDRESSES)], ids=["threads", "addresses"]
)
def test_calls_that_are_begun(tmp_path, flags):
    tools = needed("gcc", flags)
    if flags is THREADS and mpi_vendor()[0] != "MPICH":
        pytest.skip("ThreadSanitizer and this MPI do not start together")
    shutil.copytree(
        ROOT / "mpidist",
        tmp_path / "mpidist",
        ignore=shutil.ignore_patterns("*.so", "__pycache__"),
    )
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    headers = (sysconfig.get_path("include"), np.get_include())
    subprocess.run(
        [
            *("gcc", *flags, "-g", "-std=c11", "-ffp-contract=off", "-fPIC", "-shared"),
            *(f"-I{folder}" for folder in headers),
            *map(str, sorted(NATIVE.glob("*.c"))),
            *("-lm", "-o", str(tmp_path / "mpidist" / "_native" / f"_core{suffix}")),
        ],
        check=True,
        timeout=200,
    )
    name = "libtsan.so" if flags is THREADS else "libasan.so"
    library = subprocess.run(
        ["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    program = tmp_path / "program.py"
    program.write_text(f"FOLDER = {str(tmp_path)!r}\n{PROGRAM}")
    # Not to mpirun, so by each rank before it is one.
    words = [*tools.prefix, sys.executable, str(program)]
    settings = {
        "LD_PRELOAD": library,
        "PYTHONPATH": str(tmp_path),
        "TSAN_OPTIONS": "ignore_noninstrumented_modules=1 exitcode=66",
        "ASAN_OPTIONS": "detect_leaks=0 exitcode=67",
        "UCX_MEM_EVENTS": "no",
        "UCX_MEM_MMAP_HOOK_MODE": "none",
    }
    code = f"import os; os.environ.update({settings}); os.execvp({words[0]!r}, {words})"
    for nodes in (1, 2):  # by the node's memory, and by MPI
        env = {"MPIDIST_SIMULATED_NODES": str(nodes)}
        result = run_ranks(2, ["-c", code], timeout=150, env=env)
        assert result.returncode == 0, result
        assert result.stdout.split() == ["right"] * 2
        assert "Sanitizer" not in result.stderr
