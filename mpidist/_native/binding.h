/* What the files of the binding share.  These are all that know Python:

   - py_memory.c: `Memory`, a file that is mapped; `Pool` and `Slot`, parts of it;
   - py_channel.c: how a call begins, waits and ends; `Channel`, headers in shared memory;
   - py_between.c: `Between`, headers between ranks that share no memory;
   - py_reduce.c: `Reduce`, the all-reduce of a nest;
   - py_gather.c: `Gather`, the all-gather of a nest;
   - py_calls.c: `CallState` and `ArrayCall`, a call with a small array without Python in
     between;
   - core.c: the module.

   While a rank waits, other threads of its process run (the GIL is released), and after
   each slice of a wait Python's signal handlers do, and `Channel.pause`, which may raise.
   What another rank does, or fails to do, is a value that a call returns.

   Of CPython only what 3.11 to 3.14 have, in the same form.  NumPy's own arrays are read and
   made by its C API, since the buffer protocol costs 60 ns for each, and `numpy.empty` 140. */
#ifndef MPIDIST_BINDING_H
#define MPIDIST_BINDING_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL mpidist_array_api
#ifndef IMPORTS_NUMPY
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>

#include "algorithms.h"
#include "guess.h"

#define PAGE 4096

typedef struct Memory {
  PyObject_HEAD
  unsigned char *start;
  Py_ssize_t nbytes;
  int is_private; /* of this process, and of no file */
  int fd;         /* -1: none, or this is a forked child */
  struct Memory *before, *after; /* of those that are mapped files */
} Memory;

/* What carries headers: a Channel or a Between, which both begin with it. */
typedef struct {
  PyObject_HEAD
  int rank, size;
  int busy;           /* a call is under way, which began at `start` */
  int active, moves;  /* requests of MPI in progress; whether they are of data */
  int lends;          /* whether MPI has arrays of the caller then */
  double start, last; /* of this header, and of the one before */
  double seconds;     /* spent in calls */
  PyObject *pause;
  PyThreadState *released; /* of its thread, while it has given the GIL away */
  md_header *verdict;      /* of the last header */
  unsigned long reductions, gathers;    /* all that `Reduce` and `Gather` have done */
  unsigned long long reduced, gathered; /* bytes of this rank's arrays in them */
} Carrier;

typedef struct {
  Carrier carrier;
  Memory *memory;
  unsigned long results_in_arena, sources_in_arena; /* calls of `Reduce.run` so far */
  md_channel channel;
} Channel;

#define PAYLOAD_ALIGNMENT 16 /* of leaves behind a header of `Between`: what all dtypes need */

typedef int (*mpi_iallreduce)(const void *, void *, int, intptr_t, intptr_t, intptr_t, void *);
typedef int (*mpi_iallgather)(const void *, int, intptr_t, void *, int, intptr_t, intptr_t, void *);
#define MOST_REQUESTS 64

/* Data that MPI moves. */
typedef struct {
  md_data data;
  const unsigned char *from;
  unsigned char *to;
} Transfer;

typedef struct Between {
  Carrier carrier;
  Py_buffer sent, received; /* elements: a header each, and room for a payload */
  int merges; /* MPI merges the elements of all into one; otherwise all have those of all */
  size_t room, share; /* of a payload; of a rank's part of one that all gather */
  int64_t key;                       /* by which `md_between_op` finds it */
  void *persistent, *status; /* an MPI_Request, NULL where MPI has no such ones; an MPI_Status */
  int (*mpi_start)(void *), (*mpi_test)(void *, int *, void *);
  PyObject *address_of, *fail, *owner, *wait;
  struct {
    mpi_iallreduce iallreduce;
    mpi_iallgather iallgather;
    intptr_t comm, byte, element, op; /* handles */
  } mpi;
  md_guesses guesses;
  int64_t next_kind, kind; /* for `guesses`: of the call that begins, if it has one; in progress */
  const Transfer *offer; /* data of the call that begins, if they are expected */
  int went;              /* whether the data of the last header went with it */
  unsigned char *other;  /* memory of no meaning for a call that was not expected */
  /* Of the header, or the data, in progress: of its `active` requests. */
  int next, awaited;             /* how many have completed; of those of which `Test` tells */
  void *pending[MOST_REQUESTS];  /* where they are */
  intptr_t requests[MOST_REQUESTS];
  unsigned char *scratch; /* for data */
  size_t scratch_bytes;
  const md_nest *small;
  int64_t fingerprint;
  PyObject *keeper;
  int first_tests, tests; /* before the first yield; before each later one */
  unsigned long sleeper; /* the thread that leaves its core while it waits; 0: none */
  long long headers;
  unsigned long iallreduces, iallgathers;
  md_header verdict;
  struct Between *sibling; /* of those that merge */
} Between;

