"""How Sphinx makes the site: `sphinx-build -W -a -q docs build/site`.

Neither the build nor its readers need a network: equations become MathML while building,
and a page that would load anything from elsewhere fails the build.
"""

import inspect
import pathlib
import posixpath
import re
import subprocess
import sys

import jax
import optax
from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.errors import ExtensionError
from sphinx.util import logging
from sphinx.util.inspect import stringify_signature
from sphinx.util.typing import stringify_annotation

import lsgd_jax


HERE = pathlib.Path(__file__).parent
sys.path.append(str(HERE))
import notebooks  # noqa: E402


def repository():
    """The web address of the repository that this is a clone of, or an empty string."""
    remote = ["git", "-C", str(HERE), "remote", "get-url", "origin"]
    try:
        found = subprocess.run(remote, capture_output=True, text=True).stdout.strip()
    except OSError:  # no git
        return ""
    address = re.fullmatch(r"https://(?:[^@/]*@)?(.*?)(?:\.git)?", found)
    return f"https://{address[1]}" if address else ""  # without a user's credentials


project = "lsgd_jax"
version = release = lsgd_jax.__version__
author = copyright = "the authors of lsgd_jax"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
myst_enable_extensions = ["dollarmath", "deflist", "colon_fence"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "description"  # with those arguments that `Args:` describes
autodoc_typehints_description_target = "documented"
autodoc_mock_imports = ["ray"]  # so that the extra `docs` does without it
napoleon_use_ivar = True
napoleon_attr_annotations = False
default_role = "py:obj"
python_maximum_signature_line_length = 88
# The pages of the names that our own pages use, so that no build asks a network for them.
intersphinx_mapping = {
    "jax": ("https://docs.jax.dev/en/latest/", "inventories/jax.inv"),
    "optax": ("https://optax.readthedocs.io/en/latest/", "inventories/optax.inv"),
}

html_theme = "sphinx_book_theme"
html_title = f"lsgd_jax {version}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = [("search.js", {"defer": "defer"})]
html_copy_source = False
html_show_sourcelink = False
html_math_renderer = "mathml"
html_search_scorer = str(HERE / "static" / "scorer.js")
html_context = {"default_mode": "auto"}  # otherwise each page warns of its theme
html_theme_options = {
    "show_toc_level": 2,
    "use_download_button": False,
    "extra_footer": f"lsgd_jax {version}",
    "navbar_persistent": [],  # the search is in the sidebar
    "secondary_sidebar_items": {
        "**": ["page-toc"],
        "methods/index": [],  # its table takes the whole width
    },
}
if address := repository():
    link = {"name": "The repository", "url": address, "icon": "fa-solid fa-code-branch"}
    html_theme_options["icon_links"] = [link]

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
NOTEBOOK = """
<a href="notebooks/{name}.ipynb" download>This page as a notebook</a>
"""
OTHER_NAMES = re.compile(r"^<!-- Also called: (.*?) -->\n", re.MULTILINE | re.DOTALL)
FENCED = re.compile(r"^(```.*?^```)", re.DOTALL | re.MULTILINE)
# The words of code in a line, and where they may break.
CODE = re.compile(r'(?<=<span class="pre">)[^<]+')
BREAK = re.compile(r"(?<=[(=/])(?=[a-z])|(?<=\w{3}\.)(?=[a-z])")
NAME = re.compile(r"(?<![\[`])`(lj|jax|optax)\.([a-zA-Z_.]+)`(?![\]`])")
MODULES = {"lj": "lsgd_jax", "jax": "jax", "optax": "optax"}
# Types as a reader knows them, in place of where they are defined.
TYPES = {
    stringify_annotation(optax.ScalarOrSchedule, "smart"): "optax.ScalarOrSchedule",
    stringify_annotation(jax.typing.ArrayLike, "smart"): "~jax.typing.ArrayLike",
    "jax.jaxlib._jax.Array": "jax.Array",
    "jaxlib._jax.Device": "jax.Device",
    "jax._src.mesh.": "jax.sharding.",
    "jax._src.stages.": "jax.stages.",
    "jax.P": "jax.sharding.PartitionSpec",
    "optax._src.base.": "optax.",
}
# Pages of earlier versions, and where their content is now.
MOVED = {
    "api/averaging": "api/methods#local-sgd-slowmo-diloco",
    "api/centers": "api/methods#easgd-downpour-parle",
    "api/contrib": "api/methods#lsgd-jax-contrib",
    "api/gossip": "api/methods#gossip-push-sum-pairs-groups",
    "api/gradients": "api/methods#all-reduce-and-robust-aggregation",
    "api/leaders": "api/methods#leader-sgd",
    "api/models": "api/workers#models-and-diagnostics",
    "api/topology": "api/methods#graphs",
    "coming_from": "frameworks#coming-from-another-library",
    "results/diloco_measured": "results/predictions",
    "results/peers": "results#other-implementations",
    "results/plan": "results/predictions#the-planner-against-published-numbers",
    "results/simulator": "results/predictions",
    "robustness": "faults#numbers-that-are-not-finite",
    "simulator": "is_it_worth_it#the-simulator",
    "wrappers": "own_loop",
    "trained_models": "checkpoints",
    "when_to_follow": "methods/lsgd#when-to-follow-a-leader",
}
REDIRECT = '<meta http-equiv="refresh" content="0; url={0}"><a href="{0}">Moved.</a>'
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
    """Makes links out of docs/ lead to pages; two of them list the code of examples."""
    if docname in ("recipes", "frameworks"):
        linked = dict.fromkeys(re.findall(EXAMPLE, source[0]))
        source[0] += "".join(LISTING.format(path=path, name=name) for path, name in linked)
    for pattern, target in ELSEWHERE.items():
        source[0] = re.sub(pattern, target, source[0])


def index_other_names(app, docname, source):
    """Makes the words of "Also called: ..." index entries, which a search ranks first.

    They lead to where the comment stands.
    """
    source[0] = OTHER_NAMES.sub(index, source[0])


def index(comment):
    names = " ".join(comment[1].split()).split(", ")
    names += [name.replace("-", " ") for name in names if "-" in name]
    entries = "\n".join(f"   ! single: {name}" for name in names)
    return f"```{{eval-rst}}\n.. index::\n{entries}\n```\n"


def link_names(app, docname, source):
    """Makes names of ours, of jax and of optax lead to their reference."""
    link = lambda m: f"{{py:obj}}`{m[1]}.{m[2]} <{MODULES[m[1]]}.{m[2]}>`"
    parts = FENCED.split(source[0])
    source[0] = "".join(p if p[:3] == "```" else NAME.sub(link, p) for p in parts)


def let_code_break(app, page, template, context, doctree):
    """Lets code in a line break after brackets and dots, not inside a word."""
    if "body" in context:
        parts = lambda m: BREAK.sub("<wbr>", m[0])
        context["body"] = CODE.sub(parts, context["body"])


def offer_notebook(app, docname, source):
    if docname in notebooks.PAGES:
        title, rest = source[0].split("\n", 1)
        source[0] = f"{title}\n{NOTEBOOK.format(name=docname)}{rest}"


def write_notebooks(app, error):
    if not error and app.builder.format == "html":
        notebooks.write(app.outdir / "notebooks")


def takes_options(member):
    written = inspect.unwrap(member).__doc__ if inspect.isfunction(member) else None
    return "**options:" in (written or "")


def options_once(app, kind, name, member, options, lines):
    """Leaves the description of the options of every pull to `PullOptions`."""
    if takes_options(member):
        lines[:] = [*inspect.getdoc(inspect.unwrap(member)).splitlines(), ""]


def short_signature(app, kind, name, member, options, signature, returns):
    """The signature with `**options`, and types by their public names."""
    annotations = app.env.current_document.autodoc_annotations.get(name, {})
    for argument, annotation in annotations.items():
        for long, short in TYPES.items():
            annotation = annotation.replace(long, short)
        annotations[argument] = annotation
    if takes_options(member):
        written = inspect.signature(inspect.unwrap(member))
        return stringify_signature(written, show_annotation=False), returns


def find_class(app, env, node, content):
    """Finds a class of `lsgd_jax` that a docstring of another module names."""
    name = node["reftarget"]
    if node.get("refdomain") == "py" and name[:1].isupper() and "." not in name:
        where = env, node["refdoc"], app.builder
        domain = env.get_domain("py")
        return domain.resolve_xref(*where, "obj", f"lsgd_jax.{name}", node, content)


def redirect_old_pages(app, error):
    """Writes a page at each old address; raises ExtensionError if its section is gone."""
    if error or app.builder.format != "html":
        return
    for old, new in MOVED.items():
        page, _, section = new.partition("#")
        target = app.outdir / f"{page}.html"
        if section and f'id="{section}"' not in target.read_text():
            raise ExtensionError(f"{old} has moved to {new}, which does not exist")
        address = posixpath.relpath(f"{page}.html", posixpath.dirname(old) or ".")
        where = f"{address}#{section}" if section else address
        (app.outdir / f"{old}.html").write_text(REDIRECT.format(where))


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
    app.connect("source-read", link_names)
    app.connect("source-read", index_other_names)
    app.connect("source-read", offer_notebook)
    app.connect("html-page-context", let_code_break)
    app.connect("autodoc-process-docstring", options_once, priority=400)  # before napoleon
    app.connect("autodoc-process-signature", short_signature, priority=600)
    app.connect("missing-reference", find_class)
    app.connect("build-finished", write_notebooks)
    app.connect("build-finished", redirect_old_pages)
    app.connect("build-finished", check_offline)
