"""What a call asks: described, checked, and in the letters of the semantics."""
