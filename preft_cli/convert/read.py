"""One source of any kind becomes an `Adapter` that fits the base model."""

from __future__ import annotations

from pathlib import Path

from engine_patch.adapter import Adapter
from engine_patch.errors import PreftError
from engine_patch.rule import is_prefill_only
from engine_patch.store import read_adapter
from preft_cli.adapters.base import BaseFacts, Loaded
from preft_cli.adapters.folder import load_trained_for
from preft_cli.adapters.pairs import check_against_base
from preft_cli.adapters.peft_in import load_peft
from preft_cli.adapters.sources import Kind
from preft_cli.errors import UserError


def read_source(path: Path, kind: Kind, base: BaseFacts, method: str | None = None) -> Loaded:
    """Read and check the adapter at `path`; `method` overrules what it was trained as, which gives a warning.

    Raises:
        UserError: it is damaged, belongs to another base model, or cannot be served.
    """
    adapter, warnings = _read(path, kind, base)
    if method is None or method == adapter.method:
        return Loaded(adapter, warnings)
    trained_as = adapter.meta.get("trained_as", adapter.method)
    changed = Adapter(method, adapter.base, adapter.pairs, {**adapter.meta, "trained_as": trained_as})
    # Back to what it was trained as needs no warning.
    return Loaded(changed, warnings if method == trained_as else [*warnings, _changes(trained_as, method)])


def _read(path: Path, kind: Kind, base: BaseFacts) -> Loaded:
    if kind == "trained":
        return load_trained_for(path, base)
    if kind == "peft":
        return load_peft(path, base)
    return Loaded(read_store_file(path, base), [])


def read_store_file(path: Path, base: BaseFacts) -> Adapter:
    """Read a `.preft` file, verify its digest, and check that it fits the base model.

    Raises:
        UserError: damaged, another version, or another base model.
    """
    try:
        adapter = read_adapter(path)
    except PreftError as error:
        raise UserError(str(error)) from error
    if difference := adapter.base.mismatch(base.fingerprint):
        raise UserError(f"{path} is for another base model: {difference}")
    check_against_base(adapter.pairs, base.shapes, base.name, path)
    return adapter


def cast(adapter: Adapter, dtype: str | None) -> Adapter:
    """The adapter with its tensors in `dtype` (None: its own), scalings untouched.

    Raises:
        UserError: a value is too large for `dtype`.
    """
    if dtype is None or dtype == adapter.dtype:
        return adapter
    made = adapter.to(dtype)
    for module, pair in made.pairs.items():
        for part, tensor, was in (("A", pair.a, adapter.pairs[module].a), ("B", pair.b, adapter.pairs[module].b)):
            if not tensor.isfinite().all():
                raise UserError(
                    f"lora_{part} of {module} does not fit {dtype}: its largest value is {was.abs().max().item():.4g}; "
                    "convert with convert.dtype bfloat16 or float32"
                )
    return made


def _changes(before: str, after: str) -> str:
    reach = {True: "prompt tokens only", False: "all tokens"}
    return (
        f"--method {after} changes what this adapter computes: it was trained as {before} "
        f"({reach[is_prefill_only(before)]}) and will now act on {reach[is_prefill_only(after)]}"
    )
