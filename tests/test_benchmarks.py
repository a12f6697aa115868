"""What the benchmarks' figures rest on: the statistics, and how the load generator reads an answer."""

from __future__ import annotations

import json
import socketserver
import threading
from collections import Counter
from itertools import pairwise
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.client import Client, Target, ceiling, read
from benchmarks.measure import (
    Answer,
    Bounds,
    failures,
    percentile,
    poisson_arrivals,
    ratio_of_medians,
    summary,
    tokens_per_second,
)
from benchmarks.report import plain
from benchmarks.works import independent, shared_prefix


def answer(*arrivals: float, intended: float = 0.0, error: str | None = None) -> Answer:
    ended = arrivals[-1] if arrivals else intended
    return Answer(intended, intended, arrivals, ended, 10, 0, len(arrivals), error=error)


# Statistics.


@pytest.mark.parametrize(("fraction", "expected"), [(0, 1), (0.5, 2.5), (0.9, 3.7), (1, 4)])
def test_a_percentile_lies_between_the_nearest_two(fraction: float, expected: float):
    assert percentile([4, 1, 3, 2], fraction) == pytest.approx(expected)


def test_a_ratio_of_rounds_that_never_change_is_certain():
    ratio = ratio_of_medians([3.0] * 5, [2.0] * 5)
    assert (ratio.value, ratio.low, ratio.high) == (1.5, 1.5, 1.5)


def test_rounds_are_drawn_in_pairs():
    """Both were twice as slow in two rounds: their ratio was the same in all."""
    ratio = ratio_of_medians([11.0, 5.5, 11.0, 5.5, 11.0], [10.0, 5.0, 10.0, 5.0, 10.0])
    assert (ratio.low, ratio.high) == (pytest.approx(1.1), pytest.approx(1.1))


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.floats(1, 100), st.floats(1, 100)), min_size=1, max_size=9))
def test_an_interval_lies_within_the_rounds_and_is_the_same_each_time(rounds: list[tuple[float, float]]):
    ours, theirs = [a for a, _ in rounds], [b for _, b in rounds]
    ratio = ratio_of_medians(ours, theirs, resamples=200)
    assert min(ours) / max(theirs) <= ratio.low <= ratio.high <= max(ours) / min(theirs)
    assert ratio == ratio_of_medians(ours, theirs, resamples=200)


@pytest.mark.parametrize(
    ("target", "at_most", "met"),
    [(1.05, False, True), (1.3, False, False), (0.95, True, True), (0.7, True, False)],
)
def test_a_target_is_met_when_the_interval_reaches_it(target: float, at_most: bool, met: bool):
    ratio = ratio_of_medians([8, 9, 10, 11, 12], [10, 10, 10, 10, 10])
    assert (ratio.low, ratio.high) == (0.8, 1.2)
    assert ratio.meets(target, at_most=at_most) is met


def test_poisson_arrivals_come_at_their_rate_and_clump():
    times = poisson_arrivals(20.0, 4000, seed=1)
    gaps = [after - before for before, after in pairwise(times)]
    assert times == sorted(times)
    assert mean(gaps) == pytest.approx(1 / 20, rel=0.1)
    assert mean(gap * gap for gap in gaps) == pytest.approx(2 / 20**2, rel=0.2)  # an even pace has half of that


def test_a_late_client_does_not_hide_the_wait():
    late = Answer(
        intended=1.0, sent=3.0, arrivals=(3.5,), ended=3.5, prompt_tokens=1, cached_tokens=0, completion_tokens=1
    )
    assert late.ttft == 2.5
    assert tokens_per_second([answer(1.0, 2.0), late]) == 3 / 3.5


def test_a_summary_counts_what_kept_the_bounds_and_what_failed():
    answers = [answer(0.1, 0.2, 0.3), answer(3.0, 3.1), answer(0.1, 1.1), answer(error="503: busy")]
    found = summary(answers, Bounds(ttft=1.0, tpot=0.5))
    assert (found["requests"], found["failed"]) == (4, 1)
    assert found["goodput"] == pytest.approx(1 / 3.1)
    assert found["itl_max"] == pytest.approx(1000)
    assert "ttft_p99" not in found  # of three
    assert failures(answers) == Counter({"503: busy": 1})


