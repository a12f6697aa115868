"""`/metrics`: what was served is counted, nobody's text becomes a label, and who may read it."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from citadel.config import Server
from citadel.http.routes_metrics import public
from citadel.metrics import MINUTES, Throughput
from tests.conftest import Serving, first_event, make_config, serving, write_script

LINES = [
    {"when": "endless", "pieces": ["word "] * 100_000, "delay_ms": 5},
    {"when": "die", "pieces": ["x"], "fail": "die", "after": 1},
    {"pieces": ["three", " small", " pieces"]},
]


def config(folder: Path, **server: object):
    source = write_script(folder / "script.jsonl", LINES)
    model = {"engine": "replay", "source": source, "aliases": ["other-name"]}
    return make_config(folder, {"m": model}, server=server)


async def scrape(server: Serving) -> dict[tuple[str, ...], float]:
    """Values by the series' name and its labels' values, the model's first."""
    async with server.session.get(server.url + "/metrics", headers={"Authorization": ""}) as response:
        assert response.status == 200
        families = text_string_to_metric_families(await response.text())
        samples = [sample for family in families for sample in family.samples]
    found: dict[tuple[str, ...], float] = {}
    for sample in samples:
        names = sorted(sample.labels, key=lambda name: (name != "model", name))
        found[sample.name, *(sample.labels[name] for name in names)] = sample.value
    return found


async def test_calls_are_counted_with_their_tokens_and_times(tmp_path: Path) -> None:
    async with serving(config(tmp_path)) as server:
        for _ in range(2):
            async with server.chat(model="other-name") as response:
                assert response.status == 200
        found = await scrape(server)
    assert found["citadel_calls_total", "m", "ok"] == 2
    assert found["citadel_tokens_total", "m", "completion"] == 6
    assert found["citadel_time_to_first_token_seconds_count", "m"] == 2
    assert found["citadel_inter_token_seconds_count", "m"] == 4
    assert found["citadel_queue_wait_seconds_count", "m"] == 2
    assert found["citadel_load_seconds_count", "m"] == 1
    assert found["citadel_model_state", "m", "loaded"] == 1
    assert not [key for key in found if "other-name" in key]


async def test_running_calls_hold_slots_and_tokens_until_they_are_gone(tmp_path: Path) -> None:
    async with serving(config(tmp_path)) as server:
        async with server.chat("endless", stream=True) as response:
            await first_event(response)
            during = await scrape(server)
            response.close()
        server.services.registry.unload("m")
        while server.services.registry.status("m").state != "stopped":
            await server.services.registry.considered()
        after = await scrape(server)
    assert during["citadel_calls_running", "m"] == 1
    assert during["citadel_kv_tokens", "m"] > 0
    assert (after["citadel_calls_running", "m"], after["citadel_kv_tokens", "m"]) == (0, 0)
    assert after["citadel_calls_total", "m", "client_gone"] == 1
    assert after["citadel_unloads_total", "m", "owner"] == 1
    assert after["citadel_unload_seconds_count", "m"] == 1


async def test_refusals_and_deaths_are_counted_by_code(tmp_path: Path) -> None:
    async with serving(config(tmp_path)) as server:
        async with server.chat(chat_template_kwargs={"messages": 1}) as response:
            assert response.status == 400
        async with server.chat("die") as response:
            assert response.status == 502
        found = await scrape(server)
    assert found["citadel_calls_total", "m", "BadRequestError"] == 1
    assert found["citadel_calls_total", "m", "engine_restarted"] == 1
    assert found["citadel_watchdog_restarts_total", "m"] == 1


