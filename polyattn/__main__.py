"""The command ``python -m polyattn``, which is the same as ``polyattn``."""

import sys

from polyattn_command import main

sys.exit(main())
