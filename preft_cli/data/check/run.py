"""From a config to everything that training will see. No weights are loaded."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from preft_cli.config.schema import PreftConfig
from preft_cli.console import progress
from preft_cli.data.check.count import count_file, find_leaks
from preft_cli.data.check.result import DataCheck, ServerCheck, ServerRow
from preft_cli.data.check.show import show_row
from preft_cli.data.load import Tokens, data_files, load_tokens, tokenise_files
from preft_cli.data.tokenise import tokenise_turn
from preft_cli.data.turn import Turn
from preft_cli.doctor.facts import has_module
from preft_cli.errors import UserError
from preft_cli.models import BaseModel, resolve
from preft_cli.serving.options import option_name

SHAPES_PROMPTS = ("chat-template-content-format", "default-chat-template-kwargs")
"""Options of the server that change what it makes of messages."""


def check(config: PreftConfig, root: Path, rows: int, row: int = 1) -> DataCheck:
    """Read, tokenise and count the data files of `config`, and compare prompts with the server's.

    Args:
        rows: how many of the first rows of train.file are compared.
        row: the one that is shown, from 1 on.

    Raises:
        UserError: what training would refuse too, or there is no such row.
    """
    if config.train.task == "grpo":
        raise UserError(
            "preft data check looks at answers to learn, and train.task: grpo has none; preft train --dry-run counts problems "
            "and names those that cannot be judged",
            exit_code=2,
        )
    files = data_files(config, root)
    turns = {setting: file.read() for setting, file in files.items()}
    base = resolve(config.model.base, root)
    tokens = load_tokens(config, root, base)
    data = tokenise_files(turns, tokens)
    kept = data["train.file"].rows
    if row > len(kept):
        raise UserError(f"--row {row}: train.file has {len(kept)} rows to show", exit_code=2)
    return DataCheck(
        base_model=base.name,
        method=config.adapter.method,
        max_length=tokens.limit,
        files=[
            count_file(setting, str(files[setting].file), turns[setting], data[setting], tokens.limit)
            for setting in files
        ],
        leaks=find_leaks(data),
        row=show_row(kept[row - 1], config.adapter.method, tokens.tokenizer),
        server=compare(config, root, base, tokens, turns["train.file"], rows),
    )


def compare(
    config: PreftConfig, root: Path, base: BaseModel, tokens: Tokens, turns: list[Turn], rows: int
) -> ServerCheck:
    """The prompts of the first `rows` of `turns` that fit, here and on the server; or why they were not compared."""
    if not rows:
        return ServerCheck(not_compared="--rows 0", rows=[])
    if not has_module("vllm"):
        return ServerCheck(not_compared="vLLM is not installed here: pip install 'preft[cpu]' or 'preft[gpu]'", rows=[])
    from preft_cli.data.check.server import ServerPrompts

    options = {option_name(key): value for key, value in config.serve.vllm_args.items()}
    with progress("asking vLLM's front end for the same prompts", total=rows, unit="rows") as bar:
        server = ServerPrompts(
            base.path,
            root / config.model.chat_template if config.model.chat_template else None,
            {name: value for name, value in options.items() if name in SHAPES_PROMPTS},
        )
        tokenised = ((turn, tokenise_turn(turn, tokens.tokenizer, tokens.template)) for turn in turns)
        compared = []
        for turn, row in islice((both for both in tokenised if len(both[1]) <= tokens.limit), rows):
            found = server.ids(turn)
            ids, refusal = (None, found) if isinstance(found, str) else (found, None)
            compared.append(ServerRow(where=turn.where, ids=row.prompt_ids, server_ids=ids, refusal=refusal))
            bar.advance()
    return ServerCheck(not_compared=None, rows=compared)
