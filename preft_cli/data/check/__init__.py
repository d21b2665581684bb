"""`preft data check`: what training will see, before any training."""

from __future__ import annotations

from preft_cli.data.check.result import DataCheck
from preft_cli.data.check.run import check

__all__ = ["DataCheck", "check"]
