"""A private SLURM cluster on this machine, for tests of batch jobs.

Everything is in one folder: configuration, keys, logs, spool. Its daemons are children
of this process, in the foreground, and end with it (PR_SET_PDEATHSIG), however it ends;
nothing of a SLURM that the machine may have is read or used. All nodes are this
machine, on different ports (``slurmd -N``), so SLURM starts real steps on each. With
root each node has its own host name, the one that SLURM knows it by: otherwise Open MPI
under ``srun --mpi=pmix`` takes each rank for one of another node.

It needs slurmctld, slurmd, srun and munged (Debian: slurm-wlm, munge), and libpmix for
``srun --mpi=pmix`` (libpmix2); `why_not` says what is missing.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import launching

_T = TypeVar("_T")
_PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "scontrol", "munged")
_GPUS = 2  # of each node; stand-ins
_UP_SECONDS = 60.0
_DOWN_SECONDS = 10.0
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")

# cred_expire is also how long a job that is requeued waits. config_overrides: more
# nodes than the machine has cores. TmpFS: the PMIx plug-ins of the nodes make folders
# of the same name. FirstJobId: MPICH names its shared memory by the job, and what a job
# that was killed leaves behind would meet a later one.
_CONFIGURATION = """\
ClusterName=mpidist
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
TmpFS={folder}/tmp/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
GresTypes=gpu
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=5
MinJobAge=600
FirstJobId={first_job}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PropagateResourceLimits=NONE
MailProg=/bin/true
PartitionName=main Nodes=ALL Default=YES State=UP PriorityTier=1 GraceTime=30
PartitionName=urgent Nodes=ALL State=UP PriorityTier=9 PreemptMode=OFF
"""


def why_not() -> str:
    """Return why there can be no cluster here; "" if there can."""
    missing = [program for program in _PROGRAMS if _find(program) is None]
    if missing:
        return f"no {', '.join(missing)} here (Debian: slurm-wlm, munge, libpmix2)"
    return ""


def _find(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


# Runs a command where the host has a name, and /etc/hosts is another file: hydra looks
# for the addresses of all nodes.
_NAMED = ["unshare", "--uts", "--mount", "sh", "-c"]
_NAMED += ['hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"']


def _may_name_hosts() -> bool:
    """Whether a node can have a host name of its own, with an address: namespaces."""
    if not all(map(_find, ("unshare", "hostname", "mount"))):
        return False
    command = [*_NAMED, "node1", "/etc/hosts", "true"]
    return not subprocess.call(command, stderr=subprocess.DEVNULL)


def _version() -> tuple[int, ...]:
    slurmd = _find("slurmd")
    assert slurmd is not None
    text = subprocess.run([slurmd, "-V"], capture_output=True, text=True, check=True)
    return tuple(int(word) for word in text.stdout.split()[1].split(".")[:2])


def _free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on now, and that no connection will be given."""
    ports: list[int] = []
    candidates = list(range(20_000, 32_000))  # below those that Linux deals out
    random.shuffle(candidates)
    for port in candidates:
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
            ports.append(port)
        if len(ports) == count:
            return ports
    raise RuntimeError("no free ports between 20000 and 32000")


