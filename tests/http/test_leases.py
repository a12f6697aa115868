"""Leases of the GPU for media jobs: granted, queued, renewed, expired, and in turn with the models."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from citadel.runtime.leases import LeaseDesk
from tests.conftest import Serving, events_of, first_event, make_config, serving, write_script
from tests.process import ROOT

LEASES = "/v1/gpu/leases"
LINES = [
    {"when": "endless", "pieces": ["word "] * 100_000, "delay_ms": 5},
    {"when": "slow", "pieces": ["a"] * 20, "delay_ms": 10},
    {"pieces": ["ok"]},
]
SCOPES = ("llm", "gpu", "admin")


def config(folder: Path, **gpu: Any) -> Any:
    model = {"engine": "replay", "source": write_script(folder / "script.jsonl", LINES), "memory_gb": 1}
    return make_config(folder, {"m": model}, gpu={"ram_limit_gb": 2, **gpu}, server={"comment_s": 0.1})


@pytest.fixture
async def server(tmp_path: Path) -> AsyncGenerator[Serving]:
    async with serving(config(tmp_path), scopes=SCOPES) as running:
        yield running


async def call(server: Serving, method: str, path: str = LEASES, body: Any = None) -> tuple[int, Any]:
    async with server.session.request(method, server.url + path, json=body) as response:
        return response.status, await response.json()


async def lease(server: Serving, **fields: Any) -> dict[str, Any]:
    status, body = await call(server, "POST", LEASES, {"kind": "image", **fields})
    assert (status, body["ok"]) == (200, True)
    assert set(body) == {"ok", "id", "state", "position", "expires_in_s", "retry_after_s"}
    return body


async def test_a_lease_of_an_idle_box_is_granted_at_once(server: Serving) -> None:
    got = await lease(server)
    assert (got["state"], got["position"], got["retry_after_s"]) == ("granted", 0, 0)
    assert 0 < got["expires_in_s"] <= 60
    assert (await call(server, "DELETE", f"{LEASES}/{got['id']}")) == (200, {"ok": True})
    assert (await call(server, "DELETE", f"{LEASES}/{got['id']}"))[0] == 404


async def test_a_second_lease_waits_its_turn(server: Serving) -> None:
    first, second = await lease(server), await lease(server)
    assert (second["state"], second["position"]) == ("queued", 1)
    assert second["retry_after_s"] == 30
    waiting = asyncio.create_task(lease(server, wait_s=30))
    async with asyncio.timeout(10):
        while (await call(server, "GET", f"{LEASES}/{second['id']}"))[1]["state"] == "queued":
            await call(server, "DELETE", f"{LEASES}/{first['id']}")
    await call(server, "DELETE", f"{LEASES}/{second['id']}")
    third = await waiting
    assert third["state"] == "granted"
    await call(server, "DELETE", f"{LEASES}/{third['id']}")
    server.services.registry.check_integrity()


async def test_a_model_waits_for_a_media_job_and_says_so(server: Serving) -> None:
    got = await lease(server)
    async with server.chat(headers={"X-LLM-Wait": "0"}) as response:
        error = (await response.json())["error"]
        assert (response.status, error["code"], error["position"]) == (503, "queued", 1)
        assert error["reason"] == "waiting for the GPU: a media job is running"
        assert error["retry_after_s"] == 30 + 60  # what a job takes without history, and the load
    async with server.chat(stream=True) as stream:
        assert await stream.content.readline() == b": queued m position 1\n"
        await call(server, "DELETE", f"{LEASES}/{got['id']}")
        data, comments = await events_of(stream)
        assert data[-1]["choices"][0]["finish_reason"] == "stop"
        assert set(comments) <= {"queued m position 1", "queued m position 0", "loading m"}


async def test_a_media_job_lets_the_running_answers_end(server: Serving) -> None:
    async with server.chat("slow", stream=True) as running:
        await first_event(running)
        got = await lease(server, wait_s=30)
        assert got["state"] == "granted"
        data, _ = await events_of(running)
        assert data[-1]["choices"][0]["finish_reason"] == "stop"
        assert server.services.registry.status("m").state == "stopped"


async def test_a_job_that_states_its_memory_runs_beside_a_model(server: Serving) -> None:
    async with server.chat("endless", stream=True) as running:
        await first_event(running)
        got = await lease(server, gpu_memory_gb=0.5)
        assert got["state"] == "granted"
        assert server.services.registry.status("m").state == "loaded"
        running.close()


async def test_a_lease_does_not_expire_before_its_asker_is_answered() -> None:
    """Measuring what is free, or a busy machine, may take longer than a lease lasts."""
    desk = LeaseDesk([], expiry_s=0.0, changed=lambda: None)
    lease = desk.ask("image", None)
    desk.expire(time.monotonic())
    await desk.wait(lease, 0)
    assert (desk.open, desk.next_expiry()) == (1, None)
    desk.renew(lease)
    desk.expire(time.monotonic())
    assert desk.open == 0


async def test_a_lease_that_is_not_renewed_expires(tmp_path: Path) -> None:
    async with serving(config(tmp_path, lease_expiry_s=0.3), scopes=SCOPES) as server:
        forgotten, kept = await lease(server, gpu_memory_gb=0.1), await lease(server, gpu_memory_gb=0.1)
        async with asyncio.timeout(10):
            while (await call(server, "GET", f"{LEASES}/{forgotten['id']}"))[0] == 200:
                assert (await call(server, "POST", f"{LEASES}/{kept['id']}/renew"))[0] == 200
        assert (await call(server, "POST", f"{LEASES}/{kept['id']}/renew"))[1]["state"] == "granted"


async def test_after_too_long_behind_media_jobs_the_gpu_is_busy(tmp_path: Path) -> None:
    async with serving(config(tmp_path, busy_after_s=0.2), scopes=SCOPES) as server:
        await lease(server)
        async with server.chat() as response:
            error = (await response.json())["error"]
            assert (response.status, error["code"], error["type"]) == (503, "gpu-busy", "gpu-busy")
            assert set(error) == {"message", "type", "code", "reason"}
            assert response.headers["Retry-After"] == "60"


async def test_a_caller_that_leaves_while_it_waits_gives_its_place_up(server: Serving) -> None:
    await lease(server)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await lease(server, wait_s=100)
    async with asyncio.timeout(10):
        while (await lease(server))["position"] != 1:
            raise AssertionError("somebody who left is still in the queue")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "kind: field required"),
        ({"kind": "video"}, "kind: input should be 'image', 'music' or 'other'"),
        ({"kind": "image", "wait_s": 901}, "wait_s: input should be less than or equal to 900"),
        ({"kind": "image", "gpu_memory_gb": 0}, "gpu_memory_gb: input should be greater than 0"),
        ({"kind": "image", "colour": 1}, "colour: extra inputs are not permitted"),
    ],
)
async def test_a_bad_body_is_refused(server: Serving, body: Any, message: str) -> None:
    status, told = await call(server, "POST", LEASES, body)
    assert (status, told["code"], told["message"]) == (400, "bad_request", message)


async def test_unknown_leases_are_not_found_and_the_scope_is_needed(server: Serving, tmp_path: Path) -> None:
    for method, path in [("GET", "/x"), ("POST", "/x/renew"), ("DELETE", "/x")]:
        status, told = await call(server, method, LEASES + path)
        assert (status, told["code"], told["ok"]) == (404, "not_found", False)
    other = tmp_path / "other"
    other.mkdir()
    async with serving(config(other), scopes=["llm"]) as stranger:
        assert (await call(stranger, "POST", LEASES, {"kind": "image"}))[0] == 403


async def gpu(server: Serving, *command: str) -> asyncio.subprocess.Process:
    """`citadel gpu -- COMMAND`, as its user starts it."""
    words = ["-m", "citadel", "gpu", "--url", server.url, "--kind", "music", "--", *command]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CITADEL_API_KEY": server.key}
    return await asyncio.create_subprocess_exec(sys.executable, *words, env=environment)


async def test_a_command_runs_under_a_lease_and_its_code_is_kept(server: Serving, tmp_path: Path) -> None:
    sign = tmp_path / "ran"
    code = f"import pathlib, sys; pathlib.Path({str(sign)!r}).write_text('x'); sys.exit(7)"
    assert await (await gpu(server, sys.executable, "-c", code)).wait() == 7
    assert sign.exists()
    await server.services.registry.considered()
    server.services.registry.check_integrity()


async def test_a_command_whose_lease_is_lost_is_ended(tmp_path: Path) -> None:
    async with serving(config(tmp_path, lease_expiry_s=2), scopes=SCOPES) as server:
        command = await gpu(server, "sleep", "100")
        leases = server.services.registry.leases
        async with asyncio.timeout(30):
            while not leases.running:
                await server.services.registry.considered()
        leases.release(leases.running[0].id)
        assert await command.wait() == 75


async def test_without_a_key_or_a_command_it_says_so(server: Serving) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("CITADEL_API_KEY", None)
    words = ["-m", "citadel", "gpu", "--url", server.url, "--", "true"]
    nobody = await asyncio.create_subprocess_exec(sys.executable, *words, env=environment)
    assert await nobody.wait() == 2
    assert await (await gpu(server)).wait() == 2
    assert await (await gpu(server, "/no/such/command")).wait() == 127
