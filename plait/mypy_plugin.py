"""A plugin of mypy that checks the arguments of a program, together with the keywords of `run`.

Python's types cannot say "the parameters of the body, and also temperature, seed, ...": PEP 612 allows no keyword
beside those of a ParamSpec. With `plugins = ["plait.mypy_plugin"]` in mypy's settings, `run`, `arun`, `compile`, `bind`
and the items of `run_batch` and `arun_batch` have the parameters of the body. Without it they take any arguments, which
are checked when the program runs.
"""

from __future__ import annotations

from collections.abc import Callable

from mypy.nodes import (
    ARG_NAMED,
    ARG_NAMED_OPT,
    ARG_OPT,
    ARG_POS,
    ARG_STAR,
    ARG_STAR2,
    ArgKind,
    DictExpr,
    Expression,
    ListComprehension,
    ListExpr,
)
from mypy.plugin import MethodSigContext, Plugin
from mypy.types import (
    CallableType,
    FunctionLike,
    Instance,
    Parameters,
    Type,
    TypedDictType,
    get_proper_type,
)

PROGRAM = "plait.lang.program.Program"
Argument = tuple[str | None, ArgKind, Type]
_OPTIONAL = {ARG_POS: ARG_OPT, ARG_NAMED: ARG_NAMED_OPT}


class ProgramPlugin(Plugin):
    """Gives the methods of `Program` the parameters of its body."""

    def get_method_signature_hook(self, fullname: str) -> Callable[[MethodSigContext], FunctionLike] | None:
        return _HOOKS.get(fullname)


def plugin(version: str) -> type[Plugin]:
    """mypy's entry point."""
    return ProgramPlugin


def _parameters(context: MethodSigContext) -> Parameters | None:
    """Returns the parameters of the body after the state, if they are known."""
    program = get_proper_type(context.type)
    if not isinstance(program, Instance) or len(program.args) != 1:
        return None
    parameters = get_proper_type(program.args[0])
    return parameters if isinstance(parameters, Parameters) else None


def _arguments(signature: CallableType | Parameters) -> list[Argument]:
    return list(zip(signature.arg_names, signature.arg_kinds, signature.arg_types, strict=True))


def _sampling_keywords(context: MethodSigContext) -> list[Argument]:
    """Returns the keywords of `Program._sampling_keywords`, which takes those of `run`."""
    program = get_proper_type(context.type)
    assert isinstance(program, Instance)
    method = program.type.get_method("_sampling_keywords")
    signature = None if method is None else get_proper_type(method.type)
    if not isinstance(signature, CallableType):
        return []
    return [argument for argument in _arguments(signature.with_unpacked_kwargs()) if argument[1] is ARG_NAMED_OPT]


def _with_arguments(signature: CallableType, arguments: list[Argument]) -> CallableType:
    return signature.copy_modified(
        arg_names=[name for name, _, _ in arguments],
        arg_kinds=[kind for _, kind, _ in arguments],
        arg_types=[type_ for _, _, type_ in arguments],
    )


def _run_signature(context: MethodSigContext) -> FunctionLike:
    return _with_body_parameters(context, _parameters(context), are_optional=False)


def _compile_signature(context: MethodSigContext) -> FunctionLike:
    return _with_body_parameters(context, _parameters(context), are_optional=True)


def _with_body_parameters(
    context: MethodSigContext, parameters: Parameters | None, *, are_optional: bool
) -> FunctionLike:
    """Replaces `*args` and `**kwargs` of a method by the parameters of the body and the sampling keywords."""
    signature = context.default_signature
    if parameters is None:
        return signature
    own = [argument for argument in _arguments(signature) if argument[1] not in (ARG_STAR, ARG_STAR2)]
    body = _arguments(parameters)
    if are_optional:
        body = [(name, _OPTIONAL.get(kind, kind), type_) for name, kind, type_ in body]
    names = {name for name, _, _ in body}
    keywords = [argument for argument in (*own, *_sampling_keywords(context)) if argument[0] not in names]
    before = [argument for argument in body if argument[1] is not ARG_STAR2]
    return _with_arguments(signature, [*before, *keywords, *(a for a in body if a[1] is ARG_STAR2)])


def _bind_signature(context: MethodSigContext) -> FunctionLike:
    """The parameters of the body, by name and optional."""
    parameters, signature = _parameters(context), context.default_signature
    if parameters is None:
        return signature
    body = [a for a in _arguments(parameters) if a[0] is not None and a[1] not in (ARG_STAR, ARG_STAR2)]
    others = [argument for argument in _arguments(parameters) if argument[1] is ARG_STAR2]
    named = [(name, ARG_NAMED_OPT, type_) for name, _, type_ in body]
    return _with_arguments(signature, [*named, *others])


def _batch_signature(context: MethodSigContext) -> FunctionLike:
    """The type of an item is a TypedDict where the items are written in the call; others are checked at run time."""
    parameters, signature = _parameters(context), context.default_signature
    if parameters is None or not context.args or not context.args[0] or not _has_dict_literals(context.args[0][0]):
        return signature
    body = _arguments(parameters)
    if any(name is None or kind in (ARG_STAR, ARG_STAR2) for name, kind, _ in body):
        return signature
    item = TypedDictType(
        {name: type_ for name, _, type_ in body if name is not None},
        {name for name, kind, _ in body if name is not None and kind in (ARG_POS, ARG_NAMED)},
        set(),
        context.api.named_generic_type("typing._TypedDict", []),
    )
    items = context.api.named_generic_type("typing.Sequence", [item])
    return signature.copy_modified(arg_types=[items, *signature.arg_types[1:]])


def _has_dict_literals(items: Expression) -> bool:
    if isinstance(items, ListExpr):
        return bool(items.items) and all(isinstance(item, DictExpr) for item in items.items)
    return isinstance(items, ListComprehension) and isinstance(items.generator.left_expr, DictExpr)


_HOOKS = {
    f"{PROGRAM}.run": _run_signature,
    f"{PROGRAM}.arun": _run_signature,
    f"{PROGRAM}.compile": _compile_signature,
    f"{PROGRAM}.bind": _bind_signature,
    f"{PROGRAM}.run_batch": _batch_signature,
    f"{PROGRAM}.arun_batch": _batch_signature,
}
