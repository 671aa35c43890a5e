/* `Reduce`: the all-reduce of a nest, at once or step by step; and `BetweenReduce`, of a small
   nest between ranks that share no memory. */
#include "binding.h"

#include <structmember.h>

#define SOURCE (PyBUF_FORMAT | PyBUF_C_CONTIGUOUS)

/* Fill in what a leaf of this dtype and shape must be, and its size; -1: an exception. */
static int expect(Expected *e, const char *dtype, PyObject *shape, md_leaf *leaf) {
  e->kind = dtype[0] == 'b' && dtype[1] == 'f' ? 'u' : dtype[0];
  e->itemsize = (Py_ssize_t)md_itemsize(leaf->kernel);
  e->ndim = (int)PyTuple_GET_SIZE(shape);
  e->shape = PyMem_Calloc((size_t)e->ndim + 1, sizeof(Py_ssize_t));
  if (!e->shape) {
    PyErr_NoMemory();
    return -1;
  }
  leaf->nbytes = (size_t)e->itemsize;
  for (int k = 0; k < e->ndim; k++) {
    e->shape[k] = PyLong_AsSsize_t(PyTuple_GET_ITEM(shape, k));
    if (e->shape[k] < 0) {
      if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "Reduce: a negative length");
      return -1;
    }
    leaf->nbytes *= (size_t)e->shape[k];
  }
  return 0;
}

/* NumPy's kind of a format of the buffer protocol. */
static char kind_of(const char *format) {
  if (!format) return 'u';
  while (*format == '@' || *format == '=' || *format == '<' || *format == '^') format++;
  switch (*format) {
    case '?': return 'b';
    case 'b': case 'h': case 'i': case 'l': case 'q': case 'n': return 'i';
    case 'B': case 'H': case 'I': case 'L': case 'Q': case 'N': return 'u';
    case 'e': case 'f': case 'd': case 'g': return 'f';
    case 'Z': return 'c';
    default: return 0;
  }
}

static int is_expected(const Expected *e, int ndim, const Py_ssize_t *shape,
                       Py_ssize_t itemsize, char kind) {
  if (ndim != e->ndim || itemsize != e->itemsize || kind != e->kind) return 0;
  for (int k = 0; k < ndim; k++)
    if (shape[k] != e->shape[k]) return 0;
  return 1;
}

/* As PyObject_GetBuffer, of an array of NumPy's: -1 if it is not what `flags` ask for. */
static int view_of_array(PyArrayObject *x, Py_buffer *view, int flags) {
  if (!PyArray_IS_C_CONTIGUOUS(x) || (flags == PyBUF_WRITABLE && !PyArray_ISWRITEABLE(x)))
    return -1;
  *view = (Py_buffer){.buf = PyArray_DATA(x), .obj = Py_NewRef(x), .len = PyArray_NBYTES(x)};
  return 0;
}

/* Lay out a nest, whose leaves begin at multiples of `alignment`; -1: an exception. */
static int set_leaves(Reduce *self, PyObject *leaves, size_t alignment) {
  Py_ssize_t count = PyList_GET_SIZE(leaves);
  size_t n = count ? (size_t)count : 1;
  self->nest.leaves = PyMem_Calloc(n, sizeof(md_leaf));
  self->views = PyMem_Calloc(2 * n, sizeof(Py_buffer));
  self->sources = PyMem_Calloc(n, sizeof(void *));
  self->results = PyMem_Calloc(n, sizeof(void *));
  self->expected = PyMem_Calloc(n, sizeof(Expected));
  if (!self->nest.leaves || !self->views || !self->sources || !self->results ||
      !self->expected) {
    PyErr_NoMemory();
    return -1;
  }
  size_t at = 0;
  self->nest.count = (int)count;
  for (Py_ssize_t i = 0; i < count; i++) {
    const char *dtype, *name;
    PyObject *shape;
    unsigned divisor;
    if (!PyArg_ParseTuple(PyList_GET_ITEM(leaves, i), "ssO!I", &dtype, &name, &PyTuple_Type,
                          &shape, &divisor))
      return -1;
    md_leaf *leaf = &self->nest.leaves[i];
    int op = md_find_op(name);
    leaf->kernel = op < 0 ? NULL : md_find_kernel(dtype, (enum md_op)op);
    if (!leaf->kernel) {
      PyErr_Format(PyExc_ValueError, "Reduce: no kernel for %s of %s", name, dtype);
      return -1;
    }
    leaf->start = at;
    if (expect(&self->expected[i], dtype, shape, leaf)) return -1;
    leaf->divisor = divisor;
    self->payload += leaf->nbytes;
    at += (leaf->nbytes + alignment - 1) / alignment * alignment;
  }
  self->nest.nbytes = at;
  return 0;
}

