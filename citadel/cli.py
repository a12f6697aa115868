"""`python -m citadel`: the command line's words. What a command does is in `citadel/commands/`."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from citadel.commands.common import EXIT_CODES, FAILED, STOPPED, USAGE_ERROR, CommandFailed, config_of
from citadel.config import ConfigError

_MOST: Final = 2**53
_COMMANDS: Final = ("serve", "keys", "members", "usage", "models", "gpu", "chat", "bench", "doctor", "plan")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code, one of `EXIT_CODES` or that of the command which `gpu` ran."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # What stands behind `--` is somebody else's command, not ours to read.
    split = arguments.index("--") if "--" in arguments else len(arguments)
    arguments, behind = arguments[:split], arguments[split + 1 :]
    if not any(word in _COMMANDS for word in arguments) and not {"-h", "--help"} & set(arguments):
        arguments = ["serve", *arguments]
    options = parser().parse_args(arguments, argparse.Namespace(argv=behind))
    try:
        return options.command(options)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return USAGE_ERROR
    except CommandFailed as failed:
        print(failed, file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return STOPPED


def parser() -> argparse.ArgumentParser:
    codes = "".join(f"\n  {code:<4} {meaning.replace('`', '')}" for code, meaning in EXIT_CODES.items())
    top = argparse.ArgumentParser(
        prog="python -m citadel",
        description="An inference server for one GPU box. Each COMMAND has its own --help.",
        epilog=f"exit codes:{codes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--config", type=Path, default=Path("models.toml"), help="the models to serve (%(default)s)")
    common.add_argument("--data-dir", type=Path, help="where keys and usage are kept")
    as_json = argparse.ArgumentParser(add_help=False)
    as_json.add_argument("--json", action="store_true", help="as JSON")

    serve = commands.add_parser("serve", parents=[common], help="serve the models of models.toml (the default command)")
    serve.add_argument("--host", help="the address to listen on (127.0.0.1)")
    serve.add_argument("--port", type=int, help="the port to listen on (8040)")
    serve.set_defaults(command=_serve)

    keys = commands.add_parser("keys", help="make, list, rotate and revoke API keys").add_subparsers(required=True)
    _key_commands(keys, common, as_json)
    members = commands.add_parser("members", help="list members and set their limits").add_subparsers(required=True)
    _member_commands(members, common, as_json)

    usage = commands.add_parser("usage", parents=[common, as_json], help="calls and tokens by day, key and model")
    usage.add_argument("--member", help="of this member only")
    usage.add_argument("--days", type=_positive, default=1, help="the last so many UTC days (%(default)s)")
    usage.set_defaults(command=_later("accounts", "show_usage"))

    server = _server_options()
    models = commands.add_parser("models", help="list, load, unload and watch models").add_subparsers(required=True)
    _model_commands(models, common, as_json, server)
    _asking_commands(commands, as_json, server)

    _plan_command(commands, common, as_json)
    doctor = commands.add_parser("doctor", parents=[common, as_json], help="look for what is wrong, and say what to do")
    doctor.set_defaults(command=_later("doctor", "run"))
    return top


def _key_commands(keys: Any, common: argparse.ArgumentParser, as_json: argparse.ArgumentParser) -> None:
    create = keys.add_parser("create", parents=[common, as_json], help="make a key; its text is the last line printed")
    create.add_argument("--member", required=True, type=_name, help="whose key it is")
    create.add_argument("--scope", action="append", required=True, choices=["llm", "gpu", "admin"])
    create.add_argument("--expires-days", type=_days, metavar="DAYS", help="the key ends after so many days")
    create.add_argument("--model", action="append", help="a model that it may use; all when none is given")
    create.add_argument("--calls-per-minute", type=_positive, metavar="N", help="calls in any 60 seconds")
    create.add_argument("--calls-per-day", type=_positive, metavar="N", help="calls in any 24 hours")
    create.add_argument("--daily-calls", type=_positive, metavar="N", help="calls from midnight to midnight UTC")
    create.set_defaults(command=_later("accounts", "create_key"))
    listed = keys.add_parser("list", parents=[common, as_json], help="list all keys, without their secrets")
    listed.set_defaults(command=_later("accounts", "list_keys"))
    rotate = keys.add_parser("rotate", parents=[common, as_json], help="make a key's successor; both work for a while")
    rotate.add_argument("id", help="the key's id: the part between hlk_ and the next underscore")
    rotate.add_argument("--overlap-hours", type=_hours, default=24.0, help="how long the old one works (%(default)s)")
    rotate.set_defaults(command=_later("accounts", "rotate_key"))
    revoke = keys.add_parser("revoke", parents=[common, as_json], help="end a key, from its next call on")
    revoke.add_argument("id", help="the key's id")
    revoke.set_defaults(command=_later("accounts", "revoke_key"))


def _member_commands(members: Any, common: argparse.ArgumentParser, as_json: argparse.ArgumentParser) -> None:
    listed = members.add_parser("list", parents=[common, as_json], help="list members and their own limits")
    listed.set_defaults(command=_later("accounts", "list_members"))
    change = members.add_parser("set", parents=[common, as_json], help="set a member's limits; 0 takes one away")
    change.add_argument("member")
    change.add_argument("--daily-tokens", type=_limit, metavar="N", help="tokens from midnight to midnight UTC")
    change.add_argument("--open-per-member", type=_limit, metavar="N", help="calls open at once")
    change.add_argument("--max-parallel", type=_limit, metavar="N", help="calls at once per model")
    change.set_defaults(command=_later("accounts", "set_member"))


def _plan_command(commands: Any, common: argparse.ArgumentParser, as_json: argparse.ArgumentParser) -> None:
    plan = commands.add_parser(
        "plan", parents=[common, as_json], help="show where a GGUF model's weights would live, and how fast that is"
    )
    plan.add_argument("model", nargs="?", help="an id of models.toml, or a .gguf file, of which the header is enough")
    plan.add_argument("--gpu-memory", type=_bytes, metavar="SIZE", help="such as 24GB; what is free here")
    plan.add_argument("--ram", type=_bytes, metavar="SIZE", help="such as 64GB; what is free here")
    plan.add_argument("--context", type=_positive, metavar="TOKENS", help="of one sequence; the model's own")
    plan.add_argument("--slots", type=_positive, metavar="N", help="sequences at once")
    plan.add_argument("--calibrate", action="store_true", help="measure this machine's bandwidths first, and keep them")
    plan.set_defaults(command=_later("plan", "show_plan"))


def _server_options() -> argparse.ArgumentParser:
    """For commands that ask a running server; the key's default is not shown by --help."""
    server, given = argparse.ArgumentParser(add_help=False), os.environ
    url = given.get("CITADEL_URL") or "http://127.0.0.1:8040"
    server.add_argument("--url", type=_url, default=url, help="the server; else CITADEL_URL (%(default)s)")
    server.add_argument("--key", default=given.get("CITADEL_API_KEY"), help="a key of it; else CITADEL_API_KEY")
    return server


