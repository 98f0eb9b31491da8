"""Names that exist for programs written for SGLang only."""
