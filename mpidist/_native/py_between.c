/* `Between`: how ranks meet that share no memory.  Each header is one MPI collective, of one
   element for each rank: a header, and behind it room for a small payload.  The element is always
   of the same size, so ranks whose calls differ make the same call of MPI, and meet here.

   Two ways, chosen by the number of ranks:
   - *rows*: an all-gather.  Every rank has the elements of all, compares them, and adds up the
     payloads from rank 0 upwards;
   - *merged*: an all-reduce by `md_between_op`, which merges two headers and adds two payloads.
     MPI adds in a tree over the ranks in their order, and gives the result to all.

   A payload without room follows as collectives of its own (`move`), when the headers agree; or
   goes with the header, if the ranks expect it (guess.h).

   No mpi.h: Python makes the request of the headers (mpidist/_mpi/between.py), and gives the
   addresses of MPI's functions and the values of its handles.  In every ABI of MPI a handle is an
   int or a pointer, and on x86-64 and aarch64 either is passed as one word, like an intptr_t.

   One header is in progress at a time: a rank that gives up on one never starts another. */
#define _GNU_SOURCE
#include "binding.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <structmember.h>

/* How often a rank yields its core before Python waits, with a deadline.  Ranks may share cores
   without knowing it, as jobs and containers do.  Between two yields MPI needs some tests to make
   progress. */
#define YIELDS 500

/* Those that merge: an op of MPI knows nothing but the elements, so these have a key.  The lock is
   for the list: MPI calls the op in any thread, also without Python's lock. */
static Between *merging;
static pthread_mutex_t merging_lock = PTHREAD_MUTEX_INITIALIZER;

/* --- the elements ---------------------------------------------------------------------- */

static unsigned char *payload_of(const Between *self, int rank) {
  unsigned char *rows = self->received.buf;
  return rows + (self->merges ? 0 : (size_t)rank * (sizeof(md_header) + self->room)) +
         sizeof(md_header);
}

const unsigned char *between_part(const Between *self, int rank) {
  return payload_of(self, rank) + (self->merges ? (size_t)rank * self->share : 0);
}

static unsigned char *room_of(const Between *self) {
  return (unsigned char *)self->sent.buf + sizeof(md_header);
}

unsigned char *between_own_part(const Between *self) {
  if (!self->merges) return room_of(self);
  memset(room_of(self), 0, self->room);
  return room_of(self) + (size_t)self->carrier.rank * self->share;
}

static void add_payload(const md_nest *nest, const unsigned char *a, unsigned char *b) {
  for (int i = 0; i < nest->count; i++) {
    const md_leaf *leaf = &nest->leaves[i];
    const void *sources[2] = {a + leaf->start, b + leaf->start};
    void *sum = b + leaf->start;
    md_reduce(leaf->kernel, &sum, 1, sources, 2, leaf->nbytes / md_itemsize(leaf->kernel), 0);
  }
}

/* MPI_User_function: adds `from`, of the lower ranks, and `to` into `to`.  MPI calls it in the
   calls of this process; not always in one that tests this header. */
void md_between_op(void *from, void *to, int *len, void *datatype) {
  (void)datatype;
  const md_header *other = from;
  md_header *header = to;
  pthread_mutex_lock(&merging_lock);
  const Between *self = merging;
  while (self && self->key != header->source_offset) self = self->sibling;
  pthread_mutex_unlock(&merging_lock); /* a header is in progress, so it stays */
  if (!self || *len != 1) {            /* not ours: cannot be */
    header->flags |= MD_OTHER_CALL;
    return;
  }
  md_merge(header, other);
  if (header->flags & (MD_FAILED | MD_OTHER_CALL)) return;
  if (self->small && self->fingerprint == header->fingerprint)
    add_payload(self->small, (const unsigned char *)from + sizeof *other,
                (unsigned char *)to + sizeof *header);
}

/* --- a header ------------------------------------------------------------------------- */

/* -1 with an exception of MPI. */
static int failed(Between *self, int code) {
  PyObject *none = PyObject_CallFunction(self->fail, "i", code);
  Py_XDECREF(none);
  if (!PyErr_Occurred()) PyErr_Format(PyExc_RuntimeError, "Between: MPI error %d", code);
  return -1;
}

