"""Who am I, and how many are we?

    mpirun -n 4 python examples/hello.py

Every rank runs this program, and is one replica.
"""

import mpidist


def hello():
    context = mpidist.get_replica_context()
    me, n = context.replica_id_in_sync_group, context.num_replicas_in_sync
    print(f"hello from replica {me} of {n}, on {context.devices[0]}", flush=True)
    total = context.all_reduce("SUM", me + 1)
    if me == 0:
        print(f"the sum of 1 to {n} is {total}")


def main():
    mpidist.MPIStrategy().run(hello)


if __name__ == "__main__":
    main()
