"""Backends other than plait's own runtime: chat APIs, and servers with SGLang's protocol."""
