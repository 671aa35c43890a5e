"""Times steps of torch in one job: mpidist with and without overlap, DDP with gloo.

    torch_overlap.py [HOSTS [STEPS]]

makes HOSTS virtual hosts (2) of one rank each, at 1 Gbit/s and 0.2 ms, with the MPI of
this Python's environment, and prints a table of medians, in milliseconds, of the
slowest rank; steps of each kind alternate. The hosts are those of tests/hosts.py:
Linux namespaces, which take root. On a cluster run the ranks yourself:

    mpirun -n 2 python launch/benchmarks/torch_overlap.py --rank STEPS

Open MPI's TCP moves one direction at a time unless OMPI_MCA_btl_tcp_flags=1, which is
set on the virtual hosts.
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
MBITS, DELAY_MS = 1000, 0.2
JOB_SECONDS = 1200.0
# Width and depth of the layers, and rows of each rank: gradients of 4, 17 and 100 MB.
CASES = [
    (512, 4, 256),
    (1024, 4, 32),
    (1024, 4, 256),
    (1024, 4, 1024),
    (2048, 6, 64),
]


def main() -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    import hosts

    count = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    steps = sys.argv[2] if len(sys.argv) > 2 else "30"
    problem = hosts.why_not()
    if problem:
        sys.exit(problem)
    machines = hosts.Hosts(count)
    try:
        print(f"{count} hosts: {machines.shape(MBITS, DELAY_MS)}", flush=True)
        program = machines.folder / "torch_overlap.py"
        shutil.copy(__file__, program)
        env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        env["OMPI_MCA_btl_tcp_flags"] = "1"
        argv = [str(program), "--rank", steps]
        with machines.job(1, argv, env=env, shown=True) as job:
            status = job.wait(JOB_SECONDS)
        if status:
            sys.exit(f"the job ended with status {status}")
    finally:
        machines.close()


def run_rank(steps: int) -> None:
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
        print("| gradients | alone | DDP | mpidist | overlap | over DDP | overlap |")
        print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for case in CASES:
        times = measure(comm, *case, steps)
        if comm.rank == 0:
            alone, ddp, plain, overlap = (1e3 * statistics.median(x) for x in times[1:])
            print(
                f"| {times[0][0] / 1e6:.1f} MB, {case[2]} rows | {alone:.1f} | "
                f"{ddp:.1f} | {plain:.1f} | {overlap:.1f} | "
                f"{plain / ddp:.2f} | {overlap / ddp:.2f} |",
                flush=True,
            )
    distributed.destroy_process_group()


def _own_address() -> str:
    """Return the address by which other hosts find this one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        try:
            one.connect(("10.77.0.1", 9))  # sends nothing
            return str(one.getsockname()[0])
        except OSError:
            return socket.gethostbyname(socket.gethostname())


def measure(comm, width, depth, rows, steps):
    """Return the bytes of the gradients, and the seconds of each way to step."""
    import torch
    from mpi4py import MPI
    from torch.nn.parallel import DistributedDataParallel

    import mpidist
    import mpidist.torch

    torch.manual_seed(0)
    layers = ((torch.nn.Linear(width, width), torch.nn.ReLU()) for _ in range(depth))
    module = torch.nn.Sequential(*itertools.chain.from_iterable(layers))
    nbytes = sum(p.nbytes for p in module.parameters())
    x = torch.randn(rows, width)
    strategy = mpidist.MPIStrategy()

    def make_step(make_module, make_optimizer):
        net = make_module(copy.deepcopy(module))
        optimizer = make_optimizer(torch.optim.SGD(net.parameters(), lr=1e-4))

        def step():
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()

        return step

    def ours(overlap):
        return lambda optimizer: mpidist.torch.DistributedOptimizer(
            optimizer, strategy=strategy, overlap=overlap
        )

    def same(x):
        return x

    ways = [
        make_step(same, same),
        make_step(lambda m: DistributedDataParallel(m, bucket_cap_mb=4), same),
        make_step(same, ours(False)),
        make_step(same, ours(True)),
    ]
    times = [[] for _ in ways]
    for number in range(steps + 3):
        for i in range(len(ways)):
            k = (i + number) % len(ways)
            comm.Barrier()
            start = time.perf_counter()
            ways[k]()
            seconds = comm.allreduce(time.perf_counter() - start, MPI.MAX)
            if number >= 3:
                times[k].append(seconds)
    strategy.close()
    return [[nbytes], *times]


if "--rank" in sys.argv:
    run_rank(int(sys.argv[sys.argv.index("--rank") + 1]))
else:
    main()
