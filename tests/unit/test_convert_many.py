"""Many adapters: patterns, what need not be converted again, worker processes, and a disk that is full."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_patch.store import read_adapter
from preft_cli.adapters.layout import PEFT_BIN, PEFT_CONFIG, PEFT_WEIGHTS
from preft_cli.config.schema import PreftConfig
from preft_cli.convert.results import ConvertResult
from preft_cli.convert.run import convert, plan_convert
from preft_cli.models import BaseModel
from tests.unit import tiny_llama as tiny
from tests.unit.test_adapters_peft import Touch

ROOT = Path(__file__).parents[2]
USERS = ("user-1", "user-2", "user-3", "user-10")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    return tiny.save_base(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture
def config(base: BaseModel) -> PreftConfig:
    return PreftConfig.model_validate({"model": {"base": base.name}})


@pytest.fixture
def users(base: BaseModel, tmp_path: Path) -> Path:
    """A folder of distinct adapters."""
    folder = tmp_path / "adapters"
    tiny.save_peft(folder / USERS[0], base)
    for number, name in enumerate(USERS[1:]):
        shutil.copytree(folder / USERS[0], folder / name)
        change(folder / name, number + 2.0)
    return folder


def change(adapter: Path, value: float) -> None:
    tensors = load_file(adapter / PEFT_WEIGHTS)
    tensors[min(tensors)][0, 0] = value
    save_file(tensors, adapter / PEFT_WEIGHTS)


def written(path: Path) -> tuple[int, int, int]:
    """Changes when the file is written; not when it is read, as the date of the last access does."""
    found = path.stat()
    return found.st_ino, found.st_mtime_ns, found.st_size


def names(result: ConvertResult, status: str = "converted") -> list[str]:
    return [item.name for item in result.converted if item.status == status]


def test_patterns(config: PreftConfig, users: Path, tmp_path: Path) -> None:
    (users / "user-9.txt").write_text("notes")
    (users / ".user-hidden").mkdir()
    (users / "user-2" / PEFT_WEIGHTS).write_bytes(b"half")
    (users / "user-out").symlink_to(tmp_path)
    plan = plan_convert([users / "user-*", users / "user-1", tmp_path / "adapters*"], config, tmp_path)
    assert [item.name for item in plan.items] == ["user-1", "user-10", "user-2", "user-3"], "each once, in order"
    assert {Path(item.source).name for item in plan.failed} == {"user-out"}
    assert "is a symbolic link that leaves" in plan.failed[0].reason
    assert "user-9.txt is no adapter" in plan.notes[0]
    result = convert([users / "user-[12]"], config, tmp_path)
    assert names(result) == ["user-1"]
    assert [Path(item.source).name for item in result.failed] == ["user-2"]


def test_a_pattern_without_a_match(config: PreftConfig, users: Path, tmp_path: Path) -> None:
    (failed,) = convert([users / "nobody-*"], config, tmp_path).failed
    assert (failed.source, failed.reason) == (str(users / "nobody-*"), "nothing matches this pattern")
    (users / "notes.txt").write_text("x")
    (failed,) = convert([users / "*.txt"], config, tmp_path).failed
    assert "there is no adapter in" in failed.reason


def test_a_name_with_brackets_is_a_path_if_it_exists(config: PreftConfig, users: Path, tmp_path: Path) -> None:
    (users / "user-1").rename(users / "user-[1]")
    plan = plan_convert([users / "user-[1]"], config, tmp_path, name="one")
    assert [item.source for item in plan.items] == [str(users / "user-[1]")]


def test_the_second_run_converts_what_changed(config: PreftConfig, users: Path, tmp_path: Path) -> None:
    first = convert([users], config, tmp_path)
    assert len(names(first)) == len(USERS)
    before = {path.name: written(path) for path in (tmp_path / "store").iterdir()}
    again = convert([users], config, tmp_path)
    assert names(again) == []
    assert [(i.name, i.digest, i.bytes, i.rank) for i in again.converted] == [
        (i.name, i.digest, i.bytes, i.rank) for i in first.converted
    ]
    assert {path.name: written(path) for path in (tmp_path / "store").iterdir()} == before
    change(users / "user-3", 9.0)
    third = convert([users], config, tmp_path)
    assert names(third) == ["user-3"]
    assert read_adapter(tmp_path / "store" / "user-3.preft").digest() not in {item.digest for item in first.converted}
    assert names(convert([users], config, tmp_path, method="lorap")) == sorted(USERS), "asked for in another way"
    assert names(convert([users], config, tmp_path, method="lorap", force=True)) == sorted(USERS)


def test_a_file_of_the_same_size_and_date_is_noticed(config: PreftConfig, users: Path, tmp_path: Path) -> None:
    convert([users / "user-3"], config, tmp_path)
    weights, date = users / "user-3" / PEFT_WEIGHTS, (users / "user-3" / PEFT_WEIGHTS).stat()
    shutil.copyfile(users / "user-2" / PEFT_WEIGHTS, weights)
    os.utime(weights, ns=(date.st_atime_ns, date.st_mtime_ns))
    assert weights.stat().st_size == date.st_size
    assert names(convert([users / "user-3"], config, tmp_path)) == ["user-3"]


@pytest.mark.parametrize("damage", ["flipped", "truncated", "link", "another"])
def test_a_damaged_file_is_written_again(config: PreftConfig, users: Path, tmp_path: Path, damage: str) -> None:
    convert([users], config, tmp_path)
    path = tmp_path / "store" / "user-1.preft"
    good = path.read_bytes()
    if damage == "flipped":
        path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    elif damage == "truncated":
        path.write_bytes(good[:-1])
    elif damage == "another":
        shutil.copy2(path.with_name("user-2.preft"), path)
    else:
        path.rename(tmp_path / "elsewhere.preft")
        path.symlink_to(tmp_path / "elsewhere.preft")
    result = convert([users], config, tmp_path)
    assert names(result) == ["user-1"]
    assert not path.is_symlink()
    assert read_adapter(path).digest() == result.converted[0].digest


def test_another_base_model_is_another_conversion(config: PreftConfig, users: Path, tmp_path: Path) -> None:
    convert([users / "user-1"], config, tmp_path)
    other = tiny.save_base(tmp_path / "other", vocab_size=128)
    result = convert([users / "user-1"], PreftConfig.model_validate({"model": {"base": other.name}}), tmp_path)
    assert names(result) == ["user-1"]


def test_a_store_file_in_its_own_place(config: PreftConfig, users: Path, tmp_path: Path) -> None:
    convert([users / "user-1"], config, tmp_path)
    store = tmp_path / "store" / "user-1.preft"
    half = config.model_copy(update={"convert": config.convert.model_copy(update={"dtype": "bfloat16"})})
    assert names(convert([store], half, tmp_path)) == ["user-1"]
    assert names(convert([store], half, tmp_path), "unchanged") == ["user-1"]
    assert read_adapter(store).dtype == "bfloat16"


def test_nothing_to_do_loads_no_torch(config: PreftConfig, users: Path, tmp_path: Path) -> None:
    convert([users], config, tmp_path)
    code = f"""
