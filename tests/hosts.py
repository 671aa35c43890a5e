"""Virtual hosts on one machine, and MPI jobs on them: for tests of several nodes.

A host is a set of Linux namespaces: its own network with one address, host name,
process ids, and /tmp and /dev/shm, so that MPI has to go by TCP from one to another. A
bridge in a namespace of its own joins them; nothing of it is seen on the machine's
network. Each host is held by its first process, whose end takes all its processes
along, and which ends with the process that made it (PR_SET_PDEATHSIG), however that
ends.

It needs root, `unshare`, `nsenter` and `ip` (util-linux, iproute2); `why_not` says what
is missing. mpirun runs in a namespace that shares the machine's process ids but has the
network of the hosts, and starts its helpers on the hosts by an *agent* in place of ssh.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TypeVar

import launching

_T = TypeVar("_T")
_NET = "10.77.0"
# `mpidist run`, which waits for mpirun 5 seconds where it would wait for 30.
_IMPATIENT = """
from mpidist import _cli
from mpidist._cli import supervision
supervision._END_SECONDS = 5.0
_cli.run()
"""
_HEAD = "head"  # where mpirun runs
_SWITCH = ".switch"  # has the bridge
_READY_SECONDS = 20.0
_ELSEWHERE = "/tmp/elsewhere"


def why_not() -> str:
    """Return why there can be no virtual hosts here; "" if there can."""
    if os.geteuid() != 0:
        return "virtual hosts need root"
    missing = [p for p in ("unshare", "nsenter", "ip") if shutil.which(p) is None]
    if missing:
        return f"virtual hosts need {', '.join(missing)} (util-linux, iproute2)"
    trial = (
        "ip link set lo up && ip link add br0 type bridge && "
        "ip link add p0 type veth peer name p1 && mount -t tmpfs tmpfs /mnt"
    )
    done = subprocess.run(
        ["unshare", *_flags("net", "uts", "ipc", "mount", "pid"), "sh", "-c", trial],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return f"no namespaces for virtual hosts here: {done.stderr.strip()[:200]}"
    return ""


def _flags(*kinds: str) -> list[str]:
    flags = [f"--{kind}" for kind in kinds]
    return [*flags, "--fork", "--mount-proc"] if "pid" in kinds else flags


def _do(*command: object) -> None:
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: {done.stderr.strip()}")


class Hosts:
    """Virtual hosts ``node1``, ``node2`` ...

    Args:
        count: how many.
        shm: the size of the /dev/shm of some hosts, by name, as mount takes it.
        read_only_home: names of hosts on which nothing can be written to $HOME.
        elsewhere: names of hosts on which Python and mpidist are used by other paths.
        one_name: whether all hosts say the same name of themselves.

    Attributes:
        names: of the hosts.
        folder: the one folder under /tmp that all of them and this process share.
    """

    def __init__(
        self,
        count: int,
        *,
        shm: Mapping[str, str] | None = None,
        read_only_home: Collection[str] = (),
        elsewhere: Collection[str] = (),
        one_name: bool = False,
    ) -> None:
        self._shm = dict(shm or {})
        self._read_only_home = read_only_home
        self._elsewhere = elsewhere
        self._one_name = one_name
        self.names = [f"node{k}" for k in range(1, count + 1)]
        self.folder = Path(tempfile.mkdtemp(prefix="mpidist-hosts-"))
        self._own = self.folder / ".hosts"
        self._own.mkdir()
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._pids: dict[str, int] = {}
        self._relays: list[subprocess.Popen[bytes]] = []
        try:
            self._write_files()
            self._hold(_SWITCH, _flags("net"), "exec sleep infinity")
            self._switch("ip", "link", "add", "br0", "type", "bridge")
            self._switch("ip", "link", "set", "br0", "up")
            for name in (_HEAD, *self.names):
                self._start(name)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the hosts and all that runs on them."""
        for process in (*self._relays, *self._holders.values()):
            process.kill()
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    # --- making them ------------------------------------------------------------

    def _number(self, name: str) -> int:
        return 0 if name == _HEAD else 1 + self.names.index(name)

    def _address(self, name: str) -> str:
        return f"{_NET}.{10 + self._number(name)}"

    def _write_files(self) -> None:
        lines = ["127.0.0.1 localhost"]
        lines += [f"{self._address(name)} {name}" for name in (_HEAD, *self.names)]
        (self._own / "hosts.txt").write_text("\n".join(lines) + "\n")
        agent = self._own / "agent"  # agent [ssh options] HOST COMMAND...
        agent.write_text(
            "#!/bin/sh\n"
            "while :; do case $1 in -[opliF]) shift 2;; -*) shift;; *) break;; esac;"
            " done\n"
            "host=$1; shift\n"
            f"pid=$(cat {self._own}/pid.$host) || exit 255\n"
            'exec nsenter -t $pid -n -u -i -m -p --wd=/ -- sh -c "$*"\n'
        )
        agent.chmod(0o755)
        # What ranks are started with: this Python, where a host has it.
        (self._own / "python").write_text(
            "#!/bin/sh\n"
            f"if [ -d {_ELSEWHERE} ]; then\n"
            f"  export PYTHONPATH={_ELSEWHERE}/tree\n"
            f'  exec {_ELSEWHERE}/env/bin/python "$@"\n'
            "fi\n"
            f'exec {sys.executable} "$@"\n'
        )
        (self._own / "python").chmod(0o755)

    def _hold(self, name: str, flags: Sequence[str], script: str) -> None:
        """Start the process that holds the namespaces of a host."""
        with (self._own / f"log.{name}").open("wb") as log:
            holder = subprocess.Popen(
                ["unshare", *flags, "--kill-child", "sh", "-c", script],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
                preexec_fn=launching.end_with_parent,
            )
        self._holders[name] = holder
        children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children")
        (found,) = self._await(name, lambda: children.read_text().split())
        self._pids[name] = int(found)
        (self._own / f"pid.{name}").write_text(found)

    def _await(self, name: str, ready: Callable[[], _T]) -> _T:
        """Wait until a function returns something true of a host, and return that."""
        end = time.monotonic() + _READY_SECONDS
        while not (found := ready()):
            if time.monotonic() > end or self._holders[name].poll() is not None:
                text = (self._own / f"log.{name}").read_text()
                raise RuntimeError(f"host {name} did not start: {text}")
            time.sleep(0.01)
        return found

    def _start(self, name: str) -> None:
        ready = self._own / f"ready.{name}"
        shared = [self.folder, *_environments()]
        lines = [
            "set -e",
            f"hostname {'node' if self._one_name and name != _HEAD else name}",
            "ip link set lo up",
            f"mount --bind {self._own}/hosts.txt /etc/hosts",
            f"mount -t tmpfs -o mode=1777,size={self._shm.get(name, '50%')} "
            "tmpfs /dev/shm",
            "mount -t tmpfs tmpfs /mnt",
        ]
        for k, folder in enumerate(shared):
            lines += [f"mkdir /mnt/{k}", f"mount --rbind {folder} /mnt/{k}"]
        lines.append("mount -t tmpfs -o mode=1777 tmpfs /tmp")
        for k, folder in enumerate(shared):
            lines += [f"mkdir -p {folder}", f"mount --move /mnt/{k} {folder}"]
        lines.append("umount /mnt")
        if name in self._elsewhere:
            for new, old in (("env", sys.prefix), ("tree", launching.ROOT)):
                place = f"{_ELSEWHERE}/{new}"
                lines += [f"mkdir -p {place}", f"mount --bind {old} {place}"]
        if name in self._read_only_home:
            home = Path.home().resolve()
            lines += [f"mount --bind {home} {home}", f"mount -o remount,bind,ro {home}"]
        lines.append(f"touch {ready}")
        if name == _HEAD:
            lines.append("exec sleep infinity")  # no child that would outlive it
        else:
            # The first process of a host reaps those that lose their parents.
            lines.append("trap : TERM INT; while :; do sleep 3600 & wait; done")
        # Who enters the ids of a process must be above them: so head shares ours.
        kinds = ["net", "uts", "ipc", "mount", *([] if name == _HEAD else ["pid"])]
        flags = _flags(*kinds)
        if "--fork" not in flags:
            flags.append("--fork")
        self._hold(name, flags, "\n".join(lines))
        self._await(name, ready.exists)
        port, inside = self._port(name), f"{self._address(name)}/24"
        self._switch(
            *("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0"),
            *("netns", self._pids[name]),
        )
        self._switch("ip", "link", "set", port, "master", "br0", "up")
        _do(*self._enter(name), "ip", "addr", "add", inside, "dev", "eth0")
        _do(*self._enter(name), "ip", "link", "set", "eth0", "up")

    def _port(self, name: str) -> str:
        return f"p{self._number(name)}"

    def _enter(self, name: str) -> list[str]:
        kinds = ["-n"]
        if name != _SWITCH:
            kinds += ["-u", "-i", "-m"]
        if name not in (_SWITCH, _HEAD):
            kinds.append("-p")
        return ["nsenter", "-t", str(self._pids[name]), *kinds, "--"]

    def _switch(self, *command: object) -> None:
        _do(*self._enter(_SWITCH), *command)

    # --- what happens to them -----------------------------------------------------

    def cut(self, name: str) -> None:
        """Make the link of a host a black hole: it stays up, and nothing passes."""
        self._switch("ip", "link", "set", self._port(name), "nomaster")

    def heal(self, name: str) -> None:
        """Undo `cut`."""
        self._switch("ip", "link", "set", self._port(name), "master", "br0")

    def shape(self, mbits: int, delay_ms: float = 0.0, lost: float = 0.0) -> str:
        """Give each host's link a rate, a delay in each direction, and losses.

        By `tc`, or where the kernel has no netem, but for the rate, by a relay.

        Args:
            mbits: the rate, in Mbit/s.
            delay_ms: the delay of each frame, in ms.
            lost: the share of the frames that is lost, from 0 to 1.

        Returns:
            What was done, in words.
        """
        rate = f"{mbits}mbit"
        done = f"tbf {rate}"
        for name in self.names:
            queue = ("tc", "qdisc", "replace", "dev", "eth0", "root")
            netem = [*self._enter(name), *queue, "netem", "delay", f"{delay_ms}ms"]
            if delay_ms or lost:
                netem += ["loss", f"{100 * lost}%"]
                what = f"{delay_ms} ms" + (f", {lost:.1%} lost" if lost else "")
                try:
                    _do(*netem, "rate", rate, "limit", 10000)
                    done = f"netem {rate} {what}"
                    continue
                except RuntimeError:
                    self._relay(name, delay_ms, lost)
                    done = f"tbf {rate}, relay {what}"
            tbf = ("tbf", "rate", rate, "burst", "128kb", "latency", "50ms")
            _do(*self._enter(name), *queue, *tbf)
        return done

    def _relay(self, name: str, delay_ms: float, lost: float) -> None:
        """Put a relay between a host's port and the bridge: see `shape`."""
        number = self._number(name)
        self._switch("ip", "link", "set", self._port(name), "nomaster")
        peer = f"r{number}", "type", "veth", "peer", "name", f"s{number}"
        self._switch("ip", "link", "add", *peer)
        self._switch("ip", "link", "set", f"s{number}", "master", "br0", "up")
        self._switch("ip", "link", "set", f"r{number}", "up")
        relay = [sys.executable, str(Path(__file__).with_name("relay.py"))]
        self._relays.append(
            subprocess.Popen(
                [
                    *self._enter(_SWITCH),
                    *relay,
                    self._port(name),
                    f"r{number}",
                    str(delay_ms),
                    str(lost),
                ],
                start_new_session=True,
                preexec_fn=launching.end_with_parent,
            )
        )

    def kill(self, name: str, pid: int, number: int) -> None:
        """Send a signal to a process of a host, by its id there."""
        _do(*self._enter(name), "kill", f"-{number}", str(pid))

    def power_off(self, name: str) -> None:
        """End a host and all its processes; its connections are not closed."""
        self.cut(name)
        self._holders[name].kill()

    # --- jobs ---------------------------------------------------------------------

    @contextlib.contextmanager
    def job(
        self,
        per_host: int | Sequence[int],
        argv: Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str] | None = None,
        hosts: Sequence[str] | None = None,
        cwd: Path | None = None,
        shown: bool = False,
        options: Sequence[str] = (),
        supervised: bool = False,
    ) -> Iterator[Job]:
        """Run this Python on hosts, ``per_host`` ranks on each; end it at the end.

        Args:
            per_host: ranks of each host, or how many each one has.
            argv: what follows ``python``.
            env: environment variables to set on top.
            hosts: names of the hosts; None: all.
            cwd: the folder to run in; None: the shared one.
            shown: whether what it writes goes where this process writes.
            options: of mpirun, such as `launching.ULFM`.
            supervised: start it by `mpidist run`, with its first ranks where that is,
                on a host more.
        """
        names = self.names if hosts is None else list(hosts)
        mark = f"job-{uuid.uuid4().hex}"
        environment = launching.rank_environment(env)
        environment[launching.JOB_MARK] = (
            f"{environment.get(launching.JOB_MARK, '')} {mark}"
        )
        counts = (
            [per_host] * len(names) if isinstance(per_host, int) else list(per_host)
        )
        ranks_of = dict(zip(names, counts, strict=True))
        if supervised:
            ranks_of = {_HEAD: counts[0], **ranks_of}
            command = [sys.executable, "-c", _IMPATIENT, "run"]
        else:
            command = [launching.find_mpirun()]
            if is_intel_mpi():  # otherwise it wants the same ranks on each host
                command += ["-machinefile", str(self._own / "hostfile")]
        environment |= self._settings(ranks_of)
        command += [*options, "-n", str(sum(ranks_of.values()))]
        if not supervised:
            python = str(self._own / "python") if self._elsewhere else sys.executable
            command.append(python)
        folder = self.folder if cwd is None else cwd
        command += [os.fspath(x) for x in argv]
        with (
            launching.output_file() as out,
            launching.output_file() as err,
        ):
            process = subprocess.Popen(
                [*self._enter(_HEAD)[:-1], f"--wd={folder}", "--", *command],
                stdin=subprocess.DEVNULL,
                stdout=None if shown else out,
                stderr=None if shown else err,
                env=environment,
                start_new_session=True,
            )
            try:
                yield Job(process, out, err)
            finally:
                launching.kill_marked(mark)
                process.wait()

    def _settings(self, ranks_of: Mapping[str, int]) -> dict[str, str]:
        """Return the variables that have an mpirun start ranks on hosts.

        The agent hands those of mpirun on to the ranks.
        """
        open_mpi, agent = is_open_mpi(), str(self._own / "agent")
        file = self._own / "hostfile"
        row = "{} slots={}\n" if open_mpi else "{}:{}\n"
        file.write_text("".join(row.format(*one) for one in ranks_of.items()))
        if open_mpi:
            crowded = sum(ranks_of.values()) > (os.cpu_count() or 1)
            return {
                "PRTE_MCA_prte_default_hostfile": str(file),
                "PRTE_MCA_plm_ssh_agent": agent,
                "PRTE_MCA_oob_tcp_if_include": "eth0",
                "PRTE_MCA_rmaps_default_mapping_policy": ":nooversubscribe",
                "PRTE_MCA_hwloc_default_binding_policy": "none",
                "OMPI_MCA_pml": "ob1",
                "OMPI_MCA_btl": "self,sm,tcp",
                "OMPI_MCA_btl_tcp_if_include": "eth0",
                # Each host seems to have a core for each of its ranks, but they are
                # those of the other hosts: a rank that spins keeps others from running,
                # and making a strategy took 15 times as long.
                "OMPI_MCA_mpi_yield_when_idle": str(int(crowded)),
            }
        names = self._own / "names"  # of Intel MPI
        names.write_text("".join(f"{name}\n" for name in ranks_of))
        return {
            "HYDRA_HOST_FILE": str(file),
            "HYDRA_LAUNCHER": "ssh",
            "HYDRA_LAUNCHER_EXEC": agent,
            "I_MPI_HYDRA_HOST_FILE": str(names),
            "I_MPI_PERHOST": str(max(ranks_of.values())),
            "I_MPI_HYDRA_BOOTSTRAP": "ssh",
            "I_MPI_HYDRA_BOOTSTRAP_EXEC": agent,
        }


