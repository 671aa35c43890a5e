/* `Gather`: the all-gather of a nest whose arrays travel with the header, through the memory of
   one node, or between ranks that share none. */
#include "binding.h"

#include <structmember.h>

static size_t gather_head(const Gather *self) { return (size_t)self->count * 8; }

static size_t align8(size_t n) { return (n + 7) / 8 * 8; }

static int Gather_init(Gather *self, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"channel", "leaves", "fingerprint", "timeout_ms", NULL};
  PyObject *channel, *leaves;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!|LL", names, &CarrierType, &channel,
                                   &PyList_Type, &leaves, &self->fingerprint, &self->timeout_ms))
    return -1;
  self->carrier = (Carrier *)Py_NewRef(channel);
  if (Py_TYPE(channel) == &BetweenType) self->between = (Between *)channel;
  else self->channel = (Channel *)channel;
  self->count = (int)PyList_GET_SIZE(leaves);
  size_t most = self->between ? self->between->share : MD_EAGER_BYTES;
  if (gather_head(self) > most) {
    PyErr_SetString(PyExc_ValueError, "Gather: no room for so many leaves");
    return -1;
  }
  size_t n = (size_t)self->count + 1;
  self->leaves = PyMem_Calloc(n, sizeof(GatherLeaf));
  self->lengths = PyMem_Calloc(n, sizeof(int64_t));
  self->kept.arrays = PyMem_Calloc(n, sizeof(PyObject *));
  self->parts = PyMem_Calloc(n, sizeof(md_rows));
  if (!self->leaves || !self->lengths || !self->kept.arrays || !self->parts) {
    PyErr_NoMemory();
    return -1;
  }
  for (int i = 0; i < self->count; i++) {
    Py_ssize_t before, row;
    if (!PyArg_ParseTuple(PyList_GET_ITEM(leaves, i), "nn", &before, &row)) return -1;
    self->leaves[i] = (GatherLeaf){(size_t)before, (size_t)row};
  }
  if (self->between) {
    /* Where the others leave 0 the largest byte is that of the rank. */
    self->whole = (md_leaf){.nbytes = most * (size_t)self->carrier->size,
                            .kernel = md_find_kernel("u1", "MAX")};
    self->nest = (md_nest){.count = 1, .nbytes = self->whole.nbytes, .leaves = &self->whole};
  }
  return 0;
}

MADE_BY_INIT(Gather)

static void Gather_dealloc(Gather *self) {
  let_go(&self->kept);
  PyMem_Free(self->leaves);
  PyMem_Free(self->lengths);
  PyMem_Free(self->kept.arrays);
  PyMem_Free(self->parts);
  Py_XDECREF(self->carrier);
  Py_TYPE(self)->tp_free((PyObject *)self);
}

/* The bytes of a leaf. */
static size_t nbytes_of(const Gather *self, int i, const int64_t *lengths) {
  return self->leaves[i].before * self->leaves[i].row * (size_t)lengths[i];
}

/* Whether leaves of these lengths travel with the header.  Larger ones are copied less often
   where they are written to the results of all, which takes one step more: where ranks share
   cores, a step costs more than that. */
static int gather_fits(const Gather *self, const int64_t *lengths) {
  size_t most;
  if (self->between) most = self->between->share;
  else most = self->channel->channel.tree ? MD_EAGER_BYTES : MD_EAGER_BYTES / 4;
  size_t at = gather_head(self);
  for (int i = 0; i < self->count; i++) {
    at += align8(nbytes_of(self, i, lengths));
    if (at > most) return 0;
  }
  return 1;
}

/* What came from a rank with the last header. */
static const unsigned char *gather_slot(const Gather *self, int rank) {
  if (self->between) return between_part(self->between, rank);
  return self->channel->channel.parts[rank]->eager[self->number & 1];
}

/* Where this rank's part of the next header goes; NULL: an exception. */
static unsigned char *begin_slot(Gather *self) {
  self->filled = 0;
  if (require_idle(self->carrier->busy || self->carrier->active)) return NULL;
  if (self->between) return between_own_part(self->between);
  md_channel *ch = &self->channel->channel;
  self->number = ch->headers + 1;
  return ch->parts[ch->rank]->eager[self->number & 1];
}

static void count_gather(const Gather *self, size_t nbytes) {
  self->carrier->gathers++;
  self->carrier->gathered += nbytes;
}

/* Exchange the header for what is in this rank's slot: its leaves, or only their lengths;
   return the status, or -1 with an exception. */
