"""The config as a whole: every mistake at once, with its place and the near match; `--set` over the file."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from preft_cli.config.load import load, load_defaults
from preft_cli.config.near import ELSEWHERE, model_at
from preft_cli.config.overrides import Override
from preft_cli.config.problems import ConfigErrors
from preft_cli.config.schema import PreftConfig


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "preft.yaml"


def problems(path: Path, text: str, *sets: str) -> list[str]:
    """The lines of the errors, without the folder of the file."""
    path.write_text(text)
    with pytest.raises(ConfigErrors) as caught:
        load(path, list(sets))
    assert caught.value.exit_code == 2
    return str(caught.value).replace(str(path), "preft.yaml").splitlines()


def test_empty_sections_and_defaults(path: Path) -> None:
    path.write_text("train:\nserve: {}\n")
    loaded = load(path, [])
    assert loaded.config == PreftConfig()
    assert loaded.path == path
    assert loaded.root == path.parent


@pytest.mark.parametrize("text", ["2e-5", "'2e-5'", '"2e-5"', "0.00002", "2.0e-5", "2E-5"])
def test_learning_rate_as_people_write_it(path: Path, text: str) -> None:
    path.write_text(f"train:\n  learning_rate: {text}\n")
    rate = load(path, []).config.train.learning_rate
    assert rate == 2e-5
    assert type(rate) is float
    assert load_defaults(path.parent, [f"train.learning_rate={text}"]).config.train.learning_rate == 2e-5


@pytest.mark.parametrize(("text", "expected"), [("no", False), ("off", False), ("on", True), ("true", True)])
def test_switches_in_words_mean_what_they_say(path: Path, text: str, expected: bool) -> None:
    path.write_text(f"adapter:\n  use_rslora: {text}\n  name: {'no'}\n")
    adapter = load(path, []).config.adapter
    assert adapter.use_rslora is expected
    assert adapter.name == "no"


@pytest.mark.parametrize("key", ["learning_rate", "epochs", "batch_size", "max_steps", "warmup_ratio"])
def test_a_boolean_is_no_number(path: Path, key: str) -> None:
    line = f"preft.yaml:2:{len(key) + 5}: train.{key}: expected a number, found true"
    assert problems(path, f"train:\n  {key}: true\n") == [line]


MISTAKES = [
    ("adapter:\n    rnak: 4\n", "2:5", "adapter.rnak: unknown key (did you mean rank?)"),
    ("lora_ranl: 42\n", "1:1", "lora_ranl: unknown key (did you mean adapter.rank?)"),
    ("train:\n  learning-rate: 1e-4\n", "2:3", "train.learning-rate: unknown key (did you mean learning_rate?)"),
    ("train:\n  batchSize: 1\n", "2:3", "train.batchSize: unknown key (did you mean batch_size?)"),
    ("rank: 4\n", "1:1", "rank: unknown key (did you mean adapter.rank or bench.rank?)"),
    ("learning_rate: 1\n", "1:1", "learning_rate: unknown key (did you mean train.learning_rate?)"),
    ("train:\n  rank: 4\n", "2:3", "train.rank: unknown key (did you mean adapter.rank or bench.rank?)"),
    ("train:\n  lr: 1\n", "2:3", "train.lr: unknown key (did you mean train.learning_rate?)"),
    (
        "train:\n  grpo:\n    rewards:\n      - math\n      - {reward: code, wieght: 1}\n",
        "5:24",
        "train.grpo.rewards.1.wieght: unknown key (did you mean weight?)",
    ),
    (
        "weight: 1\n",
        "1:1",
        "weight: unknown key; known here: project, model, adapter, train, convert, serve, bench, eval",
    ),
    ("trian: {}\n", "1:1", "trian: unknown key (did you mean train?)"),
    ("train: {adapter: {}}\n", "1:9", "train.adapter: unknown key (did you mean adapter at the top level?)"),
    ("model: {zzz: 1}\n", "1:9", "model.zzz: unknown key; known here: base, chat_template, residual_stream"),
    ("serve: {block_size: 1}\n", "1:9", "serve.block_size: unknown key; an option of vLLM goes under serve.vllm_args"),
    ("1: 2\n", "1:1", "1: unknown key; known here: project, model, adapter, train, convert, serve, bench, eval"),
    (
        "adapter: {method: lorapp}\n",
        "1:19",
        "adapter.method: expected lorap or direftp or lorap+direftp or lora or direft or lora+direft, found "
        "'lorapp' (did you mean lorap?)",
    ),
    ("adapter: {rank: 1.5}\n", "1:17", "adapter.rank: expected a whole number, found 1.5"),
    ("adapter: {rank: many}\n", "1:17", "adapter.rank: expected a whole number, found 'many'"),
    (
        "adapter:\n  rank:\n",
        "2:8",
        "adapter.rank: expected a whole number, found nothing; leave the line out for the default, 16",
    ),
    ("adapter: {rank: 0}\n", "1:17", "adapter.rank: must be more than 0, found 0"),
    ("adapter: {rank: 1000}\n", "1:17", "adapter.rank: must be 512 or less, found 1000"),
    ("serve: {max_lora_rank: 513}\n", "1:24", "serve.max_lora_rank: must be 512 or less, found 513"),
    ("project: {seed: 4294967296}\n", "1:17", "project.seed: must be 4294967295 or less, found 4294967296"),
    ("train: {epochs: 1e300}\n", "1:17", "train.epochs: must be 1000000 or less, found 1e+300"),
    ("train: {max_steps: 2147483648}\n", "1:20", "train.max_steps: must be 2147483647 or less, found 2147483648"),
    (f"train: {{max_steps: {'9' * 299}}}\n", "1:20", "train.max_steps: must be 2147483647 or less, found 999..."),
    (f"train: {{epochs: {'9' * 400}}}\n", "1:17", "a whole number of 400 digits; no setting takes one so large"),
    (f"adapter: {{method: 0x{'9' * 5000}}}\n", "1:19", "a whole number of 5002 digits; no setting takes one so large"),
    ("adapter: {rank: [4]}\n", "1:17", "adapter.rank: expected a whole number, found a list"),
    ("adapter: {alpha: .inf}\n", "1:18", "adapter.alpha: expected a finite number, found inf"),
    ("adapter: {alpha: .nan}\n", "1:18", "adapter.alpha: expected a finite number, found nan"),
    ("adapter: {use_rslora: maybe}\n", "1:23", "adapter.use_rslora: expected true or false, found 'maybe'"),
    (
        "adapter: {name: a b}\n",
        "1:17",
        "adapter.name: 'a b' is not allowed. Its model name on the server: letters, digits, '.', '_', '-'.",
    ),
    ("project: {name: 12}\n", "1:17", "project.name: expected text, found 12; put it in quotes if it is meant as text"),
    ("train: {file: [a]}\n", "1:15", "train.file: expected a path, found a list"),
    (
        "adapter: {target_modules: 5}\n",
        "1:27",
        "adapter.target_modules: expected all-linear, or expected a list such as [a, b], found 5",
    ),
    (
        "adapter:\n  target_modules:\n    - q_proj\n    - 3\n",
        "4:7",
        "adapter.target_modules.1: expected text, found 3; put it in quotes if it is meant as text",
    ),
    (
        "bench: {arms: [base, lroa]}\n",
        "1:22",
        "bench.arms.1: expected base or lora or lorap or direftp or direft, found 'lroa' (did you mean lora?)",
    ),
    ("bench: {arms: []}\n", "1:15", "bench.arms: needs 1 or more entries"),
    ("serve: {vllm_args: [a]}\n", "1:20", "serve.vllm_args: expected a mapping such as {key: value}, found a list"),
    ("eval: 5\n", "1:7", "eval: expected keys below it (file, split, batch_size), found 5"),
    ("train:\n- epochs: 1\n", "2:1", "train: expected keys below it (task, file, ..."),
    ("train:\n  epochs: 1\n  epochs: 2\n", "3:3", "epochs is set twice (first on line 2)"),
    ("train: {}\ntrain: {}\n", "2:1", "train is set twice (first on line 1)"),
]
"""Text of the file, line and column, message; an ellipsis at the end stands for any rest."""


@pytest.mark.parametrize(("text", "place", "expected"), MISTAKES)
def test_one_mistake_one_line(path: Path, text: str, place: str, expected: str) -> None:
    (line,) = problems(path, text)
    assert line.removeprefix(f"preft.yaml:{place}: ").startswith(expected.removesuffix("..."))
    assert line.endswith(expected) or expected.endswith("...")


def test_all_mistakes_at_once_in_the_order_of_the_file_and_set_last(path: Path) -> None:
    text = "adapter:\n  rnak: 4\n  alpha: true\nrank: 3\ntrain:\n  epochs: 1\n  epochs: x\n  dtype: no\n"
    assert [line.split(": ")[0:2] for line in problems(path, text, "adapter.rnak=3", "serve.port=0", "nonsense")] == [
        ["preft.yaml:2:3", "adapter.rnak"],
        ["preft.yaml:3:10", "adapter.alpha"],
        ["preft.yaml:4:1", "rank"],
        ["preft.yaml:7:3", "epochs is set twice (first on line 6)"],
        ["preft.yaml:7:11", "train.epochs"],
        ["preft.yaml:8:10", "train.dtype"],
        ["--set nonsense", "expected section.key=value, such as adapter.rank=8"],
        ["--set adapter.rnak=3", "adapter.rnak"],
        ["--set serve.port=0", "serve.port"],
    ]


def test_other_tools_names_lead_to_keys_that_exist() -> None:
    for path in ELSEWHERE.values():
        section, key = path.split(".")
        model = model_at(PreftConfig, (section,))
        assert model is not None
        assert key in model.model_fields, path


def test_set_wins_and_the_last_one_wins(path: Path) -> None:
    path.write_text("adapter:\n  rank: nonsense\n  alpha: 8\n")
    adapter = load(path, ["adapter.rank=4", "adapter.rank=8", "adapter.target_modules=[q_proj, v_proj]"]).config.adapter
    assert (adapter.rank, adapter.alpha, adapter.target_modules) == (8, 8.0, ["q_proj", "v_proj"])


@pytest.mark.parametrize(
    ("text", "key", "expected"),
    [
        ("train.max_steps=", "max_steps", None),
        ("train.epochs=2", "epochs", 2.0),
        ("train.gradient_checkpointing=true", "gradient_checkpointing", True),
        ("train.file=a=b.jsonl", "file", Path("a=b.jsonl")),
        ("train.file=no", "file", Path("no")),
        ("train.max_length=0o17", "max_length", 15),
    ],
)
def test_set_values_follow_the_same_yaml(tmp_path: Path, text: str, key: str, expected: Any) -> None:
    assert getattr(load_defaults(tmp_path, [text]).config.train, key) == expected


def test_set_below_a_mapping_that_the_file_has_or_lacks(path: Path) -> None:
    path.write_text("serve:\n  vllm_args: {enforce-eager: true}\n")
    assert load(path, ["serve.vllm_args.block-size=32"]).config.serve.vllm_args == {
        "enforce-eager": True,
        "block-size": 32,
    }
    path.write_text("serve:\n  vllm_args:\n")
    assert load(path, ["serve.vllm_args.block-size=32"]).config.serve.vllm_args == {"block-size": 32}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("adapter.rnak=3", "adapter.rnak: unknown key (did you mean rank?)"),
        ("rank=3", "rank: unknown key (did you mean adapter.rank or bench.rank?)"),
        ("adaptr.rank=3", "adaptr: unknown key (did you mean adapter?)"),
        ("train.learning_rate=true", "train.learning_rate: expected a number, found true"),
        ("train.x.y=1", "train.x: unknown key"),
        ("adapter.alpha.x=1", "adapter.alpha holds a single value, so nothing can be set below it"),
        ("adapter.rank.x=1", "adapter.rank: expected a whole number, found a mapping"),
        ("adapter.rank", "expected section.key=value, such as adapter.rank=8"),
        ("=3", "expected section.key=value, such as adapter.rank=8"),
        ("adapter.=3", "expected section.key=value, such as adapter.rank=8"),
        ("serve.vllm_args={a: 1, a: 2}", "a is set twice"),
        ("adapter.target_modules=[q_proj", "the file ends inside a [ or { that was never closed"),
    ],
)
def test_set_mistakes(path: Path, text: str, expected: str) -> None:
    (line,) = problems(path, "adapter:\n  alpha: 4\n", text)
    assert line.startswith(f"--set {text}: {expected}")


def test_an_unreadable_file_does_not_hide_a_bad_set(tmp_path: Path) -> None:
    with pytest.raises(ConfigErrors) as caught:
        load(tmp_path / "none.yaml", ["nonsense"])
    assert [problem.where for problem in caught.value.problems] == [str(tmp_path / "none.yaml"), "--set nonsense"]


def test_flags_are_named_as_they_were_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigErrors, match=r"^--port 0: serve\.port: must be 1 or more, found 0$"):
        load_defaults(tmp_path, ["serve.port=8001", Override(("serve", "port"), 0, "--port 0")])


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.sampled_from("adapter:rank\n\t -[]{}#&*!|>'\"%@`,?0e.~<=é\x00\ud800"), max_size=40))
def test_no_text_at_all_ends_in_anything_but_a_config_or_its_errors(path: Path, text: str) -> None:
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with suppress(ConfigErrors):
        load(path, [text])


def test_a_config_made_in_python_is_as_strict() -> None:
    with pytest.raises(ValueError, match="expected a number"):
        PreftConfig.model_validate({"train": {"max_steps": True}})
