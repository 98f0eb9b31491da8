"""JSON Schemas rewritten into equal ones that the compiler honours, or refused; nothing is approximated."""

from plait.constrained.json_schema.rewrite.document import SchemaDocument
from plait.constrained.json_schema.rewrite.rewriter import RewrittenSchema, rewrite_schema, rewrite_subschema

__all__ = ["SchemaDocument", "RewrittenSchema", "rewrite_schema", "rewrite_subschema"]
