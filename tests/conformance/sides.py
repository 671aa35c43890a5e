"""Starts the two sides, each in processes of its own, and reads what they write."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from launching import run_ranks

from conformance.results import Result

PYTHON_VARIABLE = "MPIDIST_TENSORFLOW_PYTHON"
SECONDS = 600  # for all programs on one side
HERE = Path(__file__).resolve().parent


@dataclasses.dataclass(frozen=True)
class Run:
    """What one side gave for one number of replicas.

    Attributes:
        version: of TensorFlow, or of mpidist.
        results: by the names of the programs.
        messages: what the programs raised on the way, with the messages.
    """

    version: str
    results: dict[str, Result]
    messages: dict[str, list[str]]


def tensorflow_python() -> str:
    """Return the Python that TensorFlow is asked from: by default the running one."""
    return os.environ.get(PYTHON_VARIABLE) or sys.executable


def has_tensorflow() -> bool:
    """Return whether that Python has TensorFlow: one that was named should have it."""
    if os.environ.get(PYTHON_VARIABLE):
        return True
    # Not a folder of that name on the path, as that of tests/programs is.
    spec = importlib.util.find_spec("tensorflow")
    return spec is not None and spec.loader is not None


def run_tensorflow(n: int, folder: Path, names: Sequence[str] = ()) -> Run:
    """Run programs on ``n`` logical devices; by default all."""
    file = folder / f"tensorflow-{n}.jsonl"
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": "",
    }
    result = subprocess.run(
        [tensorflow_python(), str(HERE), "tensorflow", str(n), str(file), *names],
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    if result.returncode:
        raise RuntimeError(f"TensorFlow's side failed: {_last(file)}\n{result.stderr}")
    return read(file)


def run_mpidist(n: int, folder: Path, names: Sequence[str] = ()) -> Run:
    """Run programs on ``n`` ranks; by default all."""
    file = folder / f"mpidist-{n}.jsonl"
    argv = [HERE, "mpidist", str(n), file, *names]
    result = run_ranks(n, argv, timeout=SECONDS)
    if result.returncode:
        raise RuntimeError(f"mpidist's side failed: {_last(file)}\n{result.stderr}")
    return read(file)


def record(run: Run, n: int, file: Path) -> None:
    """Write the results of a side, without messages, for `read`."""
    lines = [{"version": run.version, "n": n}]
    lines += [{"name": name, "result": r} for name, r in run.results.items()]
    texts = [json.dumps(line, separators=(",", ":")) for line in lines]
    file.write_text("\n".join(texts) + "\n", encoding="utf-8")


def read(file: Path) -> Run:
    """Read what a side wrote."""
    first, *lines = [json.loads(line) for line in file.read_text().splitlines()]
    return Run(
        first["version"],
        {line["name"]: line["result"] for line in lines},
        {line["name"]: line.get("messages", []) for line in lines},
    )


def _last(file: Path) -> str:
    if not file.exists():
        return "before the first program"
    return f"after {file.read_text().splitlines()[-1]}"[:300]
