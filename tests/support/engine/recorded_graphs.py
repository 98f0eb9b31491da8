"""A simulated CUDA graph: the list of torch calls that a capture made, repeated on the same tensors.

As on a GPU, a replay runs no Python of the captured work, and reads the memory that its calls read at the capture.
What the calls wrote lies in a pool that any graph may reuse: before each replay it is filled with garbage.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GARBAGE = -1_000_000
_active: list[CallRecorder] = []


def storages(values):
    return {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)}


class CallRecorder(TorchDispatchMode):
    """Records calls while it is active, in pieces. `pool`: the tensors that the calls allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces, self.pool, self.is_paused = [[]], [], False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not self.is_paused:
            self.add(func, args, kwargs, out, func._schema.is_mutable)
        return out

    def add(self, func, args, kwargs, out, is_mutable):
        inputs = storages((args, kwargs))
        new = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor) and not storages(leaf) <= inputs]
        self.pool += new
        if new or is_mutable:  # else a view
            self.pieces[-1].append((func, args, kwargs, new, inputs))

    @contextmanager
    def paused(self):
        self.is_paused = True
        yield
        self.is_paused = False

    def replay(self, index):
        for func, args, kwargs, recorded, inputs in self.pieces[index]:
            out = func(*args, **kwargs)
            new = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor) and not storages(leaf) <= inputs]
            for target, value in zip(recorded, new, strict=True):
                target.copy_(value)


def as_kernel(function):
    """The function as one call of a graph, whatever torch calls it consists of."""

    @functools.wraps(function)
    def kernel(*args, **kwargs):
        if not _active:
            return function(*args, **kwargs)
        with _active[-1].paused():
            out = function(*args, **kwargs)
        _active[-1].add(function, args, kwargs, out, True)
        return out

    return kernel


class GraphPool:
    """Captures work in pieces. All captures share one pool."""

    def __init__(self) -> None:
        self.recorders = []

    def capture_pieces(self, work):
        """As `Stream.capture_pieces`, for an idle device."""
        recorder = CallRecorder()
        work(lambda: None)  # warms up
        _active.append(recorder)
        with recorder:
            work(lambda: recorder.pieces.append([]))
        _active.pop()
        self.recorders.append(recorder)

        def replay(between):
            assert len(between) == len(recorder.pieces) - 1
            for other in self.recorders:
                for tensor in other.pool:
                    tensor.fill_(float("nan") if tensor.is_floating_point() else tensor.element_size() > 2 and GARBAGE)
            recorder.replay(0)
            for index, launch in enumerate(between):
                launch()
                recorder.replay(index + 1)

        return replay
