"""The plan of the server: options are vLLM's, checked, and never dropped."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine_patch.store.format import group_modules
from engine_patch.store.layout import ModuleLayout
from preft_cli.config.schema import PreftConfig
from preft_cli.errors import UserError
from preft_cli.serving.adapters import choose
from preft_cli.serving.launch import _links_beside, _prepare, require_free_port
from preft_cli.serving.options import to_arguments
from preft_cli.serving.plan import plan_serve


def plan(**serve: Any) -> Any:
    return plan_serve(PreftConfig.model_validate({"serve": serve}), Path("/project"))


def test_options_become_arguments() -> None:
    options = {
        "block_size": 32,
        "enforce-eager": True,
        "async-scheduling": False,
        "x": None,
        "j": {"b": 1},
        "l": [1, 2],
    }
    assert to_arguments(options) == [
        *("--block-size", "32"), "--enforce-eager", "--no-async-scheduling", *("--j", '{"b": 1}'), *("--l", "1", "2"),
    ]  # fmt: skip


def test_parallel_sizes_lengths_and_memory_pass_by_vllms_names() -> None:
    sizes = {"tensor_parallel_size": 2, "max_model_len": 99, "gpu_memory_utilization": 0.5}
    arguments = plan(**sizes, vllm_args={"seed": 7}).arguments("/model", 16, None)
    for name, value in {**sizes, "seed": 7, "max-lora-rank": 16, "model": "/model"}.items():
        assert arguments[arguments.index(f"--{name.replace('_', '-')}") + 1] == str(value)
    assert not [argument for argument in arguments if "prefix-caching" in argument]  # on, as is vLLM's default


def test_prefix_caching_can_be_switched_off() -> None:
    assert "--no-enable-prefix-caching" in plan(vllm_args={"enable_prefix_caching": False}).arguments(
        "/model", 16, None
    )


def test_several_copies_of_the_engine_are_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"serve\.data_parallel_size: .* behind a proxy") as caught:
        plan(data_parallel_size=3)
    assert caught.value.exit_code == 2


def test_only_this_machine_unless_told_otherwise() -> None:
    assert plan().options["host"] == "127.0.0.1"
    assert plan(host="0.0.0.0").options["host"] == "0.0.0.0"


def test_adapters_default_to_the_store() -> None:
    assert plan().adapters == Path("/project/store")
    assert plan(adapters="mine").adapters == Path("/project/mine")


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("port", "set serve.port instead"),
        ("max_num_seqs", "set serve.max_num_seqs instead"),
        ("--model", "set model.base instead"),
        ("no-enable-lora", "set serve.adapters instead"),
        ("quantization", "refused"),
        ("specialize_active_lora", "refused"),
        ("speculative_config", "refused"),
        ("speculative-config.method", "give the option by its plain name"),
        ("spec-method", "refused"),
        ("kv_offloading_size", "refused"),
        ("config", "refused"),
        ("additional-config", "set serve.gpu_pool and serve.host_pool instead"),
        ("max_cpu_loras", "set serve.host_pool instead"),
        ("api-server-count", "refused"),
    ],
)
def test_options_with_a_key_of_their_own_or_unsafe_ones_are_refused(key: str, message: str) -> None:
    with pytest.raises(UserError, match=f"serve.vllm_args.{key}: {message}") as caught:
        plan(vllm_args={key: 1})
    assert caught.value.exit_code == 2


def collected(**ranks: int) -> Any:
    """A folder of adapters of these ranks, each of rank x 4 kB in bfloat16."""
    headers = {}
    for name, rank in ranks.items():
        groups = group_modules({"model.layers.0.mlp.up_proj": ModuleLayout(rank, 1024, 1024, 1.0)})
        headers[name] = SimpleNamespace(
            rank=rank, meta={"chat_template_digest": "t1"}, groups=groups, method="lorap", digest=name
        )
    paths = {name: Path(f"{name}.preft") for name in ranks}
    return SimpleNamespace(adapters=paths, sources=paths, headers=headers, rejected=[])


@pytest.mark.parametrize(
    ("limit", "chosen", "served"), [(None, 320, "abcd"), (16, 16, "ab"), (20, 32, "ab"), (64, 64, "abc")]
)
def test_the_rank_limit_is_the_largest_needed_or_the_one_asked_for(limit: int | None, chosen: int, served: str) -> None:
    """cases: ranks 4, 12, 64 and 320 in one folder."""
    found = choose(collected(a=4, b=12, c=64, d=320), plan(max_lora_rank=limit), "t1")
    assert found.max_lora_rank == chosen
    assert "".join(found.adapters) == served
    for path, reason in found.rejected:
        assert f"holds up to {chosen} (serve.max_lora_rank)" in reason, path


def test_the_device_pool_is_not_padded_to_the_largest() -> None:
    """cases: ranks 4, 12, 64 and 320 in one folder; room for those that two steps can need, and no more."""
    folder = collected(a=4, b=12, c=64, d=320)
    assert choose(folder, plan(gpu_slots=4), "t1").gpu_pool == (4 + 12 + 64 + 320) * 4096
    assert choose(folder, plan(gpu_slots=2), "t1").gpu_pool == (4 + 12 + 64 + 320) * 4096
    assert choose(folder, plan(gpu_slots=1), "t1").gpu_pool == (4 + 12 + 64 + 320) * 4096
    many = collected(**{f"a{i}": 64 for i in range(9)})
    assert choose(many, plan(gpu_slots=2), "t1").gpu_pool == 4 * 64 * 4096
    # Adapters of the same kind may come while the server runs.
    assert choose(folder, plan(gpu_slots=6), "t1").gpu_pool == (4 + 12 + 64 + 320 + 2 * 320) * 4096
    assert choose(folder, plan(gpu_slots=2, dtype="float32"), "t1").gpu_pool == (4 + 12 + 64 + 320) * 8192
    assert choose(folder, plan(gpu_pool="2GB"), "t1").gpu_pool == 2_000_000_000
    assert choose(collected(), plan(), "t1").gpu_pool is None


@pytest.mark.parametrize("pool", ["gpu_pool", "host_pool"])
def test_an_adapter_larger_than_a_pool_is_left_out_with_both_sizes(pool: str) -> None:
    found = choose(collected(a=4, d=320), plan(**{pool: "1MB"}), "t1")
    assert list(found.adapters) == ["a"]
    assert found.rejected == [(Path("d.preft"), f"it takes 1.3 MB, and serve.{pool} has 1.0 MB")]


def test_pools_reach_the_workers() -> None:
    arguments = plan(host_pool="3GiB").arguments("/model", 16, 4096)
    config = json.loads(arguments[arguments.index("--additional-config") + 1])
    assert config == {"preft": {"gpu_pool_bytes": 4096, "host_pool_bytes": 3 << 30}}


def test_an_adapter_trained_with_another_chat_template_is_left_out() -> None:
    found = choose(collected(a=8), plan(), "t2")
    assert not found.adapters
    assert "trained with another chat template" in found.rejected[0][1]


@pytest.mark.parametrize(
    ("vllm_args", "message"),
    [
        ({"seed": None}, "seed: has no value"),
        ({"block-size": 32, "block_size": 64}, "block_size: the same option as block-size"),
    ],
)
def test_no_option_is_dropped_in_silence(vllm_args: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan(vllm_args=vllm_args)


def test_a_port_in_use_and_a_foreign_address_are_refused_at_once() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(UserError, match=r"cannot listen on 127\.0\.0\.1:\d+: Address already in use"):
            require_free_port("127.0.0.1", other.getsockname()[1])
    with pytest.raises(UserError, match=r"cannot listen on 256\.1\.1\.1:80"):
        require_free_port("256.1.1.1", 80)


def test_links_to_adapters_in_memory_lie_in_memory_too(tmp_path: Path) -> None:
    assert _links_beside(tmp_path / "..", memory=tmp_path) == tmp_path
    assert _links_beside(Path("/proc"), memory=tmp_path) is None
    assert _links_beside(tmp_path, memory=tmp_path / "missing") is None


def test_a_missing_folder_may_be_made_empty(tmp_path: Path) -> None:
    config = PreftConfig.model_validate({"serve": {"adapters": "policy"}})
    with pytest.raises(
        UserError, match=r"no such folder; give --adapters DIR, .* \(mkdir .*policy\): adapters that come into it"
    ):
        _prepare(plan_serve(config, tmp_path))
