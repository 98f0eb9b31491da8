"""Makes operators cheap in Triton's interpreter: with operands of one type they go straight to numpy.

The interpreter checks types, promotes, broadcasts and describes every operand and result anew, which takes most of the
time of an interpreted kernel. `install()` leaves that out where nothing has to change: operands of one type, a tensor
and a number that its type can hold, a pointer and an offset. All else goes the plain way, and so do booleans, bfloat16
and fp8, whose bits numpy cannot add. triton_device calls it, after the other `interpreter_` modules.
"""

from __future__ import annotations

from typing import Any

import numpy as np

ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
BITWISE = {"and_": np.bitwise_and, "or_": np.bitwise_or, "xor_": np.bitwise_xor}
COMPARISONS = {
    "greater_than": np.greater,
    "greater_equal": np.greater_equal,
    "less_than": np.less,
    "less_equal": np.less_equal,
    "equal": np.equal,
    "not_equal": np.not_equal,
}
INTEGERS = {f"{sign}int{bits}": np.dtype(f"{sign}int{bits}").type for sign in ("", "u") for bits in (8, 16, 32, 64)}
FLOATS = {"fp16": np.float16, "fp32": np.float32, "fp64": np.float64}
NUMBERS = INTEGERS | FLOATS
LIMITS = {name: (int(np.iinfo(kind).min), int(np.iinfo(kind).max)) for name, kind in INTEGERS.items()}
CAST_SOURCES = set(NUMBERS) - {"fp16"} | {"int1"}
OFFSETS = {"int8", "int16", "int32", "int64", "uint64"}  # the smaller unsigned ones are extended first


def install() -> None:
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    if getattr(TritonSemantic.add, "is_direct", False):
        return
    # Nothing is checked there: the assertion at its end takes place in debug mode only.
    assert not interpreter.interpreter_builder.options.debug
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda self, lhs, rhs, binary_op: None
    direct = _Direct()
    tables = [(ARITHMETIC, None, NUMBERS), (COMPARISONS, tl.int1, NUMBERS), (BITWISE, None, {*INTEGERS, "int1"})]
    for table, element, names in tables:
        for name, operator in table.items():
            setattr(TritonSemantic, name, direct.binary(getattr(TritonSemantic, name), operator, element, names))
    TritonSemantic.add = direct.add(TritonSemantic.add)
    TritonSemantic.cast = direct.cast(TritonSemantic.cast)
    TritonSemantic.broadcast_impl_value = direct.broadcast(TritonSemantic.broadcast_impl_value)
    TritonSemantic.binary_op_type_checking_impl = direct.promote(TritonSemantic.binary_op_type_checking_impl)


