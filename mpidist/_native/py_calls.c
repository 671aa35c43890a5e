/* `CallState` and `ArrayCall`: a small all-reduce or all-gather from the caller's array to
   the result, without Python in between. */
#include "binding.h"

#include <structmember.h>

/* --- CallState: what the guard knows of the calls of a strategy --------------------------- */

static int CallState_traverse(CallState *self, visitproc visit, void *arg) {
  Py_VISIT(self->call);
  Py_VISIT(self->previous);
  Py_VISIT(self->timeout);
  Py_VISIT(self->usual_timeout);
  return 0;
}

static int CallState_clear(CallState *self) {
  Py_CLEAR(self->call);
  Py_CLEAR(self->previous);
  Py_CLEAR(self->timeout);
  Py_CLEAR(self->usual_timeout);
  return 0;
}

static void CallState_dealloc(CallState *self) {
  PyObject_GC_UnTrack(self);
  CallState_clear(self);
  Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMemberDef CallState_members[] = {
    {"call", T_OBJECT_EX, offsetof(CallState, call), 0, "The call of this rank."},
    {"previous_call", T_OBJECT_EX, offsetof(CallState, previous), 0, "The call before."},
    {"timeout", T_OBJECT_EX, offsetof(CallState, timeout), 0, "Seconds; of the call."},
    {"timeout_seconds", T_OBJECT_EX, offsetof(CallState, usual_timeout), 0,
     "Seconds; of calls that name no others."},
    {"sequence", T_LONGLONG, offsetof(CallState, sequence), 0, "Headers that completed."},
    {"blocked", T_BOOL, offsetof(CallState, blocked), 0, "Whether no call may begin."},
    {"mover", T_ULONG, offsetof(CallState, mover), 0,
     "The thread that moves data by Python; 0: none does."},
    {"cut_off", T_BOOL, offsetof(CallState, cut_off), 0,
     "Whether an exception came in the middle of a call."},
    {NULL}};

PyTypeObject CallStateType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "mpidist._native._core.CallState",
    .tp_doc = "CallState()\n--\n\nThe call that a rank is in, for `ArrayCall`, which sets it.",
    .tp_basicsize = sizeof(CallState),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_traverse = (traverseproc)CallState_traverse,
    .tp_clear = (inquiry)CallState_clear,
    .tp_dealloc = (destructor)CallState_dealloc,
    .tp_members = CallState_members};

/* --- ArrayCall: the plans of arrays that travel with their header ------------------------ */

#define ENTRIES 256 /* a power of two */
#define MOST_DIMS 4

/* The plan of calls with arrays of one dtype and shape. */
typedef struct {
  PyObject *key; /* the call's other argument: an operation, or an axis */
  PyObject *call, *plan;
  PyObject *core; /* a Reduce or a Gather */
  PyArray_Descr *dtype;
  int ndim, axis;
  npy_intp shape[MOST_DIMS];
} Entry;

typedef struct {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  CallState *state;
  PyObject *fallback;
  int array; /* which of the two arguments it is */
  Entry *entries;
} ArrayCall;

static void drop(Entry *e) {
  Entry old = *e;
  *e = (Entry){0};
  Py_XDECREF(old.key);
  Py_XDECREF(old.call);
  Py_XDECREF(old.plan);
  Py_XDECREF(old.dtype);
  Py_XDECREF(old.core);
}

/* Where the plan of such arrays is, if it is there. */
static Entry *entry_for(const ArrayCall *self, PyObject *key, PyArray_Descr *dtype, int ndim,
                        const npy_intp *shape) {
  size_t hash = (size_t)key >> 4;
  hash = hash * 31 + ((size_t)dtype >> 4);
  for (int k = 0; k < ndim; k++) hash = hash * 31 + (size_t)shape[k];
  hash ^= hash >> 8;
  return &self->entries[hash % ENTRIES];
}

static int is_for(const Entry *e, PyObject *key, PyArrayObject *x) {
  if (e->key != key || e->dtype != PyArray_DESCR(x) || e->ndim != PyArray_NDIM(x)) return 0;
  for (int k = 0; k < e->ndim; k++)
    if (e->shape[k] != PyArray_DIM(x, k)) return 0;
  return 1;
}

/* The exception that is set, to the plan, which raises what the caller is to see. */
static void interrupted(PyObject *plan) {
  PyObject *type, *error, *traceback;
  PyErr_Fetch(&type, &error, &traceback);
  PyErr_NormalizeException(&type, &error, &traceback);
  if (traceback) PyException_SetTraceback(error, traceback);
  PyObject *none = PyObject_CallMethod(plan, "interrupted", "O", error);
  if (none) PyErr_SetString(PyExc_SystemError, "a plan that was interrupted has not raised");
  Py_XDECREF(none);
  Py_XDECREF(type);
  Py_XDECREF(error);
  Py_XDECREF(traceback);
}

