"""What ``polyattn bench`` runs: the same call on several backends, side by side.

What must hold true: every backend is given the same numbers and the same public call, on arrays of
its own; a call is over when its result is there; and what is said of speed stands beside what the
hardware was measured to reach, the error, and what it ran on.
"""
