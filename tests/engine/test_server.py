"""`preft serve` as a user runs it: a process, HTTP, signals."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from engine_patch.adapter import Adapter
from engine_patch.store.file import read_header, write_adapter
from preft_cli.models.modules import Modules, modules_of
from tests.engine.served import Server, free_port, metric, wait_until
from tests.reference import MaskedReference, random_adapter

pytestmark = pytest.mark.engine


def gap_to(adapter: Adapter | None, answer: Any, reference: MaskedReference) -> float:
    """How far an answer with log-probabilities and token ids is from that of an adapter, or of the base model."""
    choice, prompt = answer["choices"][0], answer["prompt_token_ids"]
    served = torch.tensor([item["logprob"] for item in choice["logprobs"]["content"]])
    adapted = len(prompt) + len(choice["token_ids"]) if adapter and adapter.method == "lora" else None
    expected = reference.logprobs(prompt, choice["token_ids"], adapter, adapted)
    return float((served - expected).abs().max())


def catches(process: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for the signal."""
    (mask,) = re.findall(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
    return bool(int(mask, 16) >> (number - 1) & 1)


LOGPROBS = {"logprobs": True, "top_logprobs": 0, "return_token_ids": True}


@pytest.fixture(scope="module")
def folder(adapters: dict[str, tuple[Path, Adapter]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Good adapters among broken neighbours."""
    folder = tmp_path_factory.mktemp("serve") / "adapters"
    folder.mkdir()
    for name in ("one", "everywhere", "stream-one"):
        shutil.copy(adapters[name][0], folder / f"{name}.preft")
    (folder / "truncated.preft").write_bytes(adapters["two"][0].read_bytes()[:4000])
    (folder / "empty").mkdir()
    (folder / "notes.txt").write_text("a stray file")
    (folder / "no-weights").mkdir()
    (folder / "no-weights" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8')
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    # One adapter at a time, on the device and in host memory: every other request reads its file again.
    one = read_header(folder / "everywhere.preft").num_bytes
    settings = ["dtype=float32", "max_model_len=512", "max_num_seqs=8", "vllm_args.block-size=32"]
    settings += ["gpu_slots=1", f"gpu_pool={one}", f"host_pool={one}"]
    server = Server(folder, folder.parent / "log.txt", *(f"serve.{setting}" for setting in settings))
    server.wait_ready()
    yield server
    server.process.send_signal(signal.SIGHUP)  # the terminal was closed; the README's test sends SIGINT
    assert server.process.wait(60) == 0, server.log.read_text()
    with pytest.raises(urllib.error.URLError, match="refused"):
        server.get("/health")
    left = subprocess.run(["pgrep", "-f", "--", str(server.port)], capture_output=True, text=True)
    assert (left.returncode, left.stdout) == (1, ""), "processes outlived the server"


def test_models_are_listed_before_first_use_and_broken_ones_named(server: Server) -> None:
    listed = [card["id"] for card in server.get("/v1/models")["data"]]
    assert listed == ["smollm2-135m", "everywhere", "one", "stream-one"]
    said = server.log.read_text()
    for name in ("truncated.preft", "empty", "no-weights"):
        assert f"/{name}" in said, f"{name} was left out in silence"


@pytest.mark.parametrize("name", ["one", "everywhere", "stream-one", "smollm2-135m"])
def test_chat_answers_equal_the_reference(
    server: Server, reference: MaskedReference, adapters: dict[str, tuple[Path, Adapter]], name: str
) -> None:
    answer = server.chat(name, "What is a cat?", max_tokens=24, **LOGPROBS)
    assert gap_to(adapters[name][1] if name in adapters else None, answer, reference) < 1e-3


def test_an_unknown_name_is_a_404_with_the_nearest(server: Server) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        server.chat("everywere", "hello")
    assert caught.value.code == 404
    assert "Did you mean everywhere?" in caught.value.read().decode()


@pytest.mark.parametrize(("name", "method"), [("one", "lorap+direftp"), ("stream-one", "direftp")])
def test_a_replaced_file_answers_with_its_new_weights_and_from_no_old_kv(
    server: Server,
    folder: Path,
    smollm2: Any,
    adapters: dict[str, tuple[Path, Adapter]],
    reference: MaskedReference,
    name: str,
    method: str,
) -> None:
    """The same long prompt, before and after: its blocks are in the cache, under the same name."""
    long = "What is a dog? " * 40
    for _ in range(2):
        before = metric(server, "vllm:prefix_cache_hits_total")
        answer = server.chat(name, long, max_tokens=4, **LOGPROBS)
        assert gap_to(adapters[name][1], answer, reference) < 1e-3
    assert metric(server, "vllm:prefix_cache_hits_total") - before >= 128
    new = random_adapter(modules_of(smollm2), smollm2.fingerprint, seed=77, rank=4, method=method)
    write_adapter(folder / f"{name}.preft", new)
    assert gap_to(new, server.chat(name, long, max_tokens=4, **LOGPROBS), reference) < 1e-3


@pytest.mark.parametrize(("method", "rank"), [("direftp", 8), ("lorap+direftp", 4), ("lorap", 8)])
def test_turn_two_of_a_chat_equals_a_cold_answer(
    server: Server, folder: Path, smollm2: Any, reference: MaskedReference, method: str, rank: int
) -> None:
    """Its prompt holds what turn one has generated, without the adapter, and what is now prompt."""
    adapter = random_adapter(modules_of(smollm2), smollm2.fingerprint, seed=78, rank=rank, method=method)
    write_adapter(folder / "one.preft", adapter)
    first = server.get(
        "/v1/completions",
        {
            "model": "one",
            "prompt": [50 + i for i in range(40)],
            "max_tokens": 60,
            "ignore_eos": True,
            "temperature": 0,
            "return_token_ids": True,
        },
    )["choices"][0]
    prompt = [*first["prompt_token_ids"], *first["token_ids"], 99, 98]
    second = server.get(
        "/v1/completions",
        {
            "model": "one",
            "prompt": prompt,
            "max_tokens": 4,
            "temperature": 0,
            "logprobs": 0,
            "return_token_ids": True,
        },
    )["choices"][0]
    expected = reference.logprobs(prompt, second["token_ids"], adapter)
    assert (torch.tensor(second["logprobs"]["token_logprobs"]) - expected).abs().max() < 1e-3


def test_status_says_that_every_process_is_live(server: Server) -> None:
    for name in ("one", "everywhere", "stream-one"):
        server.chat(name, "hello", max_tokens=1)
    status = server.get("/preft/status")
    assert status["live"]
    assert status["prefix_caching"]
    assert status["adapters"] == {"listed": 3, "admitted": 3, "gpu_slots": 1}
    roles = [process["role"] for process in status["processes"]]
    assert roles == ["engine core", "vllm.v1.worker.cpu_model_runner.CPUModelRunner"]
    command = [sys.executable, "-m", "preft_cli", "status", "--url", server.url]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert said.returncode == 0, said.stderr
    assert f"{server.url}: live, preft" in said.stdout
    assert json.loads(subprocess.run([*command, "--json"], capture_output=True, timeout=60).stdout) == status


def test_beam_search_is_refused_since_it_feeds_answers_back_as_prompt(server: Server) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        server.chat("one", "hello", max_tokens=4, use_beam_search=True, n=1)
    assert caught.value.code == 400
    assert "beam search is not possible with a prefill-only adapter" in caught.value.read().decode()
    assert server.chat("smollm2-135m", "hello", max_tokens=4, use_beam_search=True, n=1)["choices"]


def test_a_file_of_another_base_model_is_refused_also_later(server: Server, folder: Path, smollm2: Any) -> None:
    kept = (folder / "one.preft").read_bytes()
    other = dataclasses.replace(smollm2.fingerprint, weights="0" * 16)
    write_adapter(folder / "one.preft", random_adapter(modules_of(smollm2), other, seed=5))
    with pytest.raises(urllib.error.HTTPError) as caught:
        server.chat("one", "hello")
    assert caught.value.code == 400
    assert "belongs to another base model" in caught.value.read().decode()
    (folder / "one.preft").write_bytes(kept)


@pytest.mark.parametrize("change", [64, -64])
def test_tensors_of_another_size_are_refused_each_time(server: Server, folder: Path, smollm2: Any, change: int) -> None:
    """Larger ones do not fit into a slot; smaller ones do, and would answer with a part of the weights."""
    kept = (folder / "one.preft").read_bytes()
    modules = modules_of(smollm2).linear
    name = next(iter(modules))
    wrong = {**modules, name: (modules[name][0] + change, modules[name][1])}
    write_adapter(folder / "one.preft", random_adapter(Modules(wrong, {}), smollm2.fingerprint, seed=6))
    for _ in range(2):
        with pytest.raises(urllib.error.HTTPError) as caught:
            server.chat("one", "hello", max_tokens=2)
        assert caught.value.code == 400
        assert f"{name} goes from {wrong[name][0]}" in caught.value.read().decode()
    (folder / "one.preft").write_bytes(kept)
    assert server.chat("one", "hello", max_tokens=2)["choices"]


def test_an_adapter_that_was_dropped_comes_back_with_what_it_was_admitted_with(server: Server, folder: Path) -> None:
    """Its file is replaced while a request for it waits behind another adapter's, and the engine has to read it again."""
    with ThreadPoolExecutor() as pool:
        first = server.chat("one", "What is a cat?", max_tokens=8)["choices"][0]["message"]["content"]
        long = pool.submit(server.chat, "everywhere", "Tell me a story.", max_tokens=150, ignore_eos=True)
        wait_until(lambda: metric(server, "vllm:num_requests_running") == 1)
        waiting = pool.submit(server.chat, "one", "What is a cat?", max_tokens=8)
        wait_until(lambda: metric(server, "vllm:num_requests_waiting") == 1)
        shutil.copy(folder / "everywhere.preft", folder / "swap")
        (folder / "swap").replace(folder / "one.preft")
        assert waiting.result()["choices"][0]["message"]["content"] == first
        assert long.result()["choices"]
    assert server.get("/health") is None


def test_a_file_damaged_later_fails_alone(
    server: Server, folder: Path, adapters: dict[str, tuple[Path, Adapter]]
) -> None:
    kept = (folder / "one.preft").read_bytes()
    (folder / "one.preft").write_bytes(kept[:5000])
    with pytest.raises(urllib.error.HTTPError) as caught:
        server.chat("one", "hello")
    assert caught.value.code == 400
    assert "truncated" in caught.value.read().decode()
    assert server.chat("everywhere", "hello", max_tokens=2)["choices"]
    (folder / "one.preft").write_bytes(kept)
    assert server.chat("one", "hello", max_tokens=2)["choices"]


def test_adapters_come_and_go_while_the_server_runs(
    server: Server, folder: Path, smollm2: Any, reference: MaskedReference
) -> None:
    new = random_adapter(modules_of(smollm2), smollm2.fingerprint, seed=79, rank=4)
    write_adapter(folder / "late.preft", new)
    assert gap_to(new, server.chat("late", "What is a cat?", max_tokens=4, **LOGPROBS), reference) < 1e-3
    assert "late" in [card["id"] for card in server.get("/v1/models")["data"]]
    (folder / "late.preft").unlink()
    with pytest.raises(urllib.error.HTTPError) as caught:
        server.chat("late", "What is a cat?")
    assert caught.value.code == 404
    assert "late" not in [card["id"] for card in server.get("/v1/models")["data"]]


def test_a_rank_that_the_server_does_not_hold_is_refused_with_the_key(
    server: Server, folder: Path, smollm2: Any
) -> None:
    write_adapter(folder / "large.preft", random_adapter(modules_of(smollm2), smollm2.fingerprint, seed=1, rank=9))
    with pytest.raises(urllib.error.HTTPError) as caught:
        server.chat("large", "hello")
    assert caught.value.code == 400
    assert "raise serve.max_lora_rank" in caught.value.read().decode()
    (folder / "large.preft").unlink()


def test_a_file_that_is_spoiled_after_it_was_admitted_fails_its_request_alone(
    server: Server, folder: Path, smollm2: Any
) -> None:
    """Somebody writes into the file, which also changes the server's link to it, and the engine has to read it again."""
    write_adapter(folder / "one.preft", random_adapter(modules_of(smollm2), smollm2.fingerprint, seed=80, rank=8))
    kept = (folder / "one.preft").read_bytes()
    server.chat("one", "hello", max_tokens=1)
    stat = (folder / "one.preft").stat()
    with (folder / "one.preft").open("r+b") as file:
        file.seek(-50_000, 2)
        file.write(b"spoiled")
    os.utime(folder / "one.preft", ns=(stat.st_atime_ns, stat.st_mtime_ns))  # and nobody can tell
    server.chat("everywhere", "hello", max_tokens=1)  # takes the only place
    with ThreadPoolExecutor() as pool:
        other = pool.submit(server.chat, "everywhere", "hello", max_tokens=30)
        with pytest.raises(urllib.error.HTTPError) as caught:
            server.chat("one", "hello", max_tokens=2)
        assert caught.value.code == 500
        assert other.result()["choices"]
    assert "with adapter one fails:" in server.log.read_text()
    assert metric(server, "preft_load_failures_total") >= 1
    (folder / "one.preft").unlink()
    (folder / "one.preft").write_bytes(kept)
    assert server.chat("one", "hello", max_tokens=2)["choices"]


def test_the_pools_count_and_never_hold_more_than_their_size(server: Server, folder: Path) -> None:
    before = metric(server, "preft_tier_evictions_total")
    for name in ("one", "everywhere", "one"):
        server.chat(name, "hello", max_tokens=1)
    assert metric(server, "preft_tier_evictions_total") - before >= 4  # two places, on the device and in host memory
    size = read_header(folder / "everywhere.preft").num_bytes
    assert metric(server, "preft_tier_capacity_bytes") == 2 * size
    assert 0 < metric(server, "preft_tier_used_bytes") <= 2 * size
    assert metric(server, "preft_step_waits_total") == 0


def test_a_minute_of_replacing_and_asking_under_the_same_names(
    server: Server,
    folder: Path,
    smollm2: Any,
    adapters: dict[str, tuple[Path, Adapter]],
    reference: MaskedReference,
) -> None:
    """One slot for two names, one of which changes its content all the time: every answer is somebody's right one."""
    other = random_adapter(modules_of(smollm2), smollm2.fingerprint, seed=77, rank=8)
    write_adapter(folder.parent / "other.preft", other)
    contents = {"one": adapters["one"], "other": (folder.parent / "other.preft", other)}
    (folder / "swap").write_bytes(contents["one"][0].read_bytes())
    (folder / "swap").replace(folder / "one.preft")
    until, answers = time.monotonic() + 60, []

    def replace() -> int:
        for count in range(10_000):
            if time.monotonic() > until:
                return count
            (folder / "swap").write_bytes(contents["other" if count % 2 == 0 else "one"][0].read_bytes())
            (folder / "swap").replace(folder / "one.preft")
            time.sleep(0.3)
        raise AssertionError

    def ask(name: str, text: str) -> int:
        count = 0
        while time.monotonic() < until:
            try:
                answers.append((name, server.chat(name, text, max_tokens=5, **LOGPROBS)))
            except urllib.error.HTTPError as error:
                raise AssertionError(f"{name}: {error.code} {error.read().decode()}") from error
            count += 1
        return count

    with ThreadPoolExecutor(8) as pool:
        replaced = pool.submit(replace)
        asked = [
            pool.submit(ask, name, text)
            for name in ("one", "everywhere", "smollm2-135m")
            for text in ("What is a cat?", "Name a fish. " * 20)
        ]
        assert replaced.result() > 20
        counts = [count.result() for count in asked]
    assert min(counts) > 5, counts
    met = dict.fromkeys(contents, 0)
    unlike = {
        json.dumps([name, answer["choices"], answer["prompt_token_ids"]]): (name, answer) for name, answer in answers
    }
    for name, answer in unlike.values():  # greedy answers: few differ
        if name == "one":
            right = [content for content, (_, adapter) in contents.items() if gap_to(adapter, answer, reference) < 1e-3]
            assert len(right) == 1
            met[right[0]] += sum(other["choices"] == answer["choices"] for _, other in answers)
        else:
            adapter = adapters[name][1] if name in adapters else None
            assert gap_to(adapter, answer, reference) < 1e-3
    assert min(met.values()) > 5  # both contents have answered
    assert metric(server, "vllm:num_requests_running") == metric(server, "vllm:num_requests_waiting") == 0
    assert server.get("/preft/status")["live"]


def test_ctrl_c_while_starting_even_where_the_shell_ignored_it(folder: Path) -> None:
    """Shells start background jobs with SIGINT ignored."""
    command = f"trap '' INT; exec {sys.executable} -m preft_cli serve --adapters {folder} --port {free_port()}"
    process = subprocess.Popen(["bash", "-c", command], cwd=folder.parent, stderr=subprocess.PIPE, text=True)
    # The server comes up much later than this, also where the machine is busy.
    wait_until(lambda: "preft_cli" in psutil.Process(process.pid).cmdline() and catches(process.pid, signal.SIGINT))
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    # 0: it came to starting the server, and stopped that. A shell calls the death by SIGINT 130 too: Python chooses it where
    # the interrupt came in the middle of a class that is made from text, as dataclasses are.
    assert process.returncode in (0, 130, -signal.SIGINT), said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("environment", "options", "code", "message"),
    [
        ({"VLLM_PLUGINS": "other"}, [], 1, "not active in vLLM: VLLM_PLUGINS=other leaves preft out"),
        (
            {},
            ["--set", "serve.vllm_args.enable-prefix-cachin=true"],
            2,
            "unrecognized arguments: --enable-prefix-cachin",
        ),
        (
            {"VLLM_SKIP_MODEL_NAME_VALIDATION": "1"},
            [],
            2,
            "an unknown adapter name would be answered by the base model",
        ),
        ({"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}, [], 2, "VLLM_ALLOW_RUNTIME_LORA_UPDATING is set"),
        ({}, ["--set", "serve.max_model_len=100000000"], 1, "error: the server could not go on"),
    ],
)
def test_refuses_to_start(
    folder: Path, environment: dict[str, str], options: list[str], code: int, message: str
) -> None:
    """Without the patch, or with an option that vLLM does not have."""
    command = [
        sys.executable,
        "-m",
        "preft_cli",
        "serve",
        "--adapters",
        str(folder),
        "--port",
        str(free_port()),
        *options,
    ]
    ended = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, cwd=folder.parent, timeout=300
    )
    assert ended.returncode == code, ended.stderr
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr
