"""Asynchronous steps on a GPU: static buffers, CUDA graphs, sampling on the device."""
