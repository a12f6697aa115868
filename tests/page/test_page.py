"""The page in a headless Chromium, against the real server over the replay engine."""

from __future__ import annotations

import ast
import json
import re
import shutil
from collections.abc import AsyncGenerator
from importlib.resources import files
from pathlib import Path

import pytest
from playwright.async_api import Page, async_playwright, expect

from citadel.http.routes_docs import ORDER
from tests.conftest import Serving, make_config, serving, write_script

AXE = files("axe_playwright_python") / "axe.min.js"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
LINES = [
    {"when": "endless", "pieces": ["word "] * 100_000, "delay_ms": 5},
    {"when": "think", "pieces": ["a ", "thought", "</think>", "the ", "answer"], "reasoning_open": True},
    {"when": "call", "pieces": [CALL]},
    {"pieces": ["three", " small", " pieces"]},
]
TOOLS = json.dumps([{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}])

expect.set_options(timeout=30_000)
pytestmark = pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no chromium here")


def config(folder: Path):
    source = write_script(folder / "script.jsonl", LINES)
    models = {
        "org/quick": {"engine": "replay", "source": source, "format": "hermes", "slots": 4},
        "slow": {"engine": "replay", "source": source, "replay": {"load_s": 3}},
        "gone": {"engine": "replay", "source": str(folder / "missing.jsonl")},
    }
    return make_config(folder, models)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncGenerator[Serving]:
    async with serving(config(tmp_path)) as running:
        yield running


