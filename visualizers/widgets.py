"""The widgets that people make: each a view with its figures. ``BlockMap(llm)`` in a cell's last line shows it, live."""

from __future__ import annotations

from refimpl.visualizers import block_map
from refimpl.visualizers.view import View


class BlockMap(View):
    """Which sequence owns this block?"""

    figures = (block_map.FIGURE,)
