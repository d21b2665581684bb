"""`512MB`, `1.5GiB`, plain numbers; and what is no size."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from preft_cli.config.schema import PreftConfig


def pool(value: Any) -> int | None:
    return PreftConfig.model_validate({"serve": {"gpu_pool": value}}).serve.gpu_pool


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MB", 512_000_000),
        ("1.5GiB", 3 << 29),
        ("1 kB", 1000),
        ("2kib", 2048),
        ("7", 7),
        (4096, 4096),
        (None, None),
    ],
)
def test_sizes(text: Any, size: int | None) -> None:
    assert pool(text) == size


@pytest.mark.parametrize("text", ["lots", "", "MB", "-1GB", "1e9", "5 parsecs", 0, "0GB", -4, True, [1], "9999999TB"])
def test_what_is_no_size(text: Any) -> None:
    with pytest.raises(ValidationError):
        pool(text)
