"""`program.compile()`: traces a program into a graph, which is checked, drawn and run."""
