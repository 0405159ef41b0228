"""Lead from the addresses of earlier pages to where their contents are now."""

from pathlib import Path

from sphinx.application import Sphinx

MOVED = {
    "array-types": "capabilities.html#what-happens-with-my-arrays",
    "changelog": "_files/CHANGELOG.html",
    "how-to/caches": "how-to/generate.html#decode-with-a-cache",
    "how-to/index": "index.html#where-to-go",
    "how-to/no-gpu": "dialects.html#run-code-that-needs-a-gpu-here",
    "how-to/which-backend": "devices.html#which-backend-should-i-use",
    "learn/index": "learn/query-key-value.html",
    "reference/backends": "reference/index.html#choosing-what-runs",
    "reference/commands": "reference/index.html#commands",
    "reference/conformance": "reference/plugin.html#conformance",
    "reference/dialects": "dialects.html#functions",
    "reference/environment": "reference/index.html#environment-variables",
    "reference/errors": "reference/index.html#errors",
    "reference/export": "reference/index.html#export",
    "reference/formula": "_files/polyattn/_kernels/dense.py.html",
    "reference/integrations": "reference/index.html#integrations",
    "reference/parallel": "reference/attention.html#many-devices",
    "reference/plot": "reference/index.html#pictures",
    "scale": "performance.html#many-devices",
}


def redirect(app: Sphinx, error: Exception | None) -> None:
    """Write a page that leads on, at each old address; docs/links.py checks where it leads."""
    for old, new in MOVED.items():
        to = "../" * old.count("/") + new
        page = Path(app.outdir, f"{old}.html")
        page.parent.mkdir(exist_ok=True)
        page.write_text(
            f'<meta charset="utf-8"><meta http-equiv="refresh" content="0; url={to}">'
            f'<title>Moved</title><a href="{to}">This page has moved.</a>\n',
            encoding="utf-8",
        )


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx."""
    app.connect("build-finished", redirect)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