static int Reduce_init(Reduce *self, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"channel",     "leaves", "piece_bytes", "fingerprint",
                          "patience_ms", "counts", NULL};
  Channel *channel;
  PyObject *leaves;
  Py_ssize_t piece_bytes;
  self->counts = 1;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!n|LLp", names, &ChannelType, &channel,
                                   &PyList_Type, &leaves, &piece_bytes, &self->fingerprint,
                                   &self->patience, &self->counts))
    return -1;
  if (self->channel || piece_bytes <= 0 || (size_t)piece_bytes > channel->channel.area_bytes) {
    PyErr_SetString(PyExc_ValueError, "Reduce: a piece that does not fit an area");
    return -1;
  }
  if (set_leaves(self, leaves, MD_LINE)) return -1;
  self->nest.pieces = md_pieces(self->nest.nbytes, (size_t)piece_bytes);
  self->channel = (Channel *)Py_NewRef(channel);
  return 0;
}

/* Take how MPI moves the leaves; -1: an exception. */
static int set_move(Reduce *self, PyObject *handles) {
  self->move.leaves = PyMem_Calloc((size_t)self->nest.count + 1, sizeof(MoveLeaf));
  if (!self->move.leaves) {
    PyErr_NoMemory();
    return -1;
  }
  if (PyList_GET_SIZE(handles) != self->nest.count) {
    PyErr_SetString(PyExc_ValueError, "BetweenReduce: expected handles for each leaf");
    return -1;
  }
  for (int i = 0; i < self->nest.count; i++) {
    unsigned long long datatype, op;
    if (!PyArg_ParseTuple(PyList_GET_ITEM(handles, i), "KK", &datatype, &op)) return -1;
    self->move.leaves[i] =
        (MoveLeaf){(intptr_t)datatype, (intptr_t)op, md_itemsize(self->nest.leaves[i].kernel)};
  }
  return between_reserve(self->between, &self->move, &self->nest);
}

static int BetweenReduce_init(Reduce *self, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"channel", "leaves", "fingerprint", "patience_ms", "algorithm", "handles",
                          "nbytes", NULL};
  Between *between;
  PyObject *leaves, *handles = NULL;
  Py_ssize_t piece_bytes = 1, nbytes = -1;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!|LL(pin)O!n", names, &BetweenType, &between,
                                   &PyList_Type, &leaves, &self->fingerprint, &self->patience,
                                   &self->move.gathers, &self->move.in_flight, &piece_bytes,
                                   &PyList_Type, &handles, &nbytes))
    return -1;
  if (self->nest.leaves) {
    PyErr_SetString(PyExc_RuntimeError, "BetweenReduce: it is there already");
    return -1;
  }
  if (set_leaves(self, leaves, PAYLOAD_ALIGNMENT)) return -1;
  if (nbytes >= 0) self->payload = (size_t)nbytes; /* before they were widened */
  self->move.piece_bytes = (size_t)piece_bytes;
  self->between = (Between *)Py_NewRef(between);
  if (handles) return set_move(self, handles);
  if (self->nest.nbytes <= between->room) return 0;
  PyErr_Format(PyExc_ValueError, "BetweenReduce: %zu bytes, room for %zu", self->nest.nbytes,
               between->room);
  return -1;
}

static void release_views(Reduce *self) {
  for (int i = 0; i < self->held; i++) PyBuffer_Release(&self->views[i]);
  self->held = 0;
}

