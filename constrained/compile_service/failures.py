"""What a caller is told whose spec has no grammar yet: that the compiler is busy, or that the spec takes too long."""

from __future__ import annotations

from plait.constrained.specs import CompileQueueFull, GrammarError, Spec, kind_of


def queue_full(num_specs: int) -> CompileQueueFull:
    """Of a tenant that has `num_specs` waiting already."""
    return CompileQueueFull(f"the queue of grammars is full: {num_specs} of this tenant are in it; try again later")


def waited_in_queue(seconds: float) -> CompileQueueFull:
    return CompileQueueFull(f"the queue of grammars is full: this one waited for {seconds:g} s; try again later")


def starved(cpu_s: float, wall_s: float, *, is_lowered: bool) -> CompileQueueFull:
    """Of a job that got `cpu_s` of processor time in `wall_s`, less than it may use."""
    got = f"{cpu_s:.2g} s of processor time in {wall_s:g} s"
    why = ", since the constraints of this tenant took much of it lately" if is_lowered else ""
    return CompileQueueFull(f"the machine is too busy: the compiler got {got}{why}; try again later")


def not_built(spec: Spec, wall_s: float) -> CompileQueueFull:
    """Of a spec that is compiled, and whose grammar was not built in the caller's process within `wall_s`."""
    return CompileQueueFull(f"the {kind_of(spec)} was not ready after {wall_s:g} s; try again later")


def too_long(spec: Spec, limit_s: float) -> GrammarError:
    return GrammarError(f"the {kind_of(spec)} took too long: more than {limit_s:.2g} s of processor time to compile")


def died() -> GrammarError:
    reason = "the compiler process died; the constraint may need too much memory, or be nested too deeply"
    return GrammarError(reason)
