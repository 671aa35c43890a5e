"""Every program in examples/ runs under mpirun and says what it should, once."""

import json
import re

import pytest
from launching import ROOT, ULFM, outlives_ranks, run_ranks
from replicas import rarely, slow

EXAMPLES = ROOT / "examples"
RANKS = 2
TIMEOUT = 100.0  # seconds; each takes a few on an idle machine


def run_example(name, *arguments, cwd, ranks=RANKS, options=()):
    script = EXAMPLES / name
    program = [script, *arguments]
    result = run_ranks(ranks, program, timeout=TIMEOUT, cwd=cwd, options=options)
    assert result.returncode == 0, result.stdout + result.stderr
    return result


def the_match(pattern, text):
    """Return the only match of ``pattern`` in ``text``."""
    matches = list(re.finditer(pattern, text))
    assert len(matches) == 1, f"{len(matches)} matches of {pattern!r} in:\n{text}"
    return matches[0]


def test_every_example_is_tested():
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert names == {
        "clip_by_global_norm.py",
        "custom_training_loop.py",
        "grain_input.py",
        "hello.py",
        "kmeans.py",
        "monte_carlo_pi.py",
        "train_digits.py",
        "train_elastic.py",
        "train_jax.py",
        "train_torch.py",
        "train_torch_elastic.py",
    }


def test_hello(tmp_path):
    output = run_example("hello.py", cwd=tmp_path).stdout
    the_match(r"the sum of 1 to 2 is 3\b", output)
    for replica_id in range(RANKS):
        the_match(
            rf"hello from replica {replica_id} of 2, on /rank:{replica_id}", output
        )


def test_custom_training_loop(tmp_path):
    pytest.importorskip("sklearn")
    result = run_example("custom_training_loop.py", "--epochs", "3", cwd=tmp_path)
    epochs = re.findall(
        r"^Epoch (\d), Loss: (\S+), Accuracy: (\S+)%, Test Loss: (\S+), "
        r"Test Accuracy: (\S+)%$",
        result.stdout,
        re.M,
    )
    losses = [float(row[1]) for row in epochs]
    assert [row[0] for row in epochs] == ["1", "2", "3"]
    assert losses == sorted(losses, reverse=True)
    assert float(epochs[-1][4]) > 80
    # The checkpoint is that of the third epoch.
    restored = the_match(r"without strategy: (\S+)%", result.stdout)
    assert restored[1] == epochs[-1][4]
    assert [path.name for path in tmp_path.iterdir()] == ["training_checkpoint"]


def test_clip_by_global_norm(tmp_path):
    output = run_example("clip_by_global_norm.py", cwd=tmp_path).stdout
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


@slow
def test_grain_input(tmp_path):
    pytest.importorskip("grain")
    pytest.importorskip("sklearn")
    output = run_example("grain_input.py", cwd=tmp_path, ranks=3).stdout
    pattern = r"9000 images in 6 epochs on 3 replicas: test accuracy (\S+)%"
    assert float(the_match(pattern, output)[1]) >= 85


def test_monte_carlo_pi(tmp_path):
    output = run_example("monte_carlo_pi.py", cwd=tmp_path).stdout
    pi, error = map(float, the_match(r"pi is (\S+) \+- (\S+), from", output).groups())
    assert error <= 5e-4
    assert pi == pytest.approx(3.14159, abs=3 * error)


def test_kmeans(tmp_path):
    pytest.importorskip("sklearn")
    output = run_example("kmeans.py", cwd=tmp_path, ranks=3).stdout
    the_match(
        r"10 starts on 3 replicas: clusters of \[38, 50, 62\] flowers, "
        r"inertia 78\.8514 \(expected: 78\.8514\)",
        output,
    )


def test_train_digits(tmp_path):
    pytest.importorskip("sklearn")
    picture = tmp_path / "new folder" / "training.png"
    options = ["--epochs", "6", "--output", picture, "--losses", "l.json"]
    result = run_example("train_digits.py", *options, cwd=tmp_path)
    output = result.stdout
    the_match(r"replicas +2, with \w+ arrays", output)
    accuracy = the_match(r"test accuracy +(\S+)%", output)[1]
    assert float(accuracy) >= 90  # test_readme has that of all epochs
    rate = the_match(r"samples per second +([\d,]+)", output)[1]
    assert int(rate.replace(",", "")) > 0
    share = the_match(r"communicating +(\d+)% of the time", output)[1]
    assert 0 < int(share) <= 100
    assert the_match(r"picture +(.+?)\r?\n", output)[1] == str(picture)
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")

    losses = json.loads((tmp_path / "l.json").read_text())
    assert len(losses) == 6 * 15
    assert sum(losses[-15:]) < 0.2 * sum(losses[:15])
    # Lines, and no bar, since stderr is no terminal.
    assert "\r" not in result.stderr
    lines = re.findall(
        r"^epoch (\d+) of 6: test accuracy \d\d\.\d%$", result.stderr, re.M
    )
    assert lines == [str(n) for n in range(1, 7)]


@slow
@pytest.mark.parametrize("library", ["torch", "jax"])
def test_train_with_torch_and_jax(tmp_path, library):
    pytest.importorskip("sklearn")
    pytest.importorskip(library)
    options = ["--losses", "losses.json", "--epochs", "3"]
    result = run_example(f"train_{library}.py", *options, cwd=tmp_path)
    the_match(r"replicas +2, with", result.stdout)
    accuracy = the_match(r"test accuracy +(\S+)%", result.stdout)[1]
    assert float(accuracy) >= 90
    picture = tmp_path / f"train_{library}.png"
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    losses = json.loads((tmp_path / "losses.json").read_text())
    assert len(losses) == 3 * 14
    assert sum(losses[-14:]) < 0.5 * sum(losses[:14])


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
        job = run_example(name, *arguments, cwd=tmp_path, options=options)
        if fault:
            assert "lost replica 1; 1 replica goes on" in job.stderr
        replicas, accuracy, total = the_match(pattern, job.stdout).groups()
        assert replicas == ("1" if fault else "2")
        assert float(accuracy) > best
        weights.append(total)
    assert len(set(weights)) == 1
