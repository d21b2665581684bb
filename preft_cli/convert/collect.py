"""A folder of adapters of any kind becomes a set of `.preft` files that a server can read."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from engine_patch.errors import PreftError
from engine_patch.residual import is_stream
from engine_patch.store import FORMAT_VERSION, SUFFIX, Header, check_name, read_header, write_adapter
from preft_cli.adapters.sources import Rejected, Source, default_name, find
from preft_cli.errors import UserError
from preft_cli.reasons import without_path

if TYPE_CHECKING:
    from preft_cli.adapters.base import BaseFacts
    from preft_cli.models import BaseModel


@dataclass
class Collected:
    """What a folder offers to a server."""

    adapters: dict[str, Path] = field(default_factory=dict)
    """The `.preft` file by adapter name; of other kinds of adapters, the converted copy."""
    rejected: list[tuple[Path, str]] = field(default_factory=list)
    """What is not served, each with its reason. Nothing is passed over in silence but hidden files."""
    headers: dict[str, Header] = field(default_factory=dict)
    """The header of each file in `adapters`."""
    sources: dict[str, Path] = field(default_factory=dict)
    """Where each adapter came from, as a person knows it."""
    reserved: list[str] = field(default_factory=list)
    """Names that two adapters claim."""


def collect(
    folder: Path, base: BaseModel, cache: Path, cache_bytes: int | None = None, *, declared: bool = False
) -> Collected:
    """Take a store, a folder of trained adapters or PEFT LoRA folders, or a mixture. pyreft folders are listed as not served.

    Adapters that are no `.preft` file are converted into `cache`, once for each content. One bad entry never stops the
    others. An adapter may not have the base model's name; two of one name are both refused. `cache_bytes` bounds the copies
    that are kept for a later start, beside those that are needed now. `declared` is `model.residual_stream`.

    Raises:
        UserError: `folder` itself is missing or no folder of adapters.
    """
    collector = _Collector(base, cache, declared)
    for entry in _entries(folder):
        if isinstance(entry, Rejected):
            collector.collected.rejected.append((entry.path, without_path(entry.path, entry.reason)))
        else:
            collector.add(entry)
    collector.drop_collisions()
    if cache_bytes is not None:
        prune(cache, cache_bytes, set(collector.collected.adapters.values()))
    return collector.collected


def _entries(folder: Path) -> Iterator[Source | Rejected]:
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give a folder of adapters")
    try:
        yield from find(folder)
    except OSError as error:
        raise UserError(f"cannot list {folder}: {error.strerror}") from error


class _Collector:
    """Adds sources one by one; the base model is looked into when the first one needs it."""

    def __init__(self, base: BaseModel, cache: Path, declared: bool) -> None:
        self.collected = Collected()
        self._base, self._cache, self._declared = base, cache, declared
        self._known: BaseFacts | None = None
        self._places: dict[str, list[Path]] = {}
        self._fitting: set[tuple[object, ...]] = set()

    @property
    def _facts(self) -> BaseFacts:
        if self._known is None:
            from preft_cli.adapters.base import BaseFacts

            self._known = BaseFacts.of(self._base, self._declared)
        return self._known

    def add(self, source: Source) -> None:
        """Check one source and take it in, or list it as rejected."""
        try:
            name = check_name(default_name(source), (self._base.name,))
            self._places.setdefault(name, []).append(source.path)
            path = source.path if source.kind == "store-file" else self._convert(source, name)
            header = read_header(path)
            self._check(header, source.path)
        except (UserError, PreftError) as error:
            self.collected.rejected.append((source.path, without_path(source.path, str(error))))
        except OSError as error:
            self.collected.rejected.append((source.path, f"cannot read or convert it: {error.strerror or error}"))
        else:
            self.collected.adapters[name] = path
            self.collected.headers[name] = header
            self.collected.sources[name] = source.path

    def drop_collisions(self) -> None:
        """Refuse every adapter whose name occurs twice: any choice could be the wrong weights."""
        for name, places in self._places.items():
            if len(places) > 1:
                self.collected.reserved.append(name)
                for part in (self.collected.adapters, self.collected.headers, self.collected.sources):
                    part.pop(name, None)
                both = " and ".join(map(str, places))
                reason = f"the name {name!r} is taken twice, by {both}; rename or remove one"
                already = {path for path, _ in self.collected.rejected}
                self.collected.rejected += [(place, reason) for place in places if place not in already]

    def _check(self, header: Header, where: Path) -> None:
        # A store's files mostly share one base model and one set of modules: checked once for all of them.
        if (header.base, header.groups) in self._fitting:
            return
        if difference := header.base.mismatch(self._facts.fingerprint):
            raise UserError(f"it is for another base model: {difference}")
        if any(map(is_stream, header.modules)):
            self._facts.require_streams(where)
        for name, module in header.modules.items():
            shape = self._facts.places.get(name)
            if shape != (module.in_features, module.out_features):
                has = "does not exist there" if shape is None else f"has {shape[0]} inputs and {shape[1]} outputs there"
                raise UserError(
                    f"it does not fit {self._base.name}: {name} ({module.in_features} inputs, {module.out_features} "
                    f"outputs) {has}"
                )
        self._fitting.add((header.base, header.groups))

    def _convert(self, source: Source, name: str) -> Path:
        from preft_cli.convert.read import read_source

        path = self._cache / self._key(source) / f"{name}{SUFFIX}"
        if _is_whole(path):
            os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))  # used now: `prune` goes by it
        else:
            adapter = read_source(source.path, source.kind, self._facts).adapter
            path.parent.mkdir(parents=True, exist_ok=True)
            write_adapter(path, adapter)
        return path

    def _key(self, source: Source) -> str:
        """Changes whenever a file of the source, the base model or the form of the store does."""
        files = []
        for file in sorted(source.path.iterdir()):
            stat = file.stat()
            # ctime as well: it also moves when a file of the same size and date is copied over.
            files.append([file.name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns])
        parts = [FORMAT_VERSION, str(source.path.resolve()), files, self._facts.fingerprint.to_dict()]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def prune(cache: Path, most_bytes: int, keep: set[Path]) -> None:
    """Delete the converted copies that were used longest ago, until at most `most_bytes` are left; none of `keep`."""
    found = []
    for path in cache.glob(f"*/*{SUFFIX}"):
        with suppress(FileNotFoundError):  # another server may prune too
            stat = path.stat()
            found.append((path in keep, stat.st_atime_ns, stat.st_size, path))
    excess = sum(size for _, _, size, _ in found) - most_bytes
    for kept, _, size, path in sorted(found):
        if excess <= 0 or kept:
            return
        path.unlink(missing_ok=True)
        with suppress(OSError):  # not empty, or gone
            path.parent.rmdir()
        excess -= size


def _is_whole(path: Path) -> bool:
    try:
        read_header(path)
    except PreftError:
        return False
    return True
