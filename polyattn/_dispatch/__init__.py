"""Select the kernel and backend that run a call, and move arrays to them."""
