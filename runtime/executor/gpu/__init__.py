"""Steps on a GPU without waiting: static buffers, captured graphs, sampling on the device."""
