"""How Sphinx makes the site: `sphinx-build -W -q docs build/site`.

Neither the build nor its readers need a network: equations become MathML while building,
and a page that would load anything from elsewhere fails the build.
"""

import re

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.errors import ExtensionError
from sphinx.util import logging

import lsgd_jax


project = "lsgd_jax"
version = release = lsgd_jax.__version__
author = copyright = "the authors of lsgd_jax"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
myst_enable_extensions = ["dollarmath", "deflist", "colon_fence"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # `Args:` says what they are, and shapes, too
autodoc_mock_imports = ["ray"]  # so that the extra `docs` does without it
napoleon_use_ivar = True
napoleon_attr_annotations = False
default_role = "py:obj"
python_maximum_signature_line_length = 88

html_theme = "sphinx_book_theme"
html_title = f"lsgd_jax {version}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_math_renderer = "mathml"
html_theme_options = {
    "show_toc_level": 2,
    "use_download_button": False,
    "navbar_persistent": [],  # the search is in the sidebar
}

ROWS = re.compile(r"\\\\|&")
ENVIRONMENT = r"\begin{"
# Where a link out of docs/, as it is right in the repository, leads on the site.
EXAMPLE = r"\]\(\.\./(examples/(?:integrations/)?(\w+)\.py)\)"
ELSEWHERE = {
    EXAMPLE: r"](#example-\2)",
    r"\]\(\.\./(CONTRIBUTING|CHANGELOG)\.md\)": lambda m: f"]({m[1].lower()}.md)",
}
LISTING = """
(example-{name})=
## {name}.py

```{{literalinclude}} ../{path}
:language: python
```
"""
LOADED = re.compile(
    rb"<(?:script|img|iframe|source)\b[^>]*?\ssrc=[\"']?(?:https?:)?//[^>]*>"
    rb"|<link\b[^>]*?\shref=[\"']?(?:https?:)?//[^>]*>"
    rb"|(?:@import|url\()\s*[\"']?(?:https?:)?//[^\s)]*"
)


def write_mathml(translator, node):
    """Writes an equation as MathML; LaTeX that has no MathML is a warning."""
    is_block, tex = isinstance(node, nodes.math_block), node.astext().strip()
    if is_block and ROWS.search(tex) and ENVIRONMENT not in tex:
        tex = rf"\begin{{aligned}}{tex}\end{{aligned}}"
    try:
        mathml = tex2mathml(tex, as_block=is_block)
    except MathError as error:
        logging.getLogger(__name__).warning("%s in %s", error, tex, location=node)
        mathml = tex
    translator.body.append(f'<div class="equation">{mathml}</div>' if is_block else mathml)
    raise nodes.SkipNode


def lead_elsewhere(app, docname, source):
    """Makes links out of docs/ lead to pages; the page of examples lists their code."""
    if docname == "examples":
        linked = dict.fromkeys(re.findall(EXAMPLE, source[0]))
        source[0] += "".join(LISTING.format(path=path, name=name) for path, name in linked)
    for pattern, target in ELSEWHERE.items():
        source[0] = re.sub(pattern, target, source[0])


def check_offline(app, error):
    """Raises ExtensionError if a page or a style sheet loads something by http."""
    if error or app.builder.format != "html":
        return
    files = [*app.outdir.rglob("*.html"), *app.outdir.rglob("*.css")]
    found = {m[0].decode() for file in files for m in LOADED.finditer(file.read_bytes())}
    if found:
        raise ExtensionError("loaded over a network: " + "; ".join(sorted(found)))


def setup(app):
    app.add_html_math_renderer("mathml", (write_mathml, None), (write_mathml, None))
    app.connect("source-read", lead_elsewhere)
    app.connect("build-finished", check_offline)
