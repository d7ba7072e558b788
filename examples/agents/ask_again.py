"""An agent that knows a base URL alone: it asks, and asks again where the answer is not one number. It runs wherever an address answers:

export OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none OPENAI_MODEL=runs/NAME
echo '{"prompt": "3 + 4 = ?", "answer": "7"}' | python examples/agents/ask_again.py

``groupwise train examples/agents/ask_again.yaml`` trains the model that it asks. A number alone earns a half,
the right one all, and asking twice costs a tenth.
"""

import json
import os
import re
import sys
from urllib.request import Request, urlopen


def ask(messages: list[dict]) -> str:
    """The answer, which the conversation then has. As a client of OpenAI's asks; with none installed."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    body = {"model": os.environ.get("OPENAI_MODEL", "any"), "messages": messages, "temperature": 0.7}
    with urlopen(Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", json.dumps(body).encode(), headers)) as answer:
        message = json.load(answer)["choices"][0]["message"]
    messages.append({"role": "assistant", "content": message["content"]})
    return message["content"]


def is_number(said: str) -> bool:
    return re.fullmatch(r"\s*-?\d+\.?\s*", said) is not None


row = json.load(sys.stdin)
conversation = [{"role": "user", "content": f"{row['prompt']} Answer with one number, nothing else."}]
said = ask(conversation)
asked_twice = not is_number(said)
if asked_twice:
    conversation.append({"role": "user", "content": "Say the number alone."})
    said = ask(conversation)
is_right = said.strip().rstrip(".") == row["answer"]
print(json.dumps({"reward": 0.5 * is_number(said) + 0.5 * is_right - 0.1 * asked_twice}))
