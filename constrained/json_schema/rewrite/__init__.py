"""JSON Schemas rewritten into equal ones that the compiler honours, or refused; nothing is approximated."""