def _model_commands(
    models: Any, common: argparse.ArgumentParser, as_json: argparse.ArgumentParser, server: argparse.ArgumentParser
) -> None:
    listed = models.add_parser("list", parents=[server, as_json], help="list what a server has, and in which state")
    listed.set_defaults(command=_later("served", "list_models"))
    for word, does in (("load", "load a model and wait for it"), ("unload", "unload one when its requests have ended")):
        change = models.add_parser(word, parents=[server, as_json], help=f"{does} (scope admin)")
        change.add_argument("model")
        change.add_argument("--no-wait", action="store_true", help="ask for it and go")
        change.set_defaults(command=_later("served", word))
    top = models.add_parser("top", parents=[server, as_json], help="watch models, queue and members (scope admin)")
    top.add_argument("--once", action="store_true", help="show this moment and end")
    top.set_defaults(command=_later("served", "top"))
    pull = models.add_parser("pull", parents=[common, as_json], help="fetch and prepare weights that are not here yet")
    pull.add_argument("model", nargs="*", help="ids of models.toml; all of them when none is given")
    pull.set_defaults(command=_later("models", "pull"))


def _asking_commands(commands: Any, as_json: argparse.ArgumentParser, server: argparse.ArgumentParser) -> None:
    chat = commands.add_parser("chat", parents=[server, as_json], help="talk with a model, or ask it one thing")
    chat.add_argument("words", nargs="*", help="what to ask; without, a conversation, or what stdin has")
    chat.add_argument("--model", help="the server's default one when none is given")
    chat.add_argument("--system", metavar="TEXT", help="a system message")
    chat.add_argument("--no-thinking", action="store_true", help="answer at once")
    chat.add_argument("--max-tokens", type=_positive, metavar="N", help="the most of one answer")
    chat.add_argument("--tools", type=Path, metavar="FILE", help="a JSON list of tools, as the API takes it")
    chat.set_defaults(command=_later("chat", "run"))
    bench = commands.add_parser("bench", parents=[server, as_json], help="measure how fast a model answers now")
    bench.add_argument("--model", help="the server's default one when none is given")
    bench.add_argument("--requests", type=_positive, default=8, metavar="N", help="(%(default)s)")
    bench.add_argument("--parallel", type=_positive, default=1, metavar="N", help="at once (%(default)s)")
    bench.add_argument("--prompt-tokens", type=_positive, default=100, metavar="N", help="about (%(default)s)")
    bench.add_argument("--max-tokens", type=_positive, default=64, metavar="N", help="of each answer (%(default)s)")
    bench.set_defaults(command=_later("bench", "run"))
    words = "run a command under a lease of the GPU: gpu [options] -- COMMAND ... (scope gpu)"
    gpu = commands.add_parser("gpu", parents=[server], help=words)
    gpu.add_argument("--kind", choices=["image", "music", "other"], default="other")
    gpu.add_argument("--gpu-memory", type=float, metavar="GB", help="what it needs; without it, it gets the whole GPU")
    gpu.add_argument("--wait", type=float, default=900.0, metavar="SECONDS", help="for the lease (%(default)s)")
    gpu.set_defaults(command=_later("gpu", "run"))


