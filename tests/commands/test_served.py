"""The commands that ask a running server: what they print, how they end, and what they say when it goes wrong."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from citadel import cli
from citadel.commands.bench import Figures, Sample, figures
from citadel.commands.chat import Answer, printable
from citadel.commands.served import how_load_ended, how_unload_ended
from tests.conftest import Serving, make_config, serving, write_script
from tests.process import ROOT

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
LINES = [
    {"when": "endless", "pieces": ["word "] * 100_000, "delay_ms": 5},
    {"when": "think", "pieces": ["a ", "thought", "</think>", "the ", "answer"], "reasoning_open": True},
    {"when": "weather", "pieces": [CALL]},
    {"when": "colour", "pieces": ["\x1b[31mred", "\x07"]},
    {"when": "break", "pieces": ["one"], "fail": "error", "after": 1},
    {"pieces": ["three", " small", " pieces"]},
]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@pytest.fixture
async def server(tmp_path: Path) -> AsyncGenerator[Serving]:
    source = write_script(tmp_path / "script.jsonl", LINES)
    models = {
        "org/quick": {"engine": "replay", "source": source, "format": "hermes", "slots": 4},
        "slow": {"engine": "replay", "source": source, "replay": {"load_s": 0.5}},
        "gone": {"engine": "replay", "source": str(tmp_path / "missing.jsonl")},
    }
    async with serving(make_config(tmp_path, models)) as running:
        yield running


@pytest.fixture
def citadel(server: Serving, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command in a thread, as against a server elsewhere; returns its exit code, stdout and stderr."""
    monkeypatch.setenv("CITADEL_URL", server.url)
    monkeypatch.setenv("CITADEL_API_KEY", server.key)

    async def run(*words: str) -> tuple[int, str, str]:
        code = await asyncio.to_thread(cli.main, words)
        return code, *capsys.readouterr()

    return run


async def test_models_are_listed_loaded_and_unloaded(citadel: Any) -> None:
    code, out, _ = await citadel("models", "list")
    assert (code, [line.split()[:3] for line in out.splitlines()[1:3]]) == (
        0,
        [["org/quick", "stopped", "replay"], ["slow", "stopped", "replay"]],
    )
    assert await citadel("models", "load", "slow") == (0, "slow: loaded\n", "")
    code, out, _ = await citadel("models", "load", "org/quick", "--json")
    assert (code, json.loads(out)["state"]) == (0, "loaded")
    assert await citadel("models", "unload", "slow") == (0, "slow: stopped\n", "")
    code, out, _ = await citadel("models", "list", "--json")
    assert [model["loaded"] for model in json.loads(out)] == [True, False, False]


async def test_a_load_that_fails_says_why(citadel: Any, tmp_path: Path) -> None:
    code, out, told = await citadel("models", "load", "gone")
    assert (code, out) == (1, "")
    assert f"there is no {tmp_path / 'missing.jsonl'}" in told
    code, out, told = await citadel("models", "load", "nope")
    assert (code, out, told) == (1, "", "there is no model 'nope'; `models list` lists them\n")


async def test_top_shows_a_moment(citadel: Any) -> None:
    await citadel("models", "load", "org/quick")
    code, out, _ = await citadel("models", "top", "--once")
    assert code == 0
    assert ["org/quick", "loaded", "0/4", "0", "0"] in [line.split() for line in out.splitlines()]
    code, out, _ = await citadel("models", "top", "--once", "--json")
    assert (code, len(out.splitlines())) == (0, 1)
    assert {"models", "queue", "memory", "usage"} <= set(json.loads(out))


async def test_a_question_is_answered_on_stdout_without_its_reasoning(citadel: Any) -> None:
    assert await citadel("chat", "please", "think") == (0, "the answer\n", "")
    code, out, _ = await citadel("chat", "--json", "--model", "slow", "please think")
    told = json.loads(out)
    assert code == 0
    assert (told["model"], told["content"], told["reasoning"]) == ("slow", "the answer", "a thought")
    assert told["usage"]["completion_tokens"] == 5


async def test_calls_are_shown_as_calls(citadel: Any, tmp_path: Path) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps(TOOLS), encoding="utf-8")
    code, out, _ = await citadel("chat", "--tools", str(tools), "the weather")
    assert code == 0
    assert out.split(maxsplit=2)[:2] == ["->", "weather"]
    assert json.loads(out.split(maxsplit=2)[2]) == {"city": "Paris"}
    code, _, told = await citadel("chat", "--tools", str(tmp_path / "none.json"), "the weather")
    assert code == 2
    assert "none.json" in told


