"""Every program in examples/ runs under mpirun and says what it should, once."""

import json
import re

import pytest
from launching import ROOT, ULFM, outlives_ranks, run_in_turn, run_ranks
from replicas import rarely, slow

EXAMPLES = ROOT / "examples"
RANKS = 2
TIMEOUT = 100.0  # seconds; each takes a few on an idle machine


def the_match(pattern, text):
    """Return the only match of ``pattern`` in ``text``."""
    matches = list(re.finditer(pattern, text))
    assert len(matches) == 1, f"{len(matches)} matches of {pattern!r} in:\n{text}"
    return matches[0]


def hello(output, folder):
    the_match(r"the sum of 1 to 2 is 3\b", output)
    for replica_id in range(RANKS):
        the_match(
            rf"hello from replica {replica_id} of 2, on /rank:{replica_id}", output
        )


def custom_training_loop(output, folder):
    epochs = re.findall(
        r"^Epoch (\d), Loss: (\S+), Accuracy: (\S+)%, Test Loss: (\S+), "
        r"Test Accuracy: (\S+)%$",
        output,
        re.M,
    )
    losses = [float(row[1]) for row in epochs]
    assert [row[0] for row in epochs] == ["1", "2", "3"]
    assert losses == sorted(losses, reverse=True)
    assert float(epochs[-1][4]) > 80
    # The checkpoint is that of the third epoch.
    restored = the_match(r"without strategy: (\S+)%", output)
    assert restored[1] == epochs[-1][4]
    assert (folder / "training_checkpoint").is_dir()


def clip_by_global_norm(output, folder):
    match = the_match(
        r"slope (\S+) \(true: 3.0\), offset (\S+) \(true: -1.0\); "
        r"clipped (\d+) of 300 gradients, the largest of norm (\d+)",
        output,
    )
    slope, offset, clipped, largest = map(float, match.groups())
    assert slope == pytest.approx(3, abs=0.15)
    assert offset == pytest.approx(-1, abs=0.15)
    assert 0 < clipped < 150
    assert largest > 3


def monte_carlo_pi(output, folder):
    pi, error = map(float, the_match(r"pi is (\S+) \+- (\S+), from", output).groups())
    assert error <= 5e-4
    assert pi == pytest.approx(3.14159, abs=3 * error)


def grain_input(output, folder):
    pattern = r"9000 images in 6 epochs on 3 replicas: test accuracy (\S+)%"
    assert float(the_match(pattern, output)[1]) >= 85


def kmeans(output, folder):
    the_match(
        r"10 starts on 2 replicas: clusters of \[38, 50, 62\] flowers, "
        r"inertia 78\.8514 \(expected: 78\.8514\)",
        output,
    )


def train_digits(output, folder):
    the_match(r"replicas +2, with \w+ arrays", output)
    accuracy = the_match(r"test accuracy +(\S+)%", output)[1]
    assert float(accuracy) >= 90  # test_readme has that of all epochs
    rate = the_match(r"samples per second +([\d,]+)", output)[1]
    assert int(rate.replace(",", "")) > 0
    share = the_match(r"communicating +(\d+)% of the time", output)[1]
    assert 0 < int(share) <= 100
    picture = folder / "new folder" / "training.png"
    assert the_match(r"picture +(.+?)\r?\n", output)[1] == str(picture)
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    losses = json.loads((folder / "l.json").read_text())
    assert len(losses) == 6 * 15
    assert sum(losses[-15:]) < 0.2 * sum(losses[:15])


def train_torch(output, folder, library="torch"):
    the_match(r"replicas +2, with", output)
    accuracy = the_match(r"test accuracy +(\S+)%", output)[1]
    assert float(accuracy) >= 90
    picture = folder / f"train_{library}.png"
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    losses = json.loads((folder / f"{library}.json").read_text())
    assert len(losses) == 3 * 14
    assert sum(losses[-14:]) < 0.5 * sum(losses[:14])


def train_jax(output, folder):
    train_torch(output, folder, "jax")


JOBS = {
    2: [
        (hello, ""),
        (clip_by_global_norm, ""),
        (monte_carlo_pi, ""),
        (kmeans, ""),
        (custom_training_loop, "--epochs 3"),
        (train_digits, "--epochs 6 --losses l.json --output"),
    ],
    3: [(grain_input, "")],
    "guests": [
        (train_torch, "--epochs 3 --losses torch.json"),
        (train_jax, "--epochs 3 --losses jax.json"),
    ],
}


def test_every_example_is_tested():
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    tested = {check.__name__ for job in JOBS.values() for check, _ in job}
    assert names == {*tested, "train_elastic", "train_torch_elastic"}


@pytest.mark.parametrize(
    "job", [2, *(pytest.param(n, marks=slow) for n in (3, "guests"))]
)
def test_examples(tmp_path, job):
    for library in {3: ["grain"], "guests": ["torch", "jax"]}.get(job, []):
        pytest.importorskip(library)
    pytest.importorskip("sklearn")
    programs = [[EXAMPLES / f"{c.__name__}.py", *a.split()] for c, a in JOBS[job]]
    for program in programs:
        if program[-1] == "--output":
            program.append("new folder/training.png")
    ranks = job if job in (2, 3) else RANKS
    results = run_in_turn(ranks, programs, timeout=2 * TIMEOUT, cwd=tmp_path)
    for (check, _), result in zip(JOBS[job], results, strict=True):
        check(result.stdout, tmp_path)
        if check is train_digits:
            # Lines, and no bar, since stderr is no terminal.
            assert "\r" not in result.stderr
            lines = re.findall(
                r"^epoch (\d+) of 6: test accuracy \d\d\.\d%$", result.stderr, re.M
            )
            assert lines == [str(n) for n in range(1, 7)]


@pytest.mark.parametrize(
    ("name", "steps", "best"),
    [("train_elastic.py", 46, 85), rarely("train_torch_elastic.py", 58, 90)],
)
def test_train_elastic(tmp_path, name, steps, best):
    pytest.importorskip("sklearn")
    if "torch" in name:
        pytest.importorskip("torch")
    pattern = rf"{steps} steps, (\d) replicas at the end: (?:test )?accuracy (\S+)%, "
    pattern += "sum of weights (.*)"
    weights = []
    # The result without a fault: of one of them, since torch takes long to start.
    for fault in (False, True) if name == "train_elastic.py" else (True,):
        fault = fault and outlives_ranks()
        arguments = ["--epochs", "2", *(["--kill", "1", "--at-step", "30"] * fault)]
        options = ULFM if fault else ()
        program = [EXAMPLES / name, *arguments]
        job = run_ranks(2, program, timeout=TIMEOUT, cwd=tmp_path, options=options)
        assert job.returncode == 0, job.stdout + job.stderr
        if fault:
            assert "lost replica 1; 1 replica goes on" in job.stderr
        replicas, accuracy, total = the_match(pattern, job.stdout).groups()
        assert replicas == ("1" if fault else "2")
        assert float(accuracy) > best
        weights.append(total)
    assert len(set(weights)) == 1
