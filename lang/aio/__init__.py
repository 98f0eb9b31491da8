"""Programs on an event loop: the state of an `async def` body, and how such bodies run."""
