"""A job that is killed while it saves leaves a whole checkpoint."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest
from checkpoint_objects import assert_same_bits
from launching import (
    JOB_MARK,
    LAUNCHER_FAULT,
    ROOT,
    find_mpirun,
    kill_marked,
    rank_environment,
    run_python,
    run_ranks,
)
from replicas import slow

import mpidist
from mpidist._checkpoints import manifest

KILLED_AT_EACH_STEP = """
import os, sys
import numpy as np
import mpidist
from mpidist._checkpoints import storage

folder, how = sys.argv[1:]
storage.CHUNK_BYTES = 64  # many steps also while arrays are written
v = mpidist.Variable(np.zeros(50))
step = mpidist.Variable(0)
checkpoint = mpidist.Checkpoint(v=v, step=step)
outcomes = []

def save(path):
    if how == "manager":
        mpidist.CheckpointManager(checkpoint, path, 1).save()
    else:
        checkpoint.save(path)

for last in range(10_000):
    path = os.path.join(folder, str(last))
    if how != "new":
        step.assign(1)
        v.assign(np.full(50, 1.0))
        save(path)
    step.assign(2)
    v.assign(np.full(50, 2.0))
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        steps = [0]

        def count(event="", *args):
            if event == "" or event.split(".")[0] in ("open", "os", "shutil"):
                if steps[0] == last:
                    os._exit(9)
                steps[0] += 1

        def counted(function):
            def call(*args, **kwargs):
                count()
                return function(*args, **kwargs)
            return call

        os.fsync = counted(os.fsync)
        storage.zlib.crc32 = counted(storage.zlib.crc32)
        sys.addaudithook(count)
        save(path)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        newest = mpidist.latest_checkpoint(path) if how == "manager" else path
        reader = mpidist.load_checkpoint(newest)
        reader.verify()
        found = int(reader["step"])
        assert (reader["v"] == found).all()
    except FileNotFoundError:
        found = 0
    outcomes.append(found)
    v.assign(np.full(50, 3.0))
    step.assign(3)
    save(path)  # cleans up
    assert not [n for n in os.listdir(folder) if n.startswith(".")]
    if how == "manager":
        (name,) = os.listdir(path)
        path = os.path.join(path, name)
    assert len(os.listdir(path)) == 2, os.listdir(path)
    assert checkpoint.restore(path) == ["step", "v"] and step.numpy() == 3
    if code == 0:
        break
    assert code == 9, code
print(*outcomes)
"""


@pytest.mark.parametrize("how", ["new", "replace", "manager"])
def test_killed_before_every_system_call_of_a_save(tmp_path, how):
    output = run_python("-c", KILLED_AT_EACH_STEP, tmp_path, how)
    outcomes = list(map(int, output.split()))
    assert len(outcomes) >= 30
    # The previous one (or none) up to one step, and the new one from there on.
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == ({0, 2} if how == "new" else {1, 2})


def kill_when(argv, output, ready):
    """Start 2 ranks, and kill all processes of the job once ``ready()`` is true."""
    mark = f"job-{os.getpid()}-{output.name}"
    environment = rank_environment()
    environment[JOB_MARK] = f"{environment.get(JOB_MARK, '')} {mark}"
    command = [find_mpirun(), "-n", "2", sys.executable, *map(os.fspath, argv)]
    deadline = time.monotonic() + 60
    started = False
    while not started:
        with open(output, "wb") as out:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=output.parent,
                env=environment,
                start_new_session=True,
            )
        try:
            while not (started := ready()):
                if process.poll() is not None:
                    assert LAUNCHER_FAULT in output.read_text(), output.read_text()
                    break
                assert time.monotonic() < deadline, output.read_text()
                time.sleep(0.002)
        finally:
            with contextlib.suppress(OSError):
                os.kill(process.pid, signal.SIGKILL)
            kill_marked(mark)
            process.wait()


# The script, but it waits for its kill at the last but one epoch at the latest.
WAITING = """
import os, runpy, sys, time
import mpidist

def save(self, number):
    path = real(self, number)
    while number == EPOCHS - 1:
        time.sleep(1)
    return path

real, mpidist.CheckpointManager.save = mpidist.CheckpointManager.save, save
sys.argv.pop(0)
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@slow
def test_training_goes_on_after_a_kill(tmp_path):
    pytest.importorskip("sklearn")
    script = ROOT / "examples" / "train_digits.py"
    epochs = 4
    arguments = ["--epochs", str(epochs), "--batch-size", "100", "--checkpoint"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"

    def train(*rest):
        argv = [script, *arguments, *rest]
        result = run_ranks(2, argv, timeout=100, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        return result.stderr

    train(whole, "--losses", "whole.json")
    waiting = WAITING.replace("EPOCHS", str(epochs))
    kill_when(
        ["-c", waiting, script, *arguments, killed],
        tmp_path / "output",
        lambda: any((killed / f"ckpt-{n}").exists() for n in range(2, epochs)),
    )
    assert not (killed / f"ckpt-{epochs}").exists()
    log = train(killed, "--resume", "--losses", "killed.json")
    assert f"epoch 1 of {epochs}" not in log
    assert f"epoch {epochs} of {epochs}" in log
    ends = [mpidist.load_checkpoint(p / f"ckpt-{epochs}") for p in (whole, killed)]
    assert len(ends[0]) >= 8  # 4 tensors of the model, and as many of the optimizer
    assert set(ends[0]) == set(ends[1])
    for name, x in ends[0].items():
        assert_same_bits(ends[1][name], x)
    assert repr(ends[0].states) == repr(ends[1].states)
    losses = [(tmp_path / f"{name}.json").read_text() for name in ("whole", "killed")]
    assert losses[0] == losses[1]


def test_two_processes_that_save_to_one_path(tmp_path, monkeypatch):
    """Without a strategy each process writes: the one that finds it out says so."""
    path = tmp_path / "saved"
    first, second = (mpidist.Checkpoint(v=mpidist.Variable(x)) for x in (1.0, 2.0))
    write_manifest = manifest.write_manifest

    def write(*args):
        monkeypatch.undo()
        second.save(path)
        write_manifest(*args)

    monkeypatch.setattr(manifest, "write_manifest", write)
    with pytest.raises(OSError, match=r"another process saves to .*MPIStrategy\(\)"):
        first.save(path)
    first.restore(path)
    assert first.v == 2.0
    assert [one.name for one in tmp_path.iterdir()] == ["saved"]
