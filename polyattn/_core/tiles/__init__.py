"""Parts of the scores: their visibility and their indices."""
