"""Transcript: what a generation yields, as the client is to read it; stream and whole answer read it alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.errors import InternalError
from engine.ipc.messages import Ended, Finish, TokenLogprob
from engine.server.openai.logprobs import ChatLogprobs, LogprobWriter, TextLogprobs, TextLogprobWriter

if TYPE_CHECKING:
    from engine.generation import Delta, Generation


class Transcript:
    """One choice. `prompt`: the text to begin with (echo); `writer`: renders logprobs, the prompt's among them."""

    def __init__(self, generation: Generation, prompt: str | None, writer: LogprobWriter | None) -> None:
        self.generation = generation
        self._prompt = prompt
        self._writer = writer

    def take(self, delta: Delta) -> tuple[str, list[TokenLogprob]]:
        """Text and logprobs to show for new output: of every token but the end token, whose text is never shown."""
        entries = delta.logprobs
        if entries and self._ends_with(entries[-1]):
            entries = entries[:-1]
        if self._prompt is None:
            return delta.text, entries
        text, of_prompt = self.rest()
        return text + delta.text, of_prompt + entries

    def _ends_with(self, entry: TokenLogprob) -> bool:
        """The entry is the end token's. A generation's final facts are there when its last output is read."""
        ended = self.generation.ended
        return ended is not None and ended.finish == Finish.STOP_TOKEN and entry.id == ended.stop_reason

    def rest(self) -> tuple[str, list[TokenLogprob]]:
        """What is left when no output comes any more: the prompt, if it went with none."""
        if self._prompt is None:
            return "", []
        text, self._prompt = self._prompt, None
        if not isinstance(self._writer, TextLogprobWriter):
            return text, []
        entries = self.generation.prompt_logprobs
        self._writer.begin(text, len(entries))
        return text, entries

    def render(self, entries: list[TokenLogprob]) -> ChatLogprobs | TextLogprobs | None:
        """The logprobs of the next entries that were taken; None if none are wanted."""
        return None if self._writer is None else self._writer.render(entries)

    @property
    def ended(self) -> Ended:
        """The final facts, after the last output. Raises InternalError if there are none."""
        if self.generation.ended is None:
            raise InternalError("The request ended without its final facts.")
        return self.generation.ended
