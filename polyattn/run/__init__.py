"""Run programs that are written for GPUs on any device: ``polyattn run``."""
