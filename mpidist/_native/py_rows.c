/* `Rows`: how few ranks meet that share no memory.  Each sends every other one a row: a header,
   and behind it a small payload, if there is one.  So a small reduction takes one exchange
   instead of a header and then a payload: all ranks have the payloads of all, and each adds
   them up in the order of the ranks.

   MPI is known to Python only, which makes the messages, and gives what starts each and what
   tests it; see mpidist/_mpi/headers.py.

   One row for each rank is enough: a rank that has all rows of a header starts the next only
   when it has used them, and what others send for the next stays in MPI until then.  No rank
   can be two headers ahead.

   Ranks whose headers agree have sent payloads of the same length, since ranks that make the
   same call have the same plan. */
#define _GNU_SOURCE
#include "binding.h"

#include <sched.h>
#include <string.h>
#include <structmember.h>

/* How often a rank then yields its core before Python waits, with a deadline.  Ranks may share
   cores without knowing it, as jobs and containers do.  Between two yields MPI needs some tests
   to make progress: of 1 to 64, 4 were good with both MPIs. */
#define YIELDS 500
#define TESTS_BETWEEN 4

static unsigned char *row_of(const Rows *self, int rank) {
  return (unsigned char *)self->memory.buf + (size_t)rank * (sizeof(md_header) + self->room);
}

static int begin(Rows *self) {
  if (require_idle(self->busy)) return -1;
  if (!self->calls || self->active) {
    PyErr_SetString(PyExc_RuntimeError, self->calls ? "Rows: a header was abandoned"
                                                    : "Rows: it is not open");
    return -1;
  }
  self->busy = 1;
  self->start = now();
  return 0;
}

static int end(Rows *self, int status) {
  self->busy = 0;
  self->seconds += now() - self->start;
  return status;
}

/* Take the calls for a row with such a payload; -1: an exception. */
static int take_calls(Rows *self, size_t nbytes) {
  PyObject *key = PyLong_FromSize_t(nbytes);
  if (!key) return -1;
  PyObject *found = Py_XNewRef(PyDict_GetItemWithError(self->calls, key));
  if (!found && !PyErr_Occurred()) found = PyObject_CallOneArg(self->prepare, key);
  Py_DECREF(key);
  PyObject *starts, *tests;
  int status = -1;
  if (found && PyArg_ParseTuple(found, "O!O!", &PyTuple_Type, &starts, &PyTuple_Type, &tests)) {
    Py_XSETREF(self->starts, Py_NewRef(starts));
    Py_XSETREF(self->tests, Py_NewRef(tests));
    status = 0;
  }
  Py_XDECREF(found);
  return status;
}

/* Start the messages.  What is counted is sent: after an exception, such as of a signal, the
   rest is started too. */
static int publish(Rows *self, const md_header *header, const md_small *small) {
  size_t nbytes = small ? small->nest->nbytes : 0;
  if (take_calls(self, nbytes)) return -1;
  unsigned char *row = row_of(self, self->rank);
  memcpy(row, header, sizeof *header);
  if (small) md_small_put(small, row + sizeof *header);
  self->headers++;
  self->active = 1;
  self->done = 0;
  PyObject *type = NULL, *error, *traceback;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->starts); i++) {
    PyObject *none = PyObject_CallNoArgs(PyTuple_GET_ITEM(self->starts, i));
    if (none) Py_DECREF(none);
    else if (type) PyErr_Clear();
    else PyErr_Fetch(&type, &error, &traceback);
  }
  if (!type) return 0;
  PyErr_Restore(type, error, traceback);
  return -1;
}

/* Whether all rows are there, and this rank's was sent; -1: an exception. */
static int test(Rows *self) {
  while (self->active && self->done < PyTuple_GET_SIZE(self->tests)) {
    PyObject *answer = PyObject_CallNoArgs(PyTuple_GET_ITEM(self->tests, self->done));
    int yes = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    if (yes <= 0) return yes;
    self->done++;
  }
  self->active = 0;
  return 1;
}

static int test_some(Rows *self, int tests) {
  int there = 0;
  if (!self->calls) {
    PyErr_SetString(PyExc_RuntimeError, "Rows: it is not open");
    return -1;
  }
  for (int i = 0; i < tests && !there; i++) there = test(self);
  return there;
}

