"""What a call is: its expressions, its description, and the tiles of its scores."""
