"""`program.compile()`: the graph of a program, checked before anything runs, drawn, and run without its body."""
