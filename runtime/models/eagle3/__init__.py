"""EAGLE-3 heads (Li et al. 2025, arXiv 2503.01840): one layer that guesses tokens from a model's hidden states."""
