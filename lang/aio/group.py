"""The branches of a fork in an async program.

Knows: states and their order. Must not know: sessions, calls.
"""

from __future__ import annotations

from plait.lang.aio.state import AsyncState
from plait.lang.core.fork_group import ForkGroup, JoinMode


class AsyncStateGroup(ForkGroup[AsyncState]):
    """What `s.fork(n)` gives in an async body: written like any group, joined with `await`."""

    async def join(self, mode: JoinMode = "gather_variable") -> None:
        """Waits for the branches and brings what they have to the state they came from; see ProgramStateGroup."""
        self._begin_join(mode)
        for state in self.states:
            await state.sync()
        self._finish_join(mode)
