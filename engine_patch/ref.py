"""How a request says which adapter it means: in `LoRARequest.lora_path`, the one field that reaches every process.

`/store/alice.preft#preft=lorap:<content digest>` tells the scheduler, the runner and the cache the method and the
content without opening a file, and a file whose content changed has another path, so nothing can take it for the old.
`live:NAME#preft=...` is a version of an adapter that a trainer in the engine's process writes (see `live`): it has no file.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from engine_patch import rule
from engine_patch.errors import PreftError
from engine_patch.rule import METHODS

_MARK = "#preft="
_LIVE = "live:"


@dataclass(frozen=True)
class AdapterRef:
    """An adapter file together with the method and content digest it had when the request was made."""

    path: Path
    method: str
    digest: str

    @classmethod
    def of_live(cls, name: str, method: str, digest: str) -> AdapterRef:
        """A version of a live adapter."""
        return cls(Path(f"{_LIVE}{name}"), method, digest)

    @property
    def live(self) -> bool:
        """Whether there is no file, and never was. Paths of files are absolute."""
        return str(self.path).startswith(_LIVE)

    @property
    def prefill_only(self) -> bool:
        """Whether only prompt positions are adapted."""
        return rule.is_prefill_only(self.method)

    def encode(self) -> str:
        """The text for `LoRARequest.lora_path`."""
        return f"{self.path}{_MARK}{self.method}:{self.digest}"


@lru_cache(maxsize=65536)
def parse_ref(lora_path: str) -> AdapterRef | None:
    """Read back what `encode` wrote; None for a stock adapter's path.

    Raises:
        PreftError: if the path carries our mark but not a method and a digest.
    """
    path, mark, rest = lora_path.rpartition(_MARK)
    if not mark:
        return None
    method, _, digest = rest.partition(":")
    if method not in METHODS or not digest:
        raise PreftError(f"{lora_path!r} does not name an adapter: expected PATH{_MARK}METHOD:DIGEST")
    return AdapterRef(Path(path), method, digest)


def is_prefill_only(lora_request: Any) -> bool:
    """Whether a `LoRARequest` (or None) names a prefill-only adapter."""
    ref = parse_ref(lora_request.lora_path) if lora_request else None
    return ref is not None and ref.prefill_only