class Cluster:
    """Nodes ``node1``, ``node2``, ... of two slots each; a context manager.

    Each has two stand-ins for GPUs, which SLURM gives to jobs as it gives real ones.

    Args:
        num_nodes: how many.
        own_names: whether each node is to have a host name of its own, if root may.

    Attributes:
        folder: where everything is; jobs run and write there.
        has_names: whether each node has a host name of its own.
    """

    def __init__(self, num_nodes: int, own_names: bool = True) -> None:
        self._num_nodes = num_nodes
        self.has_names = own_names and _may_name_hosts()
        # A short path: sockets are in it. munged refuses one that others cannot enter.
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        self.folder.chmod(0o755)
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Cluster:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel all jobs, end all daemons, and remove the folder."""
        with contextlib.suppress(Exception):  # a cluster that did not start
            self.run("scancel", "--full", f"--user={getpass.getuser()}", timeout=10)
            self.until(lambda: not self.run("squeue", "-h", timeout=10), _DOWN_SECONDS)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        end = time.monotonic() + _DOWN_SECONDS
        for daemon in self._daemons:
            try:
                daemon.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._kill_the_rest()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _kill_the_rest(self) -> None:
        """End the steps that did not end by themselves: they outlive their daemons."""
        mark = str(self.folder).encode()
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):  # gone, or somebody else's
                facts = Path(f"/proc/{pid}/environ").read_bytes()
                facts += Path(f"/proc/{pid}/cmdline").read_bytes()
                if mark in facts and int(pid) != os.getpid():
                    os.kill(int(pid), signal.SIGKILL)

    def _start(self) -> None:
        folder = self.folder
        for name in ("state", "spool", "tmp", "log"):
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        ports = _free_ports(1 + self._num_nodes)
        host = socket.gethostname().split(".")[0]
        text = _CONFIGURATION.format(
            host=host,
            port=ports[0],
            user=getpass.getuser(),
            folder=folder,
            first_job=random.randrange(1_000, 60_000_000),
        )
        for number, port in enumerate(ports[1:], 1):
            known_as = f"node{number}" if self.has_names else host
            text += (
                f"NodeName=node{number} NodeHostname={known_as} NodeAddr=127.0.0.1 "
                f"Port={port} CPUs=2 Boards=1 SocketsPerBoard=1 CoresPerSocket=2 "
                f"ThreadsPerCore=1 RealMemory=2000 Gres=gpu:{_GPUS} State=UNKNOWN\n"
            )
            for name in ("spool", "tmp"):
                (folder / name / f"node{number}").mkdir()
        (folder / "slurm.conf").write_text(text, encoding="utf-8")
        devices = [folder / f"gpu{k}" for k in range(_GPUS)]
        for device in devices:  # SLURM only looks that they are there
            device.symlink_to("/dev/null")
        files = f"Name=gpu File={folder}/gpu[0-{_GPUS - 1}]\n"
        (folder / "gres.conf").write_text(files, encoding="utf-8")
        names = " ".join(f"node{k + 1}" for k in range(self._num_nodes))
        hosts = Path("/etc/hosts").read_text(encoding="utf-8").rstrip("\n")
        text = f"{hosts}\n127.0.0.1 {names}\n"
        (folder / "hosts").write_text(text, encoding="utf-8")
        if _version() >= (23, 11):  # older ones do not look for control groups
            text = "CgroupPlugin=disabled\n"
            (folder / "cgroup.conf").write_text(text, encoding="utf-8")
        self._daemon(
            *("munged", "--foreground", f"--socket={folder}/munge.socket"),
            *(f"--key-file={key}", f"--pid-file={folder}/munged.pid"),
            *(f"--log-file={folder}/log/munged", f"--seed-file={folder}/munged.seed"),
        )
        self.until((folder / "munge.socket").exists, _UP_SECONDS)
        self._daemon("slurmctld", "-D", "-c")
        for number in range(1, self._num_nodes + 1):
            self._nodes[f"node{number}"] = self._boot(f"node{number}")
        sinfo = "sinfo", "-hN", "-pmain", "-o%t"
        self.until(
            lambda: self.run(*sinfo, check=False).count("idle") == self._num_nodes,
            _UP_SECONDS,
        )

    def _boot(self, name: str) -> subprocess.Popen[bytes]:
        return self._daemon("slurmd", "-D", "-N", name)

    @contextlib.contextmanager
    def without(self, name: str) -> Iterator[None]:
        """Lose a node, with all that runs on it; it comes back at the end.

        SLURM is told of it: left alone it would notice after some time (SlurmdTimeout).
        It takes nodes with names (`has_names`).
        """
        assert self.has_names
        node = f"nodename={name}"
        slurmd = self._nodes[name]
        host = os.readlink(f"/proc/{slurmd.pid}/ns/uts")
        for number in (signal.SIGSTOP, signal.SIGKILL):
            # Without power a host says nothing more: no connection is closed, no end of
            # a process is reported, before SLURM gives the node up.
            for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
                with contextlib.suppress(OSError):  # gone
                    if os.readlink(f"/proc/{pid}/ns/uts") == host:
                        os.kill(pid, number)
            if number == signal.SIGSTOP:
                self.run("scontrol", "update", node, "state=down", "reason=lost")
        slurmd.wait()
        try:
            yield
        finally:
            self._nodes[name] = self._boot(name)
            self.run("scontrol", "update", node, "state=resume")

    def _daemon(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        path = _find(program)
        assert path is not None
        command = [path, *arguments]
        if program == "slurmd" and self.has_names:
            command = [*_NAMED, arguments[-1], str(self.folder / "hosts"), *command]
        name = f"{program}{arguments[-1] if program == 'slurmd' else ''}"
        with open(self.folder / "log" / name, "ab") as log:
            daemon = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment(),
                preexec_fn=launching.end_with_parent,
            )
        self._daemons.append(daemon)
        return daemon

    def until(
        self, ready: Callable[[], _T], seconds: float = 100.0, job: str = ""
    ) -> _T:
        """Wait until a function returns something true, of a job; return that."""
        end = time.monotonic() + seconds
        while not (found := ready()):
            if time.monotonic() > end:
                about = f"{self.state(job)}\n{self.output(job)}\n" if job else ""
                raise TimeoutError(about + self.logs())
            time.sleep(0.05)
        return found

    def logs(self) -> str:
        """Return the ends of all logs of the daemons."""
        parts = []
        for path in sorted((self.folder / "log").iterdir()):
            lines = path.read_text(errors="replace").splitlines()[-15:]
            parts.append("\n".join([f"--- {path.name}", *lines]))
        return "\n".join(parts)

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment of a user of this cluster, with this Python first."""
        env = launching.rank_environment(extra)
        env["SLURM_CONF"] = str(self.folder / "slurm.conf")
        env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}:/usr/sbin:/sbin"
        env["VIRTUAL_ENV"] = sys.prefix
        # Without these Open MPI looks for networks for a second; and the pmi2 of SLURM
        # 22.05 refuses some of the long addresses that UCX has (in MPICH).
        env.update(OMPI_MCA_pml="ob1", OMPI_MCA_btl="^ofi")
        env.update(MPIR_CVAR_CH4_NETMOD="ofi", FI_PROVIDER="tcp")
        return env

    def run(
        self,
        *command: object,
        check: bool = True,
        env: Mapping[str, str] | None = None,
        timeout: float = 100.0,
    ) -> str:
        """Run a command as a user would, in the folder; return what it printed."""
        result = subprocess.run(
            [str(word) for word in command],
            cwd=self.folder,
            env=self.environment(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
        if check and result.returncode:
            raise RuntimeError(f"{command}: {result.stdout}\n{self.logs()}")
        return result.stdout

    def submit(
        self,
        script: str | os.PathLike[str],
        *arguments: object,
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> str:
        """Submit a batch script; return the number of the job."""
        command = ["sbatch", "--parsable", "--output=%j.out", *options, script]
        return self.run(*command, *arguments, env=env).strip().split("\n")[-1]

    def state(self, job: str) -> dict[str, str]:
        """Return what SLURM says of a job."""
        text = self.run("scontrol", "-o", "show", "job", job, check=False)
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def wait(self, job: str, *states: str) -> dict[str, str]:
        """Wait until a job is in one of these states; no states: until it has ended."""

        def state() -> dict[str, str]:
            found = self.state(job)
            return found if found.get("JobState") in (states or _ENDED) else {}

        return self.until(state, job=job)

    def output(self, job: str) -> str:
        """Return what a job has written."""
        try:
            return (self.folder / f"{job}.out").read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def wait_for_output(self, job: str, text: str) -> None:
        """Wait until a job has written a text."""
        self.until(lambda: text in self.output(job), job=job)