static void Reduce_dealloc(Reduce *self) {
  release_views(self);
  for (int i = 0; self->expected && i < self->nest.count; i++)
    PyMem_Free(self->expected[i].shape);
  PyMem_Free(self->expected);
  PyMem_Free(self->move.leaves);
  PyMem_Free(self->nest.leaves);
  PyMem_Free(self->views);
  PyMem_Free(self->sources);
  PyMem_Free(self->results);
  Py_XDECREF(self->channel);
  Py_XDECREF(self->between);
  Py_TYPE(self)->tp_free((PyObject *)self);
}

/* A complex number needs the alignment of its parts only, as for NumPy and C. */
static uintptr_t alignment_of(const Reduce *self, int i) {
  size_t itemsize = md_itemsize(self->nest.leaves[i].kernel);
  if (self->expected[i].kind == 'c') itemsize /= 2;
  return itemsize < 16 ? itemsize : 16;
}

static int get_view(Reduce *self, PyObject *x, int i, int flags, void **where) {
  Py_buffer *view = &self->views[self->held];
  const Expected *expected = &self->expected[i];
  int is_leaf = 1;
  if (PyArray_CheckExact(x) && !view_of_array((PyArrayObject *)x, view, flags)) {
    PyArrayObject *array = (PyArrayObject *)x;
    if (flags == SOURCE)
      is_leaf = PyArray_ISNOTSWAPPED(array) &&
                is_expected(expected, PyArray_NDIM(array), PyArray_DIMS(array),
                            PyArray_ITEMSIZE(array), PyArray_DESCR(array)->kind);
  } else {
    if (PyObject_GetBuffer(x, view, flags)) return -1;
    if (flags == SOURCE)
      is_leaf = is_expected(expected, view->ndim, view->shape, view->itemsize,
                            kind_of(view->format));
  }
  self->held++;
  if ((uintptr_t)view->buf % alignment_of(self, i)) {
    PyErr_Format(PyExc_ValueError, "Reduce: leaf %d is not aligned", i);
    return -1;
  }
  if (!is_leaf) {
    PyErr_Format(PyExc_ValueError, "Reduce: leaf %d is another kind of array", i);
    return -1;
  }
  if ((size_t)view->len != self->nest.leaves[i].nbytes) {
    PyErr_Format(PyExc_ValueError, "Reduce: leaf %d has %zd bytes, expected %zu", i, view->len,
                 self->nest.leaves[i].nbytes);
    return -1;
  }
  *where = view->buf;
  return 0;
}

/* The memory of one array, or of a list of arrays; -1 with an exception. */
static int get_views(Reduce *self, PyObject *arrays, int flags, void **where) {
  if (!PyList_Check(arrays)) {
    if (self->nest.count == 1) return get_view(self, arrays, 0, flags, where);
    PyErr_SetString(PyExc_TypeError, "Reduce: expected a list of arrays");
    return -1;
  }
  if (PyList_GET_SIZE(arrays) != self->nest.count) {
    PyErr_SetString(PyExc_ValueError, "Reduce: another number of arrays");
    return -1;
  }
  for (int i = 0; i < self->nest.count; i++)
    if (get_view(self, PyList_GET_ITEM(arrays, i), i, flags, &where[i])) return -1;
  return 0;
}

PyObject *other_arrays(void) {
  if (!PyErr_ExceptionMatches(PyExc_ValueError) && !PyErr_ExceptionMatches(PyExc_BufferError))
    return NULL;
  PyErr_Clear();
  Py_RETURN_NONE;
}

/* Count a reduction that was done, and return the status of the call. */
static int finish_reduction(Reduce *self, int status) {
  if (status == MD_OK && self->counts) {
    self->channel->reductions++;
    self->channel->reduced += self->payload;
  }
  return finish_call(self->channel, status);
}

/* Reduce with one header; return the status, or -1 with an exception. */
static int reduce_small(Reduce *self, const void *const *sources, void *const *results,
                        long long fingerprint, long long patience) {
  md_small small = {&self->nest, sources, results};
  if (self->between)
    return between_reduce(self->between, fingerprint, patience, &small, &self->move,
                          self->payload, (PyObject *)self);
  if (!self->channel) {
    PyErr_SetString(PyExc_RuntimeError, "Reduce: it is not there yet");
    return -1;
  }
  if (begin_call(self->channel)) return -1;
  md_header header = header_of(self->channel, fingerprint, patience);
  return finish_reduction(self, md_meet(&self->channel->channel, &header, &small));
}