/* How MPI reduces a leaf that has no room behind its header. */
typedef struct {
  intptr_t datatype, op; /* handles */
} MoveLeaf;

/* How a nest moves then: see mpidist/_mpi/allreduce_algorithm.py. */
typedef struct {
  MoveLeaf *leaves; /* NULL: it does not */
  int gathers, in_flight;
  size_t piece_bytes;
} MovePlan;

/* What the guard knows of the calls of a strategy; see mpidist/_agreement/call_state.py. */
typedef struct {
  PyObject_HEAD
  PyObject *call, *previous;         /* of this rank */
  PyObject *timeout, *usual_timeout; /* seconds; of this call, and of those that name none */
  long long sequence;                /* headers that completed */
  unsigned long mover;               /* the thread that moves data by Python; 0: none does */
  char blocked;                      /* no call may begin before Python has looked */
  char cut_off;                      /* an exception came in the middle of a call */
} CallState;

/* The arrays of a call that is under way: of this rank, and for results. */
typedef struct {
  PyObject **arrays;
  int count;
} Kept;

/* What an array must be, to be a leaf. */
typedef struct {
  char kind; /* NumPy's: of bfloat16 'V' */
  npy_intp itemsize;
  int ndim;
  npy_intp *shape;
} Expected;

typedef struct {
  PyObject_HEAD
  Carrier *carrier; /* one of the next two; the other is NULL */
  Channel *channel;
  Between *between;
  md_nest nest;
  Expected *expected;
  long long fingerprint, timeout_ms; /* of calls that name no others */
  md_shared call; /* between `start` and the last piece, for those who go step by step */
  Kept kept;
  const void **sources;
  void **results;
  MovePlan move;
  size_t payload; /* bytes of all leaves */
  size_t room;    /* of a nest that travels with its header */
  int counts;     /* whether the carrier counts it */
} Reduce;

/* Reduce with one header, or behind it, from and to C-contiguous, aligned memory; return the
   status, or -1 with an exception. */
int reduce_small(Reduce *self, const void *const *sources, void *const *results,
                 long long fingerprint, long long timeout_ms);

/* Leaf i of rank r has `length` rows of `row` bytes, `before` times; in the result the
   rows of all ranks follow each other. */
typedef struct {
  size_t before, row;
} GatherLeaf;

typedef struct {
  PyObject_HEAD
  Carrier *carrier; /* as of `Reduce` */
  Channel *channel;
  Between *between;
  int count;
  GatherLeaf *leaves;
  int64_t *lengths; /* of this rank's leaves, in a call */
  md_rows *parts;   /* their memory, and where it goes */
  Kept kept;
  uint32_t number;                 /* of the header with the lengths */
  long long fingerprint, timeout_ms; /* of calls that name no others */
  char filled;                     /* whether the last call has filled its results */
  md_leaf whole; /* where headers are merged: the parts of all ranks */
  md_nest nest;  /* which it is */
} Gather;

/* The length of the result for which `gather_one` needs memory, with the one leaf of this length;
   0: it travels with its header. */
Py_ssize_t gather_needs(const Gather *self, Py_ssize_t length);
/* Gather the one leaf, C-contiguous and of this length on this rank; return the status, or -1 with
   an exception.  If `filled` is set then, the result is in `result`. */
