"""A conversation with a model in this process. Each call adds a turn."""

from __future__ import annotations

from dataclasses import replace

from megalith.data.chat.chat_template import template_of
from megalith.data.tokenizers.tokenizer import Tokenizer
from megalith.errors import ConfigError
from megalith.generation.engine import OnToken
from megalith.generation.requests import Sampling
from megalith.generation.sampling import complete
from megalith.models.transformer import Transformer
from megalith.serve.chat_format import ChatFormat, Message


class ChatSession:
    """A conversation. `messages` is the conversation so far, as role and content."""

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer | None,
        sampling: Sampling | None = None,
        system: str | None = None,
    ):
        """Start a conversation.

        Args:
            model: a decoder on one device, as `megalith.load` returns it.
            tokenizer: the model's tokenizer, with a chat template.
            sampling: how turns are sampled; the end of a turn and the vocabulary are the tokenizer's. Default: at most
                256 tokens at temperature 0.7.
            system: system message.

        Raises:
            ConfigError: if there is no tokenizer or it has no chat template.
        """
        template = None if tokenizer is None else template_of(tokenizer)
        if template is None:
            raise ConfigError(
                "the model has no chat template; train the model with `megalith sft`, which stores the template of "
                "sft.chat_template_path, or continue texts with `megalith generate`"
            )
        sampling = sampling or Sampling(max_new_tokens=256, temperature=0.7)
        self._sampling = replace(sampling, stop=tokenizer.stop_ids, vocab_size=tokenizer.vocab_size)
        self._model, self._tokenizer, self._format = model, tokenizer, ChatFormat(tokenizer, template)
        self.messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]

    def say(self, text: str, on_token: OnToken | None = None) -> str:
        """Add a user message, sample the model's turn, add it and return its text.

        The prompt is the whole conversation. If the turn fails, the conversation stays as it was.

        Args:
            text: the user message.
            on_token: called with each sampled token, as by `Engine.generate`.

        Raises:
            ConfigError: if the template rejects the conversation, or the model has too few positions for it.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        try:
            ids = self._format.prompt_ids(messages, {})
        except ValueError as error:
            raise ConfigError(
                f"the chat template rejects the conversation ({error}); change the message"
            ) from None
        room = self._model.config.max_position_embeddings - len(ids)
        if room < 1:
            raise ConfigError(
                f"the conversation has {len(ids)} tokens and the model has {len(ids) + room} "
                "positions, so no room is left; start a new conversation"
            )
        sampling = replace(self._sampling, max_new_tokens=min(self._sampling.max_new_tokens, room))
        (done,) = complete(self._model, [ids], sampling, on_token=on_token)
        answer = self._tokenizer.decode(done.content)
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        return answer
