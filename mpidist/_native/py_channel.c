/* How a call of the core begins, waits and ends; and `Channel`: see binding.h. */
#include "binding.h"

#include <structmember.h>

/* --- calls -------------------------------------------------------------------------- */

PyObject *make_object(PyTypeObject *type, PyObject *args, PyObject *kwargs, initproc init) {
  PyObject *self = type->tp_alloc(type, 0);
  if (self && init(self, args, kwargs)) Py_CLEAR(self);
  return self;
}

void release_gil(Carrier *self) {
  if (!self->released) self->released = PyEval_SaveThread();
}

void acquire_gil(Carrier *self) {
  if (self->released) PyEval_RestoreThread(self->released);
  self->released = NULL;
}

static void blocking(void *self) { release_gil(self); }

static int pause_call(void *arg, double seconds) {
  Carrier *self = arg;
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

int begin_call(Carrier *self) {
  if (require_idle(self->busy)) return -1;
  self->busy = 1;
  self->start = md_now();
  return 0;
}

int end_call(Carrier *self, int status) {
  acquire_gil(self);
  self->busy = 0;
  self->seconds += md_now() - self->start;
  return status == MD_STOPPED ? -1 : status; /* -1: pause has raised */
}

PyObject *status_or_null(int status) { return status < 0 ? NULL : PyLong_FromLong(status); }

void *keep_array(Kept *kept, PyObject *x, int is_written) {
  if (!PyArray_Check(x)) {
    PyErr_SetString(PyExc_TypeError, "expected an array of NumPy's");
    return NULL;
  }
  PyArrayObject *array = (PyArrayObject *)x;
  if (!PyArray_IS_C_CONTIGUOUS(array) || (is_written && !PyArray_ISWRITEABLE(array))) {
    PyErr_SetString(PyExc_ValueError, "expected a C-contiguous array; a result must be writable");
    return NULL;
  }
  kept->arrays[kept->count++] = Py_NewRef(x);
  return PyArray_DATA(array);
}

void let_go(Kept *kept) {
  while (kept->count > 0) Py_DECREF(kept->arrays[--kept->count]);
}

PyObject *other_arrays(void) {
  if (!PyErr_ExceptionMatches(PyExc_ValueError)) return NULL;
  PyErr_Clear();
  Py_RETURN_NONE;
}

/* --- Carrier: what `Channel` and `Between` have in common -------------------------------- */

void open_carrier(Carrier *self, int rank, int size, md_header *verdict) {
  self->rank = rank;
  self->size = size;
  self->verdict = verdict;
  self->last = md_now();
}

md_header header_with(Carrier *self, const long long words[WORDS]) {
  double lateness = 1e3 * (self->start - self->last);
  self->last = self->start;
  return (md_header){.flags = (int32_t)words[FLAG],
                     .lateness = lateness < INT32_MAX ? (int32_t)lateness : INT32_MAX,
                     .fingerprint = words[FINGERPRINT],
                     .value = words[VALUE],
                     .timeout_ms = words[TIMEOUT_MS] > 0 ? words[TIMEOUT_MS] : INT64_MAX,
                     .largest = words[LARGEST],
                     .result_offset = words[RESULT_OFFSET],
                     .source_offset = MD_NOWHERE};
}

/* The channel in the memory of a node; NULL: MPI carries the headers. */
static md_channel *memory_of(Carrier *self) {
  return Py_TYPE(self) == &ChannelType ? &((Channel *)self)->channel : NULL;
}

int meet_ranks(Carrier *self, const long long words[WORDS], const md_small *small,
               PyObject *keeper) {
  md_channel *ch = memory_of(self);
  if (begin_call(self)) return -1;
  const md_header header = header_with(self, words);
  return end_call(self, ch ? md_meet(ch, &header, small)
                           : between_meet((Between *)self, &header, small, keeper));
}

static int parse_words(PyObject *const *args, Py_ssize_t count, long long words[WORDS]) {
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

static PyObject *Carrier_meet(Carrier *self, PyObject *const *args, Py_ssize_t count) {
  long long words[WORDS];
  if (parse_words(args, count, words)) return NULL;
  return status_or_null(meet_ranks(self, words, NULL, NULL));
}

static PyObject *Carrier_start(Carrier *self, PyObject *const *args, Py_ssize_t count) {
  long long words[WORDS];
  if (parse_words(args, count, words) || begin_call(self)) return NULL;
  const md_header header = header_with(self, words);
  md_channel *ch = memory_of(self);
  if (ch) md_start(ch, &header, NULL);
  if (end_call(self, ch ? MD_OK : between_start((Between *)self, &header))) return NULL;
  Py_RETURN_NONE;
}

static PyObject *Carrier_test(Carrier *self, PyObject *ignored) {
  (void)ignored;
  md_channel *ch = memory_of(self);
  int status;
  if (ch) status = md_all_reached(ch) ? md_judge(ch, NULL) : MISSING;
  else status = between_test((Between *)self);
  return status == MISSING ? Py_NewRef(Py_None) : status_or_null(status);
}

static PyObject *Carrier_missing(Carrier *self, PyObject *ignored) {
  md_channel *ch = memory_of(self);
  (void)ignored;
  PyObject *list = PyList_New(0);
  for (int r = 0; ch && list && r < ch->size; r++) {
    if (md_reached(ch, r)) continue;
    PyObject *number = PyLong_FromLong(r);
    if (!number || PyList_Append(list, number)) Py_CLEAR(list);
    Py_XDECREF(number);
  }
  return list;
}

static PyObject *Carrier_leave(Carrier *self, PyObject *ignored) {
  md_channel *ch = memory_of(self);
  (void)ignored;
  if (ch) md_leave(ch);
  Py_RETURN_NONE;
}

static PyObject *Carrier_verdict(Carrier *self, void *closure) {
  (void)closure;
  int32_t flags = self->verdict->flags;
  return Py_BuildValue("iiiiL", flags & MD_FAILED, !(flags & MD_OTHER_CALL),
                       !(flags & MD_OTHER_VALUE), !(flags & MD_NO_ROOM),
                       (long long)self->verdict->largest);
}

static PyObject *Carrier_lateness(Carrier *self, void *closure) {
  (void)closure;
  return PyFloat_FromDouble(md_now() - self->last);
}

static PyMethodDef Carrier_methods[] = {
    {"meet", (PyCFunction)(void *)Carrier_meet, METH_FASTCALL,
     "meet(flag, fingerprint, value, largest, timeout_ms, result_offset)\n--\n\n"
     "Exchange a header; return OK, AGAIN, DIFFERENT or LEFT."},
    {"start", (PyCFunction)(void *)Carrier_start, METH_FASTCALL,
     "start(flag, fingerprint, value, largest, timeout_ms, result_offset)\n--\n\n"
     "Publish a header, without waiting."},
    {"test", (PyCFunction)Carrier_test, METH_NOARGS,
     "test()\n--\n\nReturn the status of the header of `start`; None if some are missing."},
    {"missing", (PyCFunction)Carrier_missing, METH_NOARGS,
     "missing()\n--\n\n"
     "Return the ranks that have not made this rank's last step; of a collective none is known."},
    {"leave", (PyCFunction)Carrier_leave, METH_NOARGS,
     "leave()\n--\n\n"
     "Tell all ranks that this one makes no more steps; between nodes a notice does."},
    {NULL}};
static PyMemberDef Carrier_members[] = {
    {"seconds", T_DOUBLE, offsetof(Carrier, seconds), READONLY, "Time spent in calls."},
    {"pause", T_OBJECT, offsetof(Carrier, pause), 0,
     "Called with the seconds waited, several times a second; may raise."},
    {"reductions", T_ULONG, offsetof(Carrier, reductions), READONLY,
     "Reductions of `Reduce` so far."},
    {"reduced", T_ULONGLONG, offsetof(Carrier, reduced), READONLY,
     "Bytes of this rank's arrays in them."},
    {"gathers", T_ULONG, offsetof(Carrier, gathers), READONLY, "All-gathers of `Gather` so far."},
    {"gathered", T_ULONGLONG, offsetof(Carrier, gathered), READONLY,
     "Bytes of this rank's arrays in them."},
    {"moves", T_INT, offsetof(Carrier, moves), READONLY,
     "Whether MPI moves the data of a call; in memory, steps say which ranks are missing."},
    {"busy", T_INT, offsetof(Carrier, busy), READONLY, "Whether a call is under way."},
    {"active", T_INT, offsetof(Carrier, active), READONLY, "How many requests are in progress."},
    {NULL}};
static PyGetSetDef Carrier_fields[] = {
    {"verdict", (getter)Carrier_verdict, NULL,
     "What all ranks make of the last header: flag, same_call, same_value, results_in_arena,\n"
     "largest.",
     NULL},
    {"lateness", (getter)Carrier_lateness, NULL, "Seconds since the last header began.", NULL},
    {NULL}};
PyTypeObject CarrierType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "mpidist._native._core.Carrier",
    .tp_doc = "What `Channel` and `Between` have in common: they carry headers.",
    .tp_basicsize = sizeof(Carrier),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_methods = Carrier_methods,
    .tp_members = Carrier_members,
    .tp_getset = Carrier_fields};

/* --- Channel: in the memory of a node ------------------------------------------------------ */

static int Channel_init(Channel *self, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"memory",      "size",    "rank",  "area_bytes",
                          "arena_bytes", "crowded", "spins", NULL};
  Memory *memory;
  int size, rank, crowded, spins;
  Py_ssize_t area, arena;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!iinnpi", names, &MemoryType, &memory, &size,
                                   &rank, &area, &arena, &crowded, &spins))
    return -1;
  if (size < 1 || size > MD_MAX_RANKS || rank < 0 || rank >= size ||
      area <= 0 || area % PAGE || arena < 0 || arena % PAGE ||
      (size_t)memory->nbytes < md_lay_out(size, (size_t)area, (size_t)arena).total_bytes) {
    PyErr_SetString(PyExc_ValueError, "Channel: sizes that do not fit the memory");
    return -1;
  }
  self->memory = (Memory *)Py_NewRef(memory);
  open_carrier(&self->carrier, rank, size, &self->channel.verdict);
  md_open(&self->channel, memory->start, size, rank, (size_t)area, (size_t)arena, crowded,
          spins);
  self->channel.hooks = (md_hooks){blocking, pause_call, self};
  return 0;
}

