/* `CallState` and `AllReduce`: a small all-reduce from the caller's array to the result,
   without Python in between. */
#include "binding.h"

#include <structmember.h>

/* --- CallState: what the guard knows of the calls of a strategy --------------------------- */

static int CallState_traverse(CallState *self, visitproc visit, void *arg) {
  Py_VISIT(self->call);
  Py_VISIT(self->before);
  Py_VISIT(self->timeout);
  Py_VISIT(self->usual_timeout);
  return 0;
}

static int CallState_clear(CallState *self) {
  Py_CLEAR(self->call);
  Py_CLEAR(self->before);
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
    {"_call", T_OBJECT_EX, offsetof(CallState, call), 0, "The call of this rank."},
    {"_before", T_OBJECT_EX, offsetof(CallState, before), 0, "The call before."},
    {"_timeout", T_OBJECT_EX, offsetof(CallState, timeout), 0, "Seconds; of the call."},
    {"timeout_seconds", T_OBJECT_EX, offsetof(CallState, usual_timeout), 0,
     "Seconds; of calls that name no others."},
    {"sequence", T_LONGLONG, offsetof(CallState, sequence), 0, "Headers that completed."},
    {"blocked", T_BOOL, offsetof(CallState, blocked), 0, "Whether no call may begin."},
    {NULL}};

PyTypeObject CallStateType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "mpidist._native._core.CallState",
    .tp_doc = "CallState()\n--\n\nThe call that a rank is in, for `AllReduce`, which sets it.",
    .tp_basicsize = sizeof(CallState),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_traverse = (traverseproc)CallState_traverse,
    .tp_clear = (inquiry)CallState_clear,
    .tp_dealloc = (destructor)CallState_dealloc,
    .tp_members = CallState_members};

/* --- AllReduce: the plans of arrays that travel with their header ------------------------ */

#define ENTRIES 256 /* a power of two */
#define MOST_DIMS 4

/* The plan of arrays of one dtype and shape. */
typedef struct {
  PyObject *op, *call, *plan;
  PyArray_Descr *dtype;
  Reduce *core;
  int ndim;
  npy_intp shape[MOST_DIMS];
} Entry;

typedef struct {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  CallState *state;
  PyObject *otherwise;
  Entry *entries;
} AllReduce;

static void drop(Entry *e) {
  Entry old = *e;
  *e = (Entry){0};
  Py_XDECREF(old.op);
  Py_XDECREF(old.call);
  Py_XDECREF(old.plan);
  Py_XDECREF(old.dtype);
  Py_XDECREF(old.core);
}

/* Where the plan of such arrays is, if it is there. */
static Entry *entry_for(const AllReduce *self, PyObject *op, PyArray_Descr *dtype, int ndim,
                        const npy_intp *shape) {
  size_t hash = (size_t)op >> 4;
  hash = hash * 31 + ((size_t)dtype >> 4);
  for (int k = 0; k < ndim; k++) hash = hash * 31 + (size_t)shape[k];
  hash ^= hash >> 8;
  return &self->entries[hash % ENTRIES];
}

static int is_for(const Entry *e, PyObject *op, PyArrayObject *x) {
  if (e->op != op || e->dtype != PyArray_DESCR(x) || e->ndim != PyArray_NDIM(x)) return 0;
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
  Py_XDECREF(PyObject_CallMethod(plan, "interrupted", "O", error));
  Py_XDECREF(type);
  Py_XDECREF(error);
  Py_XDECREF(traceback);
}

/* NULL without an exception: this call is for Python. */
static PyObject *all_reduce_array(AllReduce *self, PyObject *op, PyArrayObject *x) {
  CallState *state = self->state;
  if (state->blocked || PyArray_NDIM(x) > MOST_DIMS) return NULL;
  Entry *e = entry_for(self, op, PyArray_DESCR(x), PyArray_NDIM(x), PyArray_DIMS(x));
  if (!is_for(e, op, x) || !PyArray_IS_C_CONTIGUOUS(x) || !PyArray_ISALIGNED(x)) return NULL;
  Py_INCREF(e->dtype); /* which the array takes */
  PyObject *array = PyArray_NewFromDescr(&PyArray_Type, e->dtype, e->ndim, e->shape, NULL, NULL,
                                         0, NULL);
  if (!array) {
    PyErr_Clear(); /* Python tries again, and tells the others */
    return NULL;
  }
  /* What runs during the call may drop the entry. */
  PyObject *plan = Py_NewRef(e->plan), *result = NULL;
  Reduce *core = (Reduce *)Py_NewRef(e->core);
  Py_XSETREF(state->before, state->call);
  state->call = Py_NewRef(e->call);
  Py_XSETREF(state->timeout, Py_XNewRef(state->usual_timeout));
  int status = reduce_one(core, PyArray_DATA(x), PyArray_DATA((PyArrayObject *)array));
  if (status == MD_OK) {
    state->sequence++;
    result = Py_NewRef(array);
  } else if (status < 0) {
    interrupted(plan);
  } else {
    result = PyObject_CallMethod(plan, "concluded", "iOO", status, x, array);
  }
  Py_DECREF(array);
  Py_DECREF(plan);
  Py_DECREF(core);
  return result;
}