async def test_what_a_model_says_does_not_steer_the_terminal(citadel: Any) -> None:
    assert await citadel("chat", "a colour") == (0, "[31mred\n", "")
    assert printable("a\x9b1m\tb\n\x7f") == "a1m\tb\n"


async def test_an_error_within_a_stream_is_one_line(citadel: Any) -> None:
    code, out, told = await citadel("chat", "please break")
    assert (code, out.strip(), told) == (1, "one", "The replay script has an error here\n")


async def test_a_bench_counts_what_the_server_counted(citadel: Any) -> None:
    code, out, _ = await citadel("bench", "--requests", "5", "--parallel", "2", "--json")
    told = json.loads(out)
    assert code == 0
    assert (told["model"], told["requests"], told["failed"], told["tokens"]) == ("org/quick", 5, 0, 15)
    assert told["ttft_ms_median"] > 0
    code, out, _ = await citadel("bench", "--requests", "1")
    assert (code, out.splitlines()[0]) == (0, "org/quick: 1 requests, 1 at once, 0 failed")
    assert (await citadel("bench", "--model", "nope"))[::2] == (1, "The model 'nope' is not installed\n")


@pytest.mark.parametrize("words", [("models", "list"), ("models", "load", "slow"), ("chat", "hi"), ("bench",)])
async def test_what_goes_wrong_is_one_clear_line(citadel: Any, monkeypatch: pytest.MonkeyPatch, words: Any) -> None:
    monkeypatch.setenv("CITADEL_API_KEY", "hlk_wrong_key")
    assert await citadel(*words) == (1, "", "The API key is unknown or revoked\n")
    monkeypatch.delenv("CITADEL_API_KEY")
    assert await citadel(*words) == (2, "", "no key: set CITADEL_API_KEY, or give --key\n")
    code, out, told = await citadel(*words, "--key", "k", "--url", "http://127.0.0.1:1")
    assert (code, out, told.count("\n")) == (1, "", 1)
    assert told.startswith("http://127.0.0.1:1: no server answers there")


async def test_another_kind_of_server_is_told(citadel: Any) -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 2\r\n\r\nhi")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as other:
        url = f"http://127.0.0.1:{other.sockets[0].getsockname()[1]}"
        code, out, told = await citadel("models", "list", "--url", url)
    assert (code, out) == (1, "")
    assert told.startswith(f"{url}: this is no answer of Citadel; is the URL right?")


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("localhost:8040", "http://localhost:8040"),
        ("https://host/v1/", "https://host"),
        ("http://host:8040/", "http://host:8040"),
    ],
)
def test_an_address_may_be_written_in_several_ways(given: str, taken: str) -> None:
    assert cli.parser().parse_args(["models", "list", "--url", given]).url == taken