class Job:
    """An MPI job that runs on virtual hosts."""

    def __init__(
        self, process: subprocess.Popen[bytes], out: IO[str], err: IO[str]
    ) -> None:
        self.process = process
        self._files = (out, err)

    def output(self) -> str:
        """Return what was written so far, by all ranks."""
        texts = []
        for file in self._files:
            # Not by seek: the job writes where this file is at.
            size = os.fstat(file.fileno()).st_size
            texts.append(os.pread(file.fileno(), size, 0).decode(errors="replace"))
        return "\n--- stderr\n".join(texts)

    def wait(self, seconds: float) -> int:
        """Wait for its end; return the exit status of mpirun.

        Raises:
            TimeoutError: if it has not ended.
        """
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise TimeoutError(
                f"the job did not end within {seconds} s:\n{self.output()}"
            ) from None


def is_open_mpi() -> bool:
    """Whether this Python's mpirun is Open MPI's."""
    return launching.mpi_vendor()[0] == "Open MPI"


def is_intel_mpi() -> bool:
    """Whether this Python's mpirun is Intel MPI's."""
    return launching.mpi_vendor()[0] == "Intel MPI"


def _environments() -> list[Path]:
    """The folders under /tmp that the hosts have to see: Python's, and this one's."""
    wanted = {Path(sys.prefix), Path(sys.base_prefix), launching.ROOT}
    return sorted(p.resolve() for p in wanted if Path("/tmp") in p.resolve().parents)
