"""An agent by OpenAI's API, for examples/agents/calculator.yaml. It knows nothing of Megalith.

`solve` answers the policy's calls of a calculator until it writes an answer, and returns the reward.
"""

import json

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
MAX_TURNS = 3


def run_call(call) -> str:
    try:
        arguments = json.loads(call.function.arguments)
        return str(int(arguments["a"]) + int(arguments["b"]))
    except (ValueError, TypeError, LookupError) as error:
        return f"error: {error}"


async def solve(client, row) -> float:
    messages = list(row["prompt"])
    for _ in range(MAX_TURNS):
        answer = await client.chat.completions.create(model="policy", messages=messages, tools=[ADD])
        message = answer.choices[0].message
        if not message.tool_calls:
            return float((message.content or "").strip() == str(row["answer"]))
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "name": "add", "content": run_call(call)}
            )
    return 0.0
