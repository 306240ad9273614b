/* A Python module that calls hooks by kind. Callgrind counts by C function, so each kind of hook has a function.
   `tests/bench/instructions.py` compiles it. */
#include <Python.h>
#include <valgrind/callgrind.h>

#define KINDS(each) \
    each(seen) each(lookup) each(allocated) each(load_allocated) each(ended) \
    each(admitting_step) each(decoding_step) each(empty_step) each(report) each(no_report) \
    each(events) each(has_work) each(stats)

#define FUNCTION(kind) \
    static PyObject *hook_##kind(PyObject *module, PyObject *const *given, Py_ssize_t count) { \
        return PyObject_Vectorcall(given[0], given + 1, count - 1, NULL); \
    }
KINDS(FUNCTION)

static PyObject *start(PyObject *module, PyObject *nothing) {
    CALLGRIND_START_INSTRUMENTATION;
    Py_RETURN_NONE;
}

static PyObject *stop(PyObject *module, PyObject *nothing) {
    CALLGRIND_STOP_INSTRUMENTATION;
    Py_RETURN_NONE;
}

#define METHOD(kind) {#kind, (PyCFunction)hook_##kind, METH_FASTCALL, "Call a hook of this kind."},
static PyMethodDef methods[] = {
    KINDS(METHOD)
    {"start", start, METH_NOARGS, "Let callgrind count."},
    {"stop", stop, METH_NOARGS, "Let callgrind count no more."},
    {NULL, NULL, 0, NULL},
};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "hook_kinds", "Calls hooks by kind.", -1, methods};

PyMODINIT_FUNC PyInit_hook_kinds(void) { return PyModule_Create(&module); }
