"""What `preft store` tells: the documents behind its `--json`."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

SCHEMA_VERSION = 1


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StoreRow(_Document):
    """One adapter of a store."""

    name: str
    method: str
    rank: int
    """The largest rank of its modules."""
    dtype: str
    bytes: int
    """Size of the file."""
    base: str
    """The base model as a person knows it; what is compared is the fingerprint (`preft store info`)."""
    digest: str
    """Content digest: equal for equal weights."""
    modified: str
    """When the file was written: UTC, ISO 8601."""


class BrokenFile(_Document):
    """A file that no server would use."""

    path: str
    reason: str


class StoreList(_Document):
    """`preft store ls`. Exit code 1 if anything is broken."""

    schema_version: int = SCHEMA_VERSION
    store: str
    adapters: list[StoreRow]
    broken: list[BrokenFile]


class ModuleGroup(_Document):
    """Modules of one kind that share rank and scaling."""

    module: str
    """With a star for the layer, such as `model.layers.*.self_attn.q_proj`."""
    in_features: int
    out_features: int
    rank: int
    scaling: float
    layers: str
    """Such as `0-11` or `1,4-7`; empty for modules outside of the layers."""


class StoreInfo(StoreRow):
    """Everything that a file's header says."""

    path: str
    pages: int
    weight_bytes: int
    """Bytes of the pages; the rest of the file is the header."""
    fingerprint: dict[str, Any]
    """What the base model must agree with."""
    modules: list[ModuleGroup]
    meta: dict[str, Any]
    """Where it comes from."""


class StoreInfos(_Document):
    """`preft store info`. Exit code 1 if anything is broken."""

    schema_version: int = SCHEMA_VERSION
    store: str
    adapters: list[StoreInfo]
    broken: list[BrokenFile]


class StoreRemoval(_Document):
    """`preft store rm`. Exit code 1 if a file could not be removed."""

    schema_version: int = SCHEMA_VERSION
    store: str
    removed: list[str]
    failed: list[BrokenFile]