static int exchange(Gather *self, const unsigned char *slot, int fits, long long fingerprint,
                    long long timeout_ms, long long result_offset) {
  const int64_t *lengths = (const int64_t *)slot;
  uint64_t hash = 14695981039346656037u;
  size_t payload = 0;
  for (int i = 0; i < self->count; i++) {
    hash = (hash ^ (uint64_t)lengths[i]) * 1099511628211u;
    payload += nbytes_of(self, i, lengths);
  }
  /* All learn whether all fit. */
  const long long words[WORDS] = {0,     fingerprint, (long long)(hash >> 1), !fits, timeout_ms,
                                  result_offset};
  const md_small in_room = {&self->nest, NULL, NULL};
  int status = meet_ranks(self->carrier, words, self->between ? &in_room : NULL, (PyObject *)self);
  /* What moves behind the header is counted then. */
  if (status == MD_OK && !self->carrier->verdict->largest) count_gather(self, payload);
  return status;
}

/* Whether MPI gathers the one leaf as it is, and all know it by the last header. */
static int is_one_block(const Gather *self) {
  return self->between && self->count == 1 && self->leaves[0].before == 1;
}

Py_ssize_t gather_needs(const Gather *self, Py_ssize_t length) {
  const int64_t lengths[] = {length};
  if (!is_one_block(self) || gather_fits(self, lengths)) return 0;
  return length * self->carrier->size;
}

/* Whether the one leaf did not fit, on some rank, and is of one length on all. */
static int is_large_and_even(const Gather *self) {
  if (!self->carrier->verdict->largest) return 0;
  int64_t length = *(const int64_t *)gather_slot(self, self->carrier->rank);
  for (int r = 0; r < self->carrier->size; r++)
    if (*(const int64_t *)gather_slot(self, r) != length) return 0;
  return 1;
}

/* Gather the one leaf behind a header, if it is large and even; -1: an exception. */
static int fill(Gather *self, const void *source, void *result) {
  if (!is_one_block(self)) return 0;
  if (!is_large_and_even(self)) {
    md_unlearn(&self->between->guesses);
    return 0;
  }
  if (!result) return 0; /* on no rank */
  size_t nbytes = self->leaves[0].row * (size_t)self->lengths[0];
  if (between_gather(self->between, source, result, nbytes)) return -1;
  self->filled = 1;
  count_gather(self, nbytes);
  return 0;
}

static int64_t total_of(const Gather *self, int leaf) {
  int64_t total = 0;
  for (int r = 0; r < self->carrier->size; r++)
    total += ((const int64_t *)gather_slot(self, r))[leaf];
  return total;
}

/* Whether the last header has shown that all have made results of the right size in their
   arenas, before they knew the lengths of the others. */
static int has_room(const Gather *self) {
  return !self->between && !(self->carrier->verdict->flags & (MD_NO_ROOM | MD_OTHER_VALUE));
}

Py_ssize_t gathered_length(const Gather *self) {
  return self->carrier->verdict->largest ? -1 : (Py_ssize_t)total_of(self, 0);
}

/* Where leaf i begins in the slot of a rank. */
static size_t leaf_start(const Gather *self, const int64_t *lengths, int i) {
  size_t at = gather_head(self);
  for (int k = 0; k < i; k++) at += align8(nbytes_of(self, k, lengths));
  return at;
}

void gather_to(const Gather *self, int i, unsigned char *out) {
  const GatherLeaf *leaf = &self->leaves[i];
  size_t total = (size_t)total_of(self, i) * leaf->row;
  for (int r = 0; r < self->carrier->size; r++) {
    const int64_t *lengths = (const int64_t *)gather_slot(self, r);
    const unsigned char *from = gather_slot(self, r) + leaf_start(self, lengths, i);
    size_t bytes = (size_t)lengths[i] * leaf->row;
    for (size_t b = 0; b < leaf->before; b++) memcpy(out + b * total, from + b * bytes, bytes);
    out += bytes;
  }
}

/* Take the lengths of a call; -1: an exception.  A call of another thread that is under way
   has its own there, by which it will write to the memory of all ranks. */
static int parse_lengths(Gather *self, PyObject *lengths) {
  if (require_idle(self->carrier->busy)) return -1;
  if (!PyTuple_Check(lengths) || PyTuple_GET_SIZE(lengths) != self->count) {
    PyErr_SetString(PyExc_TypeError, "Gather: expected a tuple with the length of each leaf");
    return -1;
  }
  for (int i = 0; i < self->count; i++)
    self->lengths[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(lengths, i));
  return PyErr_Occurred() ? -1 : 0;
}

