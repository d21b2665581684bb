"""The templates of `preft init`: where they lie, and how one becomes a preft.yaml."""

from __future__ import annotations

import importlib.metadata
import os
import tempfile
from pathlib import Path

from preft_cli.config.near import near_words
from preft_cli.errors import UserError

_CHECKOUT = Path(__file__).resolve().parents[2]


def template_files() -> dict[str, Path]:
    """Template names to files: of the checkout this runs from, else of the installed distribution."""
    in_checkout = (_CHECKOUT / "pyproject.toml").is_file()  # no site-packages folder has one
    files = list((_CHECKOUT / "templates").glob("*.yaml")) if in_checkout else _installed()
    if not files:
        raise UserError("no templates found: this installation of preft is incomplete, install it again")
    return {path.stem: path for path in sorted(files)}


def _installed() -> list[Path]:
    """The files that pip put under share/preft/templates, wherever that is in this environment."""
    try:
        files = importlib.metadata.files("preft") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    found = (file for file in files if file.parts[-3:-1] == ("preft", "templates") and file.suffix == ".yaml")
    return [path for path in (Path(str(file.locate())) for file in found) if path.is_file()]


def templates() -> dict[str, str]:
    """Template names to their one-line descriptions: the first comment of the file."""
    return {
        name: path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
        for name, path in template_files().items()
    }


def read_template(name: str) -> str:
    """The text of a template. UserError (exit code 2) names the known ones."""
    files = template_files()
    if name not in files:
        near = near_words(name, list(files))
        meant = f" (did you mean {near}?)" if near else ""
        raise UserError(f"--template {name}: no such template{meant}; known: {', '.join(files)}", 2)
    return files[name].read_text(encoding="utf-8")


def write_config(path: Path, text: str, *, force: bool) -> None:
    """Write a config aside and put it in place; one that is there stays, unless `force`."""
    if not force and (path.exists() or path.is_symlink()):
        raise UserError(f"{path} exists already and is left as it is; --force replaces it", 2)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, aside = tempfile.mkstemp(prefix=".preft.yaml-", dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(aside).chmod(0o644)
        Path(aside).replace(path)
    except OSError as problem:
        raise UserError(f"{path} cannot be written: {problem.strerror or problem}") from None
