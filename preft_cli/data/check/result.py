"""What `preft data check` finds."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION = 1


class Part(BaseModel):
    """Base of every part of the result."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Lengths(Part):
    """Tokens."""

    median: int
    p95: int
    max: int


class Bin(Part):
    """One bar of a histogram."""

    up_to: int = Field(description="Tokens, prompt and completion; more than the bar before it has.")
    rows: int


class Dropped(Part):
    """A row that is not trained on, or not evaluated."""

    where: str
    reason: str


class Same(Part):
    """Two rows of the same ids."""

    where: str
    of: str = Field(description="Where they were met first.")


class FileCheck(Part):
    """One data file."""

    setting: str = Field(description="The key of preft.yaml that names it.")
    file: str
    conversations: int = Field(description="Records.")
    rows: int = Field(description="Assistant turns that fit, each with everything before it as its prompt.")
    dropped: list[Dropped]
    prompt: Lengths
    completion: Lengths = Field(description="Its one end-of-turn token included.")
    histogram: list[Bin]
    duplicates: list[Same] = Field(description="Rows of the same prompt and completion as an earlier one of this file.")
    prompts: int = Field(description="Different prompts.")
    sharing_prompt: float = Field(description="Share of the rows whose prompt some other row of the file has too.")
    remarks: list[str]


class Leak(Part):
    """What two files have in common, one of which is to be held out."""

    held_out: str = Field(description="The key that names the file.")
    seen_in: str
    rows: list[Same]
    prompts: int = Field(description="Rows whose prompt is in the other file, whatever their completion.")


class Token(Part):
    """One position of a row."""

    id: int
    text: str
    adapted: bool = Field(description="The adapter acts here: in training, and on the server.")
    learnt: bool = Field(description="It counts for the loss: it is to be predicted from the positions before it.")


class ShownRow(Part):
    """A row, token by token."""

    where: str
    tokens: list[Token]

    @property
    def mask(self) -> list[bool]:
        """Whether each position is adapted."""
        return [token.adapted for token in self.tokens]


class ServerRow(Part):
    """The prompt of a row here and on the server."""

    where: str
    ids: list[int]
    server_ids: list[int] | None = Field(description="None: the server refuses the request.")
    refusal: str | None = None

    @property
    def equal(self) -> bool:
        """Whether training sees what serving sees."""
        return self.ids == self.server_ids


class ServerCheck(Part):
    """The first rows of train.file, as vLLM renders and tokenises the same request."""

    not_compared: str | None = Field(description="Why nothing was compared, if so.")
    rows: list[ServerRow]

    @property
    def equal(self) -> bool:
        """Whether no row differs."""
        return all(row.equal for row in self.rows)


class DataCheck(Part):
    """All of it."""

    schema_version: int = SCHEMA_VERSION
    kind: Literal["data-check"] = "data-check"
    base_model: str
    method: str
    max_length: int = Field(description="The smaller of train.max_length and what the model takes.")
    files: list[FileCheck]
    leaks: list[Leak] = Field(description="Of each held-out file, in each file that is seen before it.")
    row: ShownRow
    server: ServerCheck
