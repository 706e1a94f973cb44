"""An OpenAI-compatible chat endpoint as an agent: off unless it is asked for by address; standard library only."""

from __future__ import annotations

import http.client
import ipaddress
import json
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nbkit.errors import InputError, RunError

from .protocol import Agent

__all__ = ["ChatEndpoint", "OpenAICompatibleAgent"]

_MAX_BYTES = 4 << 20
KEY_VARIABLE = "NBKIT_ENDPOINT_KEY"


class _Refuse(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the key to another address."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):  # the signature is urllib's
        return None


class ChatEndpoint:
    """A chat endpoint that speaks the OpenAI protocol, such as vLLM, llama.cpp or a hosted one.

    base_url: ends before ``/chat/completions``; https, or http on this machine (localhost, 127.0.0.1, ::1). The key, if one is needed, is read from
    the environment variable named by ``key_variable`` and goes to no other address: redirects are refused. timeout: seconds.
    Raises: InputError for another scheme, a name or key inside the address, or a timeout that is not positive.

    >>> ChatEndpoint("http://127.0.0.1:8000/v1", "tiny")
    ChatEndpoint(model='tiny', base_url='http://127.0.0.1:8000/v1')
    """

    def __init__(self, base_url: str, model: str, *, timeout: float = 60.0, key_variable: str = KEY_VARIABLE):
        parts = urllib.parse.urlsplit(base_url if isinstance(base_url, str) else "")
        local = parts.scheme == "http" and _is_loopback(parts.hostname or "")
        if not parts.hostname or parts.username or parts.query or not (parts.scheme == "https" or local):
            shown = base_url if not parts.username else "an address with a name in it"
            raise InputError("base_url", got=shown, allowed="https://host/v1, or http:// on this machine", hint=f"put the key into {key_variable}")
        if not model or not isinstance(model, str):
            raise InputError("model", got=model, allowed="the name the endpoint serves it under")
        if not timeout > 0:
            raise InputError("timeout", got=timeout, allowed="> 0 seconds")
        self.base_url, self.model, self.timeout, self.key_variable = base_url.rstrip("/"), model, timeout, key_variable
        handlers: list[Any] = [_Refuse()] + ([urllib.request.ProxyHandler({})] if local else [])
        self._opener = urllib.request.build_opener(*handlers)

    def chat(self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = (), max_tokens: int = 512) -> dict[str, Any]:
        """The assistant's message (role, content, tool_calls) at temperature 0.

        Raises: RunError when the endpoint cannot be reached, answers with an error, or with something else than a message.
        """
        body: dict[str, Any] = {"model": self.model, "messages": list(messages), "temperature": 0, "max_tokens": max_tokens}
        if tools:
            body["tools"] = list(tools)
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        key = os.environ.get(self.key_variable)
        if key:
            headers["Authorization"] = f"Bearer {key}"
        url = f"{self.base_url}/chat/completions"
        request = urllib.request.Request(url, data=json.dumps(body).encode(), headers=headers, method="POST")
        try:
            with self._opener.open(request, timeout=self.timeout) as response:
                raw = response.read(_MAX_BYTES + 1)
        except urllib.error.HTTPError as error:
            told = error.read(300).decode("utf-8", "replace").strip()
            raise RunError(f"endpoint {url}", got=f"status {error.code}: {told or error.reason}", allowed="status 200") from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            hint = "start the server, or check base_url; nothing else needs it"
            raise RunError(f"endpoint {url}", got=f"no answer ({reason})", allowed="a running server", hint=hint) from error
        if len(raw) > _MAX_BYTES:
            raise RunError(f"endpoint {url}", got=f"more than {_MAX_BYTES} bytes", allowed="one chat completion")
        try:
            message = json.loads(raw)["choices"][0]["message"]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise RunError(f"endpoint {url}", got=f"{raw[:200]!r}", allowed="JSON with choices[0].message") from error
        if not isinstance(message, dict):
            raise RunError(f"endpoint {url}", got=f"a message that is {type(message).__name__}", allowed="an object")
        return message

    def __repr__(self) -> str:
        return f"ChatEndpoint(model={self.model!r}, base_url={self.base_url!r})"


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class OpenAICompatibleAgent(Agent):
    """A language model behind a chat endpoint that works by tool calls; it is told nothing but the request, the tools and their results.

    A reply without a tool call ends the episode. Of several calls in one reply the first is done. Options as in :class:`ChatEndpoint`.
    """

    kind = "real model"

    def __init__(self, base_url: str, model: str, *, timeout: float = 60.0, key_variable: str = KEY_VARIABLE, name: str | None = None):
        super().__init__(name or f"endpoint {model}")
        self.endpoint = ChatEndpoint(base_url, model, timeout=timeout, key_variable=key_variable)

    def reset(self, variant: Any, text: str, seed: int, rng: np.random.Generator) -> None:
        super().reset(variant, text, seed, rng)
        system = "You do office work with the tools given. Call one tool at a time. Do not ask questions. Stop when the job is done."
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": system}, {"role": "user", "content": text}]
        self._tools = tool_schemas(variant, self.plan)
        self._pending: str | None = None

    def tell(self, text: str) -> None:
        super().tell(text)
        self.messages.append({"role": "user", "content": text})

    def next_call(self, observation: Any) -> Any:
        """One round: the conversation goes out, a tool call comes back (None: the model stopped)."""
        reply = self.endpoint.chat(self.messages, tools=self._tools)
        calls = reply.get("tool_calls") or []
        if not calls:
            return None
        call, self._pending = _parse(calls[0])
        self.messages.append({"role": "assistant", "content": reply.get("content") or "", "tool_calls": [calls[0]]})
        return call

    def observed(self, call: Any, observation: Any) -> None:
        """A result answers its tool call; what was done without one, verification after a message, reaches the model as plain text."""
        if self._pending is not None:
            self.messages.append({"role": "tool", "tool_call_id": self._pending, "content": observation.text})
        else:
            self.messages.append({"role": "user", "content": f"{call}: {observation.text}"})
        self._pending = None


def _parse(tool_call: Any) -> tuple[Any, str]:
    """The call and its id; arguments that are no JSON object of plain values become none, and the office will say what is missing."""
    from nbkit.envs.office import Call

    try:
        name, ident = tool_call["function"]["name"], str(tool_call.get("id") or "call")
        args = tool_call["function"].get("arguments") or {}
    except (TypeError, LookupError, AttributeError) as error:
        raise RunError("tool call of the endpoint", got=str(tool_call)[:200], allowed="function.name and function.arguments") from error
    try:
        args = json.loads(args) if isinstance(args, str) else args
    except (ValueError, RecursionError):
        args = {}
    plain = isinstance(args, dict) and all(isinstance(value, (str, int, float)) for value in args.values())
    return Call(str(name), args if plain else {}), ident


def tool_schemas(variant: Any, plan: Any) -> list[dict[str, Any]]:
    """The tools of a job in the form of the protocol, from the names and arguments that its plans use; their values are not given away."""
    found: dict[str, dict[str, str]] = {}
    for word in variant.options:
        for step in plan(variant, word):
            for key, content in step.call.args.items():
                found.setdefault(step.call.name, {})[key] = "string" if isinstance(content, str) else "number"
            found.setdefault(step.call.name, {})
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {
                    "type": "object",
                    "properties": {key: {"type": kind} for key, kind in args.items()},
                    "required": list(args),
                },
            },
        }
        for name, args in found.items()
    ]
