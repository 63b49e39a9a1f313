"""Sphinx's configuration; `make docs` builds the site. Every warning is an error there."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "Meshwright"
author = "the Meshwright authors"
extensions = ["myst_parser", "meshwright_docs"]
exclude_patterns = ["_ext"]

html_theme = "furo"
html_title = "Meshwright"
html_show_copyright = False
html_copy_source = False
html_show_sourcelink = False

smartquotes = False
highlight_language = "text"
pygments_style = "friendly"
pygments_dark_style = "monokai"
maximum_signature_line_length = 88
python_use_unqualified_type_names = True
python_display_short_literal_types = True
add_module_names = False
toc_object_entries_show_parents = "hide"

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

nitpicky = True
