/* `Reduce`: the all-reduce of a nest, at once or, in the memory of a node, step by step. */
#include "binding.h"

#include <structmember.h>

/* Fill in what a leaf of this dtype and shape must be, and its size; -1: an exception. */
static int expect(Expected *e, const char *dtype, PyObject *shape, md_leaf *leaf) {
  e->kind = dtype[0] == 'b' && dtype[1] == 'f' ? 'V' : dtype[0];
  e->itemsize = (npy_intp)md_itemsize(leaf->kernel);
  e->ndim = (int)PyTuple_GET_SIZE(shape);
  e->shape = PyMem_Calloc((size_t)e->ndim + 1, sizeof(npy_intp));
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

static int is_expected(const Expected *e, PyArrayObject *x) {
  if (PyArray_NDIM(x) != e->ndim || PyArray_ITEMSIZE(x) != e->itemsize ||
      PyArray_DESCR(x)->kind != e->kind || !PyArray_ISNOTSWAPPED(x))
    return 0;
  if (e->kind == 'V' && !PyTypeNum_ISUSERDEF(PyArray_TYPE(x))) return 0; /* no bfloat16 */
  return PyArray_CompareLists(PyArray_DIMS(x), e->shape, e->ndim);
}

/* Lay out a nest, whose leaves begin at multiples of `alignment`; -1: an exception. */
static int set_leaves(Reduce *self, PyObject *leaves, size_t alignment) {
  Py_ssize_t count = PyList_GET_SIZE(leaves);
  size_t n = count ? (size_t)count : 1;
  self->nest.leaves = PyMem_Calloc(n, sizeof(md_leaf));
  self->kept.arrays = PyMem_Calloc(2 * n, sizeof(PyObject *));
  self->sources = PyMem_Calloc(n, sizeof(void *));
  self->results = PyMem_Calloc(n, sizeof(void *));
  self->expected = PyMem_Calloc(n, sizeof(Expected));
  if (!self->nest.leaves || !self->kept.arrays || !self->sources || !self->results ||
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
    leaf->kernel = md_find_kernel(dtype, name);
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

/* Take how MPI moves the leaves; -1: an exception. */
static int set_move(Reduce *self, PyObject *handles) {
  self->move.leaves = PyMem_Calloc((size_t)self->nest.count + 1, sizeof(MoveLeaf));
  if (!self->move.leaves) {
    PyErr_NoMemory();
    return -1;
  }
  if (PyList_GET_SIZE(handles) != self->nest.count) {
    PyErr_SetString(PyExc_ValueError, "Reduce: expected handles for each leaf");
    return -1;
  }
  for (int i = 0; i < self->nest.count; i++) {
    unsigned long long datatype, op;
    if (!PyArg_ParseTuple(PyList_GET_ITEM(handles, i), "KK", &datatype, &op)) return -1;
    self->move.leaves[i] = (MoveLeaf){(intptr_t)datatype, (intptr_t)op};
  }
  return between_reserve(self->between, &self->move, &self->nest);
}

/* -1 with an exception, if the nest does not travel with its header, and MPI does not move it. */
static int require_room(const Reduce *self) {
  if (self->nest.nbytes <= self->room || self->move.leaves) return 0;
  PyErr_Format(PyExc_ValueError, "Reduce: %zu bytes, room for %zu", self->nest.nbytes, self->room);
  return -1;
}

static int Reduce_init(Reduce *self, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"channel", "leaves",    "piece_bytes", "fingerprint", "timeout_ms",
                          "counts",  "algorithm", "handles",     "nbytes",      NULL};
  PyObject *channel, *leaves, *handles = NULL;
  Py_ssize_t piece_bytes, piece_of_mpi = 1, nbytes = -1;
  self->counts = 1;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!n|LLp(pin)O!n", names, &CarrierType, &channel,
                                   &PyList_Type, &leaves, &piece_bytes, &self->fingerprint,
                                   &self->timeout_ms, &self->counts, &self->move.gathers,
                                   &self->move.in_flight, &piece_of_mpi, &PyList_Type, &handles,
                                   &nbytes))
    return -1;
  self->carrier = (Carrier *)Py_NewRef(channel);
  if (Py_TYPE(channel) == &ChannelType) {
    self->channel = (Channel *)channel;
    if (piece_bytes < 0 || (size_t)piece_bytes > self->channel->channel.area_bytes) {
      PyErr_SetString(PyExc_ValueError, "Reduce: a piece that does not fit an area");
      return -1;
    }
    if (set_leaves(self, leaves, MD_LINE)) return -1;
    if (piece_bytes) self->nest.pieces = md_pieces(self->nest.nbytes, (size_t)piece_bytes);
    self->room = MD_EAGER_BYTES;
    return 0;
  }
  self->between = (Between *)channel;
  if (set_leaves(self, leaves, PAYLOAD_ALIGNMENT)) return -1;
  if (nbytes >= 0) self->payload = (size_t)nbytes; /* before they were widened */
  self->move.piece_bytes = (size_t)piece_of_mpi;
  self->room = self->between->room;
  if (handles) return set_move(self, handles);
  return require_room(self);
}

