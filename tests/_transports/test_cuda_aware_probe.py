"""The probe of CUDA-aware MPI: children that work, crash, refuse or hang."""

import os
import signal
from pathlib import Path

import pytest

from mpidist._transports import cuda_aware_probe
from mpidist._transports.cuda_aware_probe import child_environment

TESTS = str(Path(__file__).parents[1])

# A `cupy` for children: host memory that poses as a GPU array.
POSES = """
import sys
sys.path.append({tests!r})
import posing
cupy = posing._make_module(1)
sys.modules["cupy"] = cupy
{change}
"""


def poses(folder, change=""):
    (folder / "cupy.py").write_text(POSES.format(tests=TESTS, change=change))
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(Path(TESTS).parent)])}


def probe_direct(*args, **kwargs):
    """Probe; again where Open MPI's launcher failed before any child was there."""
    found = cuda_aware_probe.probe_direct(*args, **kwargs)
    if found.outcome == "no mpi":
        found = cuda_aware_probe.probe_direct(*args, **kwargs)
    return found


# What the arrays tell MPI of their address.
AT = """
def interface(self):
    return {{"shape": self.shape, "typestr": "<f4", "version": 3, "data": {at}}}
posing.ndarray.__cuda_array_interface__ = property(interface)
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_mpi_takes_the_buffers(tmp_path, ranks):
    found = probe_direct(ranks, env=poses(tmp_path))
    assert found.outcome == "works", found
    assert found.ranks == ranks
    assert found.mpi in found.detail
    assert found.mpi
    assert found.says == ""


@pytest.mark.parametrize("ranks", [1, 2])
def test_mpi_crashes_on_the_buffers(tmp_path, ranks):
    """As an MPI that is not CUDA-aware does: this process may not read the pointer."""
    found = probe_direct(ranks, env=poses(tmp_path, AT.format(at="(4096, False)")))
    assert found.outcome == "crashed", found
    assert "SIGSEGV" in found.detail
    assert "Sendrecv of 4 bytes" in found.detail


def test_mpi_refuses_the_buffers(tmp_path):
    found = probe_direct(env=poses(tmp_path, AT.format(at="None")))
    assert found.outcome == "refused", found


def test_mpi_gives_wrong_values(tmp_path):
    change = "posing.ndarray.get = lambda self, **_: self._host + 1"
    found = probe_direct(env=poses(tmp_path, change))
    assert found.outcome == "wrong", found
    assert found.detail == "Sendrecv of 4 bytes gave wrong values"


def test_mpi_hangs(tmp_path):
    change = "posing.Stream.synchronize = lambda self: __import__('time').sleep(600)"
    for seconds in (4, 12, 40):  # a busy machine may not have started MPI before
        found = probe_direct(env=poses(tmp_path, change), timeout_seconds=seconds)
        if "Sendrecv" in found.detail:
            break
    assert found.outcome == "timed out", found
    assert "Sendrecv of 4 bytes" in found.detail


def test_no_gpu(tmp_path):
    (tmp_path / "cupy.py").write_text("raise ImportError('libcuda.so.1 is not there')")
    found = probe_direct(env={"PYTHONPATH": str(tmp_path)})
    assert found.outcome == "no gpu", found
    assert "libcuda.so.1" in found.detail


def test_the_child_is_no_rank_of_its_parents_job():
    given = {
        "OMPI_COMM_WORLD_RANK": "3",
        "PMIX_NAMESPACE": "x",
        "PMI_FD": "7",
        "SLURM_STEP_ID": "0",
        "OMPI_MCA_ess_base_jobid": "1",
        "OMPI_MCA_pml": "ucx",
        "UCX_TLS": "cuda",
        "CUDA_VISIBLE_DEVICES": "1",
    }
    kept = child_environment(given)
    assert {"OMPI_MCA_pml", "UCX_TLS", "CUDA_VISIBLE_DEVICES"} <= set(kept)
    assert not {*list(given)[:5]} & set(kept)


@pytest.mark.one_size
@pytest.mark.mpi
def test_a_probe_in_every_rank_of_a_job(tmp_path):
    found = probe_direct(env=poses(tmp_path))
    assert (found.outcome, found.ranks) == ("works", 1), found


@pytest.mark.parametrize(
    ("code", "text", "outcome", "detail"),
    [
        (
            1,
            '{"step": "Bcast"}\nexited on signal 11 (Segm',
            "crashed",
            "SIGSEGV, in Bcast",
        ),
        (-signal.SIGSEGV, '{"step": "Bcast"}', "crashed", "SIGSEGV, in Bcast"),
        (139, '{"step": "Bcast"}', "crashed", "SIGSEGV, in Bcast"),
        (1, '{"step": "Bcast"}', "crashed", "exit status 1, in Bcast"),
        (-signal.SIGABRT, "{}", "crashed", "SIGABRT, in starting MPI"),
        (0, '{"outcome": "refused", "detail": "no"}', "refused", "no"),
        (1, "", "no mpi", "a child did not come as far as MPI: exit status 1"),
    ],
)
def test_what_ends_mean(code, text, outcome, detail):
    lines = f"{cuda_aware_probe.RECORD_PREFIX}{text}\n" if text else ""
    found = cuda_aware_probe._judge(1, code, False, lines, 1.0)
    assert (found.outcome, found.detail) == (outcome, detail)
