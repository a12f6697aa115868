"""`citadel models list`, `load`, `unload` and `top`: the models of a running server, and what it does with them now."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Any, Final
from urllib.parse import quote

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table

from citadel.commands.client import Client, Refused, ask
from citadel.commands.common import FAILED, show

Json = dict[str, Any]

_STREAM: Final = "/admin/status/stream"
_LISTED: Final = ("id", "state", "engine", "mode", "context_length", "cold_start_s", "notes")
_STYLES: Final = {"loaded": "green", "starting": "yellow", "unavailable": "red"}


def list_models(options: argparse.Namespace) -> int:
    async def work(client: Client) -> int:
        models = (await client.call("GET", "/v1/models"))["data"]
        rows = models if options.json else [{name: model[name] for name in _LISTED} for model in models]
        show(rows, as_json=options.json)
        return 0

    return ask(options, work)


def load(options: argparse.Namespace) -> int:
    return ask(options, lambda client: _bring(client, options, "load", how_load_ended))


def unload(options: argparse.Namespace) -> int:
    return ask(options, lambda client: _bring(client, options, "unload", how_unload_ended))


def how_load_ended(model: Json, queue: list[Json]) -> str | None:
    """`""` when it is loaded, why not when that is certain, None while it is under way."""
    if model["state"] == "loaded":
        return ""
    if model["state"] == "starting" or any(place["name"] == model["id"] for place in queue):
        return None
    return model["reason"] or "the load was given up: it does not fit, or somebody unloaded it"


def how_unload_ended(model: Json, _queue: list[Json]) -> str | None:
    """`""` when it is out of memory; a call that comes meanwhile loads it again, which is an end, too."""
    return None if model["state"] == "loaded" and model["draining"] else ""


async def _bring(
    client: Client, options: argparse.Namespace, what: str, ended: Callable[[Json, list[Json]], str | None]
) -> int:
    """Ask for it, and follow until it has ended."""
    try:
        told = await client.call("POST", f"/admin/models/{quote(options.model)}/{what}")
    except Refused as refused:
        if refused.status == 404:
            raise Refused(f"there is no model {options.model!r}; `models list` lists them", 404) from None
        raise
    model, problem = told["model"], "" if options.no_wait else None
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[left]}")
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(f"{what} {model['id']}", total=1.0, left="")
        async with aclosing(client.events("GET", _STREAM)) as snapshots:
            while problem is None:
                snapshot = (await anext(snapshots)).data or {}
                model = next(each for each in snapshot["models"] if each["id"] == model["id"])
                _draw(bar, task, model, snapshot["queue"])
                problem = ended(model, snapshot["queue"])
    if problem:
        print(f"{model['id']}: {problem}", file=sys.stderr)
        return FAILED
    if options.json:
        print(json.dumps(model, indent=2))
    else:
        print(f"{model['id']}: {model['state']}")
    return 0


def _draw(bar: Progress, task: TaskID, model: Json, queue: list[Json]) -> None:
    names = [place["name"] for place in queue]
    if model["state"] == "starting":
        bar.update(task, completed=model["progress"], left=f"{model['remaining_s']} s")
    elif model["id"] in names:
        bar.update(task, left=f"waits for the GPU, {names.index(model['id'])} ahead")
    elif model["draining"]:
        bar.update(task, left=f"{model['running']} requests are running")


# -- top


def top(options: argparse.Namespace) -> int:
    """Until Ctrl-C; once with `--once`, or where nobody watches. As JSON, each moment is a line."""

    async def work(client: Client) -> int:
        console = Console()
        once = options.once or not (options.json or console.is_terminal)
        async with aclosing(client.events("GET", _STREAM)) as snapshots:
            if options.json or once:
                async for event in snapshots:
                    _print(console, event.data or {}, as_json=options.json)
                    if once:
                        break
                return 0
            with Live(console=console, screen=True, auto_refresh=False) as live:
                async for event in snapshots:
                    live.update(picture(event.data or {}), refresh=True)
        print("the server ended the stream", file=sys.stderr)
        return FAILED

    return ask(options, work)


def _print(console: Console, snapshot: Json, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(snapshot), flush=True)
    else:
        console.print(picture(snapshot))


def picture(snapshot: Json) -> Group:
    """One moment of `/admin/status` as tables: models, the queue for the GPU, members."""
    offline = "  the server takes no calls" if snapshot["offline"] else ""
    head = f"{snapshot['tokens_per_s']:.0f} tokens/s  {_memory(snapshot['memory'])}{offline}"
    parts: list[Table | str] = [head, _models(snapshot["models"])]
    if snapshot["queue"]:
        parts.append(_queue(snapshot["queue"]))
    if snapshot["usage"]:
        parts.append(_usage(snapshot["usage"]))
    return Group(*parts)


def _memory(memory: Mapping[str, Mapping[str, int]]) -> str:
    told: list[str] = []
    for name, words in (("gpu", "GPU memory"), ("ram", "RAM")):
        if (total := memory[name]["total"]) > 0:
            told.append(f"{words} {(total - memory[name]['free']) / 1e9:.1f} of {total / 1e9:.1f} GB")
    return "  ".join(told)


def _models(models: list[Json]) -> Table:
    table = Table("model", "state", "", "slots", "waiting", "tokens/s", box=None, pad_edge=False, header_style="dim")
    for model in models:
        state, doing = model["state"], model["reason"] or ""
        if state == "starting":
            doing = f"{model['progress']:.0%}, {model['remaining_s']} s left"
        elif model["draining"]:
            doing = "ends its requests"
        elif model["pinned"]:
            doing = "pinned"
        style = _STYLES.get(state, "dim")
        running = f"{model['running']}/{model['slots']}"
        rate = f"{model['tokens_per_s']:.0f}"
        table.add_row(escape(model["id"]), f"[{style}]{state}[/]", escape(doing), running, str(model["waiting"]), rate)
    return table


def _queue(queue: list[Json]) -> Table:
    table = Table("for the GPU", "what", "since", "needs", box=None, pad_edge=False, header_style="dim")
    for place in queue:
        needs = "all of it" if place["gpu_memory"] is None else f"{place['gpu_memory'] / 1e9:.1f} GB"
        needs = needs if place["kind"] != "model" else ""
        running = "has it" if place["running"] else "waits"
        table.add_row(escape(f"{place['kind']} {place['name']}"), running, f"{place['asked_s']:.0f} s", needs)
    return table


def _usage(usage: list[Json]) -> Table:
    table = Table("member today", "calls", "prompt", "completion", box=None, pad_edge=False, header_style="dim")
    for member in sorted({row["member"] for row in usage}):
        own = [row for row in usage if row["member"] == member]
        sums = (sum(row[name] for row in own) for name in ("calls", "prompt_tokens", "completion_tokens"))
        table.add_row(escape(member), *map(str, sums))
    return table
