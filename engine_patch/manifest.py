"""What `preft serve` tells the server that it starts: a JSON file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from engine_patch.ref import AdapterRef


class Listed(BaseModel):
    """An adapter that was there at the start."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: Path
    method: str
    digest: str

    @property
    def ref(self) -> AdapterRef:
        """As requests name it."""
        return AdapterRef(self.path, self.method, self.digest)


class Manifest(BaseModel):
    """The adapters of a server, and what they must agree with."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    adapters: dict[str, Listed]
    """By name; of adapters that are not `.preft` files, the converted copy."""
    store: Path | None = None
    """The folder in which `.preft` files may come and go."""
    reserved: list[str] = []
    """Names that two adapters of the folder claim: neither is served, nor what is put in their place."""
    base_names: list[str] = []
    """The base model's own names."""
    base: dict[str, Any]
    """`BaseFingerprint.to_dict` of the base model."""
    chat_template: str | None = None
    """Digest of the server's chat template; None where it has none."""
