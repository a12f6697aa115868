"""The composition root: it makes every part, gives each what it needs, and takes them down in the opposite order."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import structlog
from aiohttp import web

from citadel.accounts.auth import NewKey
from citadel.accounts.journal import AsyncStore, utc_now
from citadel.accounts.quota import Defaults, Ledger
from citadel.accounts.store import CannotOpen
from citadel.config import Config, ConfigError
from citadel.http import (
    openapi,
    routes_admin,
    routes_chat,
    routes_docs,
    routes_embeddings,
    routes_gpu,
    routes_health,
    routes_messages,
    routes_metrics,
    routes_models,
    routes_page,
    routes_responses,
    routes_status,
    routes_tokens,
)
from citadel.http.body import BodyReader
from citadel.http.gate import Gate
from citadel.http.guard import guarded
from citadel.http.middleware import MIDDLEWARES, finish_headers
from citadel.http.outbox import Outbox
from citadel.http.server import connections
from citadel.http.services import SERVICES, Services
from citadel.metrics import Metrics
from citadel.pipeline import Pipeline
from citadel.runtime.registry import Registry
from citadel.text.formats import FORMATS
from engines import EARLY, adapter, kept

log = structlog.get_logger("citadel.app")

_API = (
    *routes_chat.ROUTES,
    *routes_embeddings.ROUTES,
    *routes_responses.ROUTES,
    *routes_messages.ROUTES,
    *routes_tokens.ROUTES,
    *routes_models.ROUTES,
    *routes_gpu.ROUTES,
    *routes_admin.ROUTES,
    *routes_health.ROUTES,
    *routes_metrics.ROUTES,
    *routes_status.ROUTES,
    *routes_page.ROUTES,
    *routes_docs.ROUTES,
)
ROUTES = (*_API, openapi.route(_API))


class CannotServe(Exception):
    """The server cannot start here; the message says why in one line."""


def build(services: Services) -> web.Application:
    app = web.Application(middlewares=MIDDLEWARES)
    app[SERVICES] = services
    for route in ROUTES:
        app.router.add_route(route.method, route.path, guarded(route))
    app.on_response_prepare.append(finish_headers)
    return app


@asynccontextmanager
async def services(config: Config) -> AsyncGenerator[Services]:
    """Everything behind the routes, running; on leaving, engines are closed first and the database last."""
    check_formats(config)
    await asyncio.to_thread(_forget_removed, config)
    try:
        store = await asyncio.to_thread(AsyncStore, config.server.data_dir)
    except CannotOpen as error:
        raise CannotServe(str(error)) from None
    metrics = Metrics()
    registry = Registry(config, adapter, metrics, learned=await store.learned_loads(), on_loaded=store.learn_load)
    ledger = Ledger(Defaults(**config.limits.model_dump()), utc_now, store, await store.tally())
    try:
        await registry.start()
        yield Services(
            store=store,
            registry=registry,
            ledger=ledger,
            pipeline=Pipeline(registry, ledger, metrics),
            metrics=metrics,
            gate=Gate(),
            bodies=BodyReader(config.server.max_body_bytes),
            outbox=Outbox(),
            started_at=int(time.time()),
        )
    finally:
        await registry.close()
        await store.close()


def _forget_removed(config: Config) -> None:
    """What is kept of a model's conversations goes with the model."""
    kept.sweep(config.server.data_dir, [id_ for id_, model in config.models.items() if model.engine == "strata"])


def check_formats(config: Config) -> None:
    """The one check of models.toml that needs the table of formats. Raises ConfigError."""
    for name, model in config.models.items():
        if model.format != "auto" and model.format not in FORMATS:
            known = ", ".join(["auto", *FORMATS])
            raise ConfigError(f"models.{name}.format: there is no format {model.format!r}; there are {known}")


async def reload(running: Services, read: Callable[[], Config]) -> None:
    """Take models.toml as it is now. A file that is wrong changes nothing; what can't change live is said."""
    old = running.config
    try:
        new = await asyncio.to_thread(read)
        check_formats(new)
    except ConfigError as error:
        log.error("models.toml is not taken", reason=str(error))  # noqa: TRY400 - the reason is the whole story
        return
    fixed = {name: getattr(old.server, name) for name in _FIXED_WHILE_RUNNING}
    changed = [name for name, value in fixed.items() if getattr(new.server, name) != value]
    later = running.registry.reload(new.model_copy(update={"server": new.server.model_copy(update=fixed)}))
    running.ledger.defaults = Defaults(**new.limits.model_dump())
    running.pipeline.forget_formats()
    await asyncio.to_thread(_forget_removed, running.config)
    log.info("models.toml is taken", later=later, needs_restart=[f"server.{name}" for name in changed])


