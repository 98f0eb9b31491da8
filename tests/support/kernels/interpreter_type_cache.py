"""Makes types and shapes cheap in Triton's interpreter, which makes and compares them anew for every operation.

Half of the time of an interpreted kernel goes into descriptions of tensors, not into numpy. `install()` keeps what
follows from a shape alone, so tensors of one shape share one object for it, and operands that share it need no
broadcast. triton_device calls it.
"""

from __future__ import annotations

import math
from typing import Any


def install() -> None:
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    core: Any = tl.core
    if getattr(core.block_type.__init__, "is_cached", False):
        return
    plain_block_type, plain_broadcast = core.block_type.__init__, TritonSemantic.broadcast_impl_value
    plain_np_dtype = interpreter._get_np_dtype
    block_shapes: dict[tuple[int, ...], tuple[Any, int]] = {}  # as a block type holds the sizes; product
    tensor_shapes: dict[tuple[int, ...], tuple[Any, Any]] = {(): (core.tuple([]), core.constexpr(1))}
    np_dtypes: dict[str, Any] = {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
        known = block_shapes.get(sizes)
        if known is None:
            plain_block_type(self, element_ty, shape)
            block_shapes[sizes] = self.shape, self.numel
            return
        self.element_ty = element_ty
        self.shape, self.numel = known
        self.name = f"<{sizes}, {element_ty.name}>"

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        sizes = tuple(type.shape.values) if isinstance(type, core.block_type) else ()
        known = tensor_shapes.get(sizes)
        if known is None:
            known = core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))
            tensor_shapes[sizes] = known
        self.shape, self.numel = known

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.shape is rhs.shape else plain_broadcast(self, lhs, rhs)

    def np_dtype(dtype: Any) -> Any:
        scalar = dtype.scalar
        known = np_dtypes.get(scalar.name)
        if known is None:
            known = np_dtypes[scalar.name] = plain_np_dtype(scalar)
        return known

    block_type.is_cached = True  # type: ignore[attr-defined]
    core.block_type.__init__ = block_type
    core.tensor.__init__ = tensor
    TritonSemantic.broadcast_impl_value = broadcast
    interpreter._get_np_dtype = np_dtype
