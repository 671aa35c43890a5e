/* `Gather`: the all-gather of a nest whose arrays travel with the header. */
#include "binding.h"

static size_t gather_head(const Gather *self) {
  return ((size_t)self->count * 8 + MD_LINE - 1) / MD_LINE * MD_LINE;
}

static size_t align16(size_t n) { return (n + 15) / 16 * 16; }

static int Gather_init(Gather *self, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"channel", "leaves", "fingerprint", "patience_ms", NULL};
  Channel *channel;
  PyObject *leaves;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!|LL", names, &ChannelType, &channel,
                                   &PyList_Type, &leaves, &self->fingerprint,
                                   &self->patience))
    return -1;
  self->count = (int)PyList_GET_SIZE(leaves);
  if (self->channel || gather_head(self) > MD_EAGER_BYTES) {
    PyErr_SetString(PyExc_ValueError, "Gather: too many leaves");
    return -1;
  }
  self->leaves = PyMem_Calloc((size_t)self->count + 1, sizeof(GatherLeaf));
  if (!self->leaves) {
    PyErr_NoMemory();
    return -1;
  }
  for (int i = 0; i < self->count; i++) {
    Py_ssize_t before, row;
    if (!PyArg_ParseTuple(PyList_GET_ITEM(leaves, i), "nn", &before, &row)) return -1;
    self->leaves[i] = (GatherLeaf){(size_t)before, (size_t)row};
  }
  self->channel = (Channel *)Py_NewRef(channel);
  return 0;
}

static void Gather_dealloc(Gather *self) {
  PyMem_Free(self->leaves);
  Py_XDECREF(self->channel);
  Py_TYPE(self)->tp_free((PyObject *)self);
}

/* Whether leaves of these lengths fit a slot. */
static int gather_fits(const Gather *self, const int64_t *lengths) {
  size_t at = gather_head(self);
  for (int i = 0; i < self->count; i++) {
    at += align16(self->leaves[i].before * self->leaves[i].row * (size_t)lengths[i]);
    if (at > MD_EAGER_BYTES) return 0;
  }
  return 1;
}

static const unsigned char *gather_slot(const Gather *self, int rank) {
  return self->channel->channel.parts[rank]->eager[self->number & 1];
}

/* Publish what is in this rank's slot: its leaves, or only their lengths; return the status. */
static int publish(Gather *self, int fits, long long fingerprint, long long patience) {
  md_channel *ch = &self->channel->channel;
  const int64_t *lengths = (const int64_t *)gather_slot(self, ch->rank);
  uint64_t hash = 14695981039346656037u;
  size_t payload = 0;
  for (int i = 0; i < self->count; i++) {
    const GatherLeaf *leaf = &self->leaves[i];
    hash = (hash ^ (uint64_t)lengths[i]) * 1099511628211u;
    payload += leaf->before * leaf->row * (size_t)lengths[i];
  }
  md_header header = header_of(self->channel, fingerprint, patience);
  header.value = (int64_t)(hash >> 1);
  header.largest = !fits; /* all know whether all fit */
  int status = md_meet(ch, &header, NULL);
  if (status == MD_OK) {
    self->channel->gathers++;
    self->channel->gathered += payload;
  }
  return finish_call(self->channel, status);
}

int gather_one(Gather *self, const void *source, Py_ssize_t length) {
  md_channel *ch = &self->channel->channel;
  if (begin_call(self->channel)) return -1;
  self->number = ch->headers + 1;
  unsigned char *slot = ch->parts[ch->rank]->eager[self->number & 1];
  int64_t *lengths = (int64_t *)slot;
  lengths[0] = length;
  int fits = gather_fits(self, lengths);
  if (fits)
    memcpy(slot + gather_head(self), source,
           self->leaves[0].before * self->leaves[0].row * (size_t)length);
  return publish(self, fits, self->fingerprint, self->patience);
}

static int64_t total_of(const Gather *self, int leaf) {
  int64_t total = 0;
  for (int r = 0; r < self->channel->channel.size; r++)
    total += ((const int64_t *)gather_slot(self, r))[leaf];
  return total;
}

Py_ssize_t gathered_length(const Gather *self) {
  return self->channel->channel.verdict.largest ? -1 : (Py_ssize_t)total_of(self, 0);
}

/* Where leaf i begins in the slot of a rank. */
static size_t leaf_start(const Gather *self, const int64_t *lengths, int i) {
  size_t at = gather_head(self);
  for (int k = 0; k < i; k++)
    at += align16(self->leaves[k].before * self->leaves[k].row * (size_t)lengths[k]);
  return at;
}

void gather_to(const Gather *self, int i, unsigned char *out) {
  const GatherLeaf *leaf = &self->leaves[i];
  size_t total = (size_t)total_of(self, i) * leaf->row;
  for (int r = 0; r < self->channel->channel.size; r++) {
    const int64_t *lengths = (const int64_t *)gather_slot(self, r);
    const unsigned char *from = gather_slot(self, r) + leaf_start(self, lengths, i);
    size_t bytes = (size_t)lengths[i] * leaf->row;
    for (size_t b = 0; b < leaf->before; b++) memcpy(out + b * total, from + b * bytes, bytes);
    out += bytes;
  }
}

