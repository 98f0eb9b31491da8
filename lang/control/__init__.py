"""What bounds and steers a program: budgets, races between branches, and patterns over forks."""
