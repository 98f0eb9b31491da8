"""Makes types and shapes cheap in Triton's interpreter, which makes and compares them anew for every operation.

Half of the time of an interpreted kernel goes into descriptions of tensors, not into numpy. `install()` keeps what
follows from a shape and an element type alone, so tensors of one shape share one object for it, and operands that share
it need no broadcast. triton_device calls it.
"""

from __future__ import annotations

import math
from typing import Any


def install() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    core: Any = tl.core
    if getattr(core.block_type.__init__, "is_cached", False):
        return
    _cache_block_types(core)
    _cache_tensor_shapes(core)
    _cache_widths(interpreter, core)
    plain_np_dtype, plain_unwrap = interpreter._get_np_dtype, core._unwrap_if_constexpr
    np_dtypes: dict[str, Any] = {}

    def np_dtype(dtype: Any) -> Any:
        scalar = dtype.scalar
        known = np_dtypes.get(scalar.name)
        if known is None:
            known = np_dtypes[scalar.name] = plain_np_dtype(scalar)
        return known

    constexpr = core.constexpr
    plain_kinds = {core.tensor, core.dtype, core.block_type, core.pointer_type, int, float, bool, str, type(None)}

    def unwrap(value: Any) -> Any:
        kind = type(value)
        if kind is constexpr:
            return value.value
        return value if kind in plain_kinds else plain_unwrap(value)

    interpreter._get_np_dtype, core._unwrap_if_constexpr = np_dtype, unwrap


def _cache_block_types(core: Any) -> None:
    plain = core.block_type.__init__
    shapes: dict[tuple[int, ...], tuple[Any, int]] = {}  # as a block type holds the sizes; product
    types: dict[tuple[str, int], Any] = {}  # by the element's name and the id of the shape, which is kept above

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
        known = shapes.get(sizes)
        if known is None:
            plain(self, element_ty, shape)
            shapes[sizes] = self.shape, self.numel
            return
        self.element_ty = element_ty
        self.shape, self.numel = known
        self.name = f"<{sizes}, {element_ty.name}>"

    def with_element_ty(self: Any, scalar: Any) -> Any:
        key = scalar.name, id(self.shape)
        known = types.get(key)
        if known is None:
            known = types[key] = core.block_type(scalar, self.shape)
        return known

    block_type.is_cached = True  # type: ignore[attr-defined]
    core.block_type.__init__, core.block_type.with_element_ty = block_type, with_element_ty


def _cache_tensor_shapes(core: Any) -> None:
    """Of a tensor, and the sizes that two tensors are broadcast to."""
    scalar_shape = core.tuple([]), core.constexpr(1)
    shapes: dict[int, tuple[Any, Any, Any]] = {}  # by the id of a block type's shape, which is kept

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        if not isinstance(type, core.block_type):
            self.shape, self.numel = scalar_shape
            return
        known = shapes.get(id(type.shape))
        if known is None:
            sizes = type.shape.values
            known = core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes)), type.shape
            shapes[id(type.shape)] = known
        self.shape, self.numel, _ = known

    core.tensor.__init__ = tensor


def _cache_widths(interpreter: Any, core: Any) -> None:
    """Of element types, which limit those of arrays."""
    plain = interpreter._validate_np_data_size
    widths: dict[str, int] = {}  # bytes by the name of a type

    def fits(array: Any, dtype: Any) -> bool:
        width = widths.get(dtype.name)
        if width is None:
            if type(dtype) is not core.dtype:
                return bool(plain(array, dtype))
            width = widths[dtype.name] = max(1, dtype.primitive_bitwidth // 8)
        return bool(array.itemsize <= width)

    interpreter._validate_np_data_size = fits
