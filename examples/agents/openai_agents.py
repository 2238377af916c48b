"""An agent of openai-agents that calls a tool, by the Responses API and by chat completions.

Usage: openai_agents.py [ADDRESS [MODEL]], those of a server (http://127.0.0.1:8000, built-in-tools).
"""

import os
import sys

import agents
import openai

ADDRESS, MODEL = (sys.argv[1:] + ["http://127.0.0.1:8000", "built-in-tools"][len(sys.argv) - 1:])[:2]
client = openai.AsyncOpenAI(base_url=ADDRESS + "/v1", api_key=os.environ.get("MOESERVE_API_KEY", "none"))
agents.set_tracing_disabled(True)


@agents.function_tool
def next_question() -> str:
    """The next question to be answered."""
    print("next_question is called")
    return "Ann gave the red ball to Ben. Who has the ball?"


for model in (agents.OpenAIResponsesModel(MODEL, client), agents.OpenAIChatCompletionsModel(MODEL, client)):
    # The model is made to call a tool first; from the tool's result on, tool_choice is auto.
    settings = agents.ModelSettings(temperature=0, max_tokens=64, tool_choice="required")
    agent = agents.Agent(name="example", model=model, model_settings=settings, tools=[next_question])
    print(agents.Runner.run_sync(agent, "Answer the next question.").final_output)
