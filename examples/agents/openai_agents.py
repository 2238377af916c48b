"""An agent of openai-agents whose model calls a tool, by the Responses API and by chat completions.

Usage: openai_agents.py [ADDRESS [MODEL]], those of a server (http://127.0.0.1:8000, built-in).
"""

import os
import sys

import agents
import openai

ADDRESS, MODEL = (sys.argv[1:] + ["http://127.0.0.1:8000", "built-in"][len(sys.argv) - 1:])[:2]
client = openai.AsyncOpenAI(base_url=ADDRESS + "/v1", api_key=os.environ.get("MOESERVE_API_KEY", "none"))
agents.set_tracing_disabled(True)


@agents.function_tool
def get_weather(city: str, day: str) -> str:
    """The weather in a city on a day."""
    print(f"get_weather({city!r}, {day!r})")
    return "sunny"


@agents.function_tool
def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    print(f"add({a}, {b})")
    return a + b


for model in (agents.OpenAIResponsesModel(MODEL, client), agents.OpenAIChatCompletionsModel(MODEL, client)):
    settings = agents.ModelSettings(temperature=0, max_tokens=64)
    agent = agents.Agent(name="example", model=model, model_settings=settings, tools=[get_weather, add])
    print(agents.Runner.run_sync(agent, "What is the weather in Paris today?").final_output)