static PyObject *AllReduce_call(AllReduce *self, PyObject *const *args, size_t flags,
                                PyObject *names) {
  Py_ssize_t count = PyVectorcall_NARGS(flags);
  int plain = !names && (count == 2 || (count == 3 && args[2] == Py_None));
  if (plain && PyArray_CheckExact(args[1])) {
    PyObject *result = all_reduce_array(self, args[0], (PyArrayObject *)args[1]);
    if (result || PyErr_Occurred()) return result;
  }
  return PyObject_Vectorcall(self->otherwise, args, flags, names);
}

static int AllReduce_init(AllReduce *self, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"state", "otherwise", NULL};
  PyObject *state, *otherwise;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O", names, &CallStateType, &state,
                                   &otherwise))
    return -1;
  if (self->entries) {
    PyErr_SetString(PyExc_RuntimeError, "AllReduce: it is there already");
    return -1;
  }
  self->entries = PyMem_Calloc(ENTRIES, sizeof(Entry));
  if (!self->entries) {
    PyErr_NoMemory();
    return -1;
  }
  self->state = (CallState *)Py_NewRef(state);
  self->otherwise = Py_NewRef(otherwise);
  self->vectorcall = (vectorcallfunc)AllReduce_call;
  return 0;
}

static PyObject *AllReduce_keep(AllReduce *self, PyObject *args) {
  PyObject *op, *dtype, *call, *plan;
  Reduce *core;
  if (!PyArg_ParseTuple(args, "OO!O!OO", &op, &PyArrayDescr_Type, &dtype, &ReduceType, &core,
                        &call, &plan))
    return NULL;
  if (core->nest.count != 1 || core->nest.nbytes > MD_EAGER_BYTES)
    return PyErr_Format(PyExc_ValueError, "keep: expected the plan of one small array");
  const Expected *leaf = core->expected;
  if (leaf->ndim > MOST_DIMS) Py_RETURN_NONE;
  Entry *e = entry_for(self, op, (PyArray_Descr *)dtype, leaf->ndim, leaf->shape);
  drop(e);
  *e = (Entry){.op = Py_NewRef(op),
               .call = Py_NewRef(call),
               .plan = Py_NewRef(plan),
               .dtype = (PyArray_Descr *)Py_NewRef(dtype),
               .core = (Reduce *)Py_NewRef(core),
               .ndim = leaf->ndim};
  for (int k = 0; k < leaf->ndim; k++) e->shape[k] = leaf->shape[k];
  Py_RETURN_NONE;
}

static PyObject *AllReduce_forget(AllReduce *self, PyObject *ignored) {
  (void)ignored;
  for (int i = 0; self->entries && i < ENTRIES; i++) drop(&self->entries[i]);
  Py_RETURN_NONE;
}

static int AllReduce_traverse(AllReduce *self, visitproc visit, void *arg) {
  Py_VISIT(self->state);
  Py_VISIT(self->otherwise);
  for (int i = 0; self->entries && i < ENTRIES; i++) {
    Py_VISIT(self->entries[i].op);
    Py_VISIT(self->entries[i].call);
    Py_VISIT(self->entries[i].plan);
  }
  return 0;
}

static int AllReduce_clear(AllReduce *self) {
  Py_XDECREF(AllReduce_forget(self, NULL));
  Py_CLEAR(self->state);
  Py_CLEAR(self->otherwise);
  return 0;
}

static void AllReduce_dealloc(AllReduce *self) {
  PyObject_GC_UnTrack(self);
  AllReduce_clear(self);
  PyMem_Free(self->entries);
  Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef AllReduce_methods[] = {
    {"keep", (PyCFunction)AllReduce_keep, METH_VARARGS,
     "keep(op, dtype, core, call, plan)\n--\n\n"
     "Reduce arrays of this dtype by `core` from now on, if they are its leaf.\n\n"
     "Args:\n    op: as in calls, the same object.\n    dtype: the same object as of arrays.\n"
     "    core: a `Reduce` of one leaf.\n    call: for `CallState`.\n    plan: its methods "
     "`concluded(status, array, result)` and\n        `interrupted(error)` end calls that "
     "do not simply end."},
    {"forget", (PyCFunction)AllReduce_forget, METH_NOARGS, "forget()\n--\n\nForget all plans."},
    {NULL}};

PyTypeObject AllReduceType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "mpidist._native._core.AllReduce",
    .tp_doc =
        "AllReduce(state, otherwise)\n--\n\n"
        "Called with an operation and an array for which it keeps a plan, it reduces it;\n"
        "with anything else, or in a state that is blocked, it calls `otherwise`.",
    .tp_basicsize = sizeof(AllReduce),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(AllReduce, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)AllReduce_init,
    .tp_traverse = (traverseproc)AllReduce_traverse,
    .tp_clear = (inquiry)AllReduce_clear,
    .tp_dealloc = (destructor)AllReduce_dealloc,
    .tp_methods = AllReduce_methods};
