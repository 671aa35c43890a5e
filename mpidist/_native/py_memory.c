/* `Memory`, and `Pool` and `Slot`: parts of it that are given out and back. */
#define _GNU_SOURCE
#include "binding.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/statvfs.h>
#include <unistd.h>

/* Where a result begins in its first page.  At the same place in their pages as other
   arrays, loads wait for stores that have nothing to do with them ("4K aliasing"). */
#define OFFSET (PAGE / 2)

/* Access is given to so many bytes at a time: whole pages of any system, the huge ones
   too.  With small ones a sum of 64 MiB took 1.5 times as long, the first one 3.5 times. */
#define LARGEST_PAGE (2 * 1024 * 1024)

/* So much of a file is set aside at a time: 1 to 4 ms. */
#define STEP (4 * 1024 * 1024)

/* All mapped files of this process; the GIL guards the list. */
static Memory *files;

static int Memory_init(Memory *self, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"fd", "nbytes", NULL};
  int fd;
  Py_ssize_t nbytes;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "in", names, &fd, &nbytes)) return -1;
  int flags = MAP_NORESERVE, access = PROT_READ | PROT_WRITE;
  self->fd = -1;
  if (fd >= 0) {
    flags |= MAP_SHARED;
    self->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (self->fd < 0) {
      PyErr_SetFromErrno(PyExc_OSError);
      return -1;
    }
  } else {
    flags |= MAP_PRIVATE | MAP_ANONYMOUS;
    access = PROT_NONE; /* so a system that counts what it promises does not count it */
  }
  void *start = mmap(NULL, (size_t)nbytes, access, flags, self->fd, 0);
  if (start == MAP_FAILED) {
    PyErr_SetFromErrno(PyExc_OSError);
    return -1;
  }
  self->start = start;
  self->nbytes = nbytes;
  self->is_private = self->fd < 0;
  if (self->is_private) madvise(start, (size_t)nbytes, MADV_HUGEPAGE);
  if (self->fd >= 0) {
    self->after = files;
    if (files) files->before = self;
    files = self;
  }
  return 0;
}

MADE_BY_INIT(Memory)

static void unlist(Memory *self) {
  if (self->before) self->before->after = self->after;
  if (self->after) self->after->before = self->before;
  if (files == self) files = self->after;
  self->before = self->after = NULL;
}

/* A child sees what its parent has, and what it writes it writes for itself: the file is
   mapped again, in the same place.  Where that fails the child can only read. */
PyObject *detach_memories(PyObject *module, PyObject *nothing) {
  (void)module, (void)nothing;
  while (files) {
    Memory *self = files;
    size_t nbytes = (size_t)self->nbytes;
    int flags = MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE;
    unlist(self);
    if (mmap(self->start, nbytes, PROT_READ | PROT_WRITE, flags, self->fd, 0) == MAP_FAILED)
      mprotect(self->start, nbytes, PROT_READ);
    close(self->fd);
    self->fd = -1;
  }
  Py_RETURN_NONE;
}

static void Memory_dealloc(Memory *self) {
  unlist(self);
  if (self->start) munmap(self->start, (size_t)self->nbytes);
  if (self->start && self->fd >= 0) close(self->fd);
  Py_TYPE(self)->tp_free((PyObject *)self);
}

/* 0 if the bytes are there from now on, else errno. */
static int reserve(Memory *self, Py_ssize_t start, Py_ssize_t nbytes) {
  if (self->is_private) {
    Py_ssize_t first = start / LARGEST_PAGE * LARGEST_PAGE, last = start + nbytes;
    last = (last + LARGEST_PAGE - 1) / LARGEST_PAGE * LARGEST_PAGE;
    if (last > self->nbytes) last = self->nbytes;
    return mprotect(self->start + first, (size_t)(last - first), PROT_READ | PROT_WRITE)
               ? errno
               : 0;
  }
  if (self->fd < 0) return 0; /* in a forked child, which has the file for itself */
  struct statvfs room; /* of no blocks where there is no limit: a memfd */
  if (!fstatvfs(self->fd, &room) && room.f_blocks &&
      room.f_bavail < (size_t)nbytes / room.f_frsize)
    return ENOSPC;
  /* In steps: older kernels undo a whole step if a signal comes, and a program's timer
     may be shorter than the time that a large step takes. */
  for (Py_ssize_t done = 0; done < nbytes; done += STEP) {
    int error;
    do error = posix_fallocate(self->fd, start + done, Py_MIN(STEP, nbytes - done));
    while (error == EINTR);
    if (error) {
      if (done) fallocate(self->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, start, done);
      return error;
    }
  }
  return 0;
}

