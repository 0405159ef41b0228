from polyattn import conformance as conformance
from polyattn import dialects as dialects
from polyattn import export as export
from polyattn import nn as nn
from polyattn import parallel as parallel
from polyattn import plot as plot
from polyattn._public import *  # noqa: F403

__version__: str
