"""Chat templates: the model's own Jinja, rendered in a sandbox that cannot change what it is given.

The environment is the one that Hugging Face's templates are written for: blocks trimmed, loop controls, `tojson`
that keeps non-ASCII text, `raise_exception`, `strftime_now`, and the `generation` block.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..shared.errors import InvalidRequest

ContentFormat = Literal["string", "parts"]

# Stands at the end of a message that the model continues, so that the rendered text can be cut there.
CUT = "\ufffe"


class GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks what an assistant said, for training: rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock], autoescape=False
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env


ENVIRONMENT = _environment()


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """What a request asks of the template beside its messages."""

    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    kwargs: Mapping[str, Any] | None = None


class ChatTemplate:
    """A compiled template.

    Raises:
        InvalidRequest: the source is no valid template.
    """

    def __init__(self, source: str, content_format: ContentFormat | None = None) -> None:
        try:
            self.content_format = content_format or detect_content_format(source)
            self._template = ENVIRONMENT.from_string(source)
        except TemplateSyntaxError as e:
            raise InvalidRequest(f"The chat template cannot be read: {e.message} (line {e.lineno}).") from e
        self.knows_developer = "developer" in source

    def render(self, messages: Sequence[Mapping[str, Any]], options: RenderOptions, **tokens: str) -> str:
        """The prompt as text. `tokens` are `bos_token` and `eos_token`.

        Raises:
            InvalidRequest: the template refuses these messages, or fails on them.
        """
        if options.continue_final_message:
            messages = [*messages[:-1], _with_cut(messages[-1])]
        names: dict[str, Any] = {
            **(options.kwargs or {}),
            **tokens,
            "messages": messages,
            "tools": options.tools,
            "documents": options.documents,
            "add_generation_prompt": options.add_generation_prompt,
        }
        try:
            text = self._template.render(names)
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as e:
            # A template is code that came with the model; what it raises on these messages is about the messages.
            raise InvalidRequest(f"The model's chat template refuses these messages: {e}", param="messages") from e
        if not options.continue_final_message:
            return text
        head, found, _ = text.rpartition(CUT)
        if not found:
            raise InvalidRequest("The model's chat template drops the message to continue.", param="messages")
        return head


def _with_cut(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + CUT}
    if content and content[-1].get("type") == "text":
        return {**message, "content": [*content[:-1], {**content[-1], "text": content[-1]["text"] + CUT}]}
    raise InvalidRequest("continue_final_message needs a last message that ends in text.", param="messages")


def detect_content_format(source: str) -> ContentFormat:
    """Whether a template reads a message's `content` as a list of parts: whether some loop runs over it.

    Follows plain assignments (`{% set content = message['content'] %}`), as templates that loop over it use them.
    """
    tree = ENVIRONMENT.parse(source)
    aliases = {
        assign.target.name
        for assign in tree.find_all(nodes.Assign)
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, frozenset())
    }
    names = frozenset(aliases)
    return "parts" if any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For)) else "string"


def _is_content(node: nodes.Node, aliases: frozenset[str]) -> bool:
    """Whether `node` is `….content`, `…['content']`, one of its aliases, or a filter or slice of these."""
    for part in _operands(node):
        if isinstance(part, nodes.Name) and part.name in aliases:
            return True
        if isinstance(part, nodes.Getattr) and part.attr == "content":
            return True
        if isinstance(part, nodes.Getitem) and isinstance(part.arg, nodes.Const) and part.arg.value == "content":
            return True
    return False


def _operands(node: nodes.Node | None) -> Iterator[nodes.Node]:
    """The node, and what its filters and slices are applied to."""
    while node is not None:
        yield node
        if isinstance(node, nodes.Filter) or (isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)):
            node = node.node
        else:
            return


class ChatTemplates:
    """Compiled templates by their source, the `size` last used."""

    def __init__(self, override: str | None = None, content_format: ContentFormat | None = None, size: int = 32):
        self._override = override
        self._content_format: ContentFormat | None = content_format
        self._size = size
        self._compiled: OrderedDict[str, ChatTemplate] = OrderedDict()

    def get(self, source: str | None) -> ChatTemplate:
        """The template to use for a model whose own one is `source`.

        Raises:
            InvalidRequest: there is none, or it cannot be read.
        """
        source = self._override or source
        if not source:
            raise InvalidRequest("This model has no chat template; use /v1/completions.", param="model")
        template = self._compiled.get(source)
        if template is None:
            template = self._compiled[source] = ChatTemplate(source, self._content_format)
            if len(self._compiled) > self._size:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(source)
        return template
