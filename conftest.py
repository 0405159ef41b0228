"""What needs CuPy is collected where there are wheels of it: on Linux."""

import sys

collect_ignore_glob = []
if sys.platform != "linux":
    collect_ignore_glob += ["backends/polyattn_cupy/*", "tests/backends/test_cupy*", "tests/gpu/*"]
