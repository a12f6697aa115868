"""The contract's pages against the code's tables, row by row, where the pages lie beside the repository."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from citadel import config, errors
from citadel.errors import CITADEL_CODES, TABLE
from citadel.http import middleware
from citadel.runtime.states import State
from citadel.wire import fields, request, response

SPEC = Path(__file__).parent.parent.parent / "shared" / "spec"
pytestmark = pytest.mark.skipif(not SPEC.is_dir(), reason="the contract's pages are not beside this checkout")

BY_CODE = {row.code: row for row in TABLE.values()}


def page(name: str) -> str:
    return (SPEC / name).read_text(encoding="utf-8")


def table(text: str, header: str, width: int) -> list[list[str]]:
    """The rows under `header`, in tab-separated or in `| piped |` form, up to the first line that is none."""
    lines = text[text.index(header) :].splitlines()[1:]
    rows: list[list[str]] = []
    for line in lines:
        cells = [cell.strip().replace("`", "") for cell in re.split(r"\t|\|", line.strip().strip("|"))]
        if set("".join(cells)) <= {"-"}:
            continue
        if len(cells) != width:
            break
        rows.append(cells)
    assert rows, f"no rows under {header!r}"
    return rows


EARLY, LATER, CONTRACT, ERRORS = (
    "chat-completions-2026-10-29.txt",
    "chat-completions-later.txt",
    "CONTRACT.md",
    "errors.txt",
)


@pytest.mark.parametrize(
    ("name", "header", "width"),
    [(EARLY, "Status\tCode\tCause\tRetry", 4), (LATER, "| Status | Code | Meaning |", 3)],
)
def test_every_error_of_the_pages_has_its_status(name: str, header: str, width: int) -> None:
    for status, code, *_ in table(page(name), header, width):
        assert BY_CODE[code].status == int(status), code


def test_every_error_of_the_later_page_has_its_extra_fields() -> None:
    rows = table(page(LATER), "| Code | Extra fields |", 2)
    listed = {code.strip(): _names(names) for codes, names in rows for code in codes.split(",")}
    for code, row in BY_CODE.items():
        assert row.fields == listed.get(code, row.fields if row.type in ("BadRequestError", code) else ()), code
    assert set(listed) <= set(BY_CODE)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in re.sub(r"\(.*?\)", "", text).split(","))


def test_every_error_has_the_type_that_the_contract_gives_it() -> None:
    rows = table(page(CONTRACT), "| code | type |", 2)
    listed: dict[str, str] = {}
    for codes, type_ in rows:
        names = re.sub(r"^engine errors \((.*)\)$", r"\1", codes)
        for code in names.split(","):
            listed[code.strip()] = code.strip() if type_ == "the code" else type_
    listed |= dict.fromkeys(("not_found", "conflict", "not_implemented"), "invalid_request_error")
    assert {code: row.type for code, row in BY_CODE.items()} == listed


def test_the_citadel_format_has_every_code_and_status() -> None:
    listed = {int(status): code for status, code in table(page(ERRORS), "Status\tCode\n", 2)}
    listed |= {409: "conflict", 405: "method_not_allowed", 413: "too_large", 415: "unsupported_media_type"}
    assert listed | {503: "unavailable"} == CITADEL_CODES


def test_retry_after_of_the_contract() -> None:
    text = page(CONTRACT)
    assert "`gpu-busy`, `insufficient_memory`, `device_offline` 60; `device_busy`, `too_many_streams` 5" in text
    for code, seconds in {
        "gpu-busy": 60,
        "insufficient_memory": 60,
        "device_offline": 60,
        "device_busy": 5,
        "too_many_streams": 5,
    }.items():
        assert BY_CODE[code].retry_s == seconds
    assert "at most 55000" in text
    assert errors.MAX_RETRY_AFTER_MS == 55_000


def test_each_parameter_of_the_pages_is_honoured() -> None:
    body = request.ChatBody.model_fields
    for name, *_ in table(page(LATER), "| Name | Type | Description |", 3):
        assert name.removesuffix(" required").split(".")[0] in body, name
    for name, *_ in table(page(EARLY), "Field\tType\tDefault", 3):
        assert name.split(".")[0] in body, name


def test_each_field_that_the_contract_names_is_in_its_class() -> None:
    without_effect = {"user", "metadata", "store", "service_tier", "prediction", "prompt_cache_key"}
    refused = {"audio", "functions", "function_call", "web_search_options"}
    text = page(CONTRACT)
    assert all(f"`{name}`" in text for name in without_effect | refused)
    assert without_effect <= fields.WITHOUT_EFFECT
    assert refused <= set(fields.UNSUPPORTED)
    assert not (fields.WITHOUT_EFFECT | set(fields.UNSUPPORTED)) & set(request.ChatBody.model_fields)


def test_each_vllm_field_that_the_contract_accepts_is_honoured() -> None:
    line = next(line for line in page(CONTRACT).splitlines() if "and vLLM's `top_k`" in line)
    text = page(CONTRACT)[page(CONTRACT).index(line) :].split("What an engine cannot honour")[0]
    names = set(re.findall(r"`([a-z_]+)`", text)) - {"content", "developer"}
    assert {"logit_bias", "top_k", "continue_final_message"} <= names
    assert names <= set(request.ChatBody.model_fields)


def test_the_states_are_those_of_the_pages() -> None:
    row = next(row for row in table(page(EARLY), "Field\tValue\n`id`\tValue for `model`", 2) if row[0] == "state")
    assert set(re.findall(r"[a-z]+", row[1])) - {"or"} == {state.value for state in State}


def test_the_keys_of_models_toml_exist_with_the_contracts_defaults() -> None:
    text = page(CONTRACT)
    section = text[text.index("## Keys of `models.toml`") : text.index("## Routes")]
    defaults = {
        "[server]": (config.Server, {}),
        "[limits]": (config.Limits, {}),
        "[gpu]": (config.Gpu, {}),
    }
    for label, (model, _) in defaults.items():
        line = next(line for line in section.splitlines() if line.startswith(f"`{label}`"))
        names = re.sub(r"\(.*?\)", "", line.removeprefix(f"`{label}`")).strip(" .").split(",")
        for entry in names:
            name, _, value = entry.strip().partition(" ")
            assert name in model.model_fields, f"{label} {name}"
            if re.fullmatch(r"\d+", value):
                assert model.model_fields[name].default == int(value), f"{label} {name}"
    line = next(line for line in section.splitlines() if line.startswith("Per model:"))
    for entry in re.sub(r"\[.*?\]", "", line.removeprefix("Per model:")).split(","):
        name = entry.strip(" .").split(" ")[0]
        if name not in ("sampling", "and"):
            assert name in config.Model.model_fields, name


def test_the_routes_that_answer_in_the_openai_format() -> None:
    for route, _, spoken in table(page(CONTRACT), "| route | auth | errors in |", 3):
        for path in re.findall(r"(/[a-z0-9_/]+)", route.replace("{id}", "x")):
            if path in ("/load", "/unload", "/pin"):
                continue
            assert middleware.speaks_openai(path) == (spoken == "OpenAI format"), path


def test_the_answer_has_every_field_of_the_later_page() -> None:
    source = inspect.getsource(response)
    for name, _ in table(page(LATER), "| Field | Value |", 2):
        last = re.sub(r"\[\d\]", "", name).split(".")[-1]
        assert f'"{last}"' in source, name
