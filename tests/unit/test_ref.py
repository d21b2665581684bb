"""What a request carries: path, method, digest."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_patch.errors import PreftError
from engine_patch.ref import AdapterRef, parse_ref


@pytest.mark.parametrize("method", ["lorap", "lora"])
@pytest.mark.parametrize("path", ["/store/a.preft", "/odd #preft=x/b.preft", "/with space/c.preft"])
def test_round_trip(path: str, method: str) -> None:
    ref = AdapterRef(Path(path), method, "ab12")
    assert parse_ref(ref.encode()) == ref
    assert ref.prefill_only == (method == "lorap")


def test_a_stock_path_is_not_ours() -> None:
    assert parse_ref("/adapters/peft") is None


@pytest.mark.parametrize("text", ["/a.preft#preft=", "/a.preft#preft=lorap:", "/a.preft#preft=unknown:ab"])
def test_half_a_reference_is_an_error_not_a_stock_adapter(text: str) -> None:
    with pytest.raises(PreftError, match="does not name an adapter"):
        parse_ref(text)