/* Start the collective; -1: an exception, and it was not started. */
static int start_collective(Between *self) {
  void *request = &self->requests[0], *sent = self->sent.buf, *received = self->received.buf;
  intptr_t element = self->mpi.element, comm = self->mpi.comm;
  int code;
  if (self->persistent) code = self->mpi_start(request = self->persistent);
  else if (self->merges)
    code = self->mpi.iallreduce(sent, received, 1, element, self->mpi.op, comm, request);
  else code = self->mpi.iallgather(sent, 1, element, received, 1, element, comm, request);
  self->pending[0] = request;
  return code ? failed(self, code) : 0;
}

/* Memory for what MPI sends and receives; NULL: an exception. */
static unsigned char *scratch_of(Between *self, size_t nbytes) {
  if (self->scratch_bytes >= nbytes) return self->scratch;
  unsigned char *memory = NULL;
  if (posix_memalign((void **)&memory, MD_LINE, nbytes)) {
    PyErr_NoMemory();
    return NULL;
  }
  /* Another thread may make a plan in a call of this one: then it is leaked. */
  if (!self->carrier.busy && !self->carrier.active) free(self->scratch);
  self->scratch = memory;
  self->scratch_bytes = nbytes;
  return memory;
}

int between_reserve(Between *self, const MovePlan *plan, const md_nest *nest) {
  if (!plan->leaves || nest->nbytes <= self->room) return 0;
  size_t copies = nest->count > 1 ? 2 : 0;
  if (plan->gathers) copies += (size_t)self->carrier.size;
  return copies && !scratch_of(self, copies * nest->nbytes) ? -1 : 0;
}

static intptr_t *next_request(Between *self) {
  if (self->carrier.active == MOST_REQUESTS) {
    PyErr_SetString(PyExc_RuntimeError, "Between: too many kinds of leaves");
    return NULL;
  }
  intptr_t *request = &self->requests[self->carrier.active];
  *request = 0;
  self->pending[self->carrier.active] = request;
  return request;
}

/* Start a transfer: an all-reduce goes in pieces. */
static int start_transfer(Between *self, const Transfer *move) {
  const md_data *data = &move->data;
  intptr_t byte = self->mpi.byte, comm = self->mpi.comm;
  size_t nbytes = data->nbytes, pieces = data->gathers ? 1 : nbytes / data->piece_bytes;
  if (pieces > (size_t)data->in_flight) pieces = (size_t)data->in_flight;
  if (!pieces) pieces = 1;
  size_t step = (nbytes / pieces + MD_LINE - 1) / MD_LINE * MD_LINE;
  for (size_t at = 0; at < nbytes; at += step) {
    size_t length = nbytes - at < step ? nbytes - at : step;
    intptr_t *request = next_request(self);
    if (!request) return -1;
    int code = data->gathers ? self->mpi.iallgather(move->from, (int)length, byte, move->to,
                                                    (int)length, byte, comm, request)
                             : self->mpi.iallreduce(move->from + at, move->to + at,
                                                    (int)(length / data->itemsize),
                                                    data->datatype, data->op, comm, request);
    if (code) return failed(self, code);
    self->carrier.active++;
    ++*(data->gathers ? &self->iallgathers : &self->iallreduces);
  }
  return 0;
}

/* With the header that was started, start the data that all ranks expect: of `offer`, if they are
   its own; -1: an exception. */
static int start_early(Between *self, const Transfer *offer) {
  const md_habit *guess = md_guess(&self->guesses);
  if (!guess) return 0;
  Transfer other = {guess->data, self->other, self->other + guess->data.nbytes};
  self->carrier.lends = offer != NULL;
  return start_transfer(self, offer ? offer : &other);
}

/* Publish a header, whose payload is in its room already.  `nest`: of a payload to be added, which
   `keeper` keeps while MPI may call the op. */
static int publish(Between *self, const md_header *header, const md_nest *nest,
                   PyObject *keeper) {
  md_header *sent = self->sent.buf;
  const Transfer *offer = self->offer;
  self->kind = self->next_kind ? self->next_kind : header->fingerprint;
  self->offer = NULL;
  self->next_kind = 0;
  if (self->carrier.active) {
    PyErr_SetString(PyExc_RuntimeError, "Between: a header was abandoned");
    return -1;
  }
  *sent = *header;
  if (self->merges) sent->source_offset = self->key;
  self->small = nest;
  self->fingerprint = header->fingerprint;
  Py_XSETREF(self->keeper, Py_XNewRef(keeper));
  if (start_collective(self)) return -1;
  self->headers++;
  self->next = 0;
  self->carrier.active = 1;
  int wrong = start_early(self, offer);
  self->awaited = self->carrier.active;
  return wrong;
}

