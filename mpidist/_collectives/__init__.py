"""Collectives: for each call a plan that moves arrays, made once for its signature.

The face, one object for all callers:

- ``collectives``: `Collectives`: the all-reduce, and all classes below together, and
  the order of the routes;
- ``resources``: what every collective uses: ranks, guard, options, transports;
- ``copies``: one job each of `broadcast`, `share`, `collect`, ...; ``observed``: what
  observers are told.

From a call to a plan:

- ``plan``: what a plan is, and the steps that all have; the cache of plans;
- ``plans``, ``all_gather``: the arguments of all-reduces and all-gathers, and the plan;
- ``core_routes``: *eager* and *shared*, through the memory of one node;
- ``hierarchical_route``: *hierarchical*, through the memory of each of several nodes;
- ``between_route``: *between*, with or behind headers that are collectives of MPI;
- ``bucket_route``: *nccl* and *direct*, of arrays on GPUs; and *mpi*, which takes
  everything, also between nodes;
- ``staged_route``: *staged*, of arrays on GPUs, by the routes of host arrays;
- ``core_gather``, ``mpi_gather``: the plans of all-gathers.

What they use:

- ``node``: the memory that the ranks of a node share, and how they come to share it;
- ``nodes``: how several nodes exchange their sums, and a strategy's share of both;
- ``transports``, ``nccl``: move one flat buffer; ``staged``: by way of the host, with
  all waits for copies of GPUs; ``transport_choice`` chooses them;
- ``dtype_table``, ``compression``, ``pool``, ``bits``: operations by dtype, sums as
  16-bit floats, memory for results, whether MPI gives all ranks the same bits.
"""
