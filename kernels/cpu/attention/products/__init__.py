"""Attention's products of queries with keys and of probabilities with values, one module for each instruction set."""
