/* The module; its types are in the files that binding.h names. */
#define IMPORTS_NUMPY
#include "binding.h"

static PyObject *total_bytes(PyObject *module, PyObject *args) {
  int size;
  Py_ssize_t area, arena;
  (void)module;
  if (!PyArg_ParseTuple(args, "inn", &size, &area, &arena)) return NULL;
  md_layout l = md_lay_out(size, (size_t)area, (size_t)arena);
  return Py_BuildValue("nn", (Py_ssize_t)l.total_bytes, (Py_ssize_t)l.arenas_at);
}

static PyObject *has_kernel(PyObject *module, PyObject *args) {
  const char *dtype, *name;
  (void)module;
  if (!PyArg_ParseTuple(args, "ss", &dtype, &name)) return NULL;
  return PyBool_FromLong(md_find_kernel(dtype, name) != NULL);
}

/* --- functions for MPI_Op_create ---------------------------------------------------------- */

/* An op of MPI gets no argument of its own, so there is a function for each kernel. */
#define OPS 64
static const md_kernel *kernels[OPS];

static void combine(int number, const void *from, void *to, const int *len) {
  const void *sources[2] = {from, to};
  md_reduce(kernels[number], &to, 1, sources, 2, (size_t)*len, 0);
}

#define OP(n)                                                                    \
  static void op_##n(void *from, void *to, int *len, void *datatype) {           \
    (void)datatype;                                                              \
    combine(0##n, from, to, len);                                                \
  }
#define OPS_OF_8(d) OP(d##0) OP(d##1) OP(d##2) OP(d##3) OP(d##4) OP(d##5) OP(d##6) OP(d##7)
OPS_OF_8(0) OPS_OF_8(1) OPS_OF_8(2) OPS_OF_8(3) OPS_OF_8(4) OPS_OF_8(5) OPS_OF_8(6) OPS_OF_8(7)

#define NAMES_OF_8(d) op_##d##0, op_##d##1, op_##d##2, op_##d##3, op_##d##4, op_##d##5, op_##d##6, op_##d##7
static void (*const op_functions[OPS])(void *, void *, int *, void *) = {
    NAMES_OF_8(0), NAMES_OF_8(1), NAMES_OF_8(2), NAMES_OF_8(3),
    NAMES_OF_8(4), NAMES_OF_8(5), NAMES_OF_8(6), NAMES_OF_8(7)};

static PyObject *op_function(PyObject *module, PyObject *args) {
  const char *dtype, *name;
  (void)module;
  if (!PyArg_ParseTuple(args, "ss", &dtype, &name)) return NULL;
  const md_kernel *kernel = md_find_kernel(dtype, name);
  for (int i = 0; kernel && i < OPS; i++)
    if (!kernels[i] || kernels[i] == kernel) {
      kernels[i] = kernel;
      return PyLong_FromVoidPtr((void *)(uintptr_t)op_functions[i]);
    }
  return PyErr_Format(PyExc_ValueError, "op_function: no kernel for %s of %s", name, dtype);
}

static PyObject *merge_function(PyObject *module, PyObject *ignored) {
  (void)module, (void)ignored;
  return PyLong_FromVoidPtr((void *)(uintptr_t)md_between_op);
}

/* --- the floating-point state ------------------------------------------------------------- */

static PyObject *enter_default_state(PyObject *module, PyObject *ignored) {
  (void)module, (void)ignored;
  md_float_state before = md_enter_default_state();
  return Py_BuildValue("ki", before.control, before.rounding);
}

static PyObject *leave_default_state(PyObject *module, PyObject *args) {
  md_float_state before;
  (void)module;
  if (!PyArg_ParseTuple(args, "ki", &before.control, &before.rounding)) return NULL;
  md_leave_default_state(before);
  Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"total_bytes", total_bytes, METH_VARARGS,
     "total_bytes(size, area_bytes, arena_bytes)\n--\n\n"
     "Return how large the memory of a channel is, and where its arenas begin."},
    {"has_kernel", has_kernel, METH_VARARGS,
     "has_kernel(dtype, operation)\n--\n\nWhether arrays of this dtype can be reduced so."},
    {"op_function", op_function, METH_VARARGS,
     "op_function(dtype, operation)\n--\n\n"
     "Return the address of a function for MPI_Op_create: the reduction of `md_reduce`."},
    {"merge_function", merge_function, METH_NOARGS,
     "merge_function()\n--\n\n"
     "Return the address of the function by which MPI merges elements of `Between`."},
    {"enter_default_state", enter_default_state, METH_NOARGS,
     "enter_default_state()\n--\n\n"
     "Round to nearest and keep subnormal numbers in this thread; return the state before."},
    {"leave_default_state", leave_default_state, METH_VARARGS,
     "leave_default_state(control, rounding)\n--\n\nGo back to the state before."},
    {"detach", detach_memories, METH_NOARGS,
     "detach()\n--\n\n"
     "In the child of a fork: what it writes to shared memory, no other process sees."},
    {NULL}};

/* It needs Python's lock, and does not say otherwise: a free-threaded Python switches the lock on.
   `busy`, the plans, and the arrays of a call are protected by it alone. */
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "_core",
                                    .m_doc = "The native core: see the headers of the C files.",
                                    .m_size = -1, .m_methods = functions};

#ifndef MD_CHECKSUM  // of the sources, from setup.py
#define MD_CHECKSUM -1
#endif

PyMODINIT_FUNC PyInit__core(void) {
  PyTypeObject *types[] = {&MemoryType, &PoolType,   &SlotType,      &ChannelType, &BetweenType,
                           &ReduceType, &GatherType, &CallStateType, &ArrayCallType};
  const struct {
    const char *name;
    long value;
  } constants[] = {{"OK", MD_OK},
                   {"AGAIN", MD_AGAIN},
                   {"DIFFERENT", MD_DIFFERENT},
                   {"LEFT", MD_LEFT},
                   {"NOWHERE", MD_NOWHERE},
                   {"LINE", MD_LINE},
                   {"PAYLOAD_ALIGNMENT", PAYLOAD_ALIGNMENT},
                   {"EAGER_BYTES", MD_EAGER_BYTES},
                   {"MESSAGE_BYTES", MD_MESSAGE_BYTES},
                   {"MAX_RANKS", MD_MAX_RANKS},
                   {"CHECKSUM", MD_CHECKSUM}};
  import_array();
  PyObject *m = PyModule_Create(&module);
  for (size_t i = 0; m && i < sizeof types / sizeof *types; i++)
    if (PyModule_AddType(m, types[i])) Py_CLEAR(m);
  for (size_t i = 0; m && i < sizeof constants / sizeof *constants; i++)
    if (PyModule_AddIntConstant(m, constants[i].name, constants[i].value)) Py_CLEAR(m);
  return m;
}