def test_a_summary_of_failures_alone_says_so():
    assert summary([answer(error="gone")], Bounds()) == {"requests": 1, "failed": 1}


# The load generator.


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def stream(*events: object, newline: str = "\n") -> list[bytes]:
    """Each event in a chunk of its own, behind the head."""
    texts = [f"data: {each if isinstance(each, str) else json.dumps(each)}{newline * 2}" for each in events]
    return [HEAD, *(f"{len(text):x}\r\n{text}\r\n".encode() for text in texts), b"0\r\n\r\n"]


def said(text: str, **more: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": {"content": text}}], **more}


USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 5}}
EVENTS = (said("", role=True), said("a"), said("b"), {"choices": [], "usage": USAGE}, "[DONE]")


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_each_piece_has_the_time_of_its_own_chunk(newline: str):
    parts = stream(*EVENTS, newline=newline)
    marks, length = list[tuple[int, float]](), 0
    for at, part in enumerate(parts):
        length += len(part)
        marks.append((length, float(at)))
    found = read(b"".join(parts), marks, 0.0, 0.0)
    assert found.arrivals == (2.0, 3.0)  # behind the head and the chunk that says nothing
    assert (found.text, found.error, found.ended) == ("ab", None, 6.0)
    assert (found.prompt_tokens, found.cached_tokens, found.completion_tokens) == (7, 5, 3)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 60))
def test_an_answer_reads_the_same_however_it_was_cut(size: int):
    raw = b"".join(stream(*EVENTS))
    marks = [(min(at + size, len(raw)), float(at)) for at in range(0, len(raw), size)]
    found = read(raw, marks, 0.0, 0.0)
    assert (found.text, len(found.arrivals), found.completion_tokens, found.error) == ("ab", 2, 3, None)
    assert list(found.arrivals) == sorted(found.arrivals)


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy", "503: busy"),
        (b"", "no answer: "),
        (b"".join(stream(said("a"))), "the stream ended without [DONE]"),
        (b"".join(stream({"error": "died"}, "[DONE]")), "died"),
    ],
)
def test_what_is_no_whole_answer_is_a_failure(raw: bytes, error: str):
    assert read(raw, [(len(raw), 1.0)], 0.0, 0.0).error == error


def test_a_server_that_is_not_there_is_a_failure_of_each_request():
    with Client() as client:
        run = client.run(Target(1), [{}] * 3, streams=2)
    assert [each.error is not None for each in run.answers] == [True] * 3


def test_a_request_on_a_connection_that_its_server_gave_up_is_sent_again_on_a_new_one():
    said_ok = b"".join(stream({"choices": [{"delta": {"content": "hello"}}]}, "[DONE]"))

    class OneAnswer(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while self.rfile.readline().strip():
                pass
            self.rfile.read(2)
            self.wfile.write(said_ok)
            self.rfile.readline()  # of the next request, which is not answered

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), OneAnswer) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            with Client() as client:
                run = client.run(Target(server.server_address[1]), [{}] * 6, streams=2)
        finally:
            server.shutdown()
    assert [(each.error, each.text) for each in run.answers] == [(None, "hello")] * 6


def test_a_run_of_many_pieces_comes_whole_where_output_is_not_buffered(monkeypatch: pytest.MonkeyPatch):
    """It is a line of megabytes, in a pipe that takes some kilobytes at once."""
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    with Client() as client:
        assert ceiling(client, streams=64, pieces=2000) > 0


# The works.


def test_independent_prompts_differ_and_shared_ones_begin_alike():
    texts = [body["messages"][-1]["content"] for seed in (1, 2) for body in independent(16, 8, seed)]
    assert len({text[:8] for text in texts}) == len(texts)
    bodies = shared_prefix(8, 8, seed=3)
    assert len({body["messages"][0]["content"] for body in bodies}) == 1
    assert len({body["messages"][1]["content"] for body in bodies}) == 8


def test_a_published_command_has_no_path_of_this_machine():
    assert plain(["/somewhere/bin/llama-server", "-m", "/a/b.gguf", "-t", "2"]) == "llama-server -m b.gguf -t 2"