_FIXED_WHILE_RUNNING = ("host", "port", "data_dir", "cache_dir", "max_body_bytes")


async def serve(config: Config, read: Callable[[], Config]) -> None:
    """Serve until SIGTERM or SIGINT, then drain. `read` is for a reload. Raises CannotServe, ConfigError."""
    with _only_server(config.server.data_dir), _told_to_stop() as stopped:
        async with services(config) as running:
            runner = connections(build(running))
            await runner.setup()
            try:
                port = await _listen(runner, config)
                _announce(config, port, await running.store.first_key())
                with _told_to_reload(lambda: reload(running, read)):
                    await asyncio.to_thread(import_early, config)
                    await stopped.wait()
                log.info("draining", seconds=config.server.drain_s)
                await running.gate.drain(config.server.drain_s)
            finally:
                await runner.cleanup()
    if running.registry.stuck:
        log.error("an engine's thread is stuck in native code; the process ends without it")
        os._exit(0)


def import_early(config: Config) -> None:
    """What takes a moment and no memory to speak of is imported before somebody waits for it."""
    for name in sorted(EARLY & {model.engine for model in config.models.values()}):
        try:
            adapter(name)
        except Exception as error:  # noqa: BLE001 - a library may raise anything when it is loaded
            log.warning("an engine cannot be imported", engine=name, reason=str(error))


async def _listen(runner: web.AppRunner, config: Config) -> int:
    server = config.server
    try:
        await web.TCPSite(runner, server.host, server.port).start()
    except OSError as error:
        raise CannotServe(f"cannot listen on {server.host}:{server.port}: {error.strerror or error}") from None
    return runner.addresses[0][1]


@contextmanager
def _told_to_stop() -> Generator[asyncio.Event]:
    """Set at the first SIGTERM or SIGINT. A second one has its usual effect, and ends the process at once."""
    stopped, loop = asyncio.Event(), asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)

    def stop() -> None:
        stopped.set()
        for number in signals:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    for number in signals:
        loop.add_signal_handler(number, stop)
    yield stopped


@contextmanager
def _told_to_reload(again: Callable[[], Coroutine[Any, Any, None]]) -> Generator[None]:
    """SIGHUP runs `again`; several at once run one after the other."""
    loop, turn = asyncio.get_running_loop(), asyncio.Lock()
    tasks: set[asyncio.Task[None]] = set()

    async def in_turn() -> None:
        async with turn:
            await again()

    def begin() -> None:
        task = loop.create_task(in_turn(), name="reload")
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    loop.add_signal_handler(signal.SIGHUP, begin)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
        for task in tasks:
            task.cancel()


@contextmanager
def _only_server(data_dir: Path) -> Generator[None]:
    """Two servers on one data directory would each believe that it owns the GPU and the quotas."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(data_dir / "server.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise CannotServe(f"the data directory {data_dir} cannot be used: {error.strerror}") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CannotServe(f"another server is running on the data directory {data_dir}") from None
        yield
    finally:
        os.close(descriptor)


def _announce(config: Config, port: int, key: NewKey | None) -> None:
    """What the owner wants to see: where it listens, the first key (shown this once), and a request to try."""
    host = config.server.host
    base = f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{port}"  # noqa: S104 - compared, not bound
    shown = key.text if key else "$CITADEL_API_KEY"
    data_dir = config.server.data_dir
    print(f"Citadel serves {len(config.models)} models on {base}")
    if key:
        print(f"The first key, for its owner (scopes llm, admin); it is not shown again:\n  {key.text}")
    else:
        print(f"For a new key: python -m citadel keys create --member NAME --scope llm --data-dir {data_dir}")
    print(
        f'Try:\n  curl {base}/v1/chat/completions -H "Authorization: Bearer {shown}" '
        "-H 'Content-Type: application/json' \\\n"
        f'    -d \'{{"model": "{config.default_model}", "messages": [{{"role": "user", "content": "Say hello."}}]}}\'',
        flush=True,
    )
