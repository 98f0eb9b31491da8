"""The operators as Triton kernels, one file per family, each with the signature of its plain torch reference.

Knows: numbers in arrays. Must not know: models, batches, requests. Nothing here waits for the device or reads a
value back from it, so every operator can stand inside a captured CUDA graph.
"""
