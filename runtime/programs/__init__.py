"""What the programs of the language and of `POST /v1/programs` share: their state, without I/O."""
