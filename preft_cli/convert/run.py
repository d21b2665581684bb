"""`preft convert`: adapters into the store, back to PEFT, and the check of a store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_patch.errors import PreftError
from preft_cli.config.schema import PreftConfig
from preft_cli.convert.plan import plan_convert
from preft_cli.convert.results import ConvertedItem, ConvertPlan, ConvertResult, FailedItem, PlannedItem, Target
from preft_cli.errors import UserError

if TYPE_CHECKING:
    from engine_patch.adapter import Adapter
    from engine_patch.store import Header
    from preft_cli.adapters.base import BaseFacts, Loaded

__all__ = ["ConvertPlan", "ConvertResult", "convert", "plan_convert"]


def convert(
    sources: Sequence[Path],
    config: PreftConfig,
    root: Path,
    *,
    name: str | None = None,
    method: str | None = None,
    to: Target = "store",
    out: Path | None = None,
    check: bool = False,
) -> ConvertResult:
    """Convert (or with `check` verify) every adapter at `sources`; see `plan_convert` for what goes where.

    One that fails never stops the others: it is in `failed` with its reason. Warnings and progress go to stderr.

    Raises:
        UserError: options that contradict each other, or a base model that cannot be had.
    """
    from preft_cli.console import progress, say, warn

    plan = plan_convert(sources, config, root, name=name, method=method, to=to, out=out, check=check)
    for note in plan.notes:
        say(note)
    converted: list[ConvertedItem] = []
    failed = list(plan.failed)
    if plan.items:
        base = _base(plan.base, root)
        with progress("checking" if check else "converting", total=len(plan.items), unit="adapters") as bar:
            for item in plan.items:
                try:
                    converted.append(_check(item, base) if check else _convert(item, base, to))
                except (UserError, PreftError, OSError) as error:
                    failed.append(FailedItem.of(item.source, _reason(error, item)))
                else:
                    for note in converted[-1].notes:
                        warn(f"{item.name}: {note}")
                bar.advance(note=item.name)
    return ConvertResult(
        action=plan.action, to=to, base=plan.base, store=plan.store, converted=converted, failed=failed
    )


def _base(name: str, root: Path) -> BaseFacts:
    from preft_cli.adapters.base import BaseFacts
    from preft_cli.models import resolve

    return BaseFacts.of(resolve(name, root))


def _reason(error: Exception, item: PlannedItem) -> str:
    if isinstance(error, OSError) and error.strerror:
        at = f" ({error.filename})" if error.filename else ""  # it may be the source that could not be read
        return f"cannot convert to {item.path}: {error.strerror}{at}; nothing was changed there"
    return str(error)


def _convert(item: PlannedItem, base: BaseFacts, to: Target) -> ConvertedItem:
    from preft_cli.convert.read import read_source

    loaded = read_source(Path(item.source), item.kind, base, item.method)
    return _write_peft(item, loaded) if to == "peft" else _write_store(item, loaded)


def _write_store(item: PlannedItem, loaded: Loaded) -> ConvertedItem:
    from engine_patch.store import read_header, write_adapter

    path = Path(item.path)
    path.parent.mkdir(parents=True, exist_ok=True)
    before = None
    if path.exists():
        try:
            before = read_header(path).digest
        except PreftError:
            before = "damaged"
    header = write_adapter(path, loaded.adapter)
    notes = list(loaded.warnings)
    if before not in (None, header.digest):
        notes.append(f"replaced {path}, which held another adapter (content digest {str(before)[:12]})")
    return _done(
        item,
        header,
        header.digest,
        path.stat().st_size,
        replaced=before if before != header.digest else None,
        notes=notes,
    )


def _write_peft(item: PlannedItem, loaded: Loaded) -> ConvertedItem:
    from engine_patch.rule import is_prefill_only
    from preft_cli.adapters.peft_out import write_peft

    adapter, notes = loaded.adapter, list(loaded.warnings)
    files = write_peft(Path(item.path), adapter)
    if is_prefill_only(adapter.method):
        notes.append(
            f"{adapter.method} acts on prompt tokens only, and stock loaders would apply it to all tokens: its files "
            f"are named {' and '.join(f.name for f in files)}, which they do not read. --method lora writes a stock "
            "PEFT folder and changes what the adapter computes"
        )
    return _done(item, adapter, adapter.digest(), sum(file.stat().st_size for file in files), notes=notes)


def _done(item: PlannedItem, made: Adapter | Header, digest: str, size: int, **more: Any) -> ConvertedItem:
    """The line of the result for `item`; `size` in bytes."""
    return ConvertedItem(
        name=item.name,
        method=made.method,
        rank=made.rank,
        source=item.source,
        path=item.path,
        bytes=size,
        digest=digest,
        **more,
    )


def _check(item: PlannedItem, base: BaseFacts) -> ConvertedItem:
    """Verify one `.preft` file; for another kind of source, that the store's file of it holds the same."""
    from preft_cli.convert.read import read_source, read_store_file

    path = Path(item.path)
    if not path.is_file():
        raise UserError(f"{path} does not exist; convert {item.source} first")
    adapter = read_store_file(path, base)
    if item.kind != "store-file":
        source = read_source(Path(item.source), item.kind, base, adapter.method).adapter
        if source.digest() != adapter.digest():
            raise UserError(f"{path} holds other weights than {item.source}; convert it again")
    return _done(item, adapter, adapter.digest(), path.stat().st_size)
