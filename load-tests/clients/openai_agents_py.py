"""OpenAI's agents SDK: it runs the loop of calls itself, over Chat Completions and Responses."""

import asyncio
import sys
from importlib import metadata
from typing import Annotated, Literal

import agents
import openai
from pydantic import BaseModel, Field

import common

# Traces would go to a server of OpenAI's.
agents.set_tracing_disabled(True)
called = []


class Advice(BaseModel):
    """As common.SHORT_ANSWER: the SDK takes an answer that was cut for a failure."""

    advice: Literal["a coat", "a shirt", "boots"]


@agents.function_tool(name_override=common.TOOL, description_override=common.DESCRIPTION)
def forecast(
    city: Literal["Paris", "Oslo", "Rome"], days: Annotated[int, Field(ge=1, le=7)]
) -> str:
    called.append({"city": city, "days": days})
    return common.RESULT


async def conversation(model, streamed):
    # The agent's own rule: once a tool was used, its `tool_choice` is reset to let the model answer.
    # A small model needs to be told `none`, so the loop is left after the call and entered again.
    def agent(choice):
        settings = agents.ModelSettings(
            max_tokens=common.MAX_TOKENS,
            tool_choice=choice if common.FORCED else None,
            include_usage=True,
        )
        stop = "stop_on_first_tool" if common.FORCED and choice != "none" else "run_llm_again"
        return agents.Agent(
            name="assistant",
            instructions=instructions,
            model=model,
            tools=[forecast],
            model_settings=settings,
            tool_use_behavior=stop,
            output_type=Advice if common.FORCED and choice == "none" else None,
        )

    async def run(choice, items):
        if streamed:
            result = agents.Runner.run_streamed(agent(choice), items)
            async for _ in result.stream_events():
                pass
        else:
            result = await agents.Runner.run(agent(choice), items)
        for response in result.raw_responses:
            usage = response.usage
            cached = usage.input_tokens_details.cached_tokens
            turns.add(usage.input_tokens, cached, usage.output_tokens)
        assert result.final_output, result
        return result.to_input_list()

    instructions, turns = common.system(), common.Turns()
    called.clear()
    items = await run(common.TOOL, [{"role": "user", "content": common.QUESTION}])
    assert called, items
    for arguments in called:
        common.valid(arguments)
    if common.FORCED:
        items = await run("none", items)
    items.append({"role": "user", "content": common.THANKS})
    await run("none", items)
    return turns


def check(model, streamed):
    async def run():
        # Connections belong to one event loop.
        async with openai.AsyncOpenAI(
            base_url=common.BASE_URL,
            api_key=common.API_KEY,
            max_retries=0,
            timeout=common.TIMEOUT_S,
        ) as client:
            return await conversation(model(common.MODEL, openai_client=client), streamed)

    return lambda: asyncio.run(run())


sys.exit(
    common.run(
        "openai-agents",
        metadata.version("openai-agents"),
        [
            ("chat, whole", check(agents.OpenAIChatCompletionsModel, False)),
            ("chat, streamed", check(agents.OpenAIChatCompletionsModel, True)),
            ("responses, whole", check(agents.OpenAIResponsesModel, False)),
            ("responses, streamed", check(agents.OpenAIResponsesModel, True)),
        ],
    )
)
