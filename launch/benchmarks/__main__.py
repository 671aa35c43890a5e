"""`mpidist bench` with the benchmarks that only developers need.

    mpirun -n 2 python launch/benchmarks [NAME ...] [options of mpidist bench]

NAME is one of `mpidist bench`, or `networks` (ResNet-50 and BERT-base) or `commits` (of
an elastic training).
"""

import sys

import networks
import trainings

from mpidist._cli import bench_command

MORE = {"networks": networks.networks, "commits": trainings.commits}

sys.exit(bench_command.bench(sys.argv[1:], {**bench_command.CASES, **MORE}))