int gather_one(Gather *self, const void *source, Py_ssize_t length, void *result);
/* The length of the result otherwise; -1: the array of some rank did not fit. */
Py_ssize_t gathered_length(const Gather *self);
void gather_to(const Gather *self, int leaf, unsigned char *out);

/* `core.detach`, for the child of a fork. */
PyObject *detach_memories(PyObject *module, PyObject *nothing);

extern PyTypeObject MemoryType, PoolType, SlotType, CarrierType, ChannelType, BetweenType,
    ReduceType, GatherType, CallStateType, ArrayCallType;

/* TYPE_new, for tp_new, of TYPE_init: no object is half made, or made twice. */
PyObject *make_object(PyTypeObject *type, PyObject *args, PyObject *kwargs, initproc init);
#define MADE_BY_INIT(TYPE)                                                              \
  static PyObject *TYPE##_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {   \
    return make_object(type, args, kwargs, (initproc)TYPE##_init);                      \
  }

void open_carrier(Carrier *self, int rank, int size, md_header *verdict);
/* Begin a call: -1 with an exception if one is under way.  And end it: return its status, or -1
   where `pause` has raised. */
int begin_call(Carrier *self);
int end_call(Carrier *self, int status);
/* A status for Python; NULL for -1. */
PyObject *status_or_null(int status);
/* -1 with an exception if a call is under way: for what would change that. */
int require_idle(int busy);
/* Keep an array, and return its memory; NULL: it is none of NumPy's, or with a ValueError it is not
   C-contiguous, or not writable though it is to be written.  And let go of all that were kept. */
void *keep_array(Kept *kept, PyObject *x, int is_written);
void let_go(Kept *kept);
/* None after a ValueError of an array that is not what a call expects: nothing was sent, and the
   caller copies it.  Other exceptions stay. */
PyObject *other_arrays(void);
/* In a call that takes long other threads of this process may run; a second call does nothing. */
void release_gil(Carrier *self);
void acquire_gil(Carrier *self);
/* The arguments of `Carrier.meet`.  And the header that they ask for, of a call that has begun. */
enum { FLAG, FINGERPRINT, VALUE, LARGEST, TIMEOUT_MS, RESULT_OFFSET, WORDS };
md_header header_with(Carrier *self, const long long words[WORDS]);
/* A call that is a header, with what `small` adds to it; return the status, or -1 with an
   exception.  `keeper` keeps the nest of `small`, whose sources and results may be NULL: its bytes
   are in the room behind the header already, and stay there. */
int meet_ranks(Carrier *self, const long long words[WORDS], const md_small *small,
               PyObject *keeper);
/* The same between nodes.  Publish a header; -1: an exception.  And its status, once it is there;
   MISSING: not yet. */
int between_meet(Between *self, const md_header *header, const md_small *small, PyObject *keeper);
int between_start(Between *self, const md_header *header);
int between_test(Between *self);
enum { MISSING = -2 };
/* Allocate what `plan` needs for a nest that has no room behind its header; -1: an exception.  And
   exchange a header, and reduce the nest; return the status, or -1 with an exception.  `kind`: of
   calls with this nest, of which each may have a fingerprint of its own that contains it. */
int between_reserve(Between *self, const MovePlan *plan, const md_nest *nest);
int between_reduce(Between *self, const MovePlan *plan, const long long words[WORDS],
                   const md_small *small, int64_t kind, PyObject *keeper);
/* The room for this rank's part of a payload that all gather, and the part of a rank: where headers
   are merged each has a share of the room, and the others leave it 0. */
unsigned char *between_own_part(const Between *self);
const unsigned char *between_part(const Between *self, int rank);
/* Offer `nbytes` of each rank to be gathered with the next header, in `offer`; and gather them
   behind it, if they did not go; -1: an exception. */
void between_offer(Between *self, Transfer *offer, int64_t fingerprint, const void *from,
                   void *rows, size_t nbytes);
int between_gather(Between *self, const void *from, void *rows, size_t nbytes);
/* Whether a call was broken off while MPI was moving data: MPI may still write to its results, and
   read its arrays. */
int is_abandoned(const Carrier *self);
void md_between_op(void *from, void *to, int *len, void *datatype);

#endif
