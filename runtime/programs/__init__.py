"""What the programs of the language and of `POST /v1/programs` share: their steps, state and calls, without I/O."""
