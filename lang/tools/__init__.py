"""Tools: plain typed Python functions that the model may call.

Knows: functions, their schemas, how calls and results are written. Must not know: sessions, sockets.
"""
