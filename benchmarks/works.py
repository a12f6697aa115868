"""What the servers are asked to do: bodies of requests, greedy, of a stated length, the same for every server."""

from __future__ import annotations

from typing import Any, Final

WORDS: Final = (
    *("river", "stone", "winter", "garden", "silver", "morning", "bridge", "letter", "window", "harvest", "copper"),
    *("lantern", "valley", "orchard", "thunder", "paper", "mountain", "feather", "market", "candle"),
)


def chat(text: str, tokens: int, *, system: str | None = None, **fields: Any) -> dict[str, Any]:
    """One question. It makes exactly `tokens` tokens."""
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return conversation(messages, tokens, **fields)


def conversation(messages: list[dict[str, str]], tokens: int, **fields: Any) -> dict[str, Any]:
    return {
        "messages": messages,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }


def words(count: int, seed: int = 0) -> str:
    """That many words, the same ones for the same seed."""
    return " ".join(WORDS[(at * 7 + seed * 13 + at * at * (seed + 1)) % len(WORDS)] for at in range(count))


def independent(count: int, tokens: int, seed: int, length: int = 30) -> list[dict[str, Any]]:
    """Prompts that have nothing in common after the template's own beginning, nor with those of another seed."""
    return [chat(f"{seed}-{at}: {words(length, seed * 1000 + at)}", tokens) for at in range(count)]


def shared_prefix(count: int, tokens: int, seed: int, length: int = 500) -> list[dict[str, Any]]:
    system = f"Session {seed}. {words(length, seed)}"
    return [chat(f"Question {at}: {words(8, at)}?", tokens, system=system) for at in range(count)]


TOOLS: Final = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name.replace('_', ' ').capitalize()} for the user.",
            "parameters": {
                "type": "object",
                "properties": {"subject": {"type": "string"}, "count": {"type": "integer"}},
                "required": ["subject"],
            },
        },
    }
    for name in ("look_up", "write_note", "send_letter")
]
SCHEMA: Final = {
    "type": "json_schema",
    "json_schema": {
        "name": "numbers",
        "schema": {
            "type": "object",
            "properties": {
                "numbers": {"type": "array", "items": {"type": "integer"}, "minItems": 200},
                "note": {"type": "string"},
            },
            "required": ["numbers", "note"],
        },
    },
}