def _positive(text: str) -> int:
    return int(_between(text, 1, _MOST))


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]?)(i?)B?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text} is no size; 24GB and 512MB are")
    power = " kMGT".index(match[2] or " ")
    return int(_between(match[1], 0, _MOST) * (1024 if match[3] else 1000) ** power)


def _limit(text: str) -> int:
    return int(_between(text, 0, _MOST))


def _days(text: str) -> float:
    return _between(text, 0.001, 36_500)


def _hours(text: str) -> float:
    return _between(text, 0, 24 * 366)


def _between(text: str, least: float, most: float) -> float:
    value = float(text)
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"{text} is not from {least:g} to {most:g}")
    return value


def _url(text: str) -> str:
    """The server's own address, also of what was copied as a base URL for an SDK, or without the scheme."""
    url = (text if "://" in text else f"http://{text}").rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and not parts.path
    except ValueError:  # a port that is none
        good = False
    if not good:
        raise argparse.ArgumentTypeError(f"{text!r} is no address of a server, such as http://127.0.0.1:8040")
    return url


def _name(text: str) -> str:
    if not 1 <= len(text) <= 100:
        raise argparse.ArgumentTypeError("a name has 1 to 100 characters")
    return text


def _later(module: str, function: str) -> Callable[[argparse.Namespace], int]:
    """A command that is imported when it runs: each starts fast, without what the others need."""

    def run(options: argparse.Namespace) -> int:
        return getattr(import_module(f"citadel.commands.{module}"), function)(options)

    return run


def _serve(options: argparse.Namespace) -> int:
    # Threads of OpenMP that spin while they wait take the cores that the other engine needs; read at first use.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    import uvloop  # noqa: PLC0415 - the other commands start faster without a server's imports

    from citadel import app, logs  # noqa: PLC0415

    config = config_of(options)
    logs.configure()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(app.serve(config, lambda: config_of(options)))
    except app.CannotServe as error:
        raise CommandFailed(str(error)) from None
    return 0
