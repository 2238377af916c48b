"""Checks of instructor: instructor_check.py MODE. AT is the address of a server with the built-in model, KEY its key.
See check.py, which cannot import instructor: it needs an older openai.
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
client = instructor.from_openai(openai.OpenAI(base_url=os.environ["AT"] + "/v1", api_key=os.environ["KEY"], max_retries=0, timeout=60), mode=mode)
ask = dict(model="built-in", messages=[{"role": "user", "content": "Who has the ball?"}], response_model=Owner, max_retries=0, temperature=0, max_tokens=64)
assert client.chat.completions.create(**ask).owner in ("Ann", "Ben")
*_, last = client.chat.completions.create_partial(**ask)
assert last.owner in ("Ann", "Ben"), last
