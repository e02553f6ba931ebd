"""What the queue hands out, and who holds it."""

from dataclasses import dataclass
from typing import Any

from jobs.poison import Rows, is_single


@dataclass(frozen=True, slots=True)
class Piece:
    """What a worker can be asked for: a unit, or some of its rows to see whether they can be survived."""

    unit: Any
    attempt: int = 1
    aside: tuple[int, ...] = ()
    """Rows that are committed as rejects and not measured: each killed two workers."""
    probe: Rows | None = None
    """Measure these and commit nothing."""
    alone: bool = False
    """A worker died that held it and another: from now on its worker holds nothing else."""

    @property
    def unit_id(self) -> str:
        """Of the unit that it is, or is a part of."""
        return self.unit.unit_id

    @property
    def needs_fresh_worker(self) -> bool:
        """Whether what its worker did before could be to blame for a death."""
        return self.probe is not None and is_single(self.probe)

    @property
    def shares(self) -> bool:
        """Whether its worker may hold another one with it."""
        return self.probe is None and not self.alone


@dataclass(slots=True, eq=False)
class Hired:
    """A worker, and what it was asked for and has not answered."""

    handle: Any
    asked: dict[Any, Piece | None]
    """By ticket, in the order in which it was asked. None: for loading its scorer."""
    since: float
    """When it began with the first of them."""

    @property
    def pieces(self) -> list[Piece]:
        """What it was asked for, without the loading."""
        return [piece for piece in self.asked.values() if piece is not None]

    def holds(self, unit_id: str) -> bool:
        """Whether it was asked for this unit, or for rows of it."""
        return any(piece.unit_id == unit_id for piece in self.pieces)