MADE_BY_INIT(Reduce)

static void Reduce_dealloc(Reduce *self) {
  let_go(&self->kept);
  for (int i = 0; self->expected && i < self->nest.count; i++)
    PyMem_Free(self->expected[i].shape);
  PyMem_Free(self->expected);
  PyMem_Free(self->move.leaves);
  PyMem_Free(self->nest.leaves);
  PyMem_Free(self->kept.arrays);
  PyMem_Free(self->sources);
  PyMem_Free(self->results);
  Py_XDECREF(self->carrier);
  Py_TYPE(self)->tp_free((PyObject *)self);
}

/* A complex number needs the alignment of its parts only, as for NumPy and C. */
static uintptr_t alignment_of(const Reduce *self, int i) {
  size_t itemsize = md_itemsize(self->nest.leaves[i].kernel);
  if (self->expected[i].kind == 'c') itemsize /= 2;
  return itemsize < 16 ? itemsize : 16;
}

/* What is asked of arrays: sources whose headers did not compare them must be as expected.
   In steps, None is one that the caller copies. */
enum { SOURCE, RESULT, IN_STEPS };

static int get_array(Reduce *self, PyObject *x, int i, int use, void **where) {
  *where = NULL;
  if (x == Py_None && use & IN_STEPS) return 0;
  *where = keep_array(&self->kept, x, use & RESULT);
  if (!*where) return -1;
  PyArrayObject *array = (PyArrayObject *)x;
  if ((uintptr_t)*where % alignment_of(self, i)) {
    PyErr_Format(PyExc_ValueError, "Reduce: leaf %d is not aligned", i);
    return -1;
  }
  if (use == SOURCE && !is_expected(&self->expected[i], array)) {
    PyErr_Format(PyExc_ValueError, "Reduce: leaf %d is another kind of array", i);
    return -1;
  }
  if ((size_t)PyArray_NBYTES(array) != self->nest.leaves[i].nbytes) {
    PyErr_Format(PyExc_ValueError, "Reduce: leaf %d has %zd bytes, expected %zu", i,
                 PyArray_NBYTES(array), self->nest.leaves[i].nbytes);
    return -1;
  }
  return 0;
}

/* The memory of one array, or of a list of arrays; -1 with an exception. */
static int get_arrays(Reduce *self, PyObject *arrays, int use, void **where) {
  if (!PyList_Check(arrays)) {
    if (self->nest.count == 1) return get_array(self, arrays, 0, use, where);
    PyErr_SetString(PyExc_TypeError, "Reduce: expected a list of arrays");
    return -1;
  }
  if (PyList_GET_SIZE(arrays) != self->nest.count) {
    PyErr_SetString(PyExc_ValueError, "Reduce: another number of arrays");
    return -1;
  }
  for (int i = 0; i < self->nest.count; i++)
    if (get_array(self, PyList_GET_ITEM(arrays, i), i, use, &where[i])) return -1;
  return 0;
}

