"""Programs that actors of a cluster import, and what items do to their actor."""

from __future__ import annotations

import dataclasses
import enum
import os
import time
from pathlib import Path

import plait
from plait import gen


class Mood(enum.Enum):
    CALM = "calm"


@dataclasses.dataclass
class Note:
    number: int
    mood: Mood


@plait.function
def ask(s, number, subject="cats", then=None, folder=None):
    """Notes each start in `folder`. `then`: what goes wrong before the gen."""
    if folder is not None:
        with open(Path(folder) / "started", "a") as file:
            file.write(f"{number}\n")
    if then == "raise":
        raise LookupError("no document", number)
    if then == "read":
        s["answr"]
    if then == "end":
        os._exit(3)
    if then == "end once" and not (Path(folder) / "ended").exists():
        (Path(folder) / "ended").touch()
        os._exit(3)
    if then == "end engine":
        os.kill(s._run.client.model.server_pid, 9)
        time.sleep(0.3)
    s += f"{number}. A sentence about {subject}:" + gen("answer", max_tokens=6)
    s["note"] = Note(number, Mood.CALM)
    if then == "unsavable":
        s["function"] = lambda: 0
    return [number, s["answer"]]


@plait.function
async def ask_async(s, number):
    s += f"{number}:" + gen("answer", max_tokens=6)
    return await s["answer"]


@plait.function
def about(s, document, question):
    s += document + "\nQuestion: " + question + "\nAnswer:" + gen("answer", max_tokens=2)


@plait.function
def typed(s, number):
    """A program without calls, whose variable has another type in its second item."""
    s["value"] = number if number != 1 else "one"
    s["note"] = Note(number, Mood.CALM)
    s["more"] = 1


def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


helper = plait.agent(tools=[add], name="helper")
renamed = ask.bind(subject="dogs")


class Holder:
    @plait.function
    def method(self, s, number):
        s += "x"