async def test_what_is_refused_before_it_is_a_call_is_counted_too(tmp_path: Path) -> None:
    async with serving(config(tmp_path, max_body_bytes=1000), scopes=("admin",)) as server:
        await refused(server, 401, "POST", "/v1/chat/completions", headers={"Authorization": ""})
        await refused(server, 401, "GET", "/v1/models", headers={"Authorization": "Bearer hlk_wrong"})
        await refused(server, 403, "POST", "/v1/completions", json={})
        await refused(server, 404, "GET", "/nowhere")
        await refused(server, 405, "DELETE", "/v1/models")
        await refused(server, 400, "POST", "/v1/messages", headers={"Expect": "miracles"})
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
        writer.write(b"no HTTP\r\n\r\n")
        assert b" 400 " in await reader.readline()
        writer.close()
        found = await scrape(server)
    counted = {key[1]: value for key, value in found.items() if key[0] == "citadel_errors_total"}
    ones = dict.fromkeys(("insufficient_scope", "not_found", "method_not_allowed"), 1)
    assert counted == {**ones, "invalid_api_key": 2, "bad_header": 2}
    assert not [key for key in found if key[0] == "citadel_calls_total"]


async def refused(server: Serving, status: int, method: str, path: str, **sent: Any) -> None:
    async with server.session.request(method, server.url + path, **sent) as response:
        assert response.status == status


@pytest.mark.parametrize(
    ("status", "code", "sent"),
    [
        (404, "model_not_found", {"json": {"model": "nope"}}),
        (413, "too_large", {"data": b"x" * 2000, "headers": {"Content-Type": "application/json"}}),
        (415, "unsupported_media_type", {"data": b"{}", "headers": {"Content-Type": "text/plain"}}),
        (400, "invalid_json", {"data": b"{", "headers": {"Content-Type": "application/json"}}),
        (400, "BadRequestError", {"json": {"messages": []}}),
    ],
)
async def test_what_a_call_is_refused_for_is_counted_once(
    tmp_path: Path, status: int, code: str, sent: dict[str, Any]
) -> None:
    async with serving(config(tmp_path, max_body_bytes=1000)) as server:
        await refused(server, status, "POST", "/v1/chat/completions", **sent)
        found = await scrape(server)
    assert {key[1]: value for key, value in found.items() if key[0] == "citadel_errors_total"} == {code: 1}


async def test_a_server_keeps_out_of_the_global_registry(tmp_path: Path) -> None:
    async with serving(config(tmp_path)) as server:
        await scrape(server)
    assert not [name for name in (family.name for family in REGISTRY.collect()) if name.startswith("citadel")]


async def test_what_is_not_public_needs_an_admin_key(tmp_path: Path) -> None:
    async with serving(config(tmp_path, metrics_public=False)) as server:
        async with server.session.get(server.url + "/metrics") as response:
            assert response.status == 200
        async with server.session.get(server.url + "/metrics", headers={"Authorization": ""}) as response:
            assert (response.status, (await response.json())["code"]) == (401, "unauthorized")


@pytest.mark.parametrize(
    ("host", "given", "expected"),
    [("127.0.0.1", None, True), ("0.0.0.0", None, False), ("0.0.0.0", True, True), ("127.0.0.1", False, False)],
)
def test_a_loopback_host_is_public_unless_the_owner_says_otherwise(host: str, given: bool, expected: bool) -> None:
    assert public(Server(host=host, metrics_public=given)) is expected


def test_tokens_a_second_of_now_and_of_the_last_hour() -> None:
    rate = Throughput()
    rate.add(7200.5, 100)
    rate.add(7201.5, 50)
    assert rate.now(7202.0) == 15
    assert rate.now(7300.0) == 0
    assert rate.last_hour(7230.0)[-1] == 2.5
    rate.add(7200.0 + 3600 + 60, 60)
    assert len(rate.last_hour(10_860.0)) == MINUTES
    assert sum(rate.last_hour(10_860.0)) == 1


async def test_the_dashboard_asks_only_for_series_that_exist(tmp_path: Path) -> None:
    board = (Path(__file__).parent.parent.parent / "docs" / "grafana.json").read_text(encoding="utf-8")
    async with serving(config(tmp_path)) as server:
        async with server.chat() as response:
            assert response.status == 200
        async with server.session.get(server.url + "/metrics") as response:
            text = await response.text()
    series = set(re.findall(r"citadel_[a-z_]+", board))
    assert len(series) > 10
    for name in series:
        assert name.removesuffix("_bucket") in text or name.removesuffix("_total") in text, name