static PyObject *Gather_meet(Gather *self, PyObject *const *args, Py_ssize_t count) {
  if (count != 4 || !PyList_Check(args[0]) || !PyTuple_Check(args[1]) ||
      PyList_GET_SIZE(args[0]) != self->count || PyTuple_GET_SIZE(args[1]) != self->count)
    return PyErr_Format(PyExc_TypeError, "meet: expected a list, a tuple, and two ints");
  long long fingerprint = PyLong_AsLongLong(args[2]), patience = PyLong_AsLongLong(args[3]);
  if (PyErr_Occurred()) return NULL;
  md_channel *ch = &self->channel->channel;
  if (begin_call(self->channel)) return NULL;
  self->number = ch->headers + 1;
  unsigned char *slot = ch->parts[ch->rank]->eager[self->number & 1];
  int64_t *lengths = (int64_t *)slot;
  size_t at = gather_head(self);
  for (int i = 0; i < self->count; i++)
    lengths[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(args[1], i));
  if (PyErr_Occurred()) {
    Py_XDECREF(end_call(self->channel, MD_OK));
    return NULL;
  }
  int fits = gather_fits(self, lengths);
  for (int i = 0; fits && i < self->count; i++) {
    Py_buffer view;
    if (PyObject_GetBuffer(PyList_GET_ITEM(args[0], i), &view, PyBUF_SIMPLE)) {
      PyObject *result = other_arrays();
      if (result) Py_XDECREF(end_call(self->channel, MD_OK));
      else self->channel->busy = 0;
      return result;
    }
    memcpy(slot + at, view.buf, (size_t)view.len);
    at += align16((size_t)view.len);
    PyBuffer_Release(&view);
  }
  int status = publish(self, fits, fingerprint, patience);
  return status < 0 ? NULL : PyLong_FromLong(status);
}

static PyObject *Gather_lengths(Gather *self, PyObject *ignored) {
  md_channel *ch = &self->channel->channel;
  (void)ignored;
  PyObject *rows = PyList_New(ch->size);
  for (int r = 0; rows && r < ch->size; r++) {
    const int64_t *lengths = (const int64_t *)gather_slot(self, r);
    PyObject *row = PyTuple_New(self->count);
    for (int i = 0; row && i < self->count; i++)
      put_item(&row, i, PyLong_FromLongLong(lengths[i]));
    put_item(&rows, r, row);
  }
  return rows;
}

/* Lengths of all ranks together; None where the arrays of some rank did not fit. */
static PyObject *Gather_totals(Gather *self, PyObject *ignored) {
  md_channel *ch = &self->channel->channel;
  (void)ignored;
  if (ch->verdict.largest) Py_RETURN_NONE;
  PyObject *totals = PyTuple_New(self->count);
  for (int i = 0; totals && i < self->count; i++)
    put_item(&totals, i, PyLong_FromLongLong(total_of(self, i)));
  return totals;
}

static PyObject *Gather_get(Gather *self, PyObject *results) {
  if (!PyList_Check(results) || PyList_GET_SIZE(results) != self->count)
    return PyErr_Format(PyExc_TypeError, "get: expected a list of arrays");
  for (int i = 0; i < self->count; i++) {
    const GatherLeaf *leaf = &self->leaves[i];
    Py_buffer view;
    if (PyObject_GetBuffer(PyList_GET_ITEM(results, i), &view, PyBUF_WRITABLE)) return NULL;
    int fits = (size_t)view.len == (size_t)total_of(self, i) * leaf->row * leaf->before;
    if (fits) gather_to(self, i, view.buf);
    else PyErr_Format(PyExc_ValueError, "get: result %d has %zd bytes", i, view.len);
    PyBuffer_Release(&view);
    if (!fits) return NULL;
  }
  Py_RETURN_NONE;
}

static PyMethodDef Gather_methods[] = {
    {"meet", (PyCFunction)(void *)Gather_meet, METH_FASTCALL,
     "meet(arrays, lengths, fingerprint, patience_ms)\n--\n\n"
     "Publish this rank's arrays, or where they are large their lengths; return a status.\n\n"
     "Of the verdict, same_value says whether all ranks have these lengths, and largest "
     "whether\n"
     "some rank's arrays did not fit."},
    {"lengths", (PyCFunction)Gather_lengths, METH_NOARGS,
     "lengths()\n--\n\nReturn for each rank its lengths, after `meet`."},
    {"totals", (PyCFunction)Gather_totals, METH_NOARGS,
     "totals()\n--\n\n"
     "Return the lengths of all ranks together; None where some arrays did not fit."},
    {"get", (PyCFunction)Gather_get, METH_O,
     "get(results)\n--\n\nCopy the arrays of all ranks into the results, where all did fit."},
    {NULL}};
PyTypeObject GatherType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "mpidist._native._core.Gather",
    .tp_doc =
        "Gather(channel, leaves, fingerprint=0, patience_ms=0)\n--\n\n"
        "The all-gather of a nest: for each leaf (rows before the axis, bytes of one).",
    .tp_basicsize = sizeof(Gather),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)Gather_init,
    .tp_dealloc = (destructor)Gather_dealloc,
    .tp_methods = Gather_methods};
