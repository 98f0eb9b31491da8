"""What SGLang's programs use and plait's own way does not need, spelled as they spell it.

Knows: SGLang's names. Must not know: sockets, how a call is answered.
"""
