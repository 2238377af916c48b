"""An agent of pydantic-ai whose model calls a tool, by the Responses API and by chat completions.

Usage: pydantic_ai_agent.py [ADDRESS [MODEL]], those of a server (http://127.0.0.1:8000, built-in).
"""

import os
import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

ADDRESS, MODEL = (sys.argv[1:] + ["http://127.0.0.1:8000", "built-in"][len(sys.argv) - 1:])[:2]
provider = OpenAIProvider(base_url=ADDRESS + "/v1", api_key=os.environ.get("MOESERVE_API_KEY", "none"))


def get_weather(city: str, day: str) -> str:
    """The weather in a city on a day."""
    print(f"get_weather({city!r}, {day!r})")
    return "sunny"


def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    print(f"add({a}, {b})")
    return a + b


for model in (OpenAIResponsesModel(MODEL, provider=provider), OpenAIChatModel(MODEL, provider=provider)):
    agent = Agent(model, model_settings={"temperature": 0, "max_tokens": 64}, tools=[get_weather, add])
    print(agent.run_sync("What is the weather in Paris today?").output)
