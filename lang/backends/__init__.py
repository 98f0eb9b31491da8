"""Runtimes elsewhere, reached over HTTP: SGLang's protocol, and chat APIs.

Knows: sessions and calls as programs use them, and what each service can do. Must not know: nodes, states.
"""
