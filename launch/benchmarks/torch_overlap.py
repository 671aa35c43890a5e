"""Times steps of torch in one job: mpidist with and without overlap, DDP with gloo.

    torch_overlap.py [HOSTS [MBITS [STEPS [MB...]]]]

makes HOSTS virtual hosts (2) of one rank each, at MBITS (1000; 0: without limit), with
the MPI of this Python's environment, and prints a table of medians, in milliseconds, of
the slowest rank; steps of each kind alternate, at most STEPS (20). The hosts are those
of tests/hosts.py: Linux namespaces, which take root. On a cluster, or on one node, run
the ranks yourself:

    mpirun -n 2 python launch/benchmarks/torch_overlap.py --rank STEPS [MB...]

*alone* is a step without other ranks, *reduction* that of the gradients without a step;
the rows are chosen so that the first is 0.5, 1 or 4 times the second. *hidden* is the
part of what can be hidden: (alone + reduction - step) / min(backward pass, reduction).

The virtual hosts have the settings that mpidist gives Open MPI; gloo has its own TCP.
"""

import copy
import itertools
import shutil
import socket
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MBITS = 1000
JOB_SECONDS = 1200.0
CASE_SECONDS = 20.0
# Width and depth of the layers, by the megabytes of their gradients.
SHAPES = {4: (512, 4), 17: (1024, 4), 100: (2048, 6)}
COMPUTES = (0.5, 1.0, 4.0)
WARM_UP = 3


def main() -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    import hosts

    from mpidist._mpi.library import OPEN_MPI_SETTINGS

    count = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    mbits = int(sys.argv[2]) if len(sys.argv) > 2 else MBITS
    rest = sys.argv[3:] or ["20"]
    problem = hosts.why_not()
    if problem:
        sys.exit(problem)
    machines = hosts.Hosts(count)
    try:
        shape = machines.shape(mbits) if mbits else "without limit"
        print(f"{count} hosts: {shape}", flush=True)
        program = machines.folder / "torch_overlap.py"
        shutil.copy(__file__, program)
        env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        env |= OPEN_MPI_SETTINGS
        argv = [str(program), "--rank", *rest]
        with machines.job(1, argv, env=env, shown=True) as job:
            status = job.wait(JOB_SECONDS)
        if status:
            sys.exit(f"the job ended with status {status}")
    finally:
        machines.close()


def run_rank(steps: int, sizes: list[int]) -> None:
    import torch
    from mpi4py import MPI
    from torch import distributed

    comm = MPI.COMM_WORLD
    torch.set_num_threads(1)
    address = None
    if comm.rank == 0:
        with socket.socket() as one:
            one.bind(("", 0))
            address = (_own_address(), one.getsockname()[1])
    host, port = comm.bcast(address)
    distributed.init_process_group(
        "gloo", init_method=f"tcp://{host}:{port}", rank=comm.rank, world_size=comm.size
    )
    if comm.rank == 0:
        print(
            "| gradients, rows | alone | reduction | DDP | overlap=False | True "
            "| over DDP: False | True | hidden |\n" + "| --- " * 9 + "|",
            flush=True,
        )
    for megabytes in sizes:
        case = Case(comm, *SHAPES[megabytes])
        for compute in COMPUTES:
            row = case.measure(compute, steps)
            if comm.rank == 0:
                print(row, flush=True)
        case.strategy.close()
    distributed.destroy_process_group()


def _own_address() -> str:
    """Return the address by which other hosts find this one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        try:
            one.connect(("10.77.0.1", 9))  # sends nothing
            return str(one.getsockname()[0])
        except OSError:
            return socket.gethostbyname(socket.gethostname())


class Case:
    """A module, and the ways to step."""

    def __init__(self, comm, width, depth):
        import torch
        from torch.nn.parallel import DistributedDataParallel

        import mpidist
        import mpidist.torch

        self.comm, self.width = comm, width
        torch.manual_seed(0)
        layers = (
            (torch.nn.Linear(width, width), torch.nn.ReLU()) for _ in range(depth)
        )
        module = torch.nn.Sequential(*itertools.chain.from_iterable(layers))
        self.nbytes = sum(p.nbytes for p in module.parameters())
        self.strategy = mpidist.MPIStrategy()
        self.backward = []

        def make_step(make_module, make_optimizer):
            net = make_module(copy.deepcopy(module))
            optimizer = make_optimizer(torch.optim.SGD(net.parameters(), lr=1e-4))

            def step():
                optimizer.zero_grad()
                loss = net(self.x).square().mean()
                start = time.perf_counter()
                loss.backward()
                self.backward.append(time.perf_counter() - start)
                optimizer.step()

            return net, step

        def ours(overlap):
            return lambda optimizer: mpidist.torch.DistributedOptimizer(
                optimizer, strategy=self.strategy, overlap=overlap
            )

        def same(x):
            return x

        def ddp(net):
            return DistributedDataParallel(net, bucket_cap_mb=4)

        net, self.alone = make_step(same, same)
        self.ways = [
            self.alone,
            lambda: mpidist.torch.all_reduce_gradients(net, strategy=self.strategy),
            make_step(ddp, same)[1],
            make_step(same, ours(False))[1],
            make_step(same, ours(True))[1],
        ]

    def set_rows(self, rows):
        import torch

        self.x = torch.randn(rows, self.width)

    def seconds(self, way):
        from mpi4py import MPI

        self.comm.Barrier()
        start = time.perf_counter()
        way()
        return self.comm.allreduce(time.perf_counter() - start, MPI.MAX)

    def choose_rows(self, compute):
        """Choose the rows with which a step takes ``compute`` times a reduction."""
        times = []
        few, many = 32, 256
        for rows in few, many:
            self.set_rows(rows)
            times.append(min(self.seconds(self.alone) for _ in range(4)))
        wanted = compute * min(self.seconds(self.ways[1]) for _ in range(4))
        each = max((times[1] - times[0]) / (many - few), 1e-7)
        self.set_rows(max(1, round(few + (wanted - times[0]) / each)))

    def measure(self, compute, steps):
        """Return a row of the table."""
        self.choose_rows(compute)
        first = [self.seconds(way) for way in self.ways]
        steps = max(5, min(steps, int(CASE_SECONDS / sum(first))))
        times = [[] for _ in self.ways]
        backward = []
        for number in range(steps + WARM_UP):
            for i in range(len(self.ways)):
                k = (i + number) % len(self.ways)
                seconds = self.seconds(self.ways[k])
                if number >= WARM_UP:
                    times[k].append(seconds)
                    backward += self.backward[-1:] if k == 0 else []
        alone, reduction, ddp, plain, overlap = map(statistics.median, times)
        most = min(statistics.median(backward), reduction)
        hidden = (alone + reduction - overlap) / most
        cells = [f"{1e3 * x:.1f}" for x in (alone, reduction, ddp, plain, overlap)]
        cells += [f"{plain / ddp:.2f}", f"{overlap / ddp:.2f}", f"{100 * hidden:.0f} %"]
        what = f"{self.nbytes / 1e6:.1f} MB, {len(self.x)}"
        return f"| {' | '.join([what, *cells])} |"


if "--rank" in sys.argv:
    numbers = [int(x) for x in sys.argv[sys.argv.index("--rank") + 1 :]]
    run_rank(numbers[0], numbers[1:] or list(SHAPES))
else:
    main()
