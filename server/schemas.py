"""What clients may send: the models of requests, and the engine's parameters from them.

null means that a value is not given; unknown fields are ignored, as OpenAI's clients expect.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)

from engine.asked.sampling import MAX_BIASES, MAX_LOGPROBS, SamplingParams, StructuredOutput
from engine.errors import RequestError
from engine.text.messages import content_text
from server.errors import APIError, about_form, bad_value, shown, unsupported

MAX_N: Final = 128
MAX_PROMPTS: Final = 256
MAX_STOPS: Final = 16
MAX_MESSAGES: Final = 10_000
DEFAULT_MAX_TOKENS: Final = 16
"""Of completions; a chat goes on to the end of the context."""
MAX_ID_DIGITS: Final = 20
_INT64: Final = 2**63


def _few(biases: Any) -> Any:
    if isinstance(biases, dict) and len(biases) > MAX_BIASES:
        raise ValueError(f"expected at most {MAX_BIASES} tokens, got {len(biases)}")
    return biases


Ids = Annotated[list[int], Field(fail_fast=True)]
"""Of these lists the first wrong item is told: millions may be wrong."""
Text = Annotated[str, StringConstraints(min_length=1)]


class _Lenient(BaseModel):
    """An object of which unknown fields are ignored and numbers are finite."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, strict=True)


class StreamOptions(_Lenient):
    """What a stream tells beside the text."""

    include_usage: bool | None = None
    """One more event at the end, with the usage."""
    continuous_usage_stats: bool | None = None
    """The usage so far in every event."""


class Sampling(_Lenient):
    """What completions and chats have in common."""

    model: str | None = None
    n: int | None = Field(None, ge=1, le=MAX_N)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=_INT64)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-_INT64, lt=_INT64)
    stop: Text | Annotated[list[Text], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stop_token_ids: Annotated[Ids, Field(max_length=256)] | None = None
    max_tokens: int | None = Field(None, ge=1, lt=_INT64)
    min_tokens: int | None = Field(None, ge=0, lt=_INT64)
    ignore_eos: bool | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0)
    logit_bias: Annotated[dict[str, float], BeforeValidator(_few)] | None = Field(
        None, max_length=MAX_BIASES
    )
    priority: int | None = Field(None, ge=-_INT64, lt=_INT64)
    cache_salt: Text | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    user: str | None = None
    response_format: dict[str, Any] | None = None

    @property
    def wants_usage(self) -> bool:
        """Whether the last event tells the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_running_usage(self) -> bool:
        """Whether every event tells the usage so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def form_name(self) -> str:
        """The field that gives the answer its form."""
        return "response_format"

    def form(self) -> StructuredOutput | None:
        """Return the form that the answer must have.

        Raises:
            APIError: It is asked for in another way than the published one.
        """
        asked = self.response_format
        match asked:
            case None | {"type": "text"}:
                return None
            case {"type": "json_object"}:
                return StructuredOutput(json_object=True)
            case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
                return StructuredOutput(json_schema=schema)
            case _:
                raise bad_value(
                    "response_format",
                    "response_format: expected type text, json_object, or json_schema with "
                    f"json_schema.schema, got {shown(asked)}.",
                )

    def params(
        self,
        *,
        defaults: Mapping[str, Any],
        n: int,
        max_tokens: int | None,
        logprobs: int | None,
        form: StructuredOutput | None,
    ) -> SamplingParams:
        """Return the engine's parameters; those left out are of `defaults`, but for max_tokens.

        Raises:
            APIError: A value is out of bounds or not supported.
        """
        if self.stream_options is not None and not self.stream:
            raise bad_value(
                "stream_options", "stream_options: expected stream=true beside it. Remove it."
            )
        given: dict[str, Any] = {
            name: value
            for name in (
                *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids"),
                *("min_tokens", "ignore_eos", "cache_salt"),
                *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"),
            )
            if (value := getattr(self, name)) is not None
        }
        given = {name: x for name, x in defaults.items() if name != "max_tokens"} | given
        if given.get("stop") == []:
            del given["stop"]
        if "logit_bias" in given:
            given["logit_bias"] = _biases(given["logit_bias"])
        try:
            params = SamplingParams(
                n=n, max_tokens=max_tokens, logprobs=logprobs, structured=form, **given
            )
            params.check()
        except RequestError as error:
            message, param = about_form(error, self.form_name)
            raise bad_value(param, message) from None
        return params


def _biases(given: dict[str, float]) -> dict[int, float]:
    for name in given:
        if not name.isdecimal() or len(name) > MAX_ID_DIGITS:
            raise bad_value(
                "logit_bias", f"logit_bias: expected token ids as keys, got {shown(name)}."
            )
    return {int(name): value for name, value in given.items()}


