"""The table that `polyattn check` prints."""
