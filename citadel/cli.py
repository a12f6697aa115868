"""`python -m citadel`: serve (the default), and the owner's commands. Each command is a function below."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from citadel import config as configuration
from citadel.config import Config, ConfigError

USAGE_ERROR: Final = 2
_COMMANDS: Final = ("serve", "keys", "models")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 for what failed, 2 for a wrong command line or models.toml."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not any(word in _COMMANDS for word in arguments) and not {"-h", "--help"} & set(arguments):
        arguments = ["serve", *arguments]
    options = parser().parse_args(arguments)
    try:
        return options.command(options)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        return 130


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m citadel", description="An inference server for one GPU box.")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--config", type=Path, default=Path("models.toml"), help="the models to serve (%(default)s)")
    common.add_argument("--data-dir", type=Path, help="where keys and usage are kept")

    serve = commands.add_parser("serve", parents=[common], help="serve the models of models.toml (the default command)")
    serve.add_argument("--host", help="the address to listen on (127.0.0.1)")
    serve.add_argument("--port", type=int, help="the port to listen on (8040)")
    serve.set_defaults(command=_serve)

    keys = commands.add_parser("keys", help="make, list and revoke API keys").add_subparsers(required=True)
    create = keys.add_parser("create", parents=[common], help="make a key; its text is the last line printed")
    create.add_argument("--member", required=True, help="whose key it is")
    create.add_argument("--scope", action="append", required=True, choices=["llm", "gpu", "admin"])
    create.add_argument("--expires-days", type=float, metavar="DAYS", help="the key ends after so many days")
    create.set_defaults(command=_keys_create)
    listed = keys.add_parser("list", parents=[common], help="list all keys, without their secrets")
    listed.add_argument("--json", action="store_true", help="as JSON")
    listed.set_defaults(command=_keys_list)
    revoke = keys.add_parser("revoke", parents=[common], help="end a key, from its next call on")
    revoke.add_argument("id", help="the key's id: the part between hlk_ and the next underscore")
    revoke.set_defaults(command=_keys_revoke)

    models = commands.add_parser("models", help="look after the models' weights").add_subparsers(required=True)
    pull = models.add_parser("pull", parents=[common], help="fetch and prepare weights that are not on this disk")
    pull.add_argument("model", nargs="*", help="ids of models.toml; all of them when none is given")
    pull.set_defaults(command=_models_pull)
    return top


def _config(options: argparse.Namespace) -> Config:
    given = {"host": getattr(options, "host", None), "port": getattr(options, "port", None)}
    given["data_dir"] = options.data_dir
    overrides = {name: value for name, value in given.items() if value is not None}
    return configuration.load(options.config, server_overrides=overrides)


def _data_dir(options: argparse.Namespace) -> Path:
    """For commands that need no models: the flag alone is enough, without a models.toml."""
    return options.data_dir or _config(options).server.data_dir


def _serve(options: argparse.Namespace) -> int:
    # Threads of OpenMP that spin while they wait take the cores that the other engine needs; read at first use.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    import uvloop  # noqa: PLC0415 - the other commands start faster without a server's imports

    from citadel import app, logs  # noqa: PLC0415

    config = _config(options)
    logs.configure()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(app.serve(config))
    except app.CannotServe as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _keys_create(options: argparse.Namespace) -> int:
    from citadel.accounts.store import Store  # noqa: PLC0415

    expires = None
    if options.expires_days is not None:
        expires = datetime.now(UTC) + timedelta(days=options.expires_days)
    store = Store(_data_dir(options))
    key = store.create_key(options.member, frozenset(options.scope), expires)
    store.close()
    print(f"A key for {options.member} (scopes {', '.join(sorted(set(options.scope)))}); it is not shown again:")
    print(key.text)
    return 0


def _keys_list(options: argparse.Namespace) -> int:
    from citadel.accounts.store import Store  # noqa: PLC0415

    store = Store(_data_dir(options))
    rows = store.list_keys()
    store.close()
    listed: list[dict[str, Any]] = [
        {
            "id": row.id,
            "member": row.member,
            "scopes": sorted(row.scopes),
            "created_at": row.created_at.isoformat(),
            "expires_at": row.expires_at.isoformat() if row.expires_at else None,
            "revoked_at": row.revoked_at.isoformat() if row.revoked_at else None,
        }
        for row in rows
    ]
    if options.json:
        print(json.dumps(listed, indent=2))
        return 0
    for key in listed:
        state = f"revoked {key['revoked_at']}" if key["revoked_at"] else "live"
        print(f"{key['id']}  {key['member']:<16} {','.join(key['scopes']):<14} made {key['created_at']}  {state}")
    return 0


def _keys_revoke(options: argparse.Namespace) -> int:
    from citadel.accounts.store import Store  # noqa: PLC0415

    store = Store(_data_dir(options))
    revoked = store.revoke_key(options.id)
    store.close()
    if not revoked:
        print(f"there is no live key {options.id!r}", file=sys.stderr)
        return 1
    print(f"revoked {options.id}")
    return 0


def _models_pull(options: argparse.Namespace) -> int:
    from citadel.runtime import sources  # noqa: PLC0415
    from citadel.runtime.installed import engine_spec  # noqa: PLC0415
    from engines import adapter  # noqa: PLC0415

    config = _config(options)
    wanted = options.model or list(config.models)
    if unknown := [name for name in wanted if name not in config.models]:
        print(f"there is no model {unknown[0]!r}; there are {', '.join(config.models)}", file=sys.stderr)
        return USAGE_ERROR
    failed = False
    for name in wanted:
        settings = config.models[name]
        try:
            try:
                source = sources.locate(name, settings.source, config.folder)
            except sources.SourceMissing as missing:
                if not missing.fetchable:
                    raise
                source = sources.fetch(settings.source)
            adapter(settings.engine).open_tokenizer(engine_spec(name, config, source))
        except sources.SourceMissing as missing:
            print(f"{name}: {missing}", file=sys.stderr)
            failed = True
        else:
            print(f"{name}: ready, {source}")
    return int(failed)
