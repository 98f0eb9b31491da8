"""Runtimes elsewhere, reached over HTTP: SGLang's protocol, and chat APIs."""
