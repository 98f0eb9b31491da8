"""`program.compile()`: the graph of a program, checked before anything runs, drawn, and run without its body.

Knows: expressions and states. Must not know: sockets, how a call is answered.
"""
