"""JSON Schemas rewritten into equal ones that the compiler honours, or refused; nothing is approximated.

Knows: JSON Schema. Must not know: vocabularies, tokens or grammars.
"""

from plait.constrained.rewrite.document import Document
from plait.constrained.rewrite.walk import Rewritten, rewritten, rewritten_part

__all__ = ["Document", "Rewritten", "rewritten", "rewritten_part"]
