"""Instructor: an object from a text in the modes that servers like this are used with, whole and in part."""

from __future__ import annotations

import instructor
from facts import KEY, MODEL, URL
from openai import OpenAI
from pydantic import BaseModel


class Person(BaseModel):
    name: str
    age: int


client = OpenAI(base_url=URL, api_key=KEY)
asked = {"model": MODEL, "messages": [{"role": "user", "content": "Who is Ada?"}], "max_retries": 0}
for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON):
    reads = instructor.from_openai(client, mode=mode)
    whole = reads.chat.completions.create(response_model=Person, **asked)
    assert (whole.name, whole.age) == ("Ada", 36)
    *_, last = reads.chat.completions.create_partial(response_model=Person, **asked)
    assert (last.name, last.age) == ("Ada", 36)
