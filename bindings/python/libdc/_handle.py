"""The base class of objects that own a handle of the library."""

from __future__ import annotations

from typing import Any, TypeVar

from .errors import closed

Self = TypeVar("Self", bound="OwnedHandle")


class OwnedHandle:
    """Subclasses set `_owned` to what _lib.gc_handle() returned, and `_kind` to the noun for errors about a closed
    handle."""

    _kind = "handle"
    _owned: Any = None

    @property
    def _handle(self) -> Any:
        if self._owned is None:
            raise closed(self._kind)
        return self._owned

    def close(self) -> None:
        """Releases the handle. Later calls are errors."""
        self._owned = None

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