static PyObject *new_array(PyArray_Descr *dtype, int ndim, const npy_intp *shape) {
  Py_INCREF(dtype); /* which the array takes */
  return PyArray_NewFromDescr(&PyArray_Type, dtype, ndim, shape, NULL, NULL, 0, NULL);
}

/* Make what the result of a call needs before it; -1: there is no memory. */
static int prepare(const Entry *e, int reduces, PyObject **result) {
  npy_intp shape[MOST_DIMS];
  for (int k = 0; k < e->ndim; k++) shape[k] = e->shape[k];
  if (!reduces) {
    shape[e->axis] = gather_needs((Gather *)e->core, e->shape[e->axis]);
    if (!shape[e->axis]) return 0;
  }
  *result = new_array(e->dtype, e->ndim, shape);
  if (*result) return 0;
  PyErr_Clear(); /* Python tries again, and tells the others */
  return -1;
}

/* Both return the status, or -1 with an exception; and the result, if there is one yet. */
static int reduce(const Entry *e, PyArrayObject *x, PyObject **result) {
  Reduce *core = (Reduce *)e->core;
  const void *source = PyArray_DATA(x);
  void *sum = PyArray_DATA((PyArrayObject *)*result);
  return reduce_small(core, &source, &sum, core->fingerprint, core->timeout_ms);
}

static int gather(const Entry *e, PyArrayObject *x, PyObject **result) {
  Gather *core = (Gather *)e->core;
  npy_intp shape[MOST_DIMS];
  void *memory = *result ? PyArray_DATA((PyArrayObject *)*result) : NULL;
  int status = gather_one(core, PyArray_DATA(x), PyArray_DIM(x, e->axis), memory);
  if (status != MD_OK || core->filled) return status;
  Py_CLEAR(*result);
  for (int k = 0; k < e->ndim; k++) shape[k] = e->shape[k];
  shape[e->axis] = gathered_length(core);
  if (shape[e->axis] < 0) return status;
  *result = new_array(e->dtype, e->ndim, shape);
  if (*result) gather_to(core, 0, PyArray_DATA((PyArrayObject *)*result));
  else PyErr_Clear(); /* Python tries again, and tells the others */
  return status;
}

/* NULL without an exception: this call is for Python. */
static PyObject *call_with_array(ArrayCall *self, PyObject *key, PyArrayObject *x) {
  CallState *state = self->state;
  if (!state || state->blocked || state->mover || PyArray_NDIM(x) > MOST_DIMS) return NULL;
  Entry *found = entry_for(self, key, PyArray_DESCR(x), PyArray_NDIM(x), PyArray_DIMS(x));
  if (!is_for(found, key, x) || !PyArray_IS_C_CONTIGUOUS(x) || !PyArray_ISALIGNED(x))
    return NULL;
  PyObject *result = NULL;
  int reduces = Py_TYPE(found->core) != &GatherType;
  const Carrier *carrier =
      reduces ? ((Reduce *)found->core)->carrier : ((Gather *)found->core)->carrier;
  /* Of another thread, or below a signal handler: Python refuses a call inside another. */
  if (carrier->busy || carrier->active) return NULL;
  if (prepare(found, reduces, &result)) return NULL;
  /* What runs during the call may drop the entry. */
  Entry e = *found;
  Py_INCREF(e.plan);
  Py_INCREF(e.core);
  Py_INCREF(e.dtype);
  Py_XSETREF(state->previous, state->call);
  state->call = Py_NewRef(e.call);
  Py_XSETREF(state->timeout, Py_XNewRef(state->usual_timeout));
  int status = (reduces ? reduce : gather)(&e, x, &result);
  if (status == MD_OK && result) {
    state->sequence++;
  } else if (status < 0) {
    if (is_abandoned(carrier)) {
      Py_INCREF(x); /* leaked, and the result */
      result = NULL;
    }
    Py_CLEAR(result);
    state->blocked = state->cut_off = 1; /* after a RecursionError Python may not get to say so */
    interrupted(e.plan);
  } else {
    PyObject *other = result ? result : Py_NewRef(Py_None);
    result = PyObject_CallMethod(e.plan, "concluded", "iOO", status, x, other);
    Py_DECREF(other);
  }
  Py_DECREF(e.plan);
  Py_DECREF(e.core);
  Py_DECREF(e.dtype);
  return result;
}

static PyObject *ArrayCall_call(ArrayCall *self, PyObject *const *args, size_t flags,
                                PyObject *names) {
  Py_ssize_t count = PyVectorcall_NARGS(flags);
  int plain = !names && (count == 2 || (count == 3 && args[2] == Py_None));
  if (plain && PyArray_CheckExact(args[self->array])) {
    PyArrayObject *x = (PyArrayObject *)args[self->array];
    PyObject *result = call_with_array(self, args[!self->array], x);
    if (result || PyErr_Occurred()) return result;
  }
  if (!self->fallback) return PyErr_Format(PyExc_RuntimeError, "ArrayCall: it is gone");
  return PyObject_Vectorcall(self->fallback, args, flags, names);
}

