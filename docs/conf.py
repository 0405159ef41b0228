"""Configure the site: every page of docs/, and the reference from docstrings; no network."""

import sys
from pathlib import Path

from sphinx.application import Sphinx

import polyattn

sys.path.insert(0, str(Path(__file__).with_name("_ext")))

project = author = "polyattn"
project_copyright = "The polyattn developers"
version = release = polyattn.__version__

extensions = [
    "looks",
    "myst_parser",
    "numpydoc",
    "repository",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",  # only for the role "autolink"
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "written",
]
exclude_patterns = ["_build", "results"]  # what `make gpu` writes
root_doc = "index"
smartquotes = False
nitpicky = True
# Names in docstrings without a page on this site: those of other libraries, single attributes.
nitpick_ignore_regex = [
    ("py:obj", r"(importlib|jax|mlx|numpy|torch)\..*|tqdm"),
    ("py:obj", "Finding|KVCache|PagedCache|QuantizedCache|check_callable|length|poison_in"),
    ("py:obj", "ids|rotary|scaled_dot_product_attention"),
]

# ---- pages ----

myst_heading_anchors = 4
# The prompt of a console and its output are not copied.
copybutton_prompt_text = "$ "
copybutton_selector = "div:not(div.highlight-python + div.highlight-text) > div.highlight pre"
copybutton_exclude = ".linenos, .gp, .go"

# ---- docstrings ----

default_role = "autolink"
# The documentation of a layer or a kernel is that of its call.
autodoc_default_options = {"special-members": "__call__"}
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autosummary_generate = False
numpydoc_show_class_members = False

# ---- looks ----

html_theme = "furo"
html_title = f"polyattn {release}"
pygments_dark_style = "github-dark"
html_static_path = ["_static"]
html_favicon = "_static/favicon.svg"
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False


ALIASES = {"polyattn.dialects.scaled_dot_product_attention"}
TWICE = {"progress", "thread_count"}  # names of polyattn.plugin; their modules have public ones too


def alias_of_viewcode(app: Sphinx, module: str, name: str) -> str | None:
    """Keep viewcode from linking modules that are documented under another name as well."""
    return module if f"{module}.{name}" in ALIASES or name in TWICE else None


def says_nothing(
    app: Sphinx, kind: str, name: str, value: object, skip: bool, options: object
) -> bool | None:
    """Leave out calls without a docstring, and fields that a named tuple's docstring describes."""
    if name == "__call__":
        return not value.__doc__ or None
    return True if str(value.__doc__).startswith("Alias for field number") else None


def setup(app: Sphinx) -> None:
    """Register with Sphinx."""
    app.connect("autodoc-skip-member", says_nothing)
    app.connect("viewcode-follow-imported", alias_of_viewcode)