/* Whether the first `awaited` requests have completed; -1: an exception. */
static int test_some(Between *self, int tests) {
  for (int i = 0; i < tests && self->carrier.active && self->next < self->awaited; i++) {
    int done = 0, code = self->mpi_test(self->pending[self->next], &done, self->status);
    if (code) return failed(self, code);
    if (done && ++self->next == self->carrier.active) self->carrier.active = 0;
  }
  return !self->carrier.active || self->next >= self->awaited;
}

/* Linux lets a thread that yields wait for as long as others may run at a time, a millisecond or
   more; one that sleeps it wakes in time. */
static int most_yields(const Between *self, int most) {
  return self->sleeper && self->sleeper == PyThread_get_thread_ident() ? 0 : most;
}

/* Return when they have; -1: an exception. */
static int wait_for(Between *self, int awaited) {
  self->awaited = awaited;
  int there = test_some(self, self->first_tests), yields = most_yields(self, YIELDS);
  for (int i = 0; !there && (i < yields || !self->wait); i++) {
    Py_BEGIN_ALLOW_THREADS sched_yield();
    Py_END_ALLOW_THREADS;
    if (PyErr_CheckSignals()) return -1;
    there = test_some(self, self->tests);
  }
  if (there) return there < 0 ? -1 : 0;
  PyObject *none = PyObject_CallOneArg(self->wait, (PyObject *)self);
  if (!none) return -1;
  Py_DECREF(none);
  if (!self->carrier.active || self->next >= awaited) return 0;
  PyErr_SetString(PyExc_RuntimeError, "Between: `wait` has not waited");
  return -1;
}

/* Return when the header has completed, and what went with it; -1: an exception. */
static int wait_for_header(Between *self) {
  int all = self->carrier.active;
  if (all > 1) {
    if (wait_for(self, 1)) return -1;
    self->carrier.moves = self->carrier.lends;
  }
  return wait_for(self, all);
}

/* The status of the header, which has completed. */
static int judge(Between *self) {
  memcpy(&self->verdict, self->received.buf, sizeof(md_header));
  for (int r = 0; r < (self->merges ? 0 : self->carrier.size); r++)
    md_merge(&self->verdict, (const md_header *)(payload_of(self, r) - sizeof(md_header)));
  int status = md_status_of(&self->verdict);
  self->went = status == MD_OK && self->carrier.lends;
  self->carrier.moves = self->carrier.lends = 0;
  md_note(&self->guesses, status == MD_OK ? self->kind : 0);
  return status;
}

/* Add up payloads; or take one, in which MPI has done all but the division. */
static void take_sum(const md_small *small, const unsigned char *const *payloads, int count) {
  md_small_sum(small, payloads, count, NULL);
  for (int i = 0; count == 1 && i < small->nest->count; i++)
    md_unify_nans(small->nest->leaves[i].kernel, small->results[i], small->nest->leaves[i].nbytes);
}

static void take_payload(Between *self, const md_small *small) {
  int count = self->merges ? 1 : self->carrier.size;
  const unsigned char *payloads[count];
  for (int r = 0; r < count; r++) payloads[r] = payload_of(self, r);
  take_sum(small, payloads, count);
}

/* --- data behind a header ------------------------------------------------------------- */

/* The transfer of the leaves of one kind from number *i on, which becomes that of the next kind. */
static Transfer next_transfer(const MovePlan *plan, const Transfer *whole, const md_nest *nest,
                              int *i) {
  const md_leaf *first = &nest->leaves[*i];
  const MoveLeaf *kind = &plan->leaves[*i];
  size_t stop = first->start;
  /* With the bytes between them, which nobody reads. */
  for (; *i < nest->count && plan->leaves[*i].datatype == kind->datatype &&
         plan->leaves[*i].op == kind->op;
       ++*i)
    stop = nest->leaves[*i].start + nest->leaves[*i].nbytes;
  return (Transfer){.data = {.nbytes = stop - first->start,
                             .piece_bytes = plan->piece_bytes,
                             .itemsize = md_itemsize(first->kernel),
                             .datatype = kind->datatype,
                             .op = kind->op,
                             .in_flight = plan->in_flight},
                    .from = whole->from + first->start,
                    .to = whole->to + first->start};
}

static Transfer gather_of(const void *from, void *rows, size_t nbytes) {
  return (Transfer){.data = {.nbytes = nbytes, .gathers = 1}, .from = from, .to = rows};
}

