"""The states of a program, plain and async: written with `+=`, read, forked, joined and raced."""
