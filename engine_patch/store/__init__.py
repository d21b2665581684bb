"""The serving store: a folder of `.preft` files. Importing this and reading headers needs no torch."""

from engine_patch.store.file import read_adapter, read_header, write_adapter
from engine_patch.store.folder import NAME_RULE, StoreListing, adapter_name, check_name, list_store, scan_store
from engine_patch.store.format import FORMAT_VERSION, SUFFIX, Header
from engine_patch.store.layout import PAGE_BYTES, ModuleLayout, PageLayout, plan_pages

__all__ = [
    "FORMAT_VERSION",
    "NAME_RULE",
    "PAGE_BYTES",
    "SUFFIX",
    "Header",
    "ModuleLayout",
    "PageLayout",
    "StoreListing",
    "adapter_name",
    "check_name",
    "list_store",
    "plan_pages",
    "read_adapter",
    "read_header",
    "scan_store",
    "write_adapter",
]
