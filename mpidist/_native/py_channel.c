/* `Channel`, and how a call of the core begins, waits and ends; see binding.h. */
#define _GNU_SOURCE
#include "binding.h"

#include <structmember.h>
#include <time.h>

/* --- calls -------------------------------------------------------------------------- */

double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void release_gil(Channel *self) {
  if (!self->released) self->released = PyEval_SaveThread();
}

void acquire_gil(Channel *self) {
  if (self->released) PyEval_RestoreThread(self->released);
  self->released = NULL;
}

static void blocking(void *self) { release_gil(self); }

static int pause_call(void *arg, double seconds) {
  Channel *self = arg;
  acquire_gil(self);
  if (PyErr_CheckSignals()) return 1;
  if (self->pause && self->pause != Py_None) {
    PyObject *result = PyObject_CallFunction(self->pause, "d", seconds);
    if (!result) return 1;
    Py_DECREF(result);
  }
  release_gil(self);
  return 0;
}

int require_idle(int busy) {
  if (!busy) return 0;
  PyErr_SetString(PyExc_RuntimeError,
                  "another thread of this rank, or what a signal has interrupted, is in "
                  "a collective call of this strategy; make the calls of a strategy from "
                  "one thread, one after the other");
  return -1;
}

int begin_call(Channel *self) {
  if (!self->memory) {
    PyErr_SetString(PyExc_RuntimeError, "Channel: it is not open");
    return -1;
  }
  if (require_idle(self->busy)) return -1;
  self->busy = 1;
  self->start = now();
  return 0;
}

int finish_call(Channel *self, int status) {
  acquire_gil(self);
  self->busy = 0;
  self->seconds += now() - self->start;
  return status == MD_STOPPED ? -1 : status; /* -1: pause has raised */
}

PyObject *end_call(Channel *self, int status) {
  status = finish_call(self, status);
  return status < 0 ? NULL : PyLong_FromLong(status);
}

void put_item(PyObject **list, Py_ssize_t i, PyObject *item) {
  if (!item) Py_CLEAR(*list);
  else if (PyList_Check(*list)) PyList_SET_ITEM(*list, i, item);
  else PyTuple_SET_ITEM(*list, i, item);
}

int parse_words(PyObject *const *args, Py_ssize_t count, long long words[WORDS]) {
  if (count != WORDS) {
    PyErr_Format(PyExc_TypeError, "header: expected %d arguments", WORDS);
    return -1;
  }
  for (int i = 0; i < WORDS; i++) {
    words[i] = PyLong_AsLongLong(args[i]);
    if (words[i] == -1 && PyErr_Occurred()) return -1;
  }
  return 0;
}

md_header header_with(const long long words[WORDS], double start, double *last) {
  double lateness = 1e3 * (start - *last);
  *last = start;
  return (md_header){.flag = (int32_t)words[FLAG],
                     .lateness = lateness < INT32_MAX ? (int32_t)lateness : INT32_MAX,
                     .fingerprint = words[FINGERPRINT],
                     .value = words[VALUE],
                     .patience = words[PATIENCE] > 0 ? words[PATIENCE] : INT64_MAX,
                     .largest = words[LARGEST],
                     .result_offset = words[RESULT_OFFSET],
                     .source_offset = MD_NOWHERE};
}

md_header header_of(Channel *self, long long fingerprint, long long patience) {
  const long long words[WORDS] = {0, fingerprint, 0, 0, patience, MD_NOWHERE};
  return header_with(words, self->start, &self->last);
}

PyObject *verdict_of(const md_verdict *v) {
  return Py_BuildValue("iiiiL", v->flag, v->same_call, v->same_value, v->results_in_arena,
                       (long long)v->largest);
}

static int Channel_init(Channel *self, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"memory",      "size",    "rank",  "area_bytes",
                          "arena_bytes", "crowded", "spins", NULL};
  Memory *memory;
  int size, rank, crowded, spins;
  Py_ssize_t area, arena;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!iinnpi", names, &MemoryType, &memory, &size,
                                   &rank, &area, &arena, &crowded, &spins))
    return -1;
  if (self->memory || size < 1 || size > MD_MAX_RANKS || rank < 0 || rank >= size ||
      area <= 0 || area % PAGE || arena < 0 || arena % PAGE ||
      (size_t)memory->nbytes < md_lay_out(size, (size_t)area, (size_t)arena).total_bytes) {
    PyErr_SetString(PyExc_ValueError, "Channel: sizes that do not fit the memory");
    return -1;
  }
  self->memory = (Memory *)Py_NewRef(memory);
  self->last = now();
  md_open(&self->channel, memory->start, size, rank, (size_t)area, (size_t)arena, crowded,
          spins);
  self->channel.hooks = (md_hooks){blocking, pause_call, self};
  return 0;
}

static void Channel_dealloc(Channel *self) {
  Py_XDECREF(self->memory);
  Py_XDECREF(self->pause);
  Py_TYPE(self)->tp_free((PyObject *)self);
}

