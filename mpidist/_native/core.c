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
  int op = md_find_op(name);
  return PyBool_FromLong(op >= 0 && md_find_kernel(dtype, (enum md_op)op) != NULL);
}

static PyMethodDef functions[] = {
    {"total_bytes", total_bytes, METH_VARARGS,
     "total_bytes(size, area_bytes, arena_bytes)\n--\n\n"
     "Return how large the memory of a channel is, and where its arenas begin."},
    {"has_kernel", has_kernel, METH_VARARGS,
     "has_kernel(dtype, operation)\n--\n\nWhether arrays of this dtype can be reduced so."},
    {"detach", detach_memories, METH_NOARGS,
     "detach()\n--\n\n"
     "In the child of a fork: what it writes to shared memory, no other process sees."},
    {NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "_core",
                                    .m_doc = "The native core: see the headers of the C files.",
                                    .m_size = -1, .m_methods = functions};

PyMODINIT_FUNC PyInit__core(void) {
  PyTypeObject *types[] = {&MemoryType,  &PoolType,   &SlotType,
                           &ChannelType, &RowsType,   &ReduceType,
                           &RowReduceType, &GatherType, &CallStateType,
                           &ArrayCallType};
  const struct {
    const char *name;
    long value;
  } constants[] = {{"OK", MD_OK},
                   {"AGAIN", MD_AGAIN},
                   {"DIFFERENT", MD_DIFFERENT},
                   {"LEFT", MD_LEFT},
                   {"NOWHERE", MD_NOWHERE},
                   {"LINE", MD_LINE},
                   {"ROW_ALIGNMENT", ROW_ALIGNMENT},
                   {"EAGER_BYTES", MD_EAGER_BYTES},
                   {"MESSAGE_BYTES", MD_MESSAGE_BYTES},
                   {"RING_BYTES", MD_RING_BYTES},
                   {"MAX_RANKS", MD_MAX_RANKS}};
  import_array();
  PyObject *m = PyModule_Create(&module);
  for (size_t i = 0; m && i < sizeof types / sizeof *types; i++)
    if (PyModule_AddType(m, types[i])) Py_CLEAR(m);
  for (size_t i = 0; m && i < sizeof constants / sizeof *constants; i++)
    if (PyModule_AddIntConstant(m, constants[i].name, constants[i].value)) Py_CLEAR(m);
  return m;
}