static int ArrayCall_init(ArrayCall *self, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"state", "fallback", "array", NULL};
  PyObject *state, *fallback;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!Op", names, &CallStateType, &state,
                                   &fallback, &self->array))
    return -1;
  self->entries = PyMem_Calloc(ENTRIES, sizeof(Entry));
  if (!self->entries) {
    PyErr_NoMemory();
    return -1;
  }
  self->state = (CallState *)Py_NewRef(state);
  self->fallback = Py_NewRef(fallback);
  self->vectorcall = (vectorcallfunc)ArrayCall_call;
  return 0;
}

MADE_BY_INIT(ArrayCall)

/* Whether the core can run calls with an array of so many dimensions as its one leaf. */
static int is_core_for(PyObject *core, int ndim, int axis) {
  if (Py_TYPE(core) == &ReduceType) {
    const Reduce *reduce = (const Reduce *)core;
    return reduce->nest.count == 1 && reduce->expected->ndim == ndim &&
           (reduce->move.leaves || reduce->nest.nbytes <= reduce->room);
  }
  return Py_TYPE(core) == &GatherType && ((const Gather *)core)->count == 1 && axis >= 0 &&
         axis < ndim;
}

static PyObject *ArrayCall_keep(ArrayCall *self, PyObject *args) {
  PyObject *key, *core, *call, *plan;
  PyArrayObject *x;
  int axis = 0;
  if (!PyArg_ParseTuple(args, "OO!OOO|i", &key, &PyArray_Type, &x, &core, &call, &plan, &axis))
    return NULL;
  int ndim = PyArray_NDIM(x);
  if (!is_core_for(core, ndim, axis))
    return PyErr_Format(PyExc_ValueError, "keep: not a plan of such an array");
  if (ndim > MOST_DIMS) Py_RETURN_NONE;
  Entry *e = entry_for(self, key, PyArray_DESCR(x), ndim, PyArray_DIMS(x));
  drop(e);
  *e = (Entry){.key = Py_NewRef(key),
               .call = Py_NewRef(call),
               .plan = Py_NewRef(plan),
               .core = Py_NewRef(core),
               .dtype = (PyArray_Descr *)Py_NewRef(PyArray_DESCR(x)),
               .ndim = ndim,
               .axis = axis};
  for (int k = 0; k < ndim; k++) e->shape[k] = PyArray_DIM(x, k);
  Py_RETURN_NONE;
}

static PyObject *ArrayCall_forget(ArrayCall *self, PyObject *ignored) {
  (void)ignored;
  for (int i = 0; self->entries && i < ENTRIES; i++) drop(&self->entries[i]);
  Py_RETURN_NONE;
}

static int ArrayCall_traverse(ArrayCall *self, visitproc visit, void *arg) {
  Py_VISIT(self->state);
  Py_VISIT(self->fallback);
  for (int i = 0; self->entries && i < ENTRIES; i++) {
    Py_VISIT(self->entries[i].key);
    Py_VISIT(self->entries[i].call);
    Py_VISIT(self->entries[i].plan);
  }
  return 0;
}

static int ArrayCall_clear(ArrayCall *self) {
  Py_XDECREF(ArrayCall_forget(self, NULL));
  Py_CLEAR(self->state);
  Py_CLEAR(self->fallback);
  return 0;
}

static void ArrayCall_dealloc(ArrayCall *self) {
  PyObject_GC_UnTrack(self);
  ArrayCall_clear(self);
  PyMem_Free(self->entries);
  Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef ArrayCall_methods[] = {
    {"keep", (PyCFunction)ArrayCall_keep, METH_VARARGS,
     "keep(key, array, core, call, plan, axis=0)\n--\n\n"
     "Run calls with arrays of this dtype and shape by `core` from now on.\n\n"
     "Args:\n    key: the other argument, as in calls the same object.\n"
     "    array: such an array; the same dtype object counts.\n"
     "    core: a `Reduce` or `Gather` of one such leaf.\n    call: for `CallState`.\n"
     "    plan: its methods `concluded(status, array, result)` and\n        "
     "`interrupted(error)` end calls that do not simply end; the result is None\n"
     "        if it was not made.\n    axis: of a gather."},
    {"forget", (PyCFunction)ArrayCall_forget, METH_NOARGS, "forget()\n--\n\nForget all plans."},
    {NULL}};

PyTypeObject ArrayCallType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "mpidist._native._core.ArrayCall",
    .tp_doc =
        "ArrayCall(state, fallback, array)\n--\n\n"
        "Called with two arguments, of which number `array` is one for which it keeps a\n"
        "plan, it runs it; otherwise, or in a state that is blocked, it calls `fallback`.",
    .tp_basicsize = sizeof(ArrayCall),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(ArrayCall, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = ArrayCall_new,
    .tp_traverse = (traverseproc)ArrayCall_traverse,
    .tp_clear = (inquiry)ArrayCall_clear,
    .tp_dealloc = (destructor)ArrayCall_dealloc,
    .tp_methods = ArrayCall_methods};
