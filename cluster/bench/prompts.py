"""Prompts for the benchmarks: short chats, and one document as long as asked, in tokens.

Owns plain English text of our own making. Every prompt begins differently, so that no prefix
cache can make a later repeat cheaper than the first.
"""

from __future__ import annotations

from router.text import TextCodec

_QUESTIONS = (
    "Explain to a child why the sea is salty.",
    "Write a short story about a lighthouse keeper and a lost whale.",
    "Give me a plan for a week of simple dinners for two people.",
    "Describe how a bicycle stays upright when it moves.",
    "What should I see in a city that I visit for one day in autumn?",
    "Tell me about the history of the printing press.",
    "How do bees find their way back to the hive?",
    "Compare growing tomatoes in pots and in the ground.",
)

_CLAUSE = (
    "{n}. The supplier of lot {n} shall deliver the goods to the harbour office before the {day}. "
    "day of the month; each case is weighed, sealed and entered in the book by the clerk on duty. "
    "A case that arrives open is set aside and paid for only after two people have counted it. "
)


def chat_prompt(codec: TextCodec, number: int) -> tuple[int, ...]:
    """A short question in the model's chat form, as token ids."""
    question = f"({number}) {_QUESTIONS[number % len(_QUESTIONS)]}"
    return codec.chat([{"role": "user", "content": question}])


def long_prompt(codec: TextCodec, n_tokens: int, number: int = 0) -> tuple[int, ...]:
    """A contract of exactly ``n_tokens`` tokens, cut where they end."""
    tokens: list[int] = list(codec.encode(f"Contract {number}. "))
    clause = 0
    while len(tokens) < n_tokens:
        clause += 1
        tokens += codec.encode(
            _CLAUSE.format(n=clause, day=1 + clause % 28), add_special_tokens=False
        )
    return tuple(tokens[:n_tokens])