/* Where a nest moves from and to, and the first of its transfers; whether there is only one. */
static int lay_out_transfer(const Between *self, const MovePlan *plan, const md_small *small,
                            Transfer *whole, Transfer *first) {
  const md_nest *nest = small->nest;
  int copied = nest->count > 1, i = 0;
  /* One leaf is the caller's array, which ends with its last element. */
  size_t row = copied ? nest->nbytes : nest->leaves[0].nbytes;
  unsigned char *behind = self->scratch + (copied ? row : 0);
  *whole = gather_of(copied ? self->scratch : small->sources[0],
                     copied || plan->gathers ? behind : small->results[0], row);
  *first = *whole;
  if (plan->gathers) return 1;
  *first = next_transfer(plan, whole, nest, &i);
  return i == nest->count;
}

/* Start to move a nest that had no room. */
static int start_moving(Between *self, const MovePlan *plan, const md_nest *nest,
                        const Transfer *whole) {
  if (plan->gathers) return start_transfer(self, whole);
  for (int i = 0; i < nest->count;) {
    const Transfer move = next_transfer(plan, whole, nest, &i);
    if (start_transfer(self, &move)) return -1;
  }
  return 0;
}

/* Wait for data that were started, unless something went wrong; -1: an exception. */
static int end_moving(Between *self, int wrong) {
  if (!wrong && self->carrier.active) wrong = wait_for(self, self->carrier.active);
  if (wrong) { /* no other header: MPI may use memory */
    if (!self->carrier.active) self->carrier.active = 1;
    return -1;
  }
  self->carrier.moves = 0;
  return 0;
}

static int begin_moving(Between *self) {
  if (begin_call(&self->carrier)) return -1;
  self->carrier.active = self->next = 0;
  self->carrier.moves = 1;
  return 0;
}

/* Whether such data may go with a header. */
static int may_be_early(const Between *self, const md_data *data) {
  size_t moved = data->nbytes * (data->gathers ? (size_t)self->carrier.size : 1);
  return moved <= MD_MOST_GUESSED;
}

static void learn(Between *self, const md_data *data) {
  if (may_be_early(self, data)) md_learn(&self->guesses, data);
}

/* Before the header of a call of this kind: its data go with it if ranks expect them. */
static int offer_data(Between *self, int64_t kind, const Transfer *data) {
  const md_habit *guess = md_guess(&self->guesses);
  self->next_kind = kind;
  if (!guess || guess->call != kind || !md_is_same(&guess->data, &data->data)) return 0;
  self->offer = data;
  return 1;
}

void between_offer(Between *self, Transfer *offer, int64_t fingerprint, const void *from,
                   void *rows, size_t nbytes) {
  *offer = gather_of(from, rows, nbytes);
  offer_data(self, fingerprint, offer);
}

int between_gather(Between *self, const void *from, void *rows, size_t nbytes) {
  const Transfer move = gather_of(from, rows, nbytes);
  int wrong = 0;
  if (!self->went) {
    if (begin_moving(self)) return -1;
    wrong = end_call(&self->carrier, end_moving(self, start_transfer(self, &move)));
  }
  if (!wrong) learn(self, &move.data);
  return wrong;
}

int between_reduce(Between *self, const MovePlan *plan, const long long words[WORDS],
                   const md_small *small, int64_t kind, PyObject *keeper) {
  if (require_idle(self->carrier.busy || self->carrier.active)) return -1;
  const md_nest *nest = small->nest;
  Transfer whole, first;
  int one = lay_out_transfer(self, plan, small, &whole, &first);
  unsigned char *packed = nest->count > 1 ? self->scratch : NULL;
  if (!one) self->next_kind = kind;
  else if (offer_data(self, kind, &first) && packed) md_small_put(small, packed);
  int status = meet_ranks(&self->carrier, words, NULL, keeper);
  if (status != MD_OK) return status;
  int count = plan->gathers ? self->carrier.size : 1;
  const unsigned char *payloads[count];
  for (int r = 0; r < count; r++) payloads[r] = whole.to + (size_t)r * whole.data.nbytes;
  if (!self->went) {
    if (packed) md_small_put(small, packed);
    if (begin_moving(self)) return -1;
    /* The sums are MPI's own: they must not depend on the state of this thread. */
    md_float_state before = md_enter_default_state();
    int wrong = end_moving(self, start_moving(self, plan, nest, &whole));
    md_leave_default_state(before);
    if (end_call(&self->carrier, wrong)) return -1;
  }
  take_sum(small, payloads, count);
  if (one) learn(self, &first.data);
  return MD_OK;
}