static int Memory_getbuffer(Memory *self, Py_buffer *view, int flags) {
  return PyBuffer_FillInfo(view, (PyObject *)self, self->start, self->nbytes, 0, flags);
}

static PyBufferProcs Memory_buffer = {(getbufferproc)Memory_getbuffer, NULL};
PyTypeObject MemoryType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "mpidist._native._core.Memory",
    .tp_doc =
        "Memory(fd, nbytes)\n--\n\n"
        "A file that is mapped for all who open it; -1: memory of this process, of which\n"
        "only the slots of a pool can be used.",
    .tp_basicsize = sizeof(Memory),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = Memory_new,
    .tp_dealloc = (destructor)Memory_dealloc,
    .tp_as_buffer = &Memory_buffer};

/* --- Pool and Slot ----------------------------------------------------------------- */

typedef struct {
  size_t start, stop;
} Range;

typedef struct {
  PyObject_HEAD
  Memory *memory;
  size_t start, nbytes; /* in the memory */
  size_t reserved;      /* bytes that are set aside, from the start */
  Range *ranges;        /* free, in order, none touching the next */
  Py_ssize_t count, room;
  Py_ssize_t blocks; /* given out */
  int closed;        /* what is free goes back to the system */
} Pool;

typedef struct {
  PyObject_HEAD
  Pool *pool;
  size_t first, last; /* whole pages, in the pool */
  size_t nbytes;
} Slot;

static int Pool_init(Pool *self, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"memory", "start", "nbytes", NULL};
  Memory *memory;
  Py_ssize_t start, nbytes;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!nn", names, &MemoryType, &memory, &start,
                                   &nbytes))
    return -1;
  if (start < 0 || nbytes < 0 || start + nbytes > memory->nbytes) {
    PyErr_SetString(PyExc_ValueError, "Pool: no such bytes in the memory");
    return -1;
  }
  self->ranges = PyMem_Malloc(16 * sizeof(Range));
  if (!self->ranges) {
    PyErr_NoMemory();
    return -1;
  }
  self->room = 16;
  self->memory = (Memory *)Py_NewRef(memory);
  self->start = (size_t)start;
  self->nbytes = (size_t)nbytes;
  self->ranges[0] = (Range){0, (size_t)nbytes};
  self->count = nbytes ? 1 : 0;
  return 0;
}

MADE_BY_INIT(Pool)

