"""Progress without a terminal: lines at the start, at the end, and in between also while nothing is reported."""

import io
import time

import pytest
from rich.console import Console

from preft_cli import console


@pytest.fixture
def interval(monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(console, "PLAIN_INTERVAL_S", 0.05)
    return 0.05


def test_lines_keep_coming_while_the_body_is_stuck(capsys: pytest.CaptureFixture[str], interval: float) -> None:
    with console.progress("loading"):
        time.sleep(interval * 10)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "loading: started"
    assert lines[-1] == "loading: done, 0s"
    assert len(lines) >= 4
    assert lines[1] == "loading: 0s so far"


def test_counts_note_and_time_left(capsys: pytest.CaptureFixture[str], interval: float) -> None:
    with console.progress("training", total=200, unit="steps") as bar:
        bar.update(50, note="loss [2.31]")
        time.sleep(interval * 3)
        bar.advance(150)
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert captured.out == ""
    assert lines[0] == "training: started, 200 steps"
    assert lines[1] == "training: 50/200 steps, loss [2.31], 0s so far, about 0s left"
    assert lines[-1] == "training: done, 200/200 steps, loss [2.31], 0s"


def test_an_error_says_where_it_stopped(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        with console.progress("training", total=9, unit="steps") as bar:
            bar.update(3)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert capsys.readouterr().err.splitlines()[-1] == "training: stopped, 3/9 steps, 0s"


def test_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    plain = console._Plain("training", total=100, unit="steps", interval_s=1000)
    plain.start()
    plain.update(25)
    now = 100.0
    line = plain.line()
    plain.stop(finished=True)
    assert line == "training: 25/100 steps, 1m40s so far, about 5m00s left"


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0s"), (59.9, "59s"), (245, "4m05s"), (7380, "2h03m")])
def test_duration(seconds: float, text: str) -> None:
    assert console.duration(seconds) == text


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(console, "err", Console(file=screen, force_terminal=True, width=100))
    with console.progress("training", total=4, unit="steps") as bar:
        bar.update(2, note="loss [2.31]")
        bar.advance(1)
    assert "3/4 steps" in screen.getvalue()
    assert "loss [2.31]" in screen.getvalue()
    assert "started" not in screen.getvalue()


def test_messages_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    console.say("pip install 'preft[train]' " + "x" * 300)
    console.warn("[bold]")
    console.error("[/nothing]")
    assert capsys.readouterr().err.splitlines() == [
        "pip install 'preft[train]' " + "x" * 300,
        "warning: [bold]",
        "error: [/nothing]",
    ]
