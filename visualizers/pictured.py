"""Pictured: a widget that is a picture where no browser runs it."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any


class Pictured:
    """To be inherited from before ``AnyWidget``, whose bundle is the live widget."""

    @abstractmethod
    def _repr_html_(self) -> str:
        """The picture as HTML without a script."""

    @abstractmethod
    def _repr_text(self) -> str:
        """The picture in letters."""

    def _repr_mimebundle_(self, **options: Any) -> Any:
        """The live widget where there is one, and a picture beside it for where there is none."""
        bundle = super()._repr_mimebundle_(**options)  # type: ignore[misc]
        data = bundle[0] if isinstance(bundle, tuple) else bundle
        if data is not None:
            data["text/html"] = self._repr_html_()
            data["text/plain"] = self._repr_text()
        return bundle
