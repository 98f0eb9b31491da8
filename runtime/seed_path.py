"""`SeedPath`: gives every gen of a program a seed from its place, so that branches differ and a program repeats.

A place is known when the gen is written. So a seed depends on the program alone: never on timing, on threads, on which
branch won a race, or on who runs the program (`plait.run`, the server's /v1/programs).
"""

from __future__ import annotations

import hashlib
import struct

import msgspec

from plait.runtime.sampling_params import SamplingParams

SEED_BITS = 53
"""A mixed seed has this many bits: services that read JSON numbers as floats keep all of them."""


class SeedPath:
    """The place of one branch in its program. It counts the gens and the forks of the branch.

    `path`: () for the text of the program itself. A branch of a fork adds (number of the fork on its parent, number of
    the branch). Item i of a batch has path (i,), and item 0 has the path of a single run.
    """

    def __init__(self, path: tuple[int, ...] = ()) -> None:
        self.path = path
        self._num_gens = self._num_forks = 0

    @classmethod
    def of_item(cls, index: int) -> SeedPath:
        """Returns the place of item `index` of a batch."""
        return cls((index,) if index else ())

    def fork(self, size: int) -> list[SeedPath]:
        """Counts a fork, and returns the places of its branches."""
        number, self._num_forks = self._num_forks, self._num_forks + 1
        return [SeedPath((*self.path, number, index)) for index in range(size)]

    def params_of_next_gen(self, params: SamplingParams, *, same_seed: bool = False) -> SamplingParams:
        """Counts a gen, and returns its parameters: with its own seed, if they have one. `same_seed`: as given."""
        number, self._num_gens = self._num_gens, self._num_gens + 1
        if params.seed is None or same_seed:
            return params
        return msgspec.structs.replace(params, seed=mixed_seed(params.seed, self.path, number))


def mixed_seed(seed: int, path: tuple[int, ...], gen: int) -> int:
    """Returns the seed of gen number `gen` on the branch with this path. The first gen of a program keeps `seed`.

    >>> mixed_seed(7, (), 0), mixed_seed(7, (), 1), mixed_seed(7, (0, 1), 0)
    (7, 8920763752707336, 4909043238045624)
    """
    if not path and not gen:
        return seed
    place = (seed, *path, gen)
    digest = hashlib.blake2b(struct.pack(f"<{len(place)}q", *place), digest_size=8, person=b"plait seed").digest()
    return int.from_bytes(digest, "little") >> (64 - SEED_BITS)