int is_abandoned(const Carrier *self) { return (self->moves || self->lends) && self->active; }

/* Count a reduction, if it was done. */
static void count_reduction(const Reduce *self, int status) {
  if (status != MD_OK || !self->counts) return;
  self->carrier->reductions++;
  self->carrier->reduced += self->payload;
}

int reduce_small(Reduce *self, const void *const *sources, void *const *results,
                 long long fingerprint, long long timeout_ms) {
  const long long words[WORDS] = {0, fingerprint, 0, 0, timeout_ms, MD_NOWHERE};
  const md_small small = {&self->nest, sources, results};
  int fits = self->nest.nbytes <= self->room;
  int status = fits ? meet_ranks(self->carrier, words, &small, (PyObject *)self)
                    : between_reduce(self->between, &self->move, words, &small, self->fingerprint,
                                     (PyObject *)self);
  count_reduction(self, status);
  return status;
}

/* -1 with an exception, where there is no memory of a node. */
static int require_node(const Reduce *self) {
  if (self->channel) return 0;
  PyErr_SetString(PyExc_RuntimeError, "Reduce: these ranks share no memory");
  return -1;
}

/* What `run` does once it has the sources; return the status, or -1 with an exception. */
static int reduce_in_pieces(Reduce *self, const long long words[WORDS], PyObject *results) {
  md_channel *ch = &self->channel->channel;
  md_shared shared = {.nest = &self->nest,
                      .sources = (const unsigned char *const *)self->sources};
  if (begin_call(self->carrier)) return -1;
  md_header header = header_with(self->carrier, words);
  release_gil(self->carrier);
  int status = md_shared_meet(ch, &shared, &header);
  if (status == MD_OK) {
    self->channel->results_in_arena += (unsigned long)shared.results_in_arena;
    self->channel->sources_in_arena += (unsigned long)shared.sources_in_arena;
    if (!shared.results_in_arena) {
      acquire_gil(self->carrier);
      /* Where it fails the others wait for this rank: it leaves, as with any exception here. */
      if (get_arrays(self, results, RESULT, self->results))
        return end_call(self->carrier, -1);
      shared.results = (unsigned char *const *)self->results;
      release_gil(self->carrier);
    }
    status = md_shared_finish(ch, &shared);
  }
  count_reduction(self, status);
  return end_call(self->carrier, status);
}

static PyObject *Reduce_run(Reduce *self, PyObject *const *args, Py_ssize_t count) {
  long long words[WORDS] = {[FINGERPRINT] = self->fingerprint,
                            [TIMEOUT_MS] = self->timeout_ms,
                            [RESULT_OFFSET] = MD_NOWHERE};
  if (count < 2 || count > 5 || count == 4)
    return PyErr_Format(PyExc_TypeError, "run: expected 2, 3 or 5 arguments, got %zd", count);
  if (count > 2) words[RESULT_OFFSET] = PyLong_AsLongLong(args[2]);
  if (count > 3) words[FINGERPRINT] = PyLong_AsLongLong(args[3]);
  if (count > 3) words[TIMEOUT_MS] = PyLong_AsLongLong(args[4]);
  int in_pieces = self->nest.pieces > 0;
  if (PyErr_Occurred() || require_idle(self->kept.count > 0) || (!in_pieces && require_room(self)))
    return NULL;
  PyObject *result = NULL;
  if (get_arrays(self, args[0], SOURCE, (void **)self->sources)) {
    result = other_arrays();
  } else if (in_pieces) {
    result = status_or_null(reduce_in_pieces(self, words, args[1]));
  } else if (!get_arrays(self, args[1], RESULT, self->results)) {
    result = status_or_null(reduce_small(self, self->sources, self->results, words[FINGERPRINT],
                                         words[TIMEOUT_MS]));
  }
  if (!is_abandoned(self->carrier)) let_go(&self->kept);
  return result;
}

/* Step by step: `start` after a header, then for each piece copy_in, a step, combine, a
   step, copy_out; see md_shared_run for the order. */
