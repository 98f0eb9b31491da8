"""Async programs: the state of an `async def` body, and how bodies run on an event loop."""