class _Direct:
    """Makes methods of the semantic that take the direct way where they can, else that of the method given."""

    def __init__(self) -> None:
        import triton.language.core as core
        from triton.runtime import interpreter

        self._core: Any = core
        self._tensor: Any = core.tensor
        self._handle: Any = interpreter.TensorHandle
        self._common: dict[tuple[int, int], Any] = {}  # ids of two shapes, which are kept -> a type of the common shape

    def common_type(self, lhs: Any, rhs: Any) -> Any:
        """A type of the shape that both tensors are broadcast to; None if they do not fit."""
        if lhs.shape is rhs.shape:
            return lhs.type
        known = self._common.get((id(lhs.shape), id(rhs.shape)))
        if known is None:
            sizes = [tuple(size.value for size in tensor.shape) for tensor in (lhs, rhs)]
            try:
                known = self._core.block_type(self._core.int32, list(np.broadcast_shapes(*sizes)))
            except ValueError:
                return None
            self._common[id(lhs.shape), id(rhs.shape)] = known
        return known

    def binary(self, plain: Any, operator: Any, element: Any, names: Any) -> Any:
        """For operands of one type in `names`; the result has elements of type `element`, None for theirs."""
        tensor, handle, common_type = self._tensor, self._handle, self.common_type

        def method(semantic: Any, lhs: Any, rhs: Any, *rest: Any) -> Any:
            left, right = type(lhs) is tensor, type(rhs) is tensor
            scalar = lhs.dtype if left else rhs.dtype if right else None
            if scalar is None or scalar.name not in names:
                return plain(semantic, lhs, rhs, *rest)
            if left and right:
                common = common_type(lhs, rhs) if scalar.name == rhs.dtype.name else None
                operands = lhs.handle.data, rhs.handle.data
            else:
                number = _array_of(rhs if left else lhs, scalar.name) if scalar.name in NUMBERS else None
                common = None if number is None else lhs.type if left else rhs.type
                operands = (lhs.handle.data, number) if left else (number, rhs.handle.data)
            if common is None or operands[0].dtype is not operands[1].dtype:
                return plain(semantic, lhs, rhs, *rest)
            elements = element or scalar
            return tensor(handle(operator(*operands), elements), common.with_element_ty(elements))

        method.is_direct = True  # type: ignore[attr-defined]
        return method

    def add(self, plain: Any) -> Any:
        """For a pointer and an offset."""
        tensor, handle, pointer_type = self._tensor, self._handle, self._core.pointer_type

        def method(semantic: Any, lhs: Any, rhs: Any, *rest: Any) -> Any:
            if type(lhs) is not tensor or type(lhs.dtype) is not pointer_type or type(rhs) is not tensor:
                return plain(semantic, lhs, rhs, *rest)
            common = self.common_type(lhs, rhs) if rhs.dtype.name in OFFSETS else None
            if common is None:
                return plain(semantic, lhs, rhs, *rest)
            width = max(1, lhs.handle.get_element_ty().primitive_bitwidth // 8)
            data = lhs.handle.data + width * rhs.handle.data.astype(np.uint64)
            return tensor(handle(data, lhs.dtype), common.with_element_ty(lhs.dtype))

        method.is_direct = True  # type: ignore[attr-defined]
        return method

    def promote(self, plain: Any) -> Any:
        """For operands of one type, or a number that the other's type can hold, which are broadcast only."""
        tensor, handle, names = self._tensor, self._handle, {*NUMBERS, "int1"} - {"fp16"}

        def method(semantic: Any, lhs: Any, rhs: Any, *rest: Any, **options: Any) -> Any:
            left, right = type(lhs) is tensor, type(rhs) is tensor
            scalar = lhs.dtype if left else rhs.dtype if right else None
            if scalar is None or scalar.name not in names or (left and right and rhs.dtype.name != scalar.name):
                return plain(semantic, lhs, rhs, *rest, **options)
            if not (left and right):
                number = _array_of(rhs if left else lhs, scalar.name) if scalar.name in NUMBERS else None
                if number is None:
                    return plain(semantic, lhs, rhs, *rest, **options)
                constant = tensor(handle(number, scalar), scalar)
                lhs, rhs = (lhs, constant) if left else (constant, rhs)
            return semantic.broadcast_impl_value(lhs, rhs)

        return method

    def cast(self, plain: Any) -> Any:
        """For numbers that numpy converts as Triton does."""

        def method(semantic: Any, value: Any, target: Any, rounding: Any = None) -> Any:
            source, scalar = value.dtype, target.scalar
            if source is scalar:
                return value
            kind = NUMBERS.get(scalar.name)
            if kind is None or rounding is not None or source.name not in CAST_SOURCES:
                return plain(semantic, value, target, rounding)
            return self._tensor(
                self._handle(value.handle.data.astype(kind), scalar), value.type.with_element_ty(scalar)
            )

        return method

    def broadcast(self, plain: Any) -> Any:
        """For shapes that were broadcast before."""

        def expand(value: Any, common: Any) -> Any:
            if value.type.is_block() and value.type.shape is common.shape:
                return value
            data = np.broadcast_to(value.handle.data, common.shape.values)
            return self._tensor(self._handle(data, value.dtype), common.with_element_ty(value.dtype))

        def method(semantic: Any, lhs: Any, rhs: Any) -> Any:
            if lhs.shape is rhs.shape:
                return lhs, rhs
            common = self.common_type(lhs, rhs)
            return plain(semantic, lhs, rhs) if common is None else (expand(lhs, common), expand(rhs, common))

        return method


def _array_of(number: Any, name: str) -> Any:
    """An array of a number, of the tensor's type of this name; None if the number gives the result another type."""
    kind = type(number)
    if name in INTEGERS:
        low, high = LIMITS[name]
        fits = (kind is int or kind is bool) and low <= number <= high
    else:
        fits = kind is float or kind is int or kind is bool
    return np.array([number], NUMBERS[name]) if fits else None
