"""An agent of pydantic-ai that calls a tool, by chat completions and by the Responses API.

Usage: pydantic_ai_agent.py [ADDRESS [MODEL]], those of a server (http://127.0.0.1:8000, built-in-tools).
"""

import os
import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

ADDRESS, MODEL = (sys.argv[1:] + ["http://127.0.0.1:8000", "built-in-tools"][len(sys.argv) - 1:])[:2]
provider = OpenAIProvider(base_url=ADDRESS + "/v1", api_key=os.environ.get("MOESERVE_API_KEY", "none"))


def settings(run):
    # The model is made to call a tool first.
    return {"temperature": 0, "max_tokens": 64, "tool_choice": "required" if run.run_step == 1 else "auto"}


for model in (OpenAIChatModel(MODEL, provider=provider), OpenAIResponsesModel(MODEL, provider=provider)):
    agent = Agent(model, model_settings=settings)

    @agent.tool_plain
    def next_question() -> str:
        """The next question to be answered."""
        print("next_question is called")
        return "Ann gave the red ball to Ben. Who has the ball?"

    print(agent.run_sync("Answer the next question.").output)
