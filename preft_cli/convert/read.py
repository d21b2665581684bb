"""One source of any kind becomes an `Adapter` that fits the base model."""

from __future__ import annotations

from pathlib import Path

from engine_patch.adapter import Adapter
from engine_patch.errors import PreftError
from engine_patch.residual import is_stream
from engine_patch.rule import METHODS, is_prefill_only, parts
from engine_patch.store import read_adapter
from preft_cli.adapters.base import BaseFacts, Loaded
from preft_cli.adapters.folder import load_trained_for
from preft_cli.adapters.pairs import check_fits
from preft_cli.adapters.peft_in import load_peft
from preft_cli.adapters.pyreft.read import load_pyreft
from preft_cli.adapters.pyreft.told import NOTHING, Told
from preft_cli.adapters.sources import Kind
from preft_cli.errors import UserError


def read_source(path: Path, kind: Kind, base: BaseFacts, method: str | None = None, told: Told = NOTHING) -> Loaded:
    """Read and check the adapter at `path`; `method` overrules what it was trained as, which gives a warning.

    `told` is what a person says of a pyreft folder.

    Raises:
        UserError: it is damaged, belongs to another base model, cannot be served, or has other parts than `method`.
    """
    adapter, warnings = _read(path, kind, base, told)
    if method is None or method == adapter.method:
        return Loaded(adapter, warnings)
    if parts(method) != parts(adapter.method):
        fitting = " or ".join(sorted(name for name in METHODS if parts(name) == parts(adapter.method)))
        raise UserError(
            f"{path} is a {adapter.method} adapter, and --method {method} acts elsewhere in the model; it can be {fitting}"
        )
    if kind == "pyreft":
        raise UserError(f"{path}: --method {method} and --positions {told.positions} do not agree; leave out --method")
    trained_as = adapter.meta.get("trained_as", adapter.method)
    changed = Adapter(method, adapter.base, adapter.pairs, {**adapter.meta, "trained_as": trained_as})
    # Back to what it was trained as needs no warning.
    return Loaded(changed, warnings if method == trained_as else [*warnings, _changes(trained_as, method)])


def _read(path: Path, kind: Kind, base: BaseFacts, told: Told) -> Loaded:
    if kind == "trained":
        return load_trained_for(path, base)
    if kind == "peft":
        return load_peft(path, base)
    if kind == "pyreft":
        return load_pyreft(path, base, told)
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
    check_fits(adapter.pairs, base, path)
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
        names = _INTERVENTION if is_stream(module) else _LORA
        for part, tensor in pair.tensors.items():
            if not tensor.isfinite().all():
                largest = adapter.pairs[module].tensors[part].abs().max().item()
                raise UserError(
                    f"{names[part]} of {module} does not fit {dtype}: its largest value is {largest:.4g}; "
                    "convert with convert.dtype bfloat16 or float32"
                )
    return made


_LORA = {"a": "lora_A", "b": "lora_B"}
_INTERVENTION = {"a": "W1", "b": "W2", "bias": "b"}


def _changes(before: str, after: str) -> str:
    reach = {True: "prompt tokens only", False: "all tokens"}
    return (
        f"--method {after} changes what this adapter computes: it was trained as {before} "
        f"({reach[is_prefill_only(before)]}) and will now act on {reach[is_prefill_only(after)]}"
    )
