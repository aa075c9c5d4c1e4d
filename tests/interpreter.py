"""Triton's interpreter, quicker: what it looks up at each call of a function of a kernel is looked up once."""

import inspect
import sys


def quicken():
    """Keep the names of Triton's builtins, for which it searches all of its modules each time; they stay the same.

    Nothing is done before Triton is imported, nor a second time.
    """
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or hasattr(interpreter._patch_builtin, "names"):
        return
    is_builtin, core = interpreter.tl.core.is_builtin, interpreter.tl.core
    names = {}
    for place in (interpreter.tl, core, core.tensor, interpreter.tl.math, core.tensor_descriptor_base):
        names[place] = [name for name, member in inspect.getmembers(place) if is_builtin(member)]

    def patch_builtin(place, *how):
        for name in names[place]:
            if is_builtin(member := getattr(place, name)):  # not where a kernel that calls this function has been here
                interpreter._patch_attr(place, name, member, *how)

    patch_builtin.names = names
    interpreter._patch_builtin = patch_builtin
