"""A job that is killed while it saves leaves a whole checkpoint."""

from __future__ import annotations

import shutil

import pytest
from checkpoint_objects import assert_same_bits
from launching import ROOT, run_python, run_ranks
from replicas import slow

import mpidist
from mpidist._checkpoints import manifest

KILLED_AT_EACH_STEP = """
import os, sys
import numpy as np
import mpidist
from mpidist._checkpoints import storage

folder, how = sys.argv[1:]
os.fsync = lambda fd: None  # a process that is killed loses nothing of the kernel's
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


@slow
def test_training_goes_on_from_what_a_killed_job_has_left(tmp_path):
    pytest.importorskip("sklearn")
    script = ROOT / "examples" / "train_digits.py"
    epochs = 4
    whole, killed = tmp_path / "whole", tmp_path / "killed"

    def train(folder, *rest):
        argv = [script, "--epochs", str(epochs), "--batch-size", "100", *rest]
        argv += ["--checkpoint", folder, "--losses", f"{folder.name}.json"]
        result = run_ranks(2, argv, timeout=100, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        return result.stderr

    train(whole)
    shutil.copytree(whole, killed)
    for number in (epochs - 1, epochs):
        shutil.rmtree(killed / f"ckpt-{number}")
    (killed / f".ckpt-{epochs - 1}.tmp-0a1b2c3d").mkdir()
    log = train(killed, "--resume")
    assert f"epoch {epochs - 2} of {epochs}" not in log
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
