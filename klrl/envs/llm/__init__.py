"""Transforms for environments of language models."""
