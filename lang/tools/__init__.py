"""Tools: typed Python functions that the model may call."""
