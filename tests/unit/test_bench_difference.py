"""`preft bench compare`: change or noise, what was measured otherwise, and files that are no results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from preft_cli.bench.difference import Difference, compare
from preft_cli.bench.difference_report import print_difference
from preft_cli.bench.load import load_result
from preft_cli.bench.results import Hardware
from preft_cli.console import out
from preft_cli.errors import UserError
from tests.unit.bench_results import make_config, make_result

A = make_result({"base": [10, 11, 9], "lora": [4, 5, 4.5], "lorap": [8, 9, 8.5]})


def shown(difference: Difference) -> str:
    with out.capture() as captured:
        print_difference(difference)
    return captured.get()


def test_changed_only_where_the_ranges_lie_apart() -> None:
    b = make_result({"base": [9.5, 11.5, 9], "lora": [5.1, 5.2, 6], "lorap": [8, 4, 5]})
    changes = {change.name: change for change in compare(A, b).changes}
    assert not changes["base.requests_per_second"].changed
    assert changes["lora.requests_per_second"].changed
    assert changes["lora.requests_per_second"].percent == pytest.approx(100 * (5.2 / 4.5 - 1))
    assert changes["lora.output_tokens_per_second"].changed
    assert not changes["lorap.requests_per_second"].changed  # 8 is in both ranges
    assert not changes["lorap/base"].changed
    assert {"lora/base", "lorap/lora"} <= changes.keys()


def test_a_result_beside_itself() -> None:
    difference = compare(A, A)
    assert (difference.settings, difference.cautions, difference.only_a, difference.only_b) == ([], [], [], [])
    assert {change.percent for change in difference.changes} == {0.0}
    assert "0 of 9 quantities changed" in shown(difference)


def test_what_was_measured_otherwise_comes_first() -> None:
    config = make_config("smollm2-135m", arms=["base", "lora"], prompt_len=[8, 512], enable_prefix_caching=True)
    b = make_result(
        {"base": [10, 10, 10], "lora": [4, 4, 4]},
        config=config,
        versions={"python": "3.12.0", "vllm": "0.32.1", "triton": "3.6"},
        hardware=Hardware(cpu="Made-up CPU", cores=4, memory_gib=8.0, gpus=[]),
        commit=None,
    )
    difference = compare(A, b)
    found = {setting.name: (setting.a, setting.b) for setting in difference.settings}
    assert found == {
        "model": ("random:llama-3.1-8b", "smollm2-135m"),
        "prefix_caching": (False, True),
        "versions.vllm": ("0.32.0", "0.32.1"),
        "versions.triton": (None, "3.6"),
        "hardware.cores": (2, 4),
        "hardware.gpus": (["NVIDIA H200"], []),
        "commit": ("0123abc", None),
        "bench.prompt_len": (64, [8, 512]),
        "bench.arms": (["base", "lora", "lorap"], ["base", "lora"]),
    }
    text = shown(difference)
    assert text.index("may not compare") < text.index("base req/s")
    assert difference.only_a == ["lorap"]
    assert "only in A: lorap\n" in text


def test_cautions_and_a_ratio_that_one_lacks() -> None:
    b = make_result({"base": [10], "lora": [4], "lorap": [8]}, failures=3)
    b = b.model_copy(update={"ratios": {"lora/base": b.ratios["lora/base"]}})
    difference = compare(A, b)
    assert difference.only_a == ["lorap/base", "lorap/lora"]
    assert difference.cautions == [
        "B: 3 requests failed",
        "B: 1 repetitions of an arm give no fair range; `changed` may be noise",
    ]


def test_the_tables_fit_a_plain_terminal() -> None:
    fast = {arm: [21234.0, 21999, 20111] for arm in ("base", "lora", "lorap", "direft", "direftp")}
    slow = {arm: [11234.0, 11999, 10111] for arm in fast}
    text = shown(compare(make_result(fast), make_result(slow, device="a device with a long name " * 4)))
    assert max(map(len, text.splitlines())) <= 80
    assert "-47.1%" in text
    assert "changed" in text


def test_a_result_is_read_back(tmp_path: Path) -> None:
    written = make_result(path=tmp_path / "r.json")
    assert load_result(tmp_path / "r.json") == written


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "no such file"),
        ("{", "is not JSON"),
        ("\xff", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "is no result of preft bench: it has no schema_version"),
        ('{"a": 1}', "is no result of preft bench: it has no schema_version"),
        ('{"schema_version": 1}', "has schema version 1; this preft reads version 2"),
        ('{"schema_version": 2, "arms": {}}', "is no result of preft bench: created: "),
        ('{"schema_version": 1, "points": []}', "is the summary of a sweep"),
    ],
)
def test_files_that_are_no_results(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "r.json"
    if text is not None:
        path.write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match=said) as refused:
        load_result(path)
    assert refused.value.exit_code == 2
    assert str(refused.value).startswith(str(path))


def test_a_folder_and_an_unknown_key(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a folder"):
        load_result(tmp_path)
    document = json.loads(A.model_dump_json()) | {"extra": 1}
    (tmp_path / "r.json").write_text(json.dumps(document))
    with pytest.raises(UserError, match="extra: "):
        load_result(tmp_path / "r.json")
