"""Exact results, and limits for the errors of others."""