static PyObject *Reduce_start(Reduce *self, PyObject *args) {
  PyObject *sources, *results;
  if (require_node(self) || !PyArg_ParseTuple(args, "OO", &sources, &results)) return NULL;
  let_go(&self->kept);
  md_channel *ch = &self->channel->channel;
  self->call = (md_shared){
      .nest = &self->nest, .number = ch->headers, .first_area = ch->areas_used, .undivided = 1};
  if (get_arrays(self, sources, SOURCE | IN_STEPS, (void **)self->sources)) goto fail;
  self->call.sources = (const unsigned char *const *)self->sources;
  if (results != Py_None) {
    if (get_arrays(self, results, RESULT | IN_STEPS, self->results)) goto fail;
    self->call.results = (unsigned char *const *)self->results;
  }
  ch->areas_used += (uint32_t)self->nest.pieces;
  Py_RETURN_NONE;
fail:
  let_go(&self->kept);
  return NULL;
}

/* Return the number of a piece; -1: an exception. */
static int parse_piece(const Reduce *self, PyObject *piece) {
  long p = PyLong_AsLong(piece);
  if (p >= 0 && p < self->nest.pieces) return (int)p;
  if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "Reduce: there is no piece %ld", p);
  return -1;
}

static PyObject *piece_call(Reduce *self, PyObject *piece,
                            void (*f)(md_channel *, md_shared *, int)) {
  int p = parse_piece(self, piece);
  if (p < 0) return NULL;
  if (!self->call.nest) return PyErr_Format(PyExc_RuntimeError, "Reduce: it was not started");
  Py_BEGIN_ALLOW_THREADS f(&self->channel->channel, &self->call, p);
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
  let_go(&self->kept);
  self->call.nest = NULL;
  Py_RETURN_NONE;
}

static PyObject *Reduce_piece(Reduce *self, PyObject *piece) {
  size_t first, last;
  int p = parse_piece(self, piece);
  if (p < 0) return NULL;
  md_piece(&self->nest, p, &first, &last);
  return Py_BuildValue("nn", (Py_ssize_t)first, (Py_ssize_t)last);
}

static PyMethodDef Reduce_methods[] = {
    {"run", (PyCFunction)(void *)Reduce_run, METH_FASTCALL,
     "run(sources, results, result_offset=NOWHERE, fingerprint=..., timeout_ms=...)\n--\n\n"
     "Reduce, and return OK, AGAIN, DIFFERENT or LEFT: piece by piece; without pieces with one\n"
     "header, or behind it by MPI.\n\n"
     "None, and nothing was sent, where the arrays are not what is expected.\n\n"
     "Args:\n    sources: C-contiguous arrays, or one.\n"
     "    results: the same, for the results; in the arena, if they are there.\n"
     "    result_offset: where the layout of the results begins in the arena."},
    {"start", (PyCFunction)Reduce_start, METH_VARARGS,
     "start(sources, results)\n--\n\n"
     "Begin to go piece by piece, after a header; only `reduce_range` divides. Of sources and\n"
     "results those that are None the caller copies; instead of results None: it wants none."},
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

PyTypeObject ReduceType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "mpidist._native._core.Reduce",
    .tp_doc =
        "Reduce(channel, leaves, piece_bytes, fingerprint=0, timeout_ms=0, counts=True,\n"
        "       algorithm=..., handles=..., nbytes=...)\n--\n\n"
        "The all-reduce of a nest: for each leaf (dtype, operation, shape, divisor).\n\n"
        "Args:\n    channel: a `Channel` or a `Between`.\n"
        "    piece_bytes: at most an area of the channel; 0: in one piece, as in a `Between`.\n"
        "    algorithm: how MPI moves a nest that has no room behind the header of a `Between`.\n"
        "    handles: of MPI's datatype and operation for each leaf then.\n"
        "    nbytes: what is counted, if not the bytes of the leaves.",
    .tp_basicsize = sizeof(Reduce),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = Reduce_new,
    .tp_dealloc = (destructor)Reduce_dealloc,
    .tp_methods = Reduce_methods,
    .tp_members = Reduce_members};
