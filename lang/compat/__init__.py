"""What SGLang's programs use and plait's own way does not need, spelled as they spell it."""