import sys
from pathlib import Path
from preft_cli.config.schema import PreftConfig
from preft_cli.convert.run import convert
config = PreftConfig.model_validate({{"model": {{"base": {config.model.base!r}}}}})
result = convert([Path({str(users)!r})], config, Path({str(tmp_path)!r}))
assert {{item.status for item in result.converted}} == {{"unchanged"}}, result
assert not {{"torch", "transformers", "safetensors"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_bad_ones_among_many(config: PreftConfig, users: Path, tmp_path: Path) -> None:
    (users / "user-1" / PEFT_CONFIG).write_text('{"r": 4, "lora')
    (users / "user-2" / PEFT_WEIGHTS).unlink()
    torch.save({"x": Touch(tmp_path / "executed")}, users / "user-2" / PEFT_BIN)
    for name in ("a:b", "a b", "tön"):
        shutil.copytree(users / "user-3", users / name)
    (users / "empty").mkdir()
    result = convert([users], config, tmp_path)
    assert names(result) == ["user-10", "user-3"]
    reasons = {Path(item.source).name: item.reason for item in result.failed}
    assert reasons.keys() == {"a:b", "a b", "tön", "empty", "user-1", "user-2"}
    assert all("is not allowed" in reasons[name] for name in ("a:b", "a b", "tön"))
    assert "nothing in it was executed" in reasons["user-2"]
    assert not (tmp_path / "executed").exists()


@pytest.fixture
def hooked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are started by a test die while they write `user-2`, and hang while they write `user-3` if told so."""
    site = tmp_path / "site"
    site.mkdir()
    hook = """
        import os, time
        flush = os.fsync
        def fsync(fd):
            name = os.readlink(f"/proc/self/fd/{fd}")
            if "user-2" in name and "DIE" in os.environ:
                os.kill(os.getpid(), 9)
            if "user-3" in name and "HANG" in os.environ:
                time.sleep(600)
            flush(fd)
        os.fsync = fsync
    """
    (site / "sitecustomize.py").write_text(textwrap.dedent(hook))
    monkeypatch.setenv("PYTHONPATH", f"{site}:{ROOT}")


@pytest.mark.usefixtures("hooked")
def test_workers_and_one_that_is_killed(
    config: PreftConfig, users: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DIE", "1")
    (users / "user-1" / PEFT_CONFIG).write_text("{")
    result = convert([users], config, tmp_path, jobs=2)
    assert names(result) == ["user-10", "user-3"], "in the order of the sources"
    reasons = {Path(item.source).name: item.reason for item in result.failed}
    assert list(reasons) == ["user-1", "user-2"]
    assert "was killed by SIGKILL; if the machine ran out of memory, try --jobs 1" in reasons["user-2"]
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == ["user-10.preft", "user-3.preft"]
    assert "converting: done, 4/4 adapters" in capfd.readouterr().err
    monkeypatch.delenv("DIE")
    convert([users], config, tmp_path, jobs=1)
    one = {path.name: read_adapter(path).digest() for path in (tmp_path / "store").iterdir()}
    assert one.keys() == {"user-2.preft", "user-3.preft", "user-10.preft"}
    assert {item.digest for item in result.converted} < set(one.values())
    checked = convert([], config, tmp_path, check=True, jobs=2)
    assert names(checked, "checked") == ["user-10", "user-2", "user-3"]


@pytest.mark.usefixtures("hooked")
@pytest.mark.parametrize("jobs", [1, 2])
def test_ctrl_c(base: BaseModel, users: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int) -> None:
    monkeypatch.setenv("HANG", "1")
    command = [
        sys.executable,
        "-m",
        "preft_cli",
        "convert",
        str(users),
        "--set",
        f"model.base={base.name}",
        f"-j{jobs}",
    ]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True)
    store, deadline = tmp_path / "store", time.monotonic() + 120
    while not (list(store.glob(".user-3.preft.*.tmp")) and (store / "user-10.preft").exists()):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: to all of them
    start = time.monotonic()
    _, err = process.communicate(timeout=30)
    assert time.monotonic() - start < 10
    assert process.returncode == 130
    assert "adapters are done and stay; run the same again for the others" in err
    assert "Traceback" not in err
    assert not [path.name for path in store.iterdir() if path.name.startswith(".")]
    assert "user-3.preft" not in {path.name for path in store.iterdir()}


def test_workers_that_cannot_start(
    config: PreftConfig, users: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site").mkdir()
    tried = tmp_path / "tried"
    hook = f"import os\nopen({str(tried)!r}, 'w').close()\nos._exit(7)\n"
    (tmp_path / "site" / "sitecustomize.py").write_text(hook)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    assert names(convert([users], config, tmp_path, jobs=2)) == sorted(USERS), "done in this process"
    assert tried.exists()


def test_a_full_disk(config: PreftConfig, users: Path, tmp_path: Path) -> None:
    """A real one of 200 kB, where this user may mount it."""
    in_namespace = ["unshare", "--user", "--map-root-user", "--mount"]
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=200k tmpfs {disk}"
    if not shutil.which("unshare") or subprocess.run([*in_namespace, "sh", "-c", mount], check=False).returncode:
        pytest.skip("cannot mount a small disk here")
    convert([users / "user-1"], config, tmp_path)
    before = tmp_path / "store" / "user-1.preft"
    tiny.save_peft(users / "user-1", BaseModel(config.model.base, Path(config.model.base)), r=128)
    script = f"""
        {mount} && cp -p {before} {disk}/ &&
        {sys.executable} -m preft_cli convert {users}/user-1 {users}/user-2 --store {disk} --json \\
            --set model.base={config.model.base} --jobs 1 > {tmp_path}/result.json
        echo $? > {tmp_path}/code
        cmp {before} {disk}/user-1.preft && ls -A {disk} > {tmp_path}/left
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([*in_namespace, "sh", "-c", script], check=True, timeout=120, env=environment, cwd=tmp_path)
    result = ConvertResult.model_validate(json.loads((tmp_path / "result.json").read_text()))
    assert names(result) == ["user-2"]
    assert [Path(item.source).name for item in result.failed] == ["user-1"]
    assert "No space left on device" in result.failed[0].reason
    assert (tmp_path / "code").read_text() == "1\n"
    assert (tmp_path / "left").read_text().split() == ["user-1.preft", "user-2.preft"], "the old file, and no remains"