static void Pool_dealloc(Pool *self) {
  PyMem_Free(self->ranges);
  Py_XDECREF(self->memory);
  Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *Pool_take(Pool *self, PyObject *argument) {
  size_t nbytes = PyLong_AsSize_t(argument);
  if (nbytes == (size_t)-1 && PyErr_Occurred()) return NULL;
  size_t room = (nbytes + OFFSET + PAGE - 1) / PAGE * PAGE;
  for (Py_ssize_t i = 0; i < self->count; i++) {
    Range *range = &self->ranges[i];
    if (range->stop - range->start < room) continue;
    size_t first = range->start, last = first + room;
    if (last > self->reserved) {
      if (reserve(self->memory, (Py_ssize_t)(self->start + self->reserved),
                  (Py_ssize_t)(last - self->reserved)))
        Py_RETURN_NONE;
      self->reserved = last;
    }
    /* So that giving it back needs no memory. */
    if (self->blocks + 2 > self->room) { /* one range more than blocks, at most */
      Range *more = PyMem_Realloc(self->ranges, 2 * (size_t)self->room * sizeof(Range));
      if (!more) return PyErr_NoMemory();
      self->ranges = more;
      self->room *= 2;
      range = &self->ranges[i];
    }
    Slot *slot = PyObject_New(Slot, &SlotType);
    if (!slot) return NULL;
    range->start = last;
    self->blocks++;
    if (range->start == range->stop) {
      memmove(range, range + 1, (size_t)(self->count - i - 1) * sizeof(Range));
      self->count--;
    }
    slot->pool = (Pool *)Py_NewRef(self);
    slot->first = first;
    slot->last = last;
    slot->nbytes = nbytes;
    return (PyObject *)slot;
  }
  Py_RETURN_NONE;
}

/* Let the system have the pages of a range, where the memory is this process's own; only
   those that are whole: the system's may be larger than PAGE, and madvise takes all of the
   last one. */
static void release(const Pool *self, size_t first, size_t last) {
  size_t page = (size_t)sysconf(_SC_PAGESIZE);
  first = (self->start + first + page - 1) / page * page;
  last = (self->start + last) / page * page;
  if (self->memory->is_private && first < last)
    madvise(self->memory->start + first, last - first, MADV_DONTNEED);
}

static PyObject *Pool_close(Pool *self, PyObject *ignored) {
  (void)ignored;
  self->closed = 1;
  for (Py_ssize_t i = 0; i < self->count; i++)
    release(self, self->ranges[i].start, self->ranges[i].stop);
  Py_RETURN_NONE;
}

static void give_back(Pool *self, size_t first, size_t last) {
  Py_ssize_t i = 0;
  while (i < self->count && self->ranges[i].start < first) i++;
  int joins_before = i > 0 && self->ranges[i - 1].stop == first;
  int joins_after = i < self->count && self->ranges[i].start == last;
  if (joins_before && joins_after) {
    self->ranges[i - 1].stop = self->ranges[i].stop;
    memmove(&self->ranges[i], &self->ranges[i + 1],
            (size_t)(self->count - i - 1) * sizeof(Range));
    self->count--;
  } else if (joins_before) {
    self->ranges[i - 1].stop = last;
  } else if (joins_after) {
    self->ranges[i].start = first;
  } else if (self->count < self->room) {
    memmove(&self->ranges[i + 1], &self->ranges[i], (size_t)(self->count - i) * sizeof(Range));
    self->ranges[i] = (Range){first, last};
    self->count++;
  }
}

static void Slot_dealloc(Slot *self) {
  give_back(self->pool, self->first, self->last);
  if (self->pool->closed) release(self->pool, self->first, self->last);
  self->pool->blocks--;
  Py_DECREF(self->pool);
  PyObject_Free(self);
}

static unsigned char *start_of(const Slot *slot) {
  return slot->pool->memory->start + slot->pool->start + slot->first + OFFSET;
}

static int Slot_getbuffer(Slot *self, Py_buffer *view, int flags) {
  return PyBuffer_FillInfo(view, (PyObject *)self, start_of(self), (Py_ssize_t)self->nbytes, 0,
                           flags);
}

static PyObject *Slot_offset(Slot *self, void *closure) {
  (void)closure;
  return PyLong_FromSize_t(self->first + OFFSET);
}

static PyObject *Pool_used(Pool *self, void *closure) {
  (void)closure;
  size_t unused = 0;
  for (Py_ssize_t i = 0; i < self->count; i++)
    unused += self->ranges[i].stop - self->ranges[i].start;
  return PyLong_FromSize_t(self->nbytes - unused);
}

static PyMethodDef Pool_methods[] = {
    {"take", (PyCFunction)Pool_take, METH_O,
     "take(nbytes)\n--\n\n"
     "Return a `Slot`, whose bytes are not set; None where there is no room."},
    {"close", (PyCFunction)Pool_close, METH_NOARGS,
     "close()\n--\n\n"
     "Have private memory go back to the system as soon as no slot has it."},
    {NULL}};
static PyGetSetDef Pool_fields[] = {
    {"used", (getter)Pool_used, NULL, "Bytes that blocks have, in whole pages.", NULL},
    {NULL}};
PyTypeObject PoolType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "mpidist._native._core.Pool",
    .tp_doc =
        "Pool(memory, start, nbytes)\n--\n\n"
        "Slots of a part of a memory; the bytes are set aside when first used.",
    .tp_basicsize = sizeof(Pool),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = Pool_new,
    .tp_dealloc = (destructor)Pool_dealloc,
    .tp_methods = Pool_methods,
    .tp_getset = Pool_fields};
static PyGetSetDef Slot_fields[] = {
    {"offset", (getter)Slot_offset, NULL, "Where it begins, in the pool.", NULL}, {NULL}};
static PyBufferProcs Slot_buffer = {(getbufferproc)Slot_getbuffer, NULL};
PyTypeObject SlotType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "mpidist._native._core.Slot",
    .tp_doc = "Bytes of a pool, for as long as something refers to them.",
    .tp_basicsize = sizeof(Slot),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_dealloc = (destructor)Slot_dealloc,
    .tp_getset = Slot_fields,
    .tp_as_buffer = &Slot_buffer};
