"""The parts of a call: its expressions, its description, and the tiles of its scores."""
