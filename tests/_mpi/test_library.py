"""What Open MPI is given before it starts; as the library itself says (MPI_T)."""

import pytest
from launching import ROOT, mpi_vendor, rank_environment, run_alone

from mpidist._mpi.library import OPEN_MPI_SETTINGS

PROGRAM = """
import ctypes, sys
import {first}
import mpidist
mpidist.MPIStrategy()
from mpi4py import MPI
library = ctypes.CDLL(MPI.__file__)
index, handle, count, value = (ctypes.c_int() for _ in range(4))
handle = ctypes.c_void_p()
assert library.MPI_T_init_thread(0, ctypes.byref(index)) == 0
for name in sys.argv[1:]:
    value = ctypes.c_uint64()
    assert library.MPI_T_cvar_get_index(name.encode(), ctypes.byref(index)) == 0, name
    assert 0 == library.MPI_T_cvar_handle_alloc(
        index, None, ctypes.byref(handle), ctypes.byref(count)
    )
    assert library.MPI_T_cvar_read(handle, ctypes.byref(value)) == 0
    print(name, value.value)
"""


def read_settings(first, names, **variables):
    """Return what Open MPI has, if a program imports ``first`` before mpidist."""
    environment = rank_environment()
    for name in OPEN_MPI_SETTINGS:
        environment.pop(name, None)
    program = PROGRAM.format(first=first)
    done = run_alone("-c", program, *names, base=environment, env=variables)
    assert done.returncode == 0, done.stderr
    return dict(line.split() for line in done.stdout.splitlines())


def test_open_mpi_is_given_what_it_needs_between_nodes():
    if mpi_vendor()[0] != "Open MPI":
        pytest.skip("of Open MPI")
    prefix = "OMPI_MCA_"
    wanted = {k.removeprefix(prefix): v for k, v in OPEN_MPI_SETTINGS.items()}
    assert read_settings("os", wanted) == wanted
    limit = "btl_tcp_eager_limit"
    assert read_settings("os", [limit], **{prefix + limit: "70000"})[limit] == "70000"
    assert read_settings("mpi4py.MPI", [limit])[limit] != wanted[limit]


def test_the_scripts_set_the_same():
    """For programs that start MPI themselves."""
    scripts = [
        *(ROOT / "launch" / "slurm").glob("*.sbatch"),
        ROOT / "launch" / "lib" / "env.sh",
        ROOT / "mpidist" / "_cli" / "job.sbatch",
    ]
    assert len(scripts) > 5
    for script in scripts:
        text = script.read_text()
        for name, value in OPEN_MPI_SETTINGS.items():
            assert f"export {name}=${{{name}:-{value}}}" in text, script
