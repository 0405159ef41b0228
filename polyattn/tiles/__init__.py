"""Parts of the scores: what is visible in them, and their indices."""
