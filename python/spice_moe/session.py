"""What ``spice-run`` does with a loaded model: answers, a chat with its history, and how fast that went."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from .llama import Llama

Message = dict[str, str]


@dataclass
class Meter:
    """Token counts and seconds, summed over the answers of a session.

    Prompt time is the evaluation of the prompt tokens that were not in the context yet. Decode time runs from
    there to the last token, sampling and printing included: the speed that the user sees.
    """

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    decode_tokens: int = 0  #: tokens generated after the first of an answer, which comes with the prompt
    decode_seconds: float = 0.0
    _in_prompt: bool = field(default=False, repr=False)
    _last: float = field(default=0.0, repr=False)

    def begin(self) -> None:
        """The next evaluation is a prompt."""
        self._in_prompt = True

    def evaluated(self, tokens: int, started: float, ended: float) -> None:
        """Count one evaluation; times are of ``time.perf_counter``."""
        if self._in_prompt:
            self.prompt_tokens += tokens
            self.prompt_seconds += ended - started
        else:
            self.decode_tokens += tokens
            self.decode_seconds += ended - self._last
        self._in_prompt = False
        self._last = ended

    @property
    def prompt_speed(self) -> float:
        """Prompt tokens per second, 0.0 when there were none."""
        return self.prompt_tokens / self.prompt_seconds if self.prompt_seconds > 0 else 0.0

    @property
    def decode_speed(self) -> float:
        """Generated tokens per second, 0.0 when there were none."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds > 0 else 0.0


class MeteredLlama(Llama):
    """A Llama that times its evaluations in ``meter``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.meter = Meter()
        super().__init__(*args, **kwargs)

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens as the parent does, timed."""
        started = time.perf_counter()
        super().eval(tokens)
        # An empty evaluation is the parent's way to go on from a prompt that is in the context already.
        self.meter.evaluated(len(tokens), started, time.perf_counter())


class Session:
    """Answers prompts with one model. ``messages`` is the chat so far, the system message included."""

    def __init__(self, llm: MeteredLlama, *, system: str | None, sampling: dict[str, Any]) -> None:
        """``sampling`` are keyword arguments that both completion calls of the parent take."""
        self._llm = llm
        self._sampling = sampling
        self._system: list[Message] = [{"role": "system", "content": system}] if system else []
        self.messages: list[Message] = list(self._system)
        self.finish_reason: str | None = None

    @property
    def has_template(self) -> bool:
        """Whether the model brings a chat template."""
        return any(key.startswith("tokenizer.chat_template") for key in self._llm.metadata)

    def complete(self, prompt: str) -> Iterator[str]:
        """Stream what follows ``prompt``."""
        self._llm.meter.begin()
        for chunk in self._llm.create_completion(prompt, stream=True, **self._sampling):
            choice = chunk["choices"][0]
            self.finish_reason = choice["finish_reason"]
            if choice["text"]:
                yield choice["text"]

    def chat(self, text: str) -> Iterator[str]:
        """Stream the answer to the user's ``text`` through the model's chat template.

        The answer, also one that was broken off, joins the history; a message that failed does not.
        """
        self.messages.append({"role": "user", "content": text})
        answer = ""
        self._llm.meter.begin()
        try:
            for chunk in self._llm.create_chat_completion(self.messages, stream=True, **self._sampling):
                choice = chunk["choices"][0]
                self.finish_reason = choice["finish_reason"]
                piece = choice["delta"].get("content") or ""
                answer += piece
                if piece:
                    yield piece
        except Exception:
            self.messages.pop()
            raise
        except BaseException:  # Ctrl-C, or the caller stopped listening
            self._remember(answer)
            raise
        self._remember(answer)

    def forget(self) -> None:
        """Start a new conversation."""
        self.messages = list(self._system)

    def _remember(self, answer: str) -> None:
        self.messages.append({"role": "assistant", "content": answer})
