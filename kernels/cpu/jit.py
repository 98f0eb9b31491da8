"""`inner_njit`: `numba.njit` for functions that only other compiled functions call.

numba makes machine code and Python wrappers of every function, each together with all that it calls, although a step
enters through one of them. `inner_njit` stops at optimized LLVM code, which callers link and inline as before: the
outermost function comes out the same and compiles in three fifths of the processor time (63 s instead of 107).

This replaces a pass of numba that is not a public interface, so other versions of numba than the tested one compile
inner functions in the ordinary way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numba
from numba import _dynfunc
from numba.core import codegen, compiler, typed_passes
from numba.core.compiler_machinery import register_pass

TESTED_NUMBA = (0, 68)


class _LinkedLibrary(codegen.JITCodeLibrary):  # type: ignore[misc]
    """A library that callers link, without machine code of its own."""

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._verify_declare_only_symbols()
        self._finalized = True


@register_pass(mutates_CFG=True, analysis_only=False)
class _LinkedLowering(typed_passes.NativeLowering):  # type: ignore[misc]
    _name = "linked_lowering"

    def run_pass(self, state: Any) -> bool:
        context, flags = state.targetctx, state.flags
        state.library = _LinkedLibrary(context.codegen(), state.func_id.func_qualname)
        flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
        super().run_pass(state)
        fndesc, call_helper, _, env = state.cr
        state.library.finalize()
        name, library = fndesc.qualname.split(".")[-1], state.library
        entry = _dynfunc.make_function(fndesc.lookup_module(), name, "", _refusal(), env, (library,))
        context.insert_user_function(entry, fndesc, [library])
        state.reload_init.extend(library._reload_init)
        state.cr = compiler._LowerResult(fndesc, call_helper, cfunc=entry, env=env)
        return True


@cache
def _refusal() -> int:
    """Returns the address of a Python function that raises TypeError, which stands in for the missing wrappers."""

    @numba.njit  # type: ignore[untyped-decorator]
    def called_from_python() -> None:
        raise TypeError("only compiled functions can call this kernel")

    called_from_python.compile(())
    (result,) = called_from_python.overloads.values()
    return int(result.library.get_pointer_to_function(result.fndesc.llvm_cpython_wrapper_name))


class _InnerCompiler(compiler.CompilerBase):  # type: ignore[misc]
    def define_pipelines(self) -> list[Any]:
        pipeline = compiler.DefaultPassBuilder.define_nopython_pipeline(self.state)
        lowering = (typed_passes.NativeLowering, typed_passes.NativeParforLowering)
        pipeline.passes = [
            (_LinkedLowering if kind in lowering else kind, description) for kind, description in pipeline.passes
        ]
        pipeline.finalize()
        return [pipeline]


def inner_njit(function: Callable[..., Any]) -> Any:
    """Compiles a function that only compiled functions call; a call from Python raises TypeError."""
    if numba.version_info.short != TESTED_NUMBA:
        return numba.njit(function)
    return numba.njit(pipeline_class=_InnerCompiler)(function)