int is_abandoned(const Between *self) { return self && self->moves && self->active; }

int reduce_one(Reduce *self, const void *source, void *result) {
  return reduce_small(self, &source, &result, self->fingerprint, self->patience);
}

/* The fingerprint and the patience of a call, if it names its own; -1: an exception. */
static int parse_call(Reduce *self, PyObject *const *args, Py_ssize_t count, Py_ssize_t first,
                      long long *fingerprint, long long *patience) {
  *fingerprint = self->fingerprint;
  *patience = self->patience;
  if (count == first) return 0;
  if (count != first + 2) {
    PyErr_Format(PyExc_TypeError, "Reduce: expected %zd or %zd arguments, got %zd", first,
                 first + 2, count);
    return -1;
  }
  *fingerprint = PyLong_AsLongLong(args[first]);
  *patience = PyLong_AsLongLong(args[first + 1]);
  return PyErr_Occurred() ? -1 : 0;
}

static PyObject *Reduce_eager(Reduce *self, PyObject *const *args, Py_ssize_t count) {
  long long fingerprint, patience;
  if (parse_call(self, args, count, 2, &fingerprint, &patience)) return NULL;
  if (require_idle(self->held > 0)) return NULL;
  if (Py_TYPE(self) == &ReduceType && self->nest.nbytes > MD_EAGER_BYTES)
    return PyErr_Format(PyExc_RuntimeError, "eager: %zu bytes", self->nest.nbytes);
  PyObject *result = NULL;
  if (get_views(self, args[0], SOURCE, (void **)self->sources)) {
    result = other_arrays();
  } else if (!get_views(self, args[1], PyBUF_WRITABLE, self->results)) {
    int status = reduce_small(self, self->sources, self->results, fingerprint, patience);
    if (status >= 0) result = PyLong_FromLong(status);
  }
  if (!is_abandoned(self->between)) release_views(self);
  return result;
}

static PyObject *Reduce_shared(Reduce *self, PyObject *const *args, Py_ssize_t count) {
  long long fingerprint, patience;
  if (parse_call(self, args, count, 3, &fingerprint, &patience)) return NULL;
  long long result_offset = PyLong_AsLongLong(args[2]);
  if (result_offset == -1 && PyErr_Occurred()) return NULL;
  if (self->held) return PyErr_Format(PyExc_RuntimeError, "shared: a call is under way");
  PyObject *result = NULL;
  md_channel *ch = &self->channel->channel;
  if (get_views(self, args[0], SOURCE, (void **)self->sources)) {
    result = other_arrays();
    release_views(self);
    return result;
  }
  if (begin_call(self->channel)) {
    release_views(self);
    return NULL;
  }
  md_header header = header_of(self->channel, fingerprint, patience);
  header.result_offset = result_offset;
  release_gil(self->channel);
  md_shared shared = {.nest = &self->nest,
                      .sources = (const unsigned char *const *)self->sources};
  int status = md_shared_meet(ch, &shared, &header);
  if (status == MD_OK) {
    self->channel->results_in_arena += (unsigned long)shared.results_in_arena;
    self->channel->sources_in_arena += (unsigned long)shared.sources_in_arena;
    if (!shared.results_in_arena) {
      acquire_gil(self->channel);
      if (get_views(self, args[1], PyBUF_WRITABLE, self->results)) {
        /* The others wait for this rank: it leaves, as with any exception here. */
        Py_XDECREF(end_call(self->channel, MD_OK));
        release_views(self);
        return NULL;
      }
      shared.results = (unsigned char *const *)self->results;
      release_gil(self->channel);
    }
    status = md_shared_finish(ch, &shared);
  }
  status = finish_reduction(self, status);
  if (status >= 0) result = PyLong_FromLong(status);
  release_views(self);
  return result;
}

/* Step by step: `start` after a header, then for each piece copy_in, a step, combine, a
   step, copy_out; see md_shared_run for the order. */
