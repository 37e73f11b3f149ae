"""Kernels in OpenAI Triton, run on the CPU by its interpreter, in a process that may compile them, too.

OpenAI Triton decides when a kernel is defined whether it is compiled or interpreted. So the kernels under test are
defined again, in a fresh copy of their module, and while one runs, the language's own library is interpreted, too.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch


class InterpretedKernel:
    """`kernel[grid](...)` on CPU tensors."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            with _interpreted_library():
                self._kernel[grid](*args, **kwargs)

        return launch


def interpreted(name: str) -> SimpleNamespace:
    """Return the kernels of module `name` as `InterpretedKernel`s, and its other names as they are."""
    from triton.runtime.interpreter import InterpretedFunction

    spec = importlib.util.find_spec(name)
    assert spec is not None, name
    assert spec.loader is not None, name
    module = importlib.util.module_from_spec(spec)
    with patch.dict(os.environ, TRITON_INTERPRET="1"), patch.dict(sys.modules):
        for loaded in [m for m in sys.modules if m.startswith("sits_plugins.")]:
            del sys.modules[loaded]
        spec.loader.exec_module(module)
    return SimpleNamespace(
        **{
            key: InterpretedKernel(value) if isinstance(value, InterpretedFunction) else value
            for key, value in vars(module).items()
        }
    )


@contextmanager
def _interpreted_library() -> Iterator[None]:
    """Replace the functions of the language that are kernels themselves (zeros, sum, sort...) by interpreted ones."""
    importlib.import_module("triton.experimental.gluon")  # which takes the functions as it finds them
    from triton import JITFunction
    from triton.runtime.interpreter import InterpretedFunction

    namespaces: list[ModuleType] = [
        importlib.import_module(name) for name in ("triton.language", "triton.language.standard")
    ]
    with ExitStack() as stack:
        # The interpreter leaves some of its own replacements behind where interpreted functions call one another.
        stack.enter_context(patch.dict(vars(importlib.import_module("triton.language.core"))))
        for namespace in namespaces:
            for key, value in list(vars(namespace).items()):
                if isinstance(value, JITFunction):
                    stack.enter_context(patch.object(namespace, key, InterpretedFunction(value.fn)))
        yield
