"""A small GPT, trained from nothing on four comedies, in PyTorch or JAX."""