static int parse_header(Channel *self, PyObject *const *args, Py_ssize_t count,
                        md_header *header) {
  long long words[WORDS];
  if (parse_words(args, count, words) || begin_call(self)) return -1;
  *header = header_with(words, self->start, &self->last);
  return 0;
}

static PyObject *Channel_meet(Channel *self, PyObject *const *args, Py_ssize_t count) {
  md_header header;
  if (parse_header(self, args, count, &header)) return NULL;
  return end_call(self, md_meet(&self->channel, &header, NULL));
}

static PyObject *Channel_start(Channel *self, PyObject *const *args, Py_ssize_t count) {
  if (parse_header(self, args, count, &self->started)) return NULL;
  md_start(&self->channel, &self->started, NULL);
  return end_call(self, MD_OK);
}

static PyObject *Channel_test(Channel *self, PyObject *ignored) {
  md_channel *ch = &self->channel;
  (void)ignored;
  if (!md_all_reached(ch)) Py_RETURN_NONE;
  return PyLong_FromLong(md_judge(ch, &self->started, NULL));
}

static PyObject *Channel_verdict(Channel *self, void *closure) {
  (void)closure;
  return verdict_of(&self->channel.verdict);
}

static PyObject *Channel_publish(Channel *self, PyObject *ignored) {
  (void)ignored;
  md_publish(&self->channel);
  Py_RETURN_NONE;
}

static PyObject *Channel_wait(Channel *self, PyObject *ignored) {
  (void)ignored;
  if (begin_call(self)) return NULL;
  return end_call(self, md_wait(&self->channel));
}

static PyObject *Channel_missing(Channel *self, PyObject *ignored) {
  md_channel *ch = &self->channel;
  (void)ignored;
  PyObject *list = PyList_New(0);
  for (int r = 0; list && r < ch->size; r++) {
    if (md_reached(ch, r)) continue;
    PyObject *number = PyLong_FromLong(r);
    if (!number || PyList_Append(list, number)) Py_CLEAR(list);
    Py_XDECREF(number);
  }
  return list;
}

static PyObject *Channel_leave(Channel *self, PyObject *ignored) {
  (void)ignored;
  md_leave(&self->channel);
  Py_RETURN_NONE;
}

static PyObject *Channel_post(Channel *self, PyObject *args) {
  Py_buffer data;
  if (!PyArg_ParseTuple(args, "y*", &data)) return NULL;
  if (data.len > MD_MESSAGE_BYTES) {
    PyBuffer_Release(&data);
    return PyErr_Format(PyExc_ValueError, "post: at most %d bytes", MD_MESSAGE_BYTES);
  }
  if (begin_call(self)) {
    PyBuffer_Release(&data);
    return NULL;
  }
  md_channel *ch = &self->channel;
  int status = MD_OK;
  while (!md_try_post(ch, data.buf, (uint32_t)data.len))
    if ((status = md_wait_room(ch, (uint32_t)data.len))) break;
  PyObject *result = end_call(self, status); /* which holds the GIL again */
  PyBuffer_Release(&data);
  return result;
}

static PyObject *Channel_take(Channel *self, PyObject *ignored) {
  uint32_t nbytes = 0;
  (void)ignored;
  if (begin_call(self)) return NULL;
  PyObject *result = end_call(self, md_wait_message(&self->channel, &nbytes));
  if (!result || PyLong_AsLong(result) != MD_OK) return result;
  Py_DECREF(result);
  result = PyBytes_FromStringAndSize(NULL, nbytes);
  if (!result) return NULL;
  md_take(&self->channel, PyBytes_AS_STRING(result), nbytes);
  return result;
}

static PyObject *Channel_broadcast(Channel *self, PyObject *args) {
  PyObject *object, *result = NULL;
  Py_buffer data;
  int root;
  if (!PyArg_ParseTuple(args, "Oi", &object, &root)) return NULL;
  if (root < 0 || root >= self->channel.size)
    return PyErr_Format(PyExc_ValueError, "broadcast: there is no rank %d", root);
  int flags = root == self->channel.rank ? PyBUF_SIMPLE : PyBUF_WRITABLE;
  if (PyObject_GetBuffer(object, &data, flags)) return NULL;
  if (!begin_call(self)) {
    release_gil(self);
    result = end_call(self, md_broadcast(&self->channel, data.buf, (size_t)data.len, root));
  }
  PyBuffer_Release(&data);
  return result;
}

/* Where things are in the memory, for arrays that view them. */
static PyObject *Channel_arena(Channel *self, PyObject *rank) {
  long r = PyLong_AsLong(rank);
  if (r == -1 && PyErr_Occurred()) return NULL;
  if (r < 0 || r >= self->channel.size)
    return PyErr_Format(PyExc_ValueError, "arena: there is no rank %ld", r);
  return PyLong_FromSsize_t(self->channel.arenas[r] - self->channel.memory);
}

static PyObject *Channel_sums(Channel *self, PyObject *number) {
  long n = PyLong_AsLong(number);
  if (n == -1 && PyErr_Occurred()) return NULL;
  md_channel *ch = &self->channel;
  return PyLong_FromSsize_t(ch->sums + (n & 1) * (Py_ssize_t)ch->area_bytes - ch->memory);
}

