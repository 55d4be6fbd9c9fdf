"""What the demo asks: a conversation in two turns, and a question over a long real text."""

from __future__ import annotations

from pydoc_data.topics import topics

_FIRST_QUESTION = (
    "Question: Parents have complained to the principal about bullying during recess. The "
    "principal wants to quickly resolve this, instructing recess aides to be vigilant. Which "
    "situation should the aides report to the principal?\n"
    "a) An unengaged girl is sitting alone on a bench, engrossed in a book and showing no "
    "interaction with her peers.\n"
    "b) Two boys engaged in a one-on-one basketball game are involved in a heated argument "
    "regarding the last scored basket.\n"
    "c) A group of four girls has surrounded another girl and appears to have taken possession of "
    "her backpack.\n"
    "d) Three boys are huddled over a handheld video game, which is against the rules and not "
    "permitted on school grounds.\n"
    "Answer:"
)
_FIRST_ANSWER = (
    "c) A group of four girls has surrounded another girl and appears to have taken possession of "
    "her backpack.\n"
    "Explanation: The principal wants to quickly resolve this, instructing recess aides to be "
    "vigilant. The principal is concerned about bullying during recess. The principal wants the "
    "aides to report any bullying behavior to him. The principal is not concerned about the other "
    "situations.\n"
)
_SECOND_QUESTION = (
    "Question: If the aides confront the group of girls from situation (c) and they deny "
    "bullying, stating that they were merely playing a game, what specific evidence should the "
    "aides look for to determine if this is a likely truth or a cover-up for bullying?\n"
    "Answer:"
)

TURN_1 = _FIRST_QUESTION
"""First turn of the example conversation in MindIE's Prefix Cache guide, word for word."""

TURN_2 = _FIRST_QUESTION + _FIRST_ANSWER + _SECOND_QUESTION
"""Its second turn: the first question, the guide's answer, the second question."""

ANSWER = "417"
FACT = f"The code of amber falcon is {ANSWER}."


def long_question(characters: int) -> str:
    """So many characters of Python's language reference, a fact in their middle, a question.

    The text is the one ``help()`` shows; it lies on every machine with Python.
    """
    text = "\n\n".join(topics[name] for name in sorted(topics))[:characters]
    middle = text.index("\n\n", len(text) // 2)
    document = f"{text[:middle]} {FACT}{text[middle:]}"
    return f"{document}\n\nQuestion: What is the code of amber falcon?\nAnswer:"