/* --- headers alone, and for Python ----------------------------------------------------------- */

int between_meet(Between *self, const md_header *header, const md_small *small, PyObject *keeper) {
  if (small && small->sources) md_small_put(small, room_of(self));
  md_float_state before = md_enter_default_state(); /* for data that go with the header */
  int wrong =
      publish(self, header, small ? small->nest : NULL, keeper) || wait_for_header(self);
  md_leave_default_state(before);
  if (wrong) return -1;
  int status = judge(self);
  if (status == MD_OK && small && small->results) take_payload(self, small);
  return status;
}

int between_start(Between *self, const md_header *header) {
  return publish(self, header, NULL, NULL);
}

int between_test(Between *self) {
  int there = test_some(self, self->tests);
  if (there < 0) return -1;
  return there ? judge(self) : MISSING;
}

static PyObject *Between_Test(Between *self, PyObject *ignored) {
  (void)ignored;
  int there = test_some(self, self->tests);
  return there < 0 ? NULL : PyBool_FromLong(there);
}

/* Of a request that is not of a header: a wait of Python's, without Python code while it is short. */
static PyObject *Between_complete(Between *self, PyObject *pending) {
  PyObject *address = PyObject_CallOneArg(self->address_of, pending);
  void *request = address ? PyLong_AsVoidPtr(address) : NULL;
  Py_XDECREF(address);
  if (!request) return NULL;
  int yields = most_yields(self, YIELDS / 8); /* Python looks at its clock in between */
  for (int i = 0;; i++) {
    for (int k = 0; k < self->tests; k++) {
      int done = 0, code = self->mpi_test(request, &done, self->status);
      if (code) {
        failed(self, code);
        return NULL;
      }
      if (done) Py_RETURN_TRUE;
    }
    if (i >= yields) Py_RETURN_FALSE;
    Py_BEGIN_ALLOW_THREADS sched_yield();
    Py_END_ALLOW_THREADS;
    if (PyErr_CheckSignals()) return NULL;
  }
}

static void forget(Between *self) {
  pthread_mutex_lock(&merging_lock);
  Between **at = &merging;
  while (*at && *at != self) at = &(*at)->sibling;
  if (*at) *at = self->sibling;
  pthread_mutex_unlock(&merging_lock);
}

static int Between_init(Between *self, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"sent",       "received", "rank",   "size",      "tests",
                          "key",        "request",  "status", "functions", "handles",
                          "address_of", "fail",     "owner",  NULL};
  PyObject *sent, *received, *address_of, *fail, *owner;
  unsigned long long request, status, start, test, iallreduce, iallgather;
  unsigned long long comm, byte, element_type, op;
  int rank, size, first_tests, tests;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOii(ii)LKK(KKKK)(KKKK)OOO", names, &sent,
                                   &received, &rank, &size, &first_tests, &tests, &self->key,
                                   &request, &status, &start, &test, &iallreduce, &iallgather,
                                   &comm, &byte, &element_type, &op, &address_of, &fail,
                                   &owner))
    return -1;
  if (PyObject_GetBuffer(sent, &self->sent, PyBUF_WRITABLE) ||
      PyObject_GetBuffer(received, &self->received, PyBUF_WRITABLE))
    return -1;
  size_t element = (size_t)self->sent.len, all = (size_t)self->received.len;
  uintptr_t ends = (uintptr_t)self->sent.buf | (uintptr_t)self->received.buf;
  self->merges = all == element && size > 1;
  if (rank < 0 || rank >= size || element < sizeof(md_header) || ends % MD_LINE ||
      element % MD_LINE || (!self->merges && all != element * (size_t)size)) {
    PyErr_SetString(PyExc_ValueError, "Between: memory that is not one of elements");
    return -1;
  }
  /* Only a wrong guess touches it: `MD_MOST_GUESSED` for results, and less for what is sent. */
  self->other = calloc(2, MD_MOST_GUESSED);
  if (!self->other) {
    PyErr_NoMemory();
    return -1;
  }
  open_carrier(&self->carrier, rank, size, &self->verdict);
  self->room = element - sizeof(md_header);
  self->share = self->merges ? self->room / (size_t)size / 8 * 8 : self->room;
  self->first_tests = first_tests;
  self->tests = tests;
  self->persistent = (void *)(uintptr_t)request;
  self->status = (void *)(uintptr_t)status;
  self->mpi_start = (int (*)(void *))(uintptr_t)start;
  self->mpi_test = (int (*)(void *, int *, void *))(uintptr_t)test;
  self->mpi.iallreduce = (mpi_iallreduce)(uintptr_t)iallreduce;
  self->mpi.iallgather = (mpi_iallgather)(uintptr_t)iallgather;
  self->mpi.comm = (intptr_t)comm;
  self->mpi.byte = (intptr_t)byte;
  self->mpi.element = (intptr_t)element_type;
  self->mpi.op = (intptr_t)op;
  self->address_of = Py_NewRef(address_of);
  self->fail = Py_NewRef(fail);
  self->owner = Py_NewRef(owner);
  if (self->merges) {
    pthread_mutex_lock(&merging_lock);
    self->sibling = merging;
    merging = self;
    pthread_mutex_unlock(&merging_lock);
  }
  return 0;
}

