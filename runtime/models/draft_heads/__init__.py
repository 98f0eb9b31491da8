"""Draft heads: one layer that guesses tokens from the hidden states of a model."""
