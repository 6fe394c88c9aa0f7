"""Drafts: the heads that propose tokens, their training-time unroll, and their vocabularies."""
