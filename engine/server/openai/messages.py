"""Chat messages of the wire as the plain objects a chat template reads."""

from __future__ import annotations

import msgspec

from engine.errors import InvalidRequestError
from engine.server.error_body import shorten
from engine.server.openai.protocol import Message, Part, ToolCall

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def template_messages(messages: list[Message] | None) -> list[dict[str, object]]:
    """Checked messages, absent fields left out. Raises InvalidRequestError."""
    if not messages:
        raise InvalidRequestError("messages must hold at least one message.", param="messages")
    return [_message(message, f"messages[{idx}]") for idx, message in enumerate(messages)]


def _message(message: Message, where: str) -> dict[str, object]:
    if message.role not in ROLES:
        raise InvalidRequestError(
            f"{where}.role is {shorten(message.role, 40)!r}; it must be one of {', '.join(ROLES)}.",
            param=f"{where}.role",
        )
    # Templates know no developer role; it is OpenAI's newer word for system.
    role = "system" if message.role == "developer" else message.role
    result: dict[str, object] = {"role": role, "content": _content(message, where)}
    if message.name is not None:
        result["name"] = message.name
    if message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    if message.reasoning_content is not None:
        result["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        result["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    return result


def _content(message: Message, where: str) -> str | None:
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        if message.role == "assistant" and message.tool_calls:
            return None
        raise InvalidRequestError(
            f"{where}.content is missing; only an assistant message with tool_calls may have none.",
            param=f"{where}.content",
        )
    return "".join(_text(part, f"{where}.content[{idx}]") for idx, part in enumerate(content))


def _text(part: Part, where: str) -> str:
    if part.type != "text":
        raise InvalidRequestError(
            f"{where} is of type {shorten(part.type, 40)!r}; this model takes text parts only.", param=where
        )
    if part.text is None:
        raise InvalidRequestError(f"{where}.text is missing.", param=f"{where}.text")
    return part.text


def _tool_call(call: ToolCall) -> dict[str, object]:
    result: dict[str, object] = {
        "type": call.type or "function",
        "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
    }
    if call.id is not None:
        result["id"] = call.id
    return result


def _arguments(arguments: str | dict[str, object] | None) -> str | dict[str, object]:
    """Templates render an object; text that is none stays as the model wrote it."""
    if arguments is None:
        return {}
    if isinstance(arguments, str):
        try:
            parsed = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return arguments
        return parsed if isinstance(parsed, dict) else arguments
    return arguments
