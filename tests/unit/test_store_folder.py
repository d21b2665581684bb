"""A store's folder: names by one rule, links that stay inside, no file opened."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_patch.errors import PreftError
from engine_patch.store import adapter_name, check_name, list_store, scan_store


@pytest.mark.parametrize("name", ["a", "Tone-2", "my.adapter_v1", "0", "x" * 128, "a..b"])
def test_allowed_names(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        ":",
        "a:b",
        "a b",
        " a",
        "tön",
        "名",
        "a/b",
        "..",
        "../a",
        "/a",
        ".hidden",
        "-x",
        "_x",
        "a\n",
        "x" * 129,
        "a\\b",
    ],
)
def test_refused_names_get_the_rule(name: str) -> None:
    with pytest.raises(PreftError, match=r"is not allowed: use 1 to 128 letters .* digits"):
        check_name(name)


def test_the_base_models_name_is_taken() -> None:
    with pytest.raises(PreftError, match="'smollm2-135m' is the base model's own name"):
        check_name("smollm2-135m", ["smollm2-135m"])


def test_adapter_name() -> None:
    assert adapter_name(Path("store/a.b.preft")) == "a.b"


def test_listing_opens_nothing_and_passes_over_other_files(tmp_path: Path) -> None:
    for name in ("b.preft", "a.preft", ".a.preft.1234.tmp", ".hidden.preft", "readme.md", "a.preft.tmp"):
        (tmp_path / name).touch()
    (tmp_path / "a.preft").chmod(0)
    assert list(list_store(tmp_path).items()) == [("a", tmp_path / "a.preft"), ("b", tmp_path / "b.preft")]


def test_bad_entries_are_listed_with_their_reason(tmp_path: Path) -> None:
    store, outside = tmp_path / "store", tmp_path / "outside.preft"
    store.mkdir()
    outside.touch()
    (store / "good.preft").touch()
    (store / "alias.preft").symlink_to("good.preft")
    (store / "leaves.preft").symlink_to(outside)
    (store / "gone.preft").symlink_to("nowhere.preft")
    (store / "bad name.preft").touch()
    (store / "folder.preft").mkdir()
    listing = scan_store(store)
    assert sorted(listing.files) == ["alias", "good"]
    reasons = {path.name: reason for path, reason in listing.rejected}
    assert sorted(reasons) == ["bad name.preft", "folder.preft", "gone.preft", "leaves.preft"]
    assert "symbolic link that leaves the folder" in reasons["leaves.preft"]
    assert "is not allowed" in reasons["bad name.preft"]


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(PreftError, match="cannot list the adapter store"):
        list_store(tmp_path / "none")