/* Return when all rows are there; -1: an exception. */
static int wait_for_rows(Rows *self) {
  int there = test_some(self, self->first_tests);
  for (int i = 0; !there && (i < YIELDS || !self->wait); i++) {
    Py_BEGIN_ALLOW_THREADS sched_yield();
    Py_END_ALLOW_THREADS
    if (PyErr_CheckSignals()) return -1;
    there = test_some(self, TESTS_BETWEEN);
  }
  if (there) return there < 0 ? -1 : 0;
  PyObject *none = PyObject_CallOneArg(self->wait, (PyObject *)self);
  if (!none) return -1;
  Py_DECREF(none);
  if (!self->active) return 0;
  PyErr_SetString(PyExc_RuntimeError, "Rows: `wait` has not waited");
  return -1;
}

/* The status of the header, all of whose rows are there. */
static int judge(Rows *self) {
  const md_header *headers[self->size];
  for (int r = 0; r < self->size; r++) headers[r] = (const md_header *)row_of(self, r);
  return md_compare(&self->verdict, headers, self->size, self->rank);
}

static int meet(Rows *self, const long long words[WORDS], const md_small *small) {
  if (begin(self)) return -1;
  md_header header = header_with(words, self->start, &self->last);
  if (publish(self, &header, small) || wait_for_rows(self)) return end(self, -1);
  int status = judge(self);
  if (status == MD_OK && small) {
    const unsigned char *payloads[self->size];
    for (int r = 0; r < self->size; r++) payloads[r] = row_of(self, r) + sizeof header;
    md_small_sum(small, payloads, self->rank, self->size, NULL);
  }
  return end(self, status);
}

int rows_reduce(Rows *self, long long fingerprint, long long patience, const md_small *small,
                size_t nbytes) {
  const long long words[WORDS] = {0, fingerprint, 0, 0, patience, MD_NOWHERE};
  int status = meet(self, words, small);
  if (status == MD_OK) {
    self->reductions++;
    self->reduced += nbytes;
  }
  return status;
}

static PyObject *Rows_meet(Rows *self, PyObject *const *args, Py_ssize_t count) {
  long long words[WORDS];
  if (parse_words(args, count, words)) return NULL;
  int status = meet(self, words, NULL);
  return status < 0 ? NULL : PyLong_FromLong(status);
}

static PyObject *Rows_start(Rows *self, PyObject *const *args, Py_ssize_t count) {
  long long words[WORDS];
  if (parse_words(args, count, words) || begin(self)) return NULL;
  md_header header = header_with(words, self->start, &self->last);
  if (end(self, publish(self, &header, NULL))) return NULL;
  Py_RETURN_NONE;
}

static PyObject *Rows_test(Rows *self, PyObject *ignored) {
  (void)ignored;
  int there = test_some(self, TESTS_BETWEEN);
  if (there < 0) return NULL;
  if (!there) Py_RETURN_NONE;
  return PyLong_FromLong(judge(self));
}

static PyObject *Rows_Test(Rows *self, PyObject *ignored) {
  (void)ignored;
  int there = test_some(self, TESTS_BETWEEN);
  return there < 0 ? NULL : PyBool_FromLong(there);
}

static PyObject *Rows_missing(Rows *self, PyObject *ignored) {
  (void)self, (void)ignored;
  return PyList_New(0);
}

static PyObject *Rows_leave(Rows *self, PyObject *ignored) {
  (void)self, (void)ignored;
  Py_RETURN_NONE;
}

static int Rows_init(Rows *self, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"memory", "rank", "size", "tests", "calls", "prepare", NULL};
  PyObject *memory, *calls, *prepare;
  int rank, size, tests;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OiiiO!O", names, &memory, &rank, &size, &tests,
                                   &PyDict_Type, &calls, &prepare))
    return -1;
  if (self->calls) {
    PyErr_SetString(PyExc_RuntimeError, "Rows: it is open already");
    return -1;
  }
  if (PyObject_GetBuffer(memory, &self->memory, PyBUF_WRITABLE)) return -1;
  size_t row = size > 0 ? (size_t)self->memory.len / (size_t)size : 0;
  if (size < 1 || size > MD_MAX_RANKS || rank < 0 || rank >= size || row < sizeof(md_header) ||
      row % ROW_ALIGNMENT || (uintptr_t)self->memory.buf % ROW_ALIGNMENT) {
    PyBuffer_Release(&self->memory);
    PyErr_SetString(PyExc_ValueError, "Rows: memory that is not one of rows");
    return -1;
  }
  self->rank = rank;
  self->size = size;
  self->room = row - sizeof(md_header);
  self->first_tests = tests;
  self->last = now();
  self->calls = Py_NewRef(calls);
  self->prepare = Py_NewRef(prepare);
  return 0;
}