static PyObject *Reduce_start(Reduce *self, PyObject *args) {
  PyObject *sources = Py_None, *results = Py_None;
  if (!PyArg_ParseTuple(args, "|OO", &sources, &results)) return NULL;
  release_views(self);
  md_channel *ch = &self->channel->channel;
  self->call = (md_shared){
      .nest = &self->nest, .number = ch->headers, .first_area = ch->areas_used, .undivided = 1};
  if (sources != Py_None) {
    if (get_views(self, sources, PyBUF_SIMPLE, (void **)self->sources)) goto fail;
    self->call.sources = (const unsigned char *const *)self->sources;
  }
  if (results != Py_None) {
    if (get_views(self, results, PyBUF_WRITABLE, self->results)) goto fail;
    self->call.results = (unsigned char *const *)self->results;
  }
  ch->areas_used += (uint32_t)self->nest.pieces;
  Py_RETURN_NONE;
fail:
  release_views(self);
  return NULL;
}

static PyObject *piece_call(Reduce *self, PyObject *piece,
                            void (*f)(md_channel *, md_shared *, int)) {
  long p = PyLong_AsLong(piece);
  if (p == -1 && PyErr_Occurred()) return NULL;
  if (!self->call.nest || p < 0 || p >= self->nest.pieces)
    return PyErr_Format(PyExc_ValueError, "Reduce: there is no piece %ld", p);
  Py_BEGIN_ALLOW_THREADS f(&self->channel->channel, &self->call, (int)p);
  Py_END_ALLOW_THREADS Py_RETURN_NONE;
}

static PyObject *Reduce_copy_in(Reduce *self, PyObject *piece) {
  return piece_call(self, piece, md_shared_copy_in);
}

static PyObject *Reduce_combine(Reduce *self, PyObject *piece) {
  return piece_call(self, piece, md_shared_combine);
}

static PyObject *Reduce_copy_out(Reduce *self, PyObject *piece) {
  return piece_call(self, piece, md_shared_copy_out);
}

/* Of one node's sums, and those of other nodes: `Reduce.reduce_range`. */
static PyObject *Reduce_range(Reduce *self, PyObject *args) {
  Py_ssize_t first;
  PyObject *done = NULL;
  Py_buffer copies, out;
  if (!PyArg_ParseTuple(args, "ny*w*", &first, &copies, &out)) return NULL;
  Py_ssize_t n = out.len ? copies.len / out.len : 0, last = first + out.len;
  uintptr_t ends = (uintptr_t)copies.buf | (uintptr_t)out.buf | (uintptr_t)out.len;
  if (n < 1 || n > MD_MAX_RANKS || n * out.len != copies.len || first < 0 || first % MD_LINE ||
      ends % 16 || (size_t)last > self->nest.nbytes) {
    PyErr_SetString(PyExc_ValueError, "reduce_range: not a range of the layout");
  } else {
    Py_BEGIN_ALLOW_THREADS md_reduce_range(&self->nest, (size_t)first, (size_t)last, out.buf,
                                           copies.buf, (int)n);
    Py_END_ALLOW_THREADS done = Py_NewRef(Py_None);
  }
  PyBuffer_Release(&copies);
  PyBuffer_Release(&out);
  return done;
}

static PyObject *Reduce_finish(Reduce *self, PyObject *ignored) {
  (void)ignored;
  release_views(self);
  self->call.nest = NULL;
  Py_RETURN_NONE;
}

static PyObject *Reduce_piece(Reduce *self, PyObject *piece) {
  long p = PyLong_AsLong(piece);
  if (p == -1 && PyErr_Occurred()) return NULL;
  if (p < 0 || p >= self->nest.pieces)
    return PyErr_Format(PyExc_ValueError, "Reduce: there is no piece %ld", p);
  size_t first, last;
  md_piece(&self->nest, (int)p, &first, &last);
  return Py_BuildValue("nn", (Py_ssize_t)first, (Py_ssize_t)last);
}

static PyObject *Reduce_starts(Reduce *self, void *closure) {
  (void)closure;
  PyObject *list = PyList_New(self->nest.count);
  for (int i = 0; list && i < self->nest.count; i++)
    put_item(&list, i, PyLong_FromSize_t(self->nest.leaves[i].start));
  return list;
}

