"""The one error type of the engine side; its text is written for the person who runs the server."""

from __future__ import annotations


class PreftError(ValueError):
    """An adapter, file or engine that must not be used: what is wrong, where, and what to do."""
