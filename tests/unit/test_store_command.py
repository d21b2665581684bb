"""`preft store`: what people see of a store, and what they may take out of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_patch.adapter import Adapter, LowRankPair
from engine_patch.base_model import BaseFingerprint
from engine_patch.store import read_adapter, write_adapter
from preft_cli import app
from preft_cli.store.info import ranges
from preft_cli.store.results import StoreInfos, StoreList, StoreRemoval
from preft_cli.store.table import size

Run = Callable[..., tuple[int, str, str]]
BASE = BaseFingerprint("llama", 16, 24, 12, 2, 1, 64, "0123456789abcdef")
NAMES = ["alto", "bass", "tenor"]


def adapter(rank: int = 4, method: str = "lorap", seed: int = 0, **meta: Any) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    pairs = {
        f"model.layers.{layer}.self_attn.{name}": LowRankPair(
            torch.randn(rank, 16, generator=generator), torch.randn(16, rank, generator=generator), 2.0
        )
        for layer in range(12)
        for name in ("q_proj", "o_proj")
        if (layer, name) != (5, "o_proj")
    }
    return Adapter(method, BASE, pairs, meta)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    folder.mkdir()
    write_adapter(folder / "tenor.preft", adapter(rank=4, base_model="/models/tiny-llama"))
    write_adapter(folder / "alto.preft", adapter(rank=64, method="lora", peft={"base_model_name_or_path": "org/tiny"}))
    write_adapter(folder / "bass.preft", adapter(rank=12, seed=1))
    for age, name in enumerate(NAMES):
        os.utime(folder / f"{name}.preft", (1_700_000_000 + age, 1_700_000_000 + age))
    return folder


@pytest.fixture
def run(store: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `preft store ARGUMENTS` beside the store."""
    monkeypatch.chdir(store.parent)
    monkeypatch.setattr(sys, "stdin", open(os.devnull))  # noqa: PTH123, SIM115

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            app.main(["store", *arguments])
        captured = capfd.readouterr()
        assert isinstance(end.value.code, int)
        return end.value.code, captured.out, captured.err

    return run


def test_ls_json(run: Run, store: Path) -> None:
    code, out, _ = run("ls", "--json")
    listing = StoreList.model_validate_json(out)
    assert (code, listing.broken, [row.name for row in listing.adapters]) == (0, [], NAMES)
    alto, bass, tenor = listing.adapters
    assert (alto.method, alto.rank, alto.dtype, alto.base) == ("lora", 64, "float32", "org/tiny")
    assert (tenor.base, bass.base) == ("/models/tiny-llama", "llama")
    assert tenor.bytes == (store / "tenor.preft").stat().st_size
    assert tenor.digest == read_adapter(store / "tenor.preft").digest()
    assert alto.modified == "2023-11-14T22:13:20+00:00"


def test_ls_in_plain_columns(run: Run) -> None:
    code, out, _ = run("ls")
    lines = out.splitlines()
    assert code == 0
    assert lines[0].split() == ["name", "method", "rank", "size", "base", "digest", "when"]
    assert [line.split()[0] for line in lines[1:]] == NAMES
    assert lines[3].split()[1:3] == ["lorap", "4"]
    assert " tiny-llama " in lines[3]
    column = lines[0].index("base")
    assert [line[column - 1] for line in lines] == [" "] * 4
    assert [line[column:].split()[0] for line in lines[1:]] == ["org/tiny", "llama", "tiny-llama"]


@pytest.mark.parametrize(
    ("sort", "expected"),
    [
        ("name", NAMES),
        ("size", ["alto", "bass", "tenor"]),
        ("rank", ["alto", "bass", "tenor"]),
        ("when", ["tenor", "bass", "alto"]),
    ],
)
def test_ls_sorted(run: Run, store: Path, sort: str, expected: list[str]) -> None:
    (store / "alto.preft").rename(store / "x.preft")  # so that no order is the names' by accident
    (store / "x.preft").rename(store / "zz.preft")
    names = [row["name"] for row in json.loads(run("ls", "--json", "--sort", sort)[1])["adapters"]]
    wanted = ["zz" if name == "alto" else name for name in expected]
    assert names == (sorted(wanted) if sort == "name" else wanted)


