"""Checks of instructor: instructor_check.py MODE. AT is the address of a server with the built-in model, AGENTS of one
with a template with tools for it, KEY their key. See check.py, which cannot import instructor: it needs an older openai.
"""

import os
import sys
import typing

import instructor
import openai
import pydantic


class Owner(pydantic.BaseModel):
    owner: typing.Literal["Ann", "Ben"]


mode = instructor.Mode[sys.argv[1]]
at, model = (os.environ["AT"], "built-in") if mode == instructor.Mode.JSON_SCHEMA else (os.environ["AGENTS"], "built-in-tools")
client = instructor.from_openai(openai.OpenAI(base_url=at + "/v1", api_key=os.environ["KEY"], max_retries=0, timeout=60), mode=mode)
ask = dict(model=model, messages=[{"role": "user", "content": "Who has the ball?"}], response_model=Owner, max_retries=0, temperature=0, max_tokens=64)
assert client.chat.completions.create(**ask).owner in ("Ann", "Ben")
*_, last = client.chat.completions.create_partial(**ask)
assert last.owner in ("Ann", "Ben"), last
