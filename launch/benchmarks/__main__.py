"""`mpidist bench` with the benchmarks that only developers need.

    mpirun -n 2 python launch/benchmarks [NAME ...] [options of mpidist bench]

NAME is one of `mpidist bench`, or

- `nest`: the sums of many arrays in one call;
- `reduce`: the sum of a Python number;
- `update`: sums of gradients, and the update of 20 variables in merge_fn;
- `strategy`: making an MPIStrategy;
- `networks`: the gradients of ResNet-50 and BERT-base;
- `commits`: those of an elastic training.
"""

import sys

import calls
import nests
import trainings

from mpidist._cli import bench_command

MORE = (
    *(nests.nest, calls.reduce, calls.update, calls.strategy),
    *(nests.networks, trainings.commits),
)
CASES = {**bench_command.CASES, **{case.__name__: case for case in MORE}}

sys.exit(bench_command.bench(sys.argv[1:], CASES, calls.first_strategy))