class CompletionRequest(Sampling):
    """The body of /v1/completions."""

    prompt: (
        str
        | Annotated[Ids, Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
        | Annotated[
            list[Annotated[Ids, Field(min_length=1)]],
            Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True),
        ]
    )
    best_of: int | None = Field(None, ge=1, le=MAX_N)
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    suffix: str | None = None
    add_special_tokens: bool | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each of which has answers of its own."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    def to_params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Return the engine's parameters of each prompt.

        Raises:
            APIError: A value is out of bounds, contradicts another or is not supported.
        """
        if "" in self.prompts:
            raise bad_value("prompt", "prompt: expected text of at least one character, got ''.")
        if self.suffix:
            raise unsupported("suffix", "text behind the answer")
        num, best_of = self.n or 1, self.best_of
        if best_of is not None and best_of < num:
            raise bad_value("best_of", f"best_of: expected at least n={num}, got {best_of}.")
        if best_of is not None and best_of > num and self.stream:
            raise bad_value(
                "best_of", "best_of: expected stream=false: answers are compared at their end."
            )
        found = self.params(
            defaults=defaults,
            n=best_of or num,
            max_tokens=self.max_tokens or DEFAULT_MAX_TOKENS,
            logprobs=self.logprobs,
            form=self.form(),
        )
        if self.echo:
            found.prompt_logprobs = self.logprobs
        return found


class ChatRequest(Sampling):
    """The body of /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=1, lt=_INT64)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: list[dict[str, Any]] | None = Field(None, max_length=1024)
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _check_prompt(self) -> "ChatRequest":
        if self.continue_final_message and self.add_generation_prompt is not False:
            raise ValueError(
                "continue_final_message: expected add_generation_prompt=false beside it"
            )
        return self

    def to_params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Return the engine's parameters.

        Raises:
            APIError: A value is out of bounds, contradicts another or is not supported.
        """
        if self.top_logprobs and not self.logprobs:
            raise bad_value(
                "top_logprobs", "top_logprobs: expected logprobs=true beside it. Set it."
            )
        forced = self.forced_tools()
        form = self.form() if forced is None else None
        if forced is not None:
            only_one = len(forced) == 1 or self.parallel_tool_calls is False
            form = StructuredOutput(json_schema=calls_schema(forced, only_one=only_one))
        return self.params(
            defaults=defaults,
            n=self.n or 1,
            max_tokens=self.limit or defaults.get("max_tokens"),
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            form=form,
        )

    @property
    def form_name(self) -> str:
        """The field that gives the answer its form."""
        return "response_format" if self.forced_tools() is None else "tools"

    @property
    def limit(self) -> int | None:
        """The most tokens of an answer, where the client says it."""
        return self.max_completion_tokens or self.max_tokens

    def forced_tools(self) -> list[dict[str, Any]] | None:
        """Return the tools of which the answer must call one; None: it may do as it likes.

        Raises:
            APIError: There is no such tool.
        """
        tools = self.tools or []
        match self.tool_choice:
            case None | "none" | "auto":
                return None
            case "required":
                found = tools
            case {"type": "function", "function": {"name": str(name)}}:
                found = [tool for tool in tools if tool["function"]["name"] == name]
            case _:
                found = []
        if not found:
            raise bad_value(
                "tool_choice",
                "tool_choice: expected none, auto, required or a function of tools, got "
                f"{shown(self.tool_choice)}.",
            )
        return found


class TokenizeRequest(_Lenient):
    """The body of /tokenize: a prompt, or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    tools: list[dict[str, Any]] | None = Field(None, max_length=1024)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_one(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("expected either prompt or messages")
        return self


class DetokenizeRequest(_Lenient):
    """The body of /detokenize."""

    model: str | None = None
    tokens: Ids


def calls_schema(tools: list[dict[str, Any]], *, only_one: bool) -> dict[str, Any]:
    """Return the JSON schema of a list of calls of tools, one at least."""
    # A name of its own: "#/$defs/..." in a tool's parameters is theirs, not of the whole.
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["function"]["name"]},
                "arguments": {
                    "$id": f"urn:tool:{place}",
                    **(tool["function"].get("parameters") or {"type": "object"}),
                },
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for place, tool in enumerate(tools)
    ]
    most = {"maxItems": 1} if only_one else {}
    return {"type": "array", "minItems": 1, "items": {"anyOf": calls}, **most}


ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")


def plain_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as templates take them: contents as text, arguments of calls as objects.

    Raises:
        APIError: A message is of another form than the published one.
    """
    return [_message(f"messages.{place}", message) for place, message in enumerate(messages)]


def _message(param: str, message: dict[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    if role not in ROLES:
        raise bad_value(
            f"{param}.role",
            f"{param}.role: expected one of {', '.join(ROLES)}, got {shown(role)}.",
        )
    found = {name: value for name, value in message.items() if value is not None}
    found["role"] = "system" if role == "developer" else role
    calls = found.get("tool_calls")
    if calls is not None:
        found["tool_calls"] = [
            _call(f"{param}.tool_calls.{place}", call) for place, call in enumerate(_list(calls))
        ]
    content = found.get("content")
    if content is None and not calls:
        raise APIError(
            400,
            f"{param}.content: expected text, got none.",
            param=f"{param}.content",
            code="missing_value",
        )
    found["content"] = _content(f"{param}.content", content)
    return found


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _content(param: str, content: Any) -> str:
    try:
        return "" if content is None else content_text(content, param)
    except RequestError as error:
        raise bad_value(str(error.param), str(error)) from error


def _call(param: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_value(param, f"{param}: expected a function with a name, got {shown(call)}.")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        from pydantic_core import from_json  # noqa: PLC0415

        try:
            parsed = from_json(arguments, allow_inf_nan=False) if arguments else {}
        except ValueError:
            parsed = arguments
        arguments = parsed
    return {**call, "function": {**function, "arguments": arguments}}


def plain_tools(request: ChatRequest | TokenizeRequest) -> list[dict[str, Any]] | None:
    """Return the tools that a chat's template gets.

    Raises:
        APIError: One has another form than the published one.
    """
    if not request.tools or getattr(request, "tool_choice", None) == "none":
        return None
    for place, tool in enumerate(request.tools):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise bad_value(
                f"tools.{place}", f"tools.{place}: expected type function and a function."
            )
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise bad_value(
                f"tools.{place}.function.name",
                f"tools.{place}.function.name: expected text of at least one character, got "
                f"{shown(function.get('name'))}.",
            )
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            raise bad_value(
                f"tools.{place}.function.parameters",
                f"tools.{place}.function.parameters: expected an object, got {shown(parameters)}.",
            )
    return request.tools
