"""Sphinx's settings for the manual; scripts/make_docs.py puts the reference beside these pages and runs it."""

project = "libdc"
author = "the libdc authors"
copyright = "the libdc authors, Apache-2.0"
extensions = ["myst_parser"]
exclude_patterns = ["conf.py"]
html_theme = "furo"
html_title = "libdc"
html_copy_source = False
html_show_sourcelink = False
myst_heading_anchors = 3
highlight_language = "none"
