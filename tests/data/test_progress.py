"""The lines about the progress of preprocessing."""

import contextlib
import time

from terminal import Terminal

from megajax.data.progress import show_progress


def test_a_line_has_the_share_that_is_done_the_speed_and_the_time_that_is_left(monkeypatch, capsys):
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    with show_progress(total_bytes=1000, line_seconds=10) as progress:
        for seconds, size, documents, tokens in ((9, 100, 2, 50), (11, 150, 3, 150), (5, 50, 1, 1), (15, 500, 4, 599)):
            now += seconds
            progress.advance(size, documents, tokens)
    assert progress.seconds == 40
    # A quarter took 20 seconds, and four fifths 40; the other parts came less than 10 seconds after a line.
    assert capsys.readouterr().err.splitlines() == [
        "25%: 5 documents, 200 tokens, 10 tokens/s, 60 s left",
        "80%: 10 documents, 800 tokens, 20 tokens/s, 10 s left",
    ]


def test_a_terminal_has_a_bar_with_the_share_that_is_done():
    with contextlib.redirect_stderr(Terminal()) as terminal, show_progress(total_bytes=1000) as progress:
        progress.advance(250, 1, 5)
    assert " 25%" in terminal.getvalue()
