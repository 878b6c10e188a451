"""Sphinx: python -m sphinx -W -b html docs docs/_build (pip install -e '.[docs]')."""

project = "flashtile"
author = "the flashtile authors"
copyright = "the flashtile authors, MIT license"

extensions = ["myst_parser", "sphinx.ext.mathjax"]
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "*.py"]
# A pattern of the contents may match no page yet.
suppress_warnings = ["toc.empty_glob"]

html_theme = "furo"
html_title = "flashtile"
html_show_sphinx = False
