"""What this engine can serve, as plain data: workers check by it, and the server does before it hands a request over."""

from __future__ import annotations

from functools import lru_cache

from pydantic import BaseModel, ConfigDict

from engine_patch.base_model import BaseFingerprint
from engine_patch.errors import PreftError
from engine_patch.residual import is_stream, unknown
from engine_patch.store.format import Group, Header, expand_groups
from engine_patch.store.layout import PAGE_BYTES, ModuleLayout, PageLayout, plan_pages

MOST_AHEAD_BYTES = 4 << 30


def with_room_ahead(step_bytes: int) -> int:
    """The device pool's default size: a step's adapters, and those of the next, which are copied while the step is computed."""
    return step_bytes + min(step_bytes, MOST_AHEAD_BYTES)


class Sizes(BaseModel):
    """Features of one module."""

    model_config = ConfigDict(frozen=True)

    whole: tuple[int, int]
    """(in, out) as on one device."""
    local: tuple[int, int]
    """(in, out) of one worker's share."""


class Limits(BaseModel):
    """Of one worker; with tensor parallelism all workers have the same."""

    base: dict[str, int | str | None]
    """`BaseFingerprint.to_dict` of the model that it serves."""
    max_rank: int
    modules: dict[str, Sizes]
    """Every linear layer and residual stream that can be adapted, by name, in the order of the table of weights."""
    itemsize: int
    """Bytes of an element on the device."""
    device_bytes: int
    host_bytes: int

    def check(self, header: Header, where: object) -> None:
        """Refuse an adapter that this engine cannot serve exactly.

        Raises:
            PreftError: a rank above the limit, another base model, modules that the engine does not have or of other sizes,
                or more bytes than a pool.
        """
        if header.rank > self.max_rank:
            raise PreftError(
                f"{where} has rank {header.rank}, this server holds up to {self.max_rank}; raise serve.max_lora_rank"
            )
        if difference := header.base.mismatch(BaseFingerprint.from_dict(self.base)):
            raise PreftError(f"{where} belongs to another base model: {difference}")
        if missing := sorted(set(header.modules) - set(self.modules)):
            if is_stream(missing[0]) and not any(map(is_stream, self.modules)):
                raise PreftError(f"{where} cannot be served: {unknown(str(self.base.get('model_type')))}")
            raise PreftError(f"{where} adapts modules that this engine does not have: {', '.join(missing[:5])}")
        for name, module in header.modules.items():
            found, here = (module.in_features, module.out_features), self.modules[name].whole
            if found != here:
                raise PreftError(
                    f"{where} does not fit this engine: {name} goes from {found[0]} to {found[1]} features there,"
                    f" from {here[0]} to {here[1]} here"
                )
        needed = self.layout(header.groups).num_pages * PAGE_BYTES
        for pool, size in (("gpu_pool", self.device_bytes), ("host_pool", self.host_bytes)):
            if needed > size:
                raise PreftError(f"{where} takes {needed} bytes, and serve.{pool} has {size}; raise it")

    def layout(self, groups: tuple[Group, ...]) -> PageLayout:
        """Of the share that one worker keeps of an adapter with these modules."""
        key = tuple((name, sizes.local) for name, sizes in self.modules.items())
        return _share_layout(groups, key, self.itemsize)

    def largest_pages(self) -> int:
        """Pages of an adapter of the largest rank on all modules."""
        modules = {
            name: ModuleLayout(self.max_rank, *sizes.local, 1.0, bias=is_stream(name))
            for name, sizes in self.modules.items()
        }
        return plan_pages(modules, self.itemsize).num_pages


@lru_cache(maxsize=256)
def _share_layout(
    groups: tuple[Group, ...], local: tuple[tuple[str, tuple[int, int]], ...], itemsize: int
) -> PageLayout:
    sizes = dict(local)
    return plan_pages(
        {name: ModuleLayout(m.rank, *sizes[name], m.scaling, m.bias) for name, m in expand_groups(groups).items()},
        itemsize,
    )
