"""YAML as people write it: scalars of YAML 1.2, duplicate keys, and one clear line for whatever cannot be read."""

from pathlib import Path

import pytest

from preft_cli.config.problems import ConfigErrors
from preft_cli.config.reader import parse, read_file


def value(text: str) -> object:
    document = parse(f"key: {text}", "test")
    assert document is not None
    return document.data["key"]


def error(path: Path) -> str:
    with pytest.raises(ConfigErrors) as caught:
        read_file(path)
    assert caught.value.exit_code == 2
    message = str(caught.value)
    assert "\n" not in message
    return message.removeprefix(str(path))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2e-5", 2e-5),
        ("1e-4", 1e-4),
        ("1E+3", 1000.0),
        ("-1.5", -1.5),
        (".5", 0.5),
        ("1.", 1.0),
        ("0o17", 15),
        ("017", 17),
        ("0x1f", 31),
        ("-3", -3),
        ("true", True),
        ("False", False),
        ("no", "no"),
        ("on", "on"),
        ("Yes", "Yes"),
        ("off", "off"),
        ("y", "y"),
        ("~", None),
        ("null", None),
        ("", None),
        ('"1e-4"', "1e-4"),
        ("'true'", "true"),
        ("1:30", "1:30"),
        ("2026-01-01", "2026-01-01"),
        ("1_000", "1_000"),
        ("e5", "e5"),
        ("0.32.*", "0.32.*"),
        ("!!str 5", "5"),
        ("!!int 0o10", 8),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, expected: object) -> None:
    found = value(text)
    assert found == expected
    assert type(found) is type(expected)


def test_infinity_and_nan() -> None:
    assert value(".inf") == float("inf")
    assert value("-.INF") == -float("inf")
    assert value(".nan") != value(".nan")


def test_keys_are_names_whatever_they_look_like() -> None:
    document = parse("1: a\nno: b\n~: c", "test")
    assert document is not None
    assert document.data == {"1": "a", "no": "b", "~": "c"}


def test_anchors_and_merge_keys_are_fine_and_own_keys_win() -> None:
    document = parse("a: &a {r: 1, s: 2}\nb: &b {s: 3, t: 4}\nc:\n  r: 9\n  <<: [*a, *b]\n", "test")
    assert document is not None
    assert document.data["c"] == {"r": 9, "s": 2, "t": 4}
    assert document.duplicates == []
    assert document.position(("c", "r")) == (4, 6)
    assert document.position(("c", "t")) == (2, 17)


def test_aliases_share_so_that_they_cannot_blow_up() -> None:
    lines = ["a0: &a0 [x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 40)]
    document = parse("\n".join(lines), "test")
    assert document is not None
    assert document.data["a39"][0] is document.data["a39"][9]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ":1:1: the file has no settings; `preft init` writes a commented one"),
        ("# only a comment\n", ":1:1: the file has no settings; `preft init` writes a commented one"),
        ("~", ":1:1: the file has no settings; `preft init` writes a commented one"),
        ("- a\n- b\n", ":1:1: expected sections such as `adapter:` at the top of the file, found a list"),
        ("# why\nhello\n", ":2:1: expected sections such as `adapter:` at the top of the file, found a single value"),
        ("adapter:\n\trank: 4\n", ":2:1: a tab; YAML is indented with spaces only"),
        ("adapter:\n  rank: 4\n\talpha: 4\n", ":3:1: a tab; YAML is indented with spaces only"),
        ("adapter: rank: 4\n", ":1:14: a ':' that is out of place: check the indentation, or quote the text"),
        ("a:\n    b: 1\n  c: 2\n", ":3:3: the indentation does not fit the lines above"),
        ("a: [1, 2\n", ":2:1: the file ends inside a [ or { that was never closed"),
        ("a: 'x\n", ":2:1: the file ends inside a quote that was never closed"),
        ("a: *b\n", ":1:4: an alias (*name) without its anchor (&name) above it"),
        ("a: &a [*a]\n", ":1:4: an anchor that contains itself"),
        ("a: 1\n---\nb: 1\n", ":2:1: a second document (---); a config is one document"),
        ("a: !secret x\n", ":1:4: the tag !secret has no meaning in a config file"),
        ("a: !!int x\n", ":1:4: 'x' is not a YAML int"),
        ("? [a]\n: 1\n", ":1:3: a list or mapping as a key; keys are names"),
        ("a:\n  <<: 3\n", ":2:7: << merges a mapping or a list of mappings, and this is neither"),
        ("a: \x01\n", ":1:4: a character that YAML does not allow ('\\x01')"),
        ("[" * 5000, ":1:1: the values are nested too deeply"),
    ],
)
def test_one_clear_line(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "preft.yaml"
    path.write_text(text)
    assert error(path) == expected


def test_code_in_tags_is_never_run(tmp_path: Path) -> None:
    path, trace = tmp_path / "preft.yaml", tmp_path / "trace"
    path.write_text(f"a: !!python/object/apply:os.mkdir [{trace}]\n")
    assert "has no meaning in a config file" in error(path)
    assert not trace.exists()


def test_not_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "preft.yaml"
    path.write_bytes(b"project:\n  name: caf\xe9\n")
    assert error(path) == ":2:12: not UTF-8 text; save the file as UTF-8"
    path.write_bytes("project:\n".encode("utf-16"))
    assert error(path) == ":1:1: not UTF-8 text; save the file as UTF-8"


def test_a_byte_order_mark_and_windows_lines_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "preft.yaml"
    path.write_bytes(b"\xef\xbb\xbfproject:\r\n  name: x\r\n")
    assert read_file(path).data == {"project": {"name": "x"}}


def test_missing_file_and_folder(tmp_path: Path) -> None:
    assert error(tmp_path / "nothing.yaml") == ": no such file; `preft init` writes one, --config names another"
    assert error(tmp_path) == f": a folder, not a file; did you mean {tmp_path}/preft.yaml?"
