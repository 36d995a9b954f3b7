"""Turn the docstrings' Sphinx roles into links of mkdocstrings, when the site is built.

Promise: a role such as ``:class:`~package.module.Name``` becomes a link if the reference has a page for the name, and
code otherwise; nothing else in a docstring is touched.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_ROLE = re.compile(r":(?:class|func|meth|attr|data|mod):`(~?)([\w.]+)`")


def without_roles(text: str) -> str:
    """The same text in Markdown."""
    return _ROLE.sub(_link, text)


def _link(role: re.Match[str]) -> str:
    shown = role[2].rpartition(".")[2] if role[1] else role[2]
    # The HTML form may lead nowhere without a warning, the Markdown form may not.
    return f'<autoref optional identifier="{role[2]}"><code>{shown}</code></autoref>'


class SphinxRoles(Extension):
    """Called by griffe for each object whose source it has read."""

    def on_instance(self, *, obj: Object, **kwargs: Any) -> None:
        """Change the object's docstring."""
        if obj.docstring:
            obj.docstring.value = without_roles(obj.docstring.value)