#define EAGER                                                                             \
  {"eager", (PyCFunction)(void *)Reduce_eager, METH_FASTCALL,                             \
   "eager(sources, results, fingerprint=..., patience_ms=...)\n--\n\n"                    \
   "Reduce with one header; return OK, AGAIN, DIFFERENT or LEFT.\n\n"                     \
   "None, and nothing was sent, where the arrays are not what is expected.\n\n"           \
   "Args:\n    sources: C-contiguous arrays, or one.\n    results: the same, for the "    \
   "results."}

static PyMethodDef BetweenReduce_methods[] = {EAGER, {NULL}};
static PyMethodDef Reduce_methods[] = {
    EAGER,
    {"shared", (PyCFunction)(void *)Reduce_shared, METH_FASTCALL,
     "shared(sources, results, result_offset, fingerprint=..., patience_ms=...)\n--\n\n"
     "Reduce piece by piece; return OK, AGAIN, DIFFERENT or LEFT.\n\n"
     "Args:\n    sources: C-contiguous arrays, or one.\n"
     "    results: the same, for the results; in the arena, if they are there.\n"
     "    result_offset: where the layout of the results begins in the arena, or NOWHERE."},
    {"start", (PyCFunction)Reduce_start, METH_VARARGS,
     "start(sources=None, results=None)\n--\n\n"
     "Begin to go piece by piece, after a header; only `reduce_range` divides."},
    {"copy_in", (PyCFunction)Reduce_copy_in, METH_O, "copy_in(piece)\n--\n\nCopy a piece in."},
    {"combine", (PyCFunction)Reduce_combine, METH_O,
     "combine(piece)\n--\n\nReduce this rank's slice of a piece."},
    {"copy_out", (PyCFunction)Reduce_copy_out, METH_O, "copy_out(piece)\n--\n\nCopy it out."},
    {"finish", (PyCFunction)Reduce_finish, METH_NOARGS,
     "finish()\n--\n\nLet go of the arrays of `start`."},
    {"reduce_range", (PyCFunction)Reduce_range, METH_VARARGS,
     "reduce_range(first, copies, out)\n--\n\nReduce a range of the layout, of several copies.\n\n"
     "Args:\n    first: where it begins.\n    copies: buffers of its size, one after the other.\n"
     "    out: for the result; it may be one of the copies."},
    {"piece", (PyCFunction)Reduce_piece, METH_O,
     "piece(number)\n--\n\nReturn where a piece begins and ends in the layout."},
    {NULL}};
static PyMemberDef Reduce_members[] = {
    {"nbytes", T_PYSSIZET, offsetof(Reduce, nest.nbytes), READONLY, "Bytes of the layout."},
    {"pieces", T_INT, offsetof(Reduce, nest.pieces), READONLY, "The number of pieces."},
    {NULL}};
static PyGetSetDef Reduce_fields[] = {
    {"starts", (getter)Reduce_starts, NULL, "Where each leaf begins in the layout.", NULL},
    {NULL}};

PyTypeObject ReduceType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "mpidist._native._core.Reduce",
    .tp_doc =
        "Reduce(channel, leaves, piece_bytes, fingerprint=0, patience_ms=0, counts=True)\n--\n\n"
        "The all-reduce of a nest: for each leaf (dtype, operation, shape, divisor).",
    .tp_basicsize = sizeof(Reduce),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)Reduce_init,
    .tp_dealloc = (destructor)Reduce_dealloc,
    .tp_methods = Reduce_methods,
    .tp_members = Reduce_members,
    .tp_getset = Reduce_fields};

PyTypeObject BetweenReduceType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "mpidist._native._core.BetweenReduce",
    .tp_doc = "BetweenReduce(channel, leaves, fingerprint=0, patience_ms=0, algorithm=...,\n"
              "              handles=..., nbytes=...)\n--\n\n"
              "The all-reduce of a nest behind a header of `Between`; see `Reduce`.",
    .tp_basicsize = sizeof(Reduce),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)BetweenReduce_init,
    .tp_dealloc = (destructor)Reduce_dealloc,
    .tp_methods = BetweenReduce_methods};
