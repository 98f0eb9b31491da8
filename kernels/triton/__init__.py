"""The operators as Triton kernels, each with the signature of its reference in `kernels/reference`.

No operator waits for the device or reads a value back from it, so each can be captured in a CUDA graph.
"""