MADE_BY_INIT(Channel)

static void Channel_dealloc(Channel *self) {
  Py_XDECREF(self->memory);
  Py_XDECREF(self->carrier.pause);
  Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *Channel_publish(Channel *self, PyObject *ignored) {
  (void)ignored;
  md_publish(&self->channel);
  Py_RETURN_NONE;
}

static PyObject *Channel_wait(Channel *self, PyObject *ignored) {
  (void)ignored;
  if (begin_call(&self->carrier)) return NULL;
  return status_or_null(end_call(&self->carrier, md_wait(&self->channel)));
}

static PyObject *Channel_post(Channel *self, PyObject *args) {
  Py_buffer data;
  if (!PyArg_ParseTuple(args, "y*", &data)) return NULL;
  if (data.len > MD_MESSAGE_BYTES) {
    PyBuffer_Release(&data);
    return PyErr_Format(PyExc_ValueError, "post: at most %d bytes", MD_MESSAGE_BYTES);
  }
  if (begin_call(&self->carrier)) {
    PyBuffer_Release(&data);
    return NULL;
  }
  int status = md_post(&self->channel, data.buf, (uint32_t)data.len);
  status = end_call(&self->carrier, status); /* which holds the GIL again */
  PyBuffer_Release(&data);
  return status_or_null(status);
}

static PyObject *Channel_take(Channel *self, PyObject *ignored) {
  uint32_t nbytes = 0;
  (void)ignored;
  if (begin_call(&self->carrier)) return NULL;
  int status = end_call(&self->carrier, md_wait_message(&self->channel, &nbytes));
  if (status != MD_OK) return status_or_null(status);
  PyObject *result = PyBytes_FromStringAndSize(NULL, nbytes);
  if (!result) return NULL;
  md_take(&self->channel, PyBytes_AS_STRING(result), nbytes);
  return result;
}

static PyObject *Channel_broadcast(Channel *self, PyObject *args) {
  PyObject *object;
  Py_buffer data;
  int root, status = -1;
  if (!PyArg_ParseTuple(args, "Oi", &object, &root)) return NULL;
  if (root < 0 || root >= self->channel.size)
    return PyErr_Format(PyExc_ValueError, "broadcast: there is no rank %d", root);
  int flags = root == self->channel.rank ? PyBUF_SIMPLE : PyBUF_WRITABLE;
  if (PyObject_GetBuffer(object, &data, flags)) return NULL;
  if (!begin_call(&self->carrier)) {
    release_gil(&self->carrier);
    status = md_broadcast(&self->channel, data.buf, (size_t)data.len, root);
    status = end_call(&self->carrier, status);
  }
  PyBuffer_Release(&data);
  return status_or_null(status);
}

/* Where things are in the memory, for arrays that view them. */
static PyObject *Channel_areas(Channel *self, PyObject *number) {
  long n = PyLong_AsLong(number);
  if (n == -1 && PyErr_Occurred()) return NULL;
  md_channel *ch = &self->channel;
  Py_ssize_t first = (n & 1) * (Py_ssize_t)ch->area_bytes;
  return Py_BuildValue("nn", ch->areas[ch->rank] - ch->memory + first,
                       ch->sums - ch->memory + first);
}

static PyMethodDef Channel_methods[] = {
    {"publish", (PyCFunction)Channel_publish, METH_NOARGS,
     "publish()\n--\n\nSay that this rank has made a step."},
    {"wait", (PyCFunction)Channel_wait, METH_NOARGS,
     "wait()\n--\n\nWait until all ranks have made this step; return OK or LEFT."},
    {"post", (PyCFunction)Channel_post, METH_VARARGS,
     "post(data)\n--\n\nSend a message from rank 0; return OK or LEFT."},
    {"take", (PyCFunction)Channel_take, METH_NOARGS,
     "take()\n--\n\nReturn the next message of rank 0; or LEFT."},
    {"broadcast", (PyCFunction)Channel_broadcast, METH_VARARGS,
     "broadcast(buffer, root)\n--\n\nCopy the root's bytes to all ranks; return OK or LEFT."},
    {"areas", (PyCFunction)Channel_areas, METH_O,
     "areas(number)\n--\n\nReturn where this rank's area for pieces, and that for sums, are."},
    {NULL}};
static PyMemberDef Channel_members[] = {
    {"headers", T_UINT, offsetof(Channel, channel.headers), READONLY, "Headers exchanged so far."},
    {"areas_used", T_UINT, offsetof(Channel, channel.areas_used), READONLY,
     "Piece areas used so far."},
    {"who", T_INT, offsetof(Channel, channel.who), READONLY, "The rank that has left."},
    {"tree", T_INT, offsetof(Channel, channel.tree), READONLY,
     "Whether ranks wait by a tree of counters."},
    {"results_in_arena", T_ULONG, offsetof(Channel, results_in_arena), READONLY,
     "Reductions whose results were written straight to the arenas."},
    {"sources_in_arena", T_ULONG, offsetof(Channel, sources_in_arena), READONLY,
     "Reductions whose arrays were read where they are, in the arenas."},
    {NULL}};
PyTypeObject ChannelType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "mpidist._native._core.Channel",
    .tp_doc =
        "Channel(memory, size, rank, area_bytes, arena_bytes, crowded, spins)\n--\n\n"
        "One rank's view of the memory that the ranks of a node share.",
    .tp_basicsize = sizeof(Channel),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_base = &CarrierType,
    .tp_new = Channel_new,
    .tp_dealloc = (destructor)Channel_dealloc,
    .tp_methods = Channel_methods,
    .tp_members = Channel_members};
