"""The sentence encoder all-MiniLM-L6-v2 on `polyattn.nn`."""