static void Rows_dealloc(Rows *self) {
  if (!self->active) { /* otherwise MPI may still use what the messages are made of */
    if (self->calls) PyBuffer_Release(&self->memory);
    Py_XDECREF(self->calls);
    Py_XDECREF(self->prepare);
    Py_XDECREF(self->starts);
    Py_XDECREF(self->tests);
  }
  Py_XDECREF(self->wait);
  Py_XDECREF(self->pause);
  Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *Rows_get(Rows *self, void *closure) {
  switch (*(const char *)closure) {
    case 'v': return verdict_of(&self->verdict);
    case 'l': return PyFloat_FromDouble(now() - self->last);
    case 'm': return PyLong_FromSize_t(self->room);
    case 'w': return PyLong_FromLong(-1);
    default: return PyLong_FromLong(0);
  }
}

static PyMethodDef Rows_methods[] = {
    {"meet", (PyCFunction)(void *)Rows_meet, METH_FASTCALL,
     "meet(flag, fingerprint, value, largest, patience_ms, result_offset)\n--\n\n"
     "Exchange a header; return OK, AGAIN or DIFFERENT."},
    {"start", (PyCFunction)(void *)Rows_start, METH_FASTCALL,
     "start(flag, fingerprint, value, largest, patience_ms, result_offset)\n--\n\n"
     "Publish a header, without waiting."},
    {"test", (PyCFunction)Rows_test, METH_NOARGS,
     "test()\n--\n\nReturn the status of the header of `start`; None if some are missing."},
    {"Test", (PyCFunction)Rows_Test, METH_NOARGS,
     "Test()\n--\n\nWhether all rows of the last header are there, as of an MPI request."},
    {"missing", (PyCFunction)Rows_missing, METH_NOARGS,
     "missing()\n--\n\nReturn nobody: a message that is not there may be on its way."},
    {"leave", (PyCFunction)Rows_leave, METH_NOARGS,
     "leave()\n--\n\nDo nothing: the ranks that wait learn of it by a notice."},
    {NULL}};
static PyMemberDef Rows_members[] = {
    {"headers", T_LONGLONG, offsetof(Rows, headers), READONLY, "Headers published so far."},
    {"seconds", T_DOUBLE, offsetof(Rows, seconds), READONLY, "Time spent in calls."},
    {"reductions", T_ULONG, offsetof(Rows, reductions), READONLY,
     "Reductions of `RowReduce` so far."},
    {"reduced", T_ULONGLONG, offsetof(Rows, reduced), READONLY,
     "Bytes of this rank's arrays in them."},
    {"wait", T_OBJECT, offsetof(Rows, wait), 0,
     "Called with this object if rows are missing; returns when `Test` has said yes."},
    {"pause", T_OBJECT, offsetof(Rows, pause), 0,
     "For `wait`: to be called with the seconds waited, several times a second; may raise."},
    {NULL}};
static PyGetSetDef Rows_fields[] = {
    {"verdict", (getter)Rows_get, NULL, "What all ranks make of the last header; see `Channel`.",
     "v"},
    {"lateness", (getter)Rows_get, NULL, "Seconds since the last header began.", "l"},
    {"room", (getter)Rows_get, NULL, "The most bytes of a payload.", "m"},
    {"who", (getter)Rows_get, NULL, "No rank: that one has left is known by its notice.", "w"},
    {"gathers", (getter)Rows_get, NULL, "No all-gathers travel with headers.", "g"},
    {"gathered", (getter)Rows_get, NULL, "Bytes of this rank's arrays in them.", "g"},
    {NULL}};
PyTypeObject RowsType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "mpidist._native._core.Rows",
    .tp_doc =
        "Rows(memory, rank, size, tests, calls, prepare)\n--\n\n"
        "Headers of ranks that share no memory.\n\n"
        "Args:\n    memory: a buffer: for each rank a header of LINE bytes, and a payload.\n"
        "    rank: this one.\n    size: the number of ranks.\n"
        "    tests: how often to test before the first yield.\n"
        "    calls: a dict: by the bytes of a payload a tuple of functions that start the\n"
        "        messages, and one of functions that test them.\n"
        "    prepare: makes those for other bytes, and returns them; `calls` then has them.",
    .tp_basicsize = sizeof(Rows),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)Rows_init,
    .tp_dealloc = (destructor)Rows_dealloc,
    .tp_methods = Rows_methods,
    .tp_members = Rows_members,
    .tp_getset = Rows_fields};