static PyObject *Channel_lateness(Channel *self, void *closure) {
  (void)closure;
  return PyFloat_FromDouble(now() - self->last);
}

static PyObject *Channel_moves(Channel *self, void *closure) {
  (void)self, (void)closure;
  Py_RETURN_FALSE;
}

static PyMethodDef Channel_methods[] = {
    {"meet", (PyCFunction)(void *)Channel_meet, METH_FASTCALL,
     "meet(flag, fingerprint, value, largest, patience_ms, result_offset)\n--\n\n"
     "Exchange a header; return OK, AGAIN, DIFFERENT or LEFT."},
    {"start", (PyCFunction)(void *)Channel_start, METH_FASTCALL,
     "start(flag, fingerprint, value, largest, patience_ms, result_offset)\n--\n\n"
     "Publish a header, without waiting."},
    {"test", (PyCFunction)Channel_test, METH_NOARGS,
     "test()\n--\n\nReturn the status of the header of `start`; None if some are missing."},
    {"publish", (PyCFunction)Channel_publish, METH_NOARGS,
     "publish()\n--\n\nSay that this rank has made a step."},
    {"wait", (PyCFunction)Channel_wait, METH_NOARGS,
     "wait()\n--\n\nWait until all ranks have made this step; return OK or LEFT."},
    {"missing", (PyCFunction)Channel_missing, METH_NOARGS,
     "missing()\n--\n\nReturn the ranks that have not made this rank's last step."},
    {"leave", (PyCFunction)Channel_leave, METH_NOARGS,
     "leave()\n--\n\nTell all ranks that this one makes no more steps."},
    {"post", (PyCFunction)Channel_post, METH_VARARGS,
     "post(data)\n--\n\nSend a message from rank 0; return OK or LEFT."},
    {"take", (PyCFunction)Channel_take, METH_NOARGS,
     "take()\n--\n\nReturn the next message of rank 0; or LEFT."},
    {"broadcast", (PyCFunction)Channel_broadcast, METH_VARARGS,
     "broadcast(buffer, root)\n--\n\nCopy the root's bytes to all ranks; return OK or LEFT."},
    {"arena", (PyCFunction)Channel_arena, METH_O,
     "arena(rank)\n--\n\nReturn where the arena of a rank is in the memory."},
    {"sums", (PyCFunction)Channel_sums, METH_O,
     "sums(number)\n--\n\nReturn where an area for the sums of pieces is in the memory."},
    {NULL}};
static PyMemberDef Channel_members[] = {
    {"headers", T_UINT, offsetof(Channel, channel.headers), READONLY, "Headers exchanged so far."},
    {"areas_used", T_UINT, offsetof(Channel, channel.areas_used), READONLY,
     "Piece areas used so far."},
    {"who", T_INT, offsetof(Channel, channel.who), READONLY, "The rank that has left."},
    {"seconds", T_DOUBLE, offsetof(Channel, seconds), READONLY, "Time spent in calls."},
    {"tree", T_INT, offsetof(Channel, channel.tree), READONLY,
     "Whether ranks wait by a tree of counters."},
    {"pause", T_OBJECT, offsetof(Channel, pause), 0,
     "Called with the seconds waited, after each slice of a wait; may raise."},
    {"reductions", T_ULONG, offsetof(Channel, reductions), READONLY,
     "Reductions of `Reduce` so far."},
    {"reduced", T_ULONGLONG, offsetof(Channel, reduced), READONLY,
     "Bytes of this rank's arrays in them."},
    {"gathers", T_ULONG, offsetof(Channel, gathers), READONLY, "All-gathers of `Gather` so far."},
    {"gathered", T_ULONGLONG, offsetof(Channel, gathered), READONLY,
     "Bytes of this rank's arrays in them."},
    {"results_in_arena", T_ULONG, offsetof(Channel, results_in_arena), READONLY,
     "Reductions whose results were written straight to the arenas."},
    {"sources_in_arena", T_ULONG, offsetof(Channel, sources_in_arena), READONLY,
     "Reductions whose arrays were read where they are, in the arenas."},
    {NULL}};
static PyGetSetDef Channel_fields[] = {
    {"verdict", (getter)Channel_verdict, NULL,
     "What all ranks make of the last header: flag, same_call, same_value, results_in_arena,\n"
     "largest.",
     NULL},
    {"lateness", (getter)Channel_lateness, NULL, "Seconds since the last header began.", NULL},
    {"moves", (getter)Channel_moves, NULL,
     "False: while data move, steps say which ranks are missing.", NULL},
    {NULL}};
PyTypeObject ChannelType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "mpidist._native._core.Channel",
    .tp_doc =
        "Channel(memory, size, rank, area_bytes, arena_bytes, crowded, spins)\n--\n\n"
        "One rank's view of the memory that the ranks of a node share.",
    .tp_basicsize = sizeof(Channel),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)Channel_init,
    .tp_dealloc = (destructor)Channel_dealloc,
    .tp_methods = Channel_methods,
    .tp_members = Channel_members,
    .tp_getset = Channel_fields};
