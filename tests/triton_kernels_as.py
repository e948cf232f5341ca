"""Loads our Triton kernels a second time, interpreted or to be compiled, beside what else runs.

Triton decides when a kernel is defined whether it will be interpreted, so one process needs one
copy of the module for each way. Triton's own library functions (``tl.max``) were defined when torch
imported Triton, for compilation; within ``interpreted_kernels`` they run as what they are, Python.
Functions that a kernel calls run likewise: Triton would prepare its whole language anew for each
such call, which takes ten times as long as the call.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

NAME = "kernels.triton_kernels"


def load(interpreted: bool) -> ModuleType:
    """A copy of its own."""
    import triton

    spec = importlib.util.find_spec(NAME)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = interpreted
        spec.loader.exec_module(module)
    return module


@contextmanager
def interpreted_kernels() -> Iterator[None]:
    """Within it our Triton backend runs in Triton's interpreter, on CPU tensors."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    def as_python(self, *args, **kwargs):
        return self.fn(*args, **kwargs)

    def within_a_kernel(self, *args, **kwargs):
        return self.rewrite()(*args, **kwargs)

    before = sys.modules.get(NAME)
    sys.modules[NAME] = load(interpreted=True)
    calls = [(kind, kind.__call__) for kind in (JITFunction, InterpretedFunction)]
    JITFunction.__call__, InterpretedFunction.__call__ = as_python, within_a_kernel
    try:
        yield
    finally:
        for kind, call in calls:
            kind.__call__ = call
        del sys.modules[NAME]
        if before is not None:
            sys.modules[NAME] = before
