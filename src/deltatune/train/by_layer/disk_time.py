"""Measures the time that a run by layers waits for the disk."""

from __future__ import annotations

from dataclasses import dataclass

# A run that waits for a larger share of its time is told how to wait less.
_MUCH = 0.1


@dataclass
class DiskTime:
    """The time spent waiting for reads so far.

    Attributes:
        waited: The seconds that passes waited for weights, and for inputs of layers to be written and read. Writing
            counts as a whole where the layer beside it took less.
        read: The bytes that were read.
        of: The name of the store, in words.
    """

    waited: float = 0.0
    read: int = 0
    of: str = "the disk"

    def said(self, seconds: float) -> str:
        """Return a line for the end of a run that has computed for so many seconds."""
        share = self.waited / seconds if seconds else 0.0
        advice = ""
        if share > _MUCH:
            advice = " More tokens an iteration (--batch-size, --max-seq-length, --pack) would hide it."
        return f"Waited {self.waited:.1f} s for {self.of} ({share:.0%}), which gave {self.read / 1e9:,.2f} GB.{advice}"
