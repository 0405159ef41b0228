"""Time the same call on several backends, side by side: ``polyattn bench``.

Every backend gets the same numbers and the same public call, on arrays of its own library. A call
ends when its result is computed. Each time is reported beside the measured limits of the hardware
and a description of the machine.
"""
