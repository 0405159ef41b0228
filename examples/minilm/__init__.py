"""The sentence encoder all-MiniLM-L6-v2 in NumPy, with `polyattn.attention` inside."""