/* Return the memory of leaf i, or of its result, of so many bytes; NULL: an exception. */
static void *get_array(Kept *kept, PyObject *x, int i, size_t nbytes, int is_result) {
  void *memory = keep_array(kept, x, is_result);
  if (!memory || (size_t)PyArray_NBYTES((PyArrayObject *)x) == nbytes) return memory;
  return PyErr_Format(PyExc_TypeError, "Gather: %s %d has %zd bytes, expected %zu",
                      is_result ? "result" : "leaf", i, PyArray_NBYTES((PyArrayObject *)x), nbytes);
}

/* Get the memory of arrays of these lengths; -1: an exception. */
static int get_arrays(Gather *self, PyObject *arrays) {
  if (!PyList_Check(arrays) || PyList_GET_SIZE(arrays) != self->count) {
    PyErr_SetString(PyExc_TypeError, "Gather: expected a list with the array of each leaf");
    return -1;
  }
  for (int i = 0; i < self->count; i++) {
    size_t nbytes = nbytes_of(self, i, self->lengths);
    self->parts[i].from = get_array(&self->kept, PyList_GET_ITEM(arrays, i), i, nbytes, 0);
    if (!self->parts[i].from) return -1;
  }
  return 0;
}

/* Write this rank's leaves to the results of all, where the last header says; return the status,
   or -1 with an exception. */
static int spread(Gather *self) {
  md_channel *ch = &self->channel->channel;
  size_t start = 0, payload = 0;
  for (int i = 0; i < self->count; i++) {
    const GatherLeaf *leaf = &self->leaves[i];
    size_t before = 0, total = (size_t)total_of(self, i) * leaf->row;
    for (int r = 0; r < ch->rank; r++)
      before += (size_t)((const int64_t *)gather_slot(self, r))[i] * leaf->row;
    self->parts[i] = (md_rows){.from = self->parts[i].from,
                               .rows = leaf->before,
                               .bytes = (size_t)self->lengths[i] * leaf->row,
                               .stride = total,
                               .at = start + before};
    start += (leaf->before * total + MD_LINE - 1) / MD_LINE * MD_LINE;
    payload += nbytes_of(self, i, self->lengths);
  }
  if (begin_call(self->carrier)) return -1;
  release_gil(self->carrier);
  int status = end_call(self->carrier, md_spread(ch, self->parts, self->count));
  if (status == MD_OK) count_gather(self, payload);
  return status;
}

/* Exchange the header for this rank's leaves, of its lengths, by a slot that was begun;
   return the status, or -1 with an exception. */
static int meet(Gather *self, unsigned char *slot, long long fingerprint, long long timeout_ms,
                long long result_offset, void *result) {
  memcpy(slot, self->lengths, gather_head(self));
  size_t at = gather_head(self);
  int fits = gather_fits(self, self->lengths);
  for (int i = 0; fits && i < self->count; i++) {
    size_t nbytes = nbytes_of(self, i, self->lengths);
    memcpy(slot + at, self->parts[i].from, nbytes);
    at += align8(nbytes);
  }
  Transfer offer;
  if (result && !fits && is_one_block(self))
    between_offer(self->between, &offer, fingerprint, self->parts[0].from, result,
                  self->leaves[0].row * (size_t)self->lengths[0]);
  int status = exchange(self, slot, fits, fingerprint, timeout_ms, result_offset);
  if (status == MD_OK && has_room(self)) {
    status = spread(self);
    self->filled = status == MD_OK;
  }
  if (status == MD_OK && fill(self, self->parts[0].from, result)) return -1;
  return status;
}

int gather_one(Gather *self, const void *source, Py_ssize_t length, void *result) {
  unsigned char *slot = begin_slot(self);
  if (!slot) return -1;
  self->lengths[0] = length;
  self->parts[0].from = source; /* the caller holds the array */
  return meet(self, slot, self->fingerprint, self->timeout_ms, MD_NOWHERE, result);
}

/* The memory for the result of the one leaf, of the length of this rank's on all; NULL: an
   exception. */
static void *get_result(Gather *self, PyObject *result) {
  size_t nbytes = (size_t)gather_needs(self, self->lengths[0]) * self->leaves[0].row;
  return get_array(&self->kept, result, 0, nbytes, 1);
}

static PyObject *Gather_meet(Gather *self, PyObject *const *args, Py_ssize_t count) {
  if (count != 6) return PyErr_Format(PyExc_TypeError, "meet: expected 6 arguments");
  long long fingerprint = PyLong_AsLongLong(args[2]), timeout_ms = PyLong_AsLongLong(args[3]);
  long long result_offset = PyLong_AsLongLong(args[4]);
  if (PyErr_Occurred() || require_idle(self->kept.count > 0) || parse_lengths(self, args[1])) return NULL;
  PyObject *status = NULL;
  void *result = NULL;
  unsigned char *slot;
  if (get_arrays(self, args[0])) {
    status = other_arrays();
  } else if ((args[5] == Py_None || (result = get_result(self, args[5]))) &&
             (slot = begin_slot(self))) {
    status = status_or_null(meet(self, slot, fingerprint, timeout_ms, result_offset, result));
  }
  if (!is_abandoned(self->carrier)) let_go(&self->kept);
  return status;
}

