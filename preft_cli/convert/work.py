"""One adapter converted or checked, here or in a worker process; whatever goes wrong with it becomes its reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_patch.errors import PreftError
from preft_cli.convert.results import Action, ConvertedItem, FailedItem, PlannedItem, Status, Target
from preft_cli.convert.stamp import KEY, record, seal
from preft_cli.errors import UserError

if TYPE_CHECKING:
    from engine_patch.adapter import Adapter
    from engine_patch.store import Header
    from preft_cli.adapters.base import BaseFacts, Loaded


def do_item(item: PlannedItem, base: BaseFacts, action: Action, to: Target) -> ConvertedItem | FailedItem:
    """Convert or check one adapter. One that fails never stops the others, so only a missing package is raised.

    Raises:
        ModuleNotFoundError: it concerns all of them, and the caller names the extra to install.
    """
    try:
        if action == "check":
            return _check(item, base)
        return _to_peft(item, base) if to == "peft" else _to_store(item, base)
    except ModuleNotFoundError:
        raise
    except (UserError, PreftError) as error:
        return FailedItem.of(item.source, str(error))
    except MemoryError:
        return FailedItem.of(item.source, "there is not enough memory for it; --jobs 1 needs the least")
    except OSError as error:
        return FailedItem.of(item.source, _os_reason(error, item, action))
    except Exception as bug:
        return FailedItem.of(item.source, f"internal error: {type(bug).__name__}: {bug}; please report it")


def _os_reason(error: OSError, item: PlannedItem, action: Action) -> str:
    text = error.strerror or str(error)
    at = f" ({error.filename})" if error.filename else ""  # it may be the source that could not be read
    if action == "check":
        return f"cannot check {item.path}: {text}{at}"
    return f"cannot convert to {item.path}: {text}{at}; nothing was changed there"


def _to_store(item: PlannedItem, base: BaseFacts) -> ConvertedItem:
    from engine_patch.store import read_header, write_adapter
    from preft_cli.convert.read import cast, read_source

    path, made_from = Path(item.path), record(item)
    loaded = read_source(Path(item.source), item.kind, base, item.method, item.told)
    adapter = _with_meta(cast(loaded.adapter, item.dtype), base, made_from)
    path.parent.mkdir(parents=True, exist_ok=True)
    before = None
    if path.exists():
        try:
            before = read_header(path).digest
        except PreftError:
            before = "damaged"
    header = write_adapter(path, adapter)
    seal(path, made_from)
    notes = list(loaded.warnings)
    replaced = before if before != header.digest else None
    if replaced is not None:
        notes.append(f"replaced {path}, which held another adapter (content digest {replaced[:12]})")
    size = path.stat().st_size
    return _done(item, "converted", header, header.digest, size, replaced=replaced, notes=notes)


def _with_meta(adapter: Adapter, base: BaseFacts, made_from: dict[str, Any]) -> Adapter:
    meta = {**adapter.meta, KEY: made_from}
    # What is listed for people; what is compared is the fingerprint.
    meta["base_model"] = meta.get("base_model") or base.name
    return replace(adapter, meta=meta)


def _to_peft(item: PlannedItem, base: BaseFacts) -> ConvertedItem:
    from engine_patch.rule import is_prefill_only
    from preft_cli.adapters.peft_out import write_peft
    from preft_cli.convert.read import read_source

    loaded: Loaded = read_source(Path(item.source), item.kind, base, item.method, item.told)
    adapter, notes = loaded.adapter, list(loaded.warnings)
    files = write_peft(Path(item.path), adapter)
    if is_prefill_only(adapter.method):
        notes.append(
            f"{adapter.method} acts on prompt tokens only, and stock loaders would apply it to all tokens: its files "
            f"are named {' and '.join(f.name for f in files)}, which they do not read. --method lora writes a stock "
            "PEFT folder and changes what the adapter computes"
        )
    return _done(item, "converted", adapter, adapter.digest(), sum(f.stat().st_size for f in files), notes=notes)


def _check(item: PlannedItem, base: BaseFacts) -> ConvertedItem:
    """Verify one `.preft` file; for another kind of source, that the store's file of it holds the same."""
    from engine_patch.rule import parts
    from preft_cli.adapters.pyreft.read import told_of
    from preft_cli.convert.read import cast, read_source, read_store_file

    path = Path(item.path)
    if not path.is_file():
        raise UserError(f"{path} does not exist; convert {item.source} first")
    adapter = read_store_file(path, base)
    if item.kind != "store-file":
        source = read_source(Path(item.source), item.kind, base, told=told_of(adapter)).adapter
        same_parts = parts(source.method) == parts(adapter.method)
        if not same_parts or cast(replace(source, method=adapter.method), adapter.dtype).digest() != adapter.digest():
            raise UserError(f"{path} holds other weights than {item.source}; convert it again")
    return _done(item, "checked", adapter, adapter.digest(), path.stat().st_size)


def _done(
    item: PlannedItem, status: Status, made: Adapter | Header, digest: str, size: int, **more: Any
) -> ConvertedItem:
    """The line of the result for `item`; `size` in bytes."""
    return ConvertedItem(
        name=item.name,
        status=status,
        method=made.method,
        rank=made.rank,
        dtype=made.dtype,
        source=item.source,
        path=item.path,
        bytes=size,
        digest=digest,
        **more,
    )
