"""References within a document: resources, anchors and dynamic scopes."""