@pytest.fixture
async def page() -> AsyncGenerator[Page]:
    """A page that fails the test when a script of it fails, or its policy stops something."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        made = await browser.new_page()
        faults: list[str] = []
        made.on("pageerror", lambda error: faults.append(str(error)))
        made.on("console", lambda said: faults.append(said.text) if "Content Security" in said.text else None)
        yield made
        await browser.close()
        assert not faults


async def enter(page: Page, server: Serving, key: str | None = None) -> None:
    await page.goto(server.url)
    await page.get_by_label("A key of this server").fill(key or server.key)
    await page.get_by_role("button", name="Open").click()


async def ask(page: Page, words: str) -> None:
    await page.get_by_label("Message").fill(words)
    await page.get_by_role("button", name="Send").click()


async def violations(page: Page) -> list[str]:
    # evaluate, not a script element: the page's policy allows no script but its own
    await page.evaluate(AXE.read_text(encoding="utf-8"))
    found = await page.evaluate("axe.run()")
    return [f"{each['id']}: {each['nodes'][0]['html'][:120]}" for each in found["violations"]]


async def test_a_model_is_loaded_pinned_and_unloaded(page: Page, server: Serving) -> None:
    await enter(page, server)
    card = page.locator("[data-model=slow]")
    await card.get_by_role("button", name="Load slow").click()
    await expect(card.locator(".state")).to_contain_text("starting")
    await expect(card.get_by_role("progressbar")).to_be_visible()
    await expect(card.locator(".state")).to_have_text("loaded")
    await card.get_by_role("button", name="Pin slow").click()
    await expect(card.get_by_role("button", name="Pin slow")).to_have_attribute("aria-pressed", "true")
    await card.get_by_role("button", name="Unload slow").click()
    await expect(card.locator(".state")).to_have_text("stopped")
    await page.locator("[data-model=gone]").get_by_role("button", name="Load gone").click()
    await expect(page.locator("[data-model=gone] .state")).to_have_text("unavailable")


async def test_a_chat_shows_reasoning_folded_and_calls_as_calls(page: Page, server: Serving) -> None:
    await enter(page, server)
    await ask(page, "think")
    answer = page.locator(".turn.assistant").last
    await expect(answer.locator(".said")).to_have_text("the answer")
    await expect(answer.locator("details div")).to_be_hidden()
    await answer.get_by_text("Reasoning").click()
    await expect(answer.locator("details div")).to_have_text("a thought")
    await page.get_by_text("Tools (JSON)").click()
    await page.get_by_label("A list as in the API").fill(TOOLS)
    await ask(page, "call")
    await expect(page.locator(".call")).to_have_text(re.compile(r'weather \{"city": ?"Paris"\}'))
    await page.get_by_text("This request as curl and Python").click()
    await expect(page.locator("#curl")).to_contain_text('"name": "weather"')
    written = ast.parse(await page.locator("#python").inner_text())
    (asked,) = (each for each in ast.walk(written) if isinstance(each, ast.Call) and len(each.keywords) > 2)
    said = {each.arg: ast.literal_eval(each.value) for each in asked.keywords}
    assert (said["stream"], said["tools"]) == (True, json.loads(TOOLS))
    assert said["messages"][-1] == {"role": "user", "content": "Say hello."}
    assert server.key not in await page.content()
    rows = page.locator("#usage tbody tr")
    await expect(rows).to_have_count(1)
    await expect(rows.first).to_contain_text("tester")


async def test_stop_ends_the_answer_on_the_server_too(page: Page, server: Serving) -> None:
    await enter(page, server)
    await ask(page, "endless")
    await expect(page.locator(".said")).to_contain_text("word word word")
    await expect(page.locator("[data-model='org/quick'] .slots")).to_have_attribute("aria-label", "1 of 4 slots in use")
    await page.get_by_role("button", name="Stop").click()
    await expect(page.locator("#figures")).to_have_text("Stopped.")
    await expect(page.locator("[data-model='org/quick'] .slots")).to_have_attribute("aria-label", "0 of 4 slots in use")


async def test_a_wrong_key_is_told_and_not_kept(page: Page, server: Serving) -> None:
    await enter(page, server, key="hlk_wrong_key")
    await expect(page.get_by_role("alert").first).to_have_text("This key is not valid.")
    assert await page.evaluate("sessionStorage.length") == 0


async def test_a_key_without_admin_may_only_chat(page: Page, server: Serving) -> None:
    made = await server.services.store.run(lambda store: store.create_key("ann", frozenset({"llm"})))
    await enter(page, server, key=made.text)
    await ask(page, "hi")
    await expect(page.locator(".said")).to_have_text("three small pieces")
    await expect(page.locator("#owner")).to_be_hidden()


async def test_the_page_comes_back_when_the_server_does(page: Page, tmp_path: Path) -> None:
    async with serving(config(tmp_path)) as first:
        port = int(first.url.rpartition(":")[2])
        await enter(page, first)
        await expect(page.locator("#link")).to_have_text("connected")
    await expect(page.locator("#link")).to_contain_text("trying again")
    async with serving(config(tmp_path), port=port):
        await expect(page.locator("#link")).to_have_text("connected")


async def test_long_answers_and_snapshots_leave_no_elements_behind(page: Page, server: Serving) -> None:
    await enter(page, server)
    await ask(page, "endless")
    await expect(page.locator(".said")).to_contain_text("word word word")
    await expect(page.locator("[data-model='org/quick'] .slots i.on")).to_have_count(1)
    await expect(page.locator("#usage tbody tr")).to_have_count(1)
    count = "document.querySelectorAll('*').length + document.querySelector('.said').childNodes.length"
    before = await page.evaluate(count)
    await expect(page.locator(".said")).to_contain_text("word " * 500)
    assert await page.evaluate(count) == before


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_axe_finds_no_violation(page: Page, server: Serving, scheme: str) -> None:
    await page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    await page.goto(server.url)
    assert await violations(page) == []
    await enter(page, server)
    await expect(page.locator("[data-model=slow]")).to_be_visible()
    await ask(page, "think")
    await expect(page.locator(".said")).to_have_text("the answer")
    assert await violations(page) == []
    await page.set_viewport_size({"width": 360, "height": 740})
    assert await page.evaluate("document.documentElement.scrollWidth") == 360
    assert await violations(page) == []


FOCUSABLE = "a[href], button, input, select, textarea, summary, [tabindex='0']"
REACHABLE = f"""[...document.querySelectorAll("{FOCUSABLE}")]
  .filter((each) => each.checkVisibility() && !each.disabled).map((each) => each.outerHTML)"""
FOCUSED = """(() => {
  const each = document.activeElement, style = getComputedStyle(each);
  return [each.outerHTML, style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2];
})()"""


async def test_every_action_is_reached_by_tab_in_its_order_and_seen(page: Page, server: Serving) -> None:
    await page.goto(server.url)
    await page.keyboard.press("Tab")
    await expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    await page.get_by_label("A key of this server").focus()
    await page.keyboard.type(server.key)
    await page.keyboard.press("Enter")
    await expect(page.locator("#main")).to_be_focused()
    await expect(page.locator("[data-model=gone]")).to_be_visible()
    await page.locator(".skip").focus()
    order, seen = list[str](), list[bool]()
    expected = await page.evaluate(REACHABLE)
    for _ in expected:
        element, outlined = await page.evaluate(FOCUSED)
        order.append(element)
        seen.append(outlined)
        await page.keyboard.press("Tab")
    assert len(expected) >= 15
    assert order == expected
    assert all(seen), [element for element, outlined in zip(order, seen, strict=True) if not outlined]


async def test_a_chat_and_a_model_are_worked_by_keyboard_alone(page: Page, server: Serving) -> None:
    await enter(page, server)
    load = page.get_by_role("button", name="Load slow")
    await load.focus()
    await page.keyboard.press("Enter")
    await expect(page.locator("[data-model=slow] .state")).to_have_text("loaded")
    assert await page.evaluate("document.activeElement.closest('[data-model=slow]') !== null")
    await page.get_by_label("Message").focus()
    await page.keyboard.type("endless")
    await page.keyboard.press("Control+Enter")
    await expect(page.locator(".said")).to_contain_text("word word word")
    await expect(page.get_by_role("button", name="Stop")).to_be_focused()
    await page.keyboard.press("Escape")
    await expect(page.locator("#figures")).to_have_text("Stopped.")
    await expect(page.get_by_label("Message")).to_be_focused()
    await expect(page.locator("[data-model='org/quick'] .slots")).to_have_attribute("aria-label", "0 of 4 slots in use")


async def test_the_documentation_is_accessible_and_fits_a_phone(page: Page, server: Serving) -> None:
    await page.goto(server.url)
    await page.get_by_role("link", name="Documentation").click()
    await page.get_by_role("navigation").get_by_role("link", name="Errors").click()
    await expect(page.get_by_role("heading", level=1)).to_have_text("Errors")
    for scheme in ("light", "dark"):
        await page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        assert await violations(page) == []
    await page.set_viewport_size({"width": 360, "height": 740})
    for name in ORDER:
        await page.goto(f"{server.url}/docs/{name}", wait_until="load")
        assert await page.evaluate("document.documentElement.scrollWidth") == 360, name
    assert await violations(page) == []


async def test_the_files_are_open_and_carry_a_policy(server: Serving) -> None:
    headers = {"Authorization": ""}
    async with server.session.get(server.url + "/", headers=headers) as response:
        text, policy = await response.text(), response.headers["Content-Security-Policy"]
    assert (response.status, response.content_type) == (200, "text/html")
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    assert "<script>" not in text
    assert "http" not in text.replace("http-equiv", "")
    for name in re.findall(r'"(/page/[^"]+)"', text):
        async with server.session.get(server.url + name, headers=headers) as response:
            assert response.status == 200, name
    async with server.session.get(server.url + "/page/..%2fapp.py", headers=headers) as response:
        assert (response.status, (await response.json())["code"]) == (404, "not_found")