@pytest.mark.parametrize("given", ["host:port", "ftp://host", "http://host/path", "", "http://"])
def test_what_is_no_address_is_refused(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.parser().parse_args(["models", "list", "--url", given])
    assert ended.value.code == 2
    assert "is no address of a server" in capsys.readouterr().err


# -- decisions


def model(state: str, **fields: Any) -> dict[str, Any]:
    return {"id": "m", "state": state, "reason": None, "draining": False, **fields}


def test_when_a_load_has_ended() -> None:
    waits: list[Mapping[str, Any]] = [{"name": "m"}]
    assert how_load_ended(model("loaded"), []) == ""
    assert how_load_ended(model("starting"), []) is None
    assert how_load_ended(model("unavailable", reason="once"), waits) is None  # type: ignore[arg-type]
    assert how_load_ended(model("unavailable", reason="no weights"), []) == "no weights"
    assert "does not fit" in (how_load_ended(model("stopped"), []) or "")
    assert how_unload_ended(model("loaded", draining=True), []) is None
    assert how_unload_ended(model("loaded"), []) == how_unload_ended(model("stopped"), []) == ""


def test_chunks_are_folded_with_their_calls() -> None:
    answer = Answer()
    parts = [
        {"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"x"'}},
        {"index": 1, "id": "b", "type": "function", "function": {"name": "g", "arguments": ""}},
        {"index": 0, "function": {"arguments": ": 1}"}},
    ]
    for part in parts:
        answer.take({"model": "m", "choices": [{"delta": {"tool_calls": [part]}, "finish_reason": None}]})
    answer.take({"choices": [{"delta": {}, "finish_reason": "tool_calls"}]})
    answer.take({"choices": [], "usage": {"completion_tokens": 9}})
    assert [(each["id"], each["function"]["arguments"]) for each in answer.calls] == [("a", '{"x": 1}'), ("b", "")]
    assert (answer.finish_reason, answer.usage) == ("tool_calls", {"completion_tokens": 9})
    assert answer.message() == {"role": "assistant", "content": None, "tool_calls": answer.calls}


def test_figures_are_of_what_was_answered() -> None:
    samples = [Sample(first_s=n / 10, total_s=n / 10 + 1, tokens=11) for n in range(1, 21)]
    assert figures("m", samples, requests=21, parallel=2, seconds=10) == Figures(
        model="m",
        requests=21,
        failed=1,
        parallel=2,
        tokens=220,
        seconds=10,
        ttft_ms_median=1000.0,
        ttft_ms_p95=1900.0,
        tokens_per_s_median=10.0,
        throughput=22.0,
    )
    none = figures("m", [], requests=1, parallel=1, seconds=1)
    assert (none.failed, none.ttft_ms_median, none.tokens_per_s_median) == (1, None, None)


# -- a conversation, in a terminal


PATIENCE_S = 60


class Terminal:
    """`citadel chat` with a terminal of its own."""

    def __init__(self, server: Serving, *words: str) -> None:
        self._screen, inner = os.openpty()
        given = {"PYTHONPATH": str(ROOT), "TERM": "dumb", "CITADEL_URL": server.url, "CITADEL_API_KEY": server.key}
        # Ctrl-C is ignored by what a shell has started in the background, and by all that this starts in turn.
        command = ["env", "--default-signal=INT", sys.executable, "-m", "citadel", "chat", *words]
        self._process = subprocess.Popen(
            command, stdin=inner, stdout=inner, stderr=inner, env={**os.environ, **given}, start_new_session=True
        )
        os.close(inner)
        self._seen = ""

    async def until(self, text: str) -> str:
        """What came since the last call, to `text` and with it."""
        async with asyncio.timeout(PATIENCE_S):
            while text not in self._seen:
                await self._more()
        before, _, self._seen = self._seen.partition(text)
        return before + text

    async def _more(self) -> None:
        loop, there = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._screen, there.set)
        try:
            await there.wait()
        finally:
            loop.remove_reader(self._screen)
        self._seen += os.read(self._screen, 65536).decode(errors="replace").replace("\r\n", "\n")

    def type(self, line: str) -> None:
        os.write(self._screen, line.encode() + b"\n")

    def interrupt(self) -> None:
        """Ctrl-C."""
        self._process.send_signal(signal.SIGINT)

    async def interrupt_at(self, prompt: str) -> None:
        """Between showing a prompt and waiting, Python's readline does not hear a Ctrl-C before the next key; with
        others on its core the process may stay there for long."""
        await self.until(prompt)
        process = psutil.Process(self._process.pid)
        async with asyncio.timeout(PATIENCE_S):
            while process.status() != psutil.STATUS_SLEEPING:  # noqa: ASYNC110 - nobody could set an event
                await asyncio.sleep(0.01)
        self.interrupt()

    async def end(self) -> int:
        os.write(self._screen, b"\x04")
        return await asyncio.to_thread(self._process.wait, PATIENCE_S)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._screen)


async def running_on(server: Serving, model: str) -> int:
    async with server.session.get(server.url + "/admin/models") as response:
        return next(each["running"] for each in (await response.json())["models"] if each["id"] == model)


async def test_ctrl_c_stops_the_answer_and_not_the_conversation(server: Serving, tmp_path: Path) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps(TOOLS), encoding="utf-8")
    with closing(Terminal(server, "--tools", str(tools))) as talk:
        await talk.until("\n> ")
        talk.type("endless")
        await talk.until("word word word")
        talk.interrupt()
        await talk.until("stopped")
        await talk.until("\n> ")
        async with asyncio.timeout(30):  # the server hears of it in its own time
            while await running_on(server, "org/quick"):
                pass
        talk.type("please think")
        assert "a thought" in await talk.until("the answer")
        await talk.interrupt_at("\n> ")
        await talk.until("Ctrl-D ends")
        await talk.until("\n> ")
        talk.type("the weather")
        await talk.interrupt_at("result of weather: ")
        await talk.until("stopped")
        await talk.until("\n> ")
        talk.type("/model nope")
        await talk.until("\n> ")
        talk.type("hi")
        await talk.until("The model 'nope' is not installed")
        await talk.until("\n> ")
        assert await talk.end() == 0