static PyObject *Gather_spread(Gather *self, PyObject *arrays) {
  PyObject *result = NULL;
  if (self->between) return PyErr_Format(PyExc_RuntimeError, "spread: there is no arena");
  if (require_idle(self->kept.count > 0 || self->carrier->busy)) return NULL;
  memcpy(self->lengths, gather_slot(self, self->channel->channel.rank),
         (size_t)self->count * sizeof *self->lengths);
  if (!get_arrays(self, arrays)) result = status_or_null(spread(self));
  let_go(&self->kept);
  return result;
}

static PyObject *Gather_fits(Gather *self, PyObject *lengths) {
  if (parse_lengths(self, lengths)) return NULL;
  return PyBool_FromLong(gather_fits(self, self->lengths));
}

/* Take `item` as number i of a list; where there is none, let go of the list. */
static void put_item(PyObject **list, Py_ssize_t i, PyObject *item) {
  if (item) PyList_SET_ITEM(*list, i, item);
  else Py_CLEAR(*list);
}

static PyObject *Gather_lengths(Gather *self, PyObject *ignored) {
  (void)ignored;
  PyObject *rows = PyList_New(self->carrier->size);
  for (int r = 0; rows && r < self->carrier->size; r++) {
    const int64_t *lengths = (const int64_t *)gather_slot(self, r);
    PyObject *row = PyList_New(self->count);
    for (int i = 0; row && i < self->count; i++)
      put_item(&row, i, PyLong_FromLongLong(lengths[i]));
    put_item(&rows, r, row);
  }
  return rows;
}

static PyObject *Gather_get(Gather *self, PyObject *results) {
  if (require_idle(self->kept.count > 0)) return NULL;
  if (!PyList_Check(results) || PyList_GET_SIZE(results) != self->count)
    return PyErr_Format(PyExc_TypeError, "get: expected a list of arrays");
  for (int i = 0; i < self->count; i++) {
    size_t nbytes = (size_t)total_of(self, i) * self->leaves[i].row * self->leaves[i].before;
    void *memory = get_array(&self->kept, PyList_GET_ITEM(results, i), i, nbytes, 1);
    if (memory) gather_to(self, i, memory);
    let_go(&self->kept);
    if (!memory) return NULL;
  }
  Py_RETURN_NONE;
}

static PyMethodDef Gather_methods[] = {
    {"meet", (PyCFunction)(void *)Gather_meet, METH_FASTCALL,
     "meet(arrays, lengths, fingerprint, timeout_ms, result_offset, result)\n--\n\n"
     "Publish this rank's arrays, or where they are large their lengths; return a status.\n\n"
     "None, and nothing was sent, where the arrays are not contiguous.  If all ranks have the\n"
     "same lengths, and memory for the results at `result_offset`, or for that of the one leaf in\n"
     "`result` (or None), large arrays are there then: `filled`.  Of the verdict, largest says\n"
     "whether some rank's arrays were large."},
    {"spread", (PyCFunction)Gather_spread, METH_O,
     "spread(arrays)\n--\n\n"
     "Write the arrays of the last `meet` to the results of all ranks, which a header after it\n"
     "has named; return OK or LEFT."},
    {"fits", (PyCFunction)Gather_fits, METH_O,
     "fits(lengths)\n--\n\nReturn whether leaves of these lengths travel with the header."},
    {"lengths", (PyCFunction)Gather_lengths, METH_NOARGS,
     "lengths()\n--\n\nReturn for each rank its lengths, after `meet`."},
    {"get", (PyCFunction)Gather_get, METH_O,
     "get(results)\n--\n\nCopy the arrays of all ranks into the results, where all did fit."},
    {NULL}};
static PyMemberDef Gather_members[] = {
    {"filled", T_BOOL, offsetof(Gather, filled), READONLY,
     "Whether the last `meet` has filled the results."},
    {NULL}};
PyTypeObject GatherType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "mpidist._native._core.Gather",
    .tp_doc =
        "Gather(channel, leaves, fingerprint=0, timeout_ms=0)\n--\n\n"
        "The all-gather of a nest: for each leaf (rows before the axis, bytes of one).",
    .tp_basicsize = sizeof(Gather),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = Gather_new,
    .tp_dealloc = (destructor)Gather_dealloc,
    .tp_methods = Gather_methods,
    .tp_members = Gather_members};