MADE_BY_INIT(Between)

static void Between_dealloc(Between *self) {
  if (self->carrier.active) return; /* leaked: MPI may still use all of it, and call the op */
  forget(self);
  PyBuffer_Release(&self->sent); /* of which some may not be there: `Between_init` has failed */
  PyBuffer_Release(&self->received);
  Py_XDECREF(self->address_of);
  Py_XDECREF(self->fail);
  Py_XDECREF(self->keeper);
  Py_XDECREF(self->owner);
  Py_XDECREF(self->wait);
  Py_XDECREF(self->carrier.pause);
  free(self->scratch);
  free(self->other);
  Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef Between_methods[] = {
    {"Test", (PyCFunction)Between_Test, METH_NOARGS,
     "Test()\n--\n\nWhether the last header has completed, as of an MPI request."},
    {"complete", (PyCFunction)Between_complete, METH_O,
     "complete(request)\n--\n\n"
     "Return whether a request of mpi4py has completed: when it has, or after a while."},
    {NULL}};
static PyMemberDef Between_members[] = {
    {"headers", T_LONGLONG, offsetof(Between, headers), READONLY, "Headers published so far."},
    {"iallreduces", T_ULONG, offsetof(Between, iallreduces), READONLY,
     "Calls of MPI_Iallreduce so far."},
    {"iallgathers", T_ULONG, offsetof(Between, iallgathers), READONLY,
     "Calls of MPI_Iallgather so far."},
    {"room", T_PYSSIZET, offsetof(Between, room), READONLY, "The most bytes of a payload."},
    {"share", T_PYSSIZET, offsetof(Between, share), READONLY,
     "That of this rank's part of one that all gather."},
    {"merges", T_INT, offsetof(Between, merges), READONLY, "Whether MPI merges the headers."},
    {"sleeper", T_ULONG, offsetof(Between, sleeper), 0,
     "The identifier of the thread that leaves its core while it waits, which others need; 0: "
     "none."},
    {"wait", T_OBJECT, offsetof(Between, wait), 0,
     "Called with this object if a header takes long; returns when `Test` has said yes."},
    {NULL}};
PyTypeObject BetweenType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "mpidist._native._core.Between",
    .tp_doc =
        "Between(sent, received, rank, size, tests, key, request, status, functions, handles,\n"
        "        address_of, fail, owner)\n--\n\n"
        "Headers of ranks that share no memory, each an MPI collective.\n\n"
        "Args:\n    sent: a buffer for this rank's element.\n"
        "    received: for the elements of all ranks, or for the one that MPI merges.\n"
        "    rank: this one.\n    size: the number of ranks.\n"
        "    tests: how often to test before the first yield, and before each later one.\n"
        "    key: the same on all ranks; of no other `Between` of this process that merges.\n"
        "    request: the address of a persistent request; 0 without one.\n"
        "    status: the address of an MPI_Status.\n"
        "    functions: the addresses of MPI_Start, MPI_Test, MPI_Iallreduce and\n"
        "        MPI_Iallgather.\n"
        "    handles: of the communicator, of MPI_BYTE, of the datatype of an element, and of\n"
        "        the operation that merges two of them (0 without one).\n"
        "    address_of: returns the address of a request.\n"
        "    fail: called with an error code of MPI; raises.\n"
        "    owner: what to keep until no header is in progress.",
    .tp_basicsize = sizeof(Between),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_base = &CarrierType,
    .tp_new = Between_new,
    .tp_dealloc = (destructor)Between_dealloc,
    .tp_methods = Between_methods,
    .tp_members = Between_members};
