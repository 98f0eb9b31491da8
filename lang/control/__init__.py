"""What bounds and steers a program: budgets, races between branches, and patterns over forks.

Knows: states, branches, usage. Must not know: sockets, how a call is answered.
"""