def test_ls_names_broken_files(run: Run, store: Path, tmp_path: Path) -> None:
    good = (store / "bass.preft").read_bytes()
    (store / "half.preft").write_bytes(good[: len(good) // 2])
    (store / "a b.preft").write_bytes(good)
    (store / "out.preft").symlink_to("/etc/hostname")
    (store / "folder.preft").mkdir()
    (store / "stray.txt").write_text("x")
    code, out, _ = run("ls", "--json")
    listing = StoreList.model_validate_json(out)
    assert code == 1
    assert [row.name for row in listing.adapters] == NAMES
    reasons = {Path(file.path).name: file.reason for file in listing.broken}
    assert list(reasons) == ["a b.preft", "folder.preft", "half.preft", "out.preft"]
    assert "truncated or half-written" in reasons["half.preft"]
    assert "is a symbolic link that leaves" in reasons["out.preft"]
    code, out, err = run("ls")
    assert (code, len(out.splitlines())) == (1, 4)
    assert f"warning: {store / 'half.preft'}: is truncated" in err


def test_where_the_store_is(run: Run, store: Path) -> None:
    store.rename(store.with_name("other"))
    assert "cannot list the adapter store" in run("ls")[2]
    assert run("ls")[0] == 1
    assert len(run("ls", "--store", "other")[1].splitlines()) == 4
    assert len(run("ls", "--set", "convert.store=other")[1].splitlines()) == 4
    Path("preft.yaml").write_text("convert: {store: other}\n")
    assert len(run("ls")[1].splitlines()) == 4
    assert run("ls", "--set", "convert.sotre=x")[0] == 2


def test_info(run: Run, store: Path) -> None:
    code, out, _ = run("info", "bass", "alto", "--json")
    infos = StoreInfos.model_validate_json(out)
    assert (code, [info.name for info in infos.adapters]) == (0, ["bass", "alto"])
    bass = infos.adapters[0]
    o_proj, q_proj = bass.modules
    assert (o_proj.module, o_proj.layers) == ("model.layers.*.self_attn.o_proj", "0-4,6-11")
    assert (q_proj.module, q_proj.layers) == ("model.layers.*.self_attn.q_proj", "0-11")
    assert (q_proj.rank, q_proj.scaling, q_proj.in_features) == (12, 2.0, 16)
    assert bass.fingerprint == BASE.to_dict()
    assert 0 < bass.weight_bytes < bass.bytes
    assert infos.adapters[1].meta == {"peft": {"base_model_name_or_path": "org/tiny"}}
    code, out, _ = run("info", "bass")
    assert code == 0
    for text in ("bass\n", bass.digest, "rank 12, scaling 2, layers 0-4,6-11", "hidden_size 16"):
        assert text in out


def test_info_of_a_broken_file(run: Run, store: Path) -> None:
    (store / "bass.preft").write_bytes(b"x")
    code, out, err = run("info", "bass", "alto")
    assert (code, out.splitlines()[0]) == (1, "alto")
    assert "is not a .preft file" in err


@pytest.mark.parametrize("command", ["info", "rm"])
@pytest.mark.parametrize("name", ["base", "../store/bass", "/etc/hosts", "", "bass.preft", "a\0b"])
def test_unknown_names(run: Run, store: Path, command: str, name: str) -> None:
    code, _, err = run(command, "alto", name, *(["--yes"] if command == "rm" else []))
    assert code == 1
    assert "there is no adapter" in err
    assert ("did you mean bass" in err) == (name in ("base", "bass.preft", "../store/bass"))
    assert len(list(store.iterdir())) == 3, "nothing was removed"


def test_rm(run: Run, store: Path) -> None:
    code, _, err = run("rm", "bass")
    assert (code, (store / "bass.preft").exists()) == (2, True)
    assert "add --yes" in err
    (store / "half.preft").write_bytes(b"half")
    outside = store.parent / "outside.preft"
    (store / "tenor.preft").rename(outside)
    (store / "link.preft").symlink_to(outside)
    code, out, _ = run("rm", "half", "bass", "link", "--yes", "--json")
    assert (code, StoreRemoval.model_validate_json(out).removed) == (0, ["half", "bass", "link"])
    assert [path.name for path in store.iterdir()] == ["alto.preft"]
    assert outside.exists()
    assert run("rm", "alto", "-y") == (
        0,
        "removed alto\n",
        "no preft.yaml here: using the defaults (preft init writes one)\n",
    )


def test_rm_of_a_folder_removes_nothing(run: Run, store: Path) -> None:
    (store / "deep.preft").mkdir()
    code, out, err = run("rm", "deep", "bass", "--yes")
    assert (code, out) == (1, "removed bass\n")
    assert "cannot remove it" in err
    assert (store / "deep.preft").is_dir()


@pytest.mark.parametrize(("answer", "gone"), [("y\n", True), ("n\n", False), ("", False)])
def test_rm_asks_on_a_terminal(run: Run, store: Path, monkeypatch: pytest.MonkeyPatch, answer: str, gone: bool) -> None:
    import io

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    code, _, err = run("rm", "bass")
    assert (code == 0) == gone
    assert "Remove bass from" in err
    assert (store / "bass.preft").exists() != gone


@pytest.mark.parametrize(("columns", "shown"), [(60, {"method", "when"}), (80, {"base", "digest"}), (140, {"when"})])
def test_a_table_fits_the_terminal(store: Path, columns: int, shown: set[str]) -> None:
    """On a real terminal."""
    import pty
    import re
    import select

    long = "a-name-that-is-far-too-long-for-a-narrow-terminal-to-show-in-one-piece"
    (store / "bass.preft").rename(store / f"{long}.preft")
    master, slave = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "preft_cli", "store", "ls"]
    process = subprocess.Popen(command, stdout=slave, cwd=store.parent, env=environment, stderr=subprocess.DEVNULL)
    os.close(slave)
    read = b""
    while select.select([master], [], [], 60)[0]:
        try:
            read += os.read(master, 65536)
        except OSError:
            break
    assert process.wait(60) == 0
    lines = re.sub(r"\x1b\[[0-9;]*m", "", read.decode()).splitlines()
    assert len(lines) > 4
    assert max(map(len, lines)) <= columns
    assert shown <= set(" ".join(lines).split())
    assert any(line.split()[:3] == ["alto", "lora", "64"] for line in lines)


def test_no_torch_and_a_pipe_that_is_closed(store: Path) -> None:
    code = """
import sys
sys.argv = ["preft", "store", "{command}", *{names}]
from preft_cli.app import main
try:
    main()
except SystemExit as end:
    assert end.code == 0, end.code
assert not {{"torch", "transformers", "safetensors"}} & set(sys.modules)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    for command, names in (("ls", []), ("info", ["alto"]), ("rm", ["alto", "--yes"])):
        script = code.format(command=command, names=names)
        subprocess.run([sys.executable, "-c", script], check=True, timeout=60, cwd=store.parent, env=environment)
    script = f"{sys.executable} -m preft_cli store ls | true"
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, cwd=store.parent, env=environment, check=True
    )
    assert "roken" not in done.stderr


def test_compact_forms() -> None:
    assert ranges([7, 1, 2, 3, 9, 10]) == "1-3,7,9-10"
    assert ranges([]) == ""
    assert [size(count) for count in (999, 1400, 3_500_000, 2_000_000_000)] == ["999 B", "1.4 kB", "3.5 MB", "2.0 GB"]


def test_a_thousand_files_take_a_moment(store: Path) -> None:
    """Far from the limit (10,000 in a second): one look at each header, none at the weights."""
    from preft_cli.store.listing import list_adapters

    data = (store / "bass.preft").read_bytes()
    for number in range(1000):
        (store / f"user-{number}.preft").write_bytes(data)
    start = time.process_time()
    assert len(list_adapters(store).adapters) == 1003
    assert time.process_time() - start < 2
