"""What `preft convert` plans and what it did: the documents behind `--dry-run` and `--json`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from preft_cli.adapters.pyreft.told import Intervention, Positions, Told
from preft_cli.adapters.sources import Kind
from preft_cli.reasons import without_path

Target = Literal["store", "peft"]
Action = Literal["convert", "check"]
Status = Literal["converted", "unchanged", "checked"]
"""`unchanged`: the file at `path` came from the same files in the same way, and was left as it is."""

SCHEMA_VERSION = 1


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FailedItem(_Document):
    """A source that was not converted, or a file that did not pass the check."""

    source: str
    reason: str

    @classmethod
    def of(cls, source: Path | str, reason: str) -> FailedItem:
        """With the path said once: reasons are shown after their source."""
        return cls(source=str(source), reason=without_path(source, reason))


class PlannedItem(_Document):
    """One adapter, before it is read."""

    source: str
    kind: Kind
    name: str
    method: str | None
    """None: what the file says."""
    dtype: str | None
    """The type to store the weights in. None: the adapter's own."""
    positions: Positions | None = None
    """Of a pyreft folder: where it shall act. None: nobody has said so."""
    intervention: Intervention | None = None
    """Of a pyreft folder without config.json: what it holds."""
    path: str
    """The file or folder to write, or to check."""
    replaces: bool
    """Whether something is at `path` already."""

    @property
    def told(self) -> Told:
        """What the person who converts says of a pyreft folder."""
        return Told(self.positions, self.intervention)


class ConvertPlan(_Document):
    """What a call will do, worked out from names alone."""

    schema_version: int = SCHEMA_VERSION
    action: Action
    to: Target
    base: str
    store: str
    dtype: str | None
    """The type to store weights in. None: each adapter's own (with `auto`, also if the base model is not here yet)."""
    items: list[PlannedItem]
    failed: list[FailedItem]
    notes: list[str] = Field(default_factory=list)
    """What was passed over, such as other files in a folder."""


class ConvertedItem(_Document):
    """One adapter that was written, or that passed the check."""

    name: str
    status: Status
    method: str
    rank: int
    dtype: str
    """The type of the weights in `path`."""
    source: str
    path: str
    bytes: int
    digest: str
    replaced: str | None = None
    """Content digest of the file that was there before, if it differed (`damaged` if it could not be read)."""
    notes: list[str] = Field(default_factory=list)


class ConvertResult(_Document):
    """What a call did. Exit code 1 if anything failed."""

    schema_version: int = SCHEMA_VERSION
    action: Action
    to: Target
    base: str
    store: str
    converted: list[ConvertedItem]
    failed: list[FailedItem]
