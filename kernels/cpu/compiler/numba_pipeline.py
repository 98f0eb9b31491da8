"""How numba compiles the kernels' functions that `jit` marks, so that tests can call them from functions of numba.

The kernels themselves are compiled by `compiler`, and a runtime never imports this module. numba
links, optimizes and makes machine code of every function together with all that it calls, so an inner function is
optimized again at each level of calls above it. `compile_inner` stops before that: the outermost function is optimized
once with all that it calls, and comes out the same in a third of the processor time. It also leaves out the passes that
serve closures, `with` and unrolled loops, none of which a kernel has. And functions that return no array count no
references, since kernels work on memory that Python owns: an array that numba allocated, which such a function receives
from another one, would never be freed.

This replaces a pass of numba that is not a public interface, so other versions of numba than the tested one compile
inner functions in the ordinary way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import numba
from llvmlite.binding import Linkage
from numba import _dynfunc, extending, types
from numba.core import codegen, compiler, typed_passes, untyped_passes
from numba.core.compiler_machinery import register_pass
from numba.core.registry import cpu_target

from plait.kernels.cpu.compiler import signatures

TESTED_NUMBA = (0, 68)
_UNUSED_PASSES = frozenset(
    {
        untyped_passes.WithLifting,
        untyped_passes.InlineClosureLikes,
        untyped_passes.RewriteDynamicRaises,
        untyped_passes.MakeFunctionToJitFunction,
        untyped_passes.InlineInlinables,
        untyped_passes.DeadBranchPrune,
        untyped_passes.LiteralUnroll,
        untyped_passes.LiteralPropagationSubPipelinePass,
        typed_passes.InlineOverloads,
        typed_passes.NopythonRewrites,
        typed_passes.NoPythonSupportedFeatureValidation,
        typed_passes.AnnotateTypes,
        typed_passes.DumpParforDiagnostics,
    }
)


class _LinkedLibrary(codegen.JITCodeLibrary):  # type: ignore[misc]
    """A library that callers link: no machine code, and no optimization but that of single functions."""

    def finalize(self) -> None:
        """Leaves the functions as they are; whoever links them optimizes them together with all that they call."""
        self._raise_if_finalized()
        for library in self._linking_libraries:
            self._reload_init.update(library._reload_init)
        self._finalized = True

    def _get_module_for_linking(self) -> Any:
        """Returns a module of these functions and all that they call, directly or not."""
        linked = self._final_module.clone()
        inner, others = self._reachable_libraries()
        for library in inner:
            linked.link_in(library._final_module, preserve=True)
        for library in others:  # last: of these modules, LLVM links only functions that are called already
            linked.link_in(library._get_module_for_linking(), preserve=True)
        for function in linked.functions:
            if not function.is_declaration and function.linkage == Linkage.external:
                function.linkage = "linkonce_odr"
        return linked

    def _reachable_libraries(self) -> tuple[list[Any], list[Any]]:
        """Returns the libraries that these functions call, directly or not: those of this class, and others."""
        seen, waiting = {self}, [self]
        while waiting:
            for library in waiting.pop()._linking_libraries:
                if library not in seen:
                    seen.add(library)
                    if isinstance(library, _LinkedLibrary):
                        waiting.append(library)
        inner = [library for library in seen if isinstance(library, _LinkedLibrary) and library is not self]
        return inner, [library for library in seen if not isinstance(library, _LinkedLibrary)]


@register_pass(mutates_CFG=True, analysis_only=False)
class _LinkedLowering(typed_passes.NativeLowering):  # type: ignore[misc]
    _name = "linked_lowering"

    def run_pass(self, state: Any) -> bool:
        context, flags = state.targetctx, state.flags
        if not context.data_model_manager[state.return_type].contains_nrt_meminfo():
            state.targetctx = context = context.subtarget(enable_nrt=False)
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
            (_LinkedLowering if kind in lowering else kind, description)
            for kind, description in pipeline.passes
            if kind not in _UNUSED_PASSES
        ]
        pipeline.finalize()
        return [pipeline]


def compile_inner(function: Callable[..., Any]) -> Any:
    """Compiles a function that only compiled functions call; a call from Python raises TypeError."""
    if numba.version_info.short != TESTED_NUMBA:
        return numba.njit(function)
    return numba.njit(pipeline_class=_InnerCompiler)(function)


def compile_outer(function: Callable[..., Any]) -> Any:
    """Compiles a function that Python calls, too."""
    return numba.njit(function)


def type_of_carray() -> Any:
    """Returns numba's type of `numba.carray`."""
    return type_of_global(numba.carray)


def type_of_intrinsic(define: Callable[..., Any], prefer_literal: bool) -> Any:
    """Returns numba's type of the intrinsic that `define` defines in terms of `signatures`."""

    @wraps(define)
    def define_for_numba(context: Any, *kinds: Any) -> Any:
        signature, generate = define(context, *kinds)
        return _numba_type(signature.return_type)(*map(_numba_type, signature.args)), generate

    return type_of_global(extending.intrinsic(prefer_literal=prefer_literal)(define_for_numba))


def _numba_type(kind: Any) -> Any:
    """Returns the type of numba for one of `signatures`; those that numba gave the definition are numba's already."""
    if isinstance(kind, signatures.UniTuple):
        return types.UniTuple(_numba_type(kind.dtype), kind.count)
    return getattr(types, kind.name) if isinstance(kind, signatures.Scalar) else kind


def type_of_global(value: Any) -> Any:
    """Returns numba's type of one of its own functions, as a name that compiled functions use."""
    context = cpu_target.typing_context
    context.refresh()  # registers what has been defined since
    return context.resolve_value_type(value)
