"""All that the headers of some adapters say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine_patch.errors import PreftError
from engine_patch.store import Header, read_header
from preft_cli.reasons import without_path
from preft_cli.store.listing import facts
from preft_cli.store.names import pick
from preft_cli.store.results import BrokenFile, ModuleGroup, StoreInfo, StoreInfos


def describe(store: Path, names: Sequence[str]) -> StoreInfos:
    """The adapters called `names`, in that order.

    Raises:
        UserError: a name that the store does not have, with the nearest ones.
        PreftError: the folder cannot be read.
    """
    infos, broken = [], []
    for name, path in pick(store, names).items():
        try:
            infos.append(_info(name, path))
        except PreftError as error:
            broken.append(BrokenFile(path=str(path), reason=without_path(path, str(error))))
        except OSError as error:
            broken.append(BrokenFile(path=str(path), reason=f"cannot read it: {error.strerror}"))
    return StoreInfos(store=str(store), adapters=infos, broken=broken)


def _info(name: str, path: Path) -> StoreInfo:
    header = read_header(path)
    return StoreInfo(
        **facts(name, header, path),
        path=str(path),
        pages=header.num_pages,
        weight_bytes=header.num_bytes,
        fingerprint={key: value for key, value in header.base.to_dict().items() if value is not None},
        modules=_groups(header),
        meta=header.meta,
    )


def _groups(header: Header) -> list[ModuleGroup]:
    """One line for each kind of module, not one for each layer."""
    layers: dict[tuple[str, int, int, int, float], list[int]] = {}
    for name, module in header.modules.items():
        # The first numbered segment is the layer; a later one (an expert's number) belongs to the module.
        parts = name.split(".")
        at = next((index for index, part in enumerate(parts) if part.isdigit()), None)
        kind = name if at is None else ".".join([*parts[:at], "*", *parts[at + 1 :]])
        key = (kind, module.in_features, module.out_features, module.rank, module.scaling)
        layers.setdefault(key, []).extend([] if at is None else [int(parts[at])])
    return [
        ModuleGroup(
            module=kind,
            in_features=in_features,
            out_features=out_features,
            rank=rank,
            scaling=scaling,
            layers=ranges(numbers),
        )
        for (kind, in_features, out_features, rank, scaling), numbers in sorted(layers.items())
    ]


def ranges(numbers: Sequence[int]) -> str:
    """`[0, 1, 2, 5]` -> `0-2,5`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
