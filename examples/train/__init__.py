"""A small GPT, trained from scratch on four comedies, in PyTorch, JAX or NumPy."""
