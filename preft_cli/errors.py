"""Errors that are a person's to mend: shown as one message, never as a traceback."""

from __future__ import annotations


class UserError(Exception):
    """Something the user can mend.

    The message says what was wrong, where, and what to do. `exit_code` is 1 for a failure, 2 for bad usage or config.
    """

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code
