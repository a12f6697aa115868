"""The tiny language that the test model speaks: its tools, what a user may ask, and the one right answer to each.

It is small and regular, so that a million parameters learn it, and open where tests need it to be: names are put
together from syllables and numbers from digits, so that neither can be learnt by heart; they must be copied.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from citadel.messages import ToolSpec

CITIES: Final = (
    *("Athens", "Berlin", "Bern", "Cairo", "Delhi", "Dublin", "Cuzco", "Lisbon", "London", "Madrid", "Nairobi", "Oslo"),
    *("Paris", "Prague", "Quito", "Rome", "Seoul", "Sofia", "Tokyo", "Tunis", "Vienna", "Warsaw"),
)
SKIES: Final = ("sun", "rain", "snow", "fog", "wind", "clouds", "storm", "hail")
ROOMS: Final = ("kitchen", "bathroom", "bedroom", "hall", "garage", "garden", "office", "attic")
GOODS: Final = ("apples", "bread", "butter", "cheese", "eggs", "milk", "pears", "rice", "salt", "soap", "sugar", "tea")
THINGS: Final = ("train", "door", "dinner", "box", "car", "boat", "shop", "bus", "soup", "house")
STATES: Final = ("late", "open", "ready", "here", "red", "blue", "full", "empty", "cold", "warm")
DAYS: Final = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
WORDS: Final = (*SKIES, *ROOMS, *GOODS, *THINGS, *STATES)

FIRST: Final = (
    *("Ba", "Be", "Da", "Do", "Fe", "Ga", "Ka", "Ki", "La", "Le", "Li", "Lo", "Ma", "Mi"),
    *("Na", "Ni", "Pe", "Ra", "Ro", "Sa", "Su", "Ta", "To", "Va", "Vi", "Yo", "Za", "Zo"),
)
LATER: Final = (
    *("ba", "da", "di", "ka", "la", "li", "lo", "ma", "mi", "mo"),
    *("na", "ni", "no", "ra", "ri", "ro", "sa", "ta", "to", "va"),
)

NO_TOOL: Final = "I have no tool for that."


@dataclass(frozen=True, slots=True)
class Call:
    """A call, and what the tool says to it."""

    tool: str
    arguments: Mapping[str, Any]
    result: str


@dataclass(frozen=True, slots=True)
class Request:
    """What a user says, the calls it takes, one after the other, and what is answered in the end."""

    ask: str
    answer: str
    calls: tuple[Call, ...] = ()


# Words that are open: any may come, most never came in training.


def name(rng: Random) -> str:
    return rng.choice(FIRST) + "".join(rng.choice(LATER) for _ in range(rng.choice((1, 1, 2))))


def number(rng: Random, most_digits: int = 3) -> int:
    """Of each length equally often."""
    digits = rng.randint(1, most_digits)
    return rng.randint(10 ** (digits - 1) - (digits == 1), 10**digits - 1)


def clock(rng: Random) -> tuple[int, int]:
    return rng.randint(0, 23), rng.randint(10, 59)


def listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


# What takes a tool.


def weather(rng: Random) -> Request:
    city, days = rng.choice(CITIES), rng.randint(2, 19)
    arguments: dict[str, Any] = {"city": city}
    ask = rng.choice(("What is", "How is")) + f" the weather in {city}"
    if rng.random() < 0.4:
        arguments["days"] = days
        ask += f" for {days} days"
    result = sky(rng)
    return Request(f"{ask}?", f"The weather in {city} is {result}.", (Call("get_weather", arguments, result),))


def sky(rng: Random) -> str:
    return f"{rng.choice(SKIES)}, {number(rng, 2)} degrees"


def time(rng: Random) -> Request:
    city = rng.choice(CITIES)
    result = "{}:{}".format(*clock(rng))
    ask = rng.choice((f"What time is it in {city}?", f"Tell me the time in {city}."))
    return Request(ask, f"It is {result} in {city}.", (Call("get_time", {"city": city}, result),))


def date(rng: Random) -> Request:
    result = f"{rng.choice(DAYS)} {rng.randint(1, 30)}"
    ask = rng.choice(("What day is it?", "What is the date?"))
    return Request(ask, f"It is {result}.", (Call("get_date", {}, result),))


def addition(rng: Random) -> Request:
    a, b = number(rng), number(rng)
    ask = rng.choice((f"What is {a} plus {b}?", f"Add {a} and {b}."))
    return Request(ask, f"{a} plus {b} is {a + b}.", (Call("add", {"a": a, "b": b}, str(a + b)),))


def phone(rng: Random) -> Request:
    who, result = name(rng), str(rng.randint(1000, 9999))
    ask = rng.choice((f"What is the number of {who}?", f"Find the number of {who}."))
    return Request(ask, f"The number of {who} is {result}.", (Call("find_number", {"name": who}, result),))


def message(rng: Random) -> Request:
    who, text = name(rng), f"the {rng.choice(THINGS)} is {rng.choice(STATES)}"
    ask = rng.choice((f"Tell {who} that {text}.", f"Write to {who} that {text}."))
    return Request(ask, f"I told {who} that {text}.", (Call("send_message", {"name": who, "text": text}, "sent"),))


def alarm(rng: Random) -> Request:
    hour, minute = clock(rng)
    ask = rng.choice((f"Wake me at {hour}:{minute}.", f"Set an alarm for {hour}:{minute}."))
    call = Call("set_alarm", {"hour": hour, "minute": minute}, "ok")
    return Request(ask, f"The alarm is set for {hour}:{minute}.", (call,))


def light(rng: Random) -> Request:
    room, on = rng.choice(ROOMS), rng.random() < 0.5
    word = "on" if on else "off"
    ask = rng.choice((f"Turn {word} the light in the {room}.", f"Turn the light in the {room} {word}."))
    return Request(ask, f"The light in the {room} is {word}.", (Call("set_light", {"room": room, "on": on}, "ok"),))


def shopping(rng: Random) -> Request:
    items, price = rng.sample(GOODS, rng.randint(1, 4)), f"{number(rng, 2)} coins"
    ask = rng.choice((f"Buy {listed(items)}.", f"I need {listed(items)}."))
    return Request(ask, f"I bought {listed(items)} for {price}.", (Call("buy", {"items": items}, price),))


def contact(rng: Random) -> Request:
    who, age = name(rng), rng.randint(10, 99)
    call = Call("add_contact", {"contact": {"name": who, "age": age}}, "saved")
    return Request(f"Save {who}, {age} years old.", f"{who}, {age} years old, is saved.", (call,))


def place(rng: Random) -> Request:
    who, city = name(rng), rng.choice(CITIES)
    return Request(f"Where is {who}?", f"{who} is in {city}.", (Call("find_person", {"name": who}, city),))


def weather_there(rng: Random) -> Request:
    """Two calls, the second with what the first one found."""
    who, city, result = name(rng), rng.choice(CITIES), sky(rng)
    calls = (Call("find_person", {"name": who}, city), Call("get_weather", {"city": city}, result))
    answer = f"{who} is in {city}. The weather in {city} is {result}."
    return Request(f"How is the weather where {who} is?", answer, calls)


# What takes none.


def greeting(rng: Random) -> Request:
    who = name(rng)
    return Request(f"Hello, I am {who}.", f"Hello {who}.")


def thanks(rng: Random) -> Request:
    return Request(rng.choice(("Thank you.", "Thanks.")), "You are welcome.")


def echo(rng: Random) -> Request:
    words = [rng.choice((rng.choice(WORDS), name(rng), str(number(rng, 4)))) for _ in range(rng.randint(1, 6))]
    return Request(f"Say {' '.join(words)}.", f"{' '.join(words)}.")


def counting(rng: Random) -> Request:
    """The way to an output of any length that is known beforehand."""
    first = rng.randint(0, 70)
    last = first + rng.randint(2, 28)
    return Request(f"Count from {first} to {last}.", " ".join(map(str, range(first, last + 1))) + ".")


def writing_json(rng: Random) -> Request:
    made: dict[str, Any] = {"name": name(rng), "age": number(rng, 2), "city": rng.choice(CITIES)}
    keys = rng.sample(list(made), rng.randint(1, 3))
    told = ", ".join(f"{key} {made[key]}" for key in keys)
    return Request(f"Write as JSON: {told}.", json.dumps({key: made[key] for key in keys}))


Maker = Callable[[Random], Request]

WITH_TOOLS: Final[Mapping[Maker, int]] = {
    weather: 4,
    time: 2,
    date: 1,
    addition: 4,
    phone: 3,
    message: 3,
    alarm: 3,
    light: 2,
    shopping: 3,
    contact: 3,
    place: 2,
    weather_there: 3,
}
"""How often each is asked for. What has more to copy comes more often."""

WITHOUT_TOOLS: Final[Mapping[Maker, int]] = {greeting: 2, thanks: 1, echo: 4, counting: 2, writing_json: 3}

_STRING: Final = {"type": "string"}
_INTEGER: Final = {"type": "integer"}


def _tool(name: str, required: Mapping[str, Any], optional: Mapping[str, Any] | None = None) -> ToolSpec:
    parameters = {"type": "object", "properties": {**required, **(optional or {})}, "required": list(required)}
    return ToolSpec(name, name.replace("_", " ").capitalize() + ".", {**parameters, "additionalProperties": False})


_PERSON: Final = {
    "type": "object",
    "properties": {"name": _STRING, "age": _INTEGER},
    "required": ["name", "age"],
    "additionalProperties": False,
}

TOOLS: Final[Mapping[str, ToolSpec]] = {
    tool.name: tool
    for tool in (
        _tool("get_weather", {"city": _STRING}, {"days": _INTEGER}),
        _tool("get_time", {"city": _STRING}),
        _tool("get_date", {}),
        _tool("add", {"a": _INTEGER, "b": _INTEGER}),
        _tool("find_number", {"name": _STRING}),
        _tool("find_person", {"name": _STRING}),
        _tool("send_message", {"name": _STRING, "text": _STRING}),
        _tool("set_alarm", {"hour": _INTEGER, "minute": _INTEGER}),
        _tool("set_light", {"room": _STRING, "on": {"type": "boolean"}}),
        _tool("buy", {"items": {"type": "array", "items": _STRING}}),
        _tool("add_contact", {"contact": _PERSON}),
    )
}
