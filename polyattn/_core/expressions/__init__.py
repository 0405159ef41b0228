"""Masks and score rules as values that compose."""
