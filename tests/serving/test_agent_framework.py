"""OpenAI's framework for agents runs its own loop against the server: calls of tools, their results, and an answer by a schema.

Its first call is required, as the framework asks for it; whether it calls again or answers is the model's choice.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest

framework = pytest.importorskip("agents", reason="openai-agents is not installed")
openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")
pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")

from tests.serving.agents import PLAIN  # noqa: E402  behind the check for the framework
from tests.serving.conftest import Served  # noqa: E402


class Answer(pydantic.BaseModel):  # type: ignore[misc, name-defined, unused-ignore]
    """What an agent ends with."""

    ok: bool


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("interface", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def test_an_agent_calls_its_tool_until_it_answers(agents: Served, interface: str, stream: bool) -> None:
    framework.set_tracing_disabled(True)
    called: list[str] = []

    def weather(city: Literal["rome", "oslo"]) -> str:
        called.append(city)
        return "sun"

    async def run(seed: int) -> Any:
        async with openai.AsyncOpenAI(base_url=f"{agents.url}/v1", api_key="none", max_retries=0) as client:
            return await loop(client, seed)

    async def loop(client: Any, seed: int) -> Any:
        extra = {**PLAIN, "seed": seed}
        agent = framework.Agent(
            name="a", instructions="be brief", model=getattr(framework, interface)("letters", client),
            tools=[framework.function_tool(weather)], output_type=Answer,
            model_settings=framework.ModelSettings(
                tool_choice="required", parallel_tool_calls=False, temperature=1, extra_body=extra
            ),
        )  # fmt: skip
        if not stream:
            return await framework.Runner.run(agent, "hi", max_turns=30)
        running = framework.Runner.run_streamed(agent, "hi", max_turns=30)
        async for _ in running.stream_events():
            pass
        return running

    for seed in range(2):
        result = asyncio.run(run(seed))
        assert isinstance(result.final_output, Answer)
        assert len(result.raw_responses) > 1, "a call before the answer"
    assert set(called) <= {"rome", "oslo"}
    assert len(called) >= 2
