"""Checks of any attention function against the semantics."""
