from __future__ import annotations

import datetime

import pytest

from engine.errors import InvalidRequestError, ModelFileError
from engine.tokenizer.chat_template import ChatTemplate
from tests.support.tiny_tokenizer import CHATML_TEMPLATE

HI = [{"role": "user", "content": "hi"}]


def render(source: str, **kwargs: object) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(HI, **kwargs)


def test_chatml() -> None:
    template = ChatTemplate(CHATML_TEMPLATE)
    assert template.render(HI) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert template.render(HI, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ tools }}{{ extra }}", "<s>None7"),
        ("{% if true %}\n  x\n    {% endif %}\ny", "  x\ny"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ {'a': '<é&\"'} | tojson }}", '{"a": "<é&\\""}'),
        ("{{ {'b': 1, 'a': [2]} | tojson(indent=1) }}", '{\n "b": 1,\n "a": [\n  2\n ]\n}'),
        ("{% set ns = namespace(n=0) %}{% set ns.n = 3 %}{{ ns.n }}", "3"),
        ("{% generation %}in{% endgeneration %}out", "inout"),
        ("{{ messages[0].content.upper() }}{{ messages[0]['content'][::-1] }}", "HIih"),
        ("{{ '%s-%03d' % ('a', 5) }}{{ '%d' | format(5000) }}{{ '{}'.format(2024) }}", "a-00550002024"),
        ("{{ 'in 2024\nb' | indent(2) }}", "in 2024\n  b"),
    ],
)
def test_rendering(source: str, text: str) -> None:
    assert render(source, extra=7) == text


def test_time() -> None:
    assert render("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().year)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "^roles must alternate$"),
        ("{{ ''.__class__.__mro__ }}", "sandbox"),
        ("{{ messages.append(1) }}", "sandbox"),
        ("{{ no.such.thing }}", "'no' is undefined"),
        ("{{ messages[0] + 1 }}", "cannot render"),
        ("{{ range(1000000) | list }}", "range"),
        ("{{ 'a' * 100000000 }}", "exceeds"),
        ("{{ 9 ** 9999 }}", "powers"),
        ("{% set n = namespace(a='ab') %}{% for i in range(60) %}{% set n.a = n.a + n.a %}{% endfor %}", "exceeds"),
        ("{% for i in range(100000) %}{{ 'abcdefghij' * 30 }}{% endfor %}", "output exceeds"),
        ("{{ 'a'.ljust(100000000) }}", "widths"),
        ("{{ 'a' | center(100000000) }}", "widths"),
        ("{{ '%9999999s' % 'a' }}", "widths"),
        ("{{ '{:>9999999}'.format('a') }}", "widths"),
    ],
)
def test_what_a_template_may_not_do(source: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as error:
        render(source)
    assert error.value.param == "messages"


def test_syntax_errors_name_the_line() -> None:
    with pytest.raises(ModelFileError, match="tokenizer_config, line 2: "):
        ChatTemplate("a\n{% endfor %}", source_name="tokenizer_config")
    with pytest.raises(ModelFileError, match=r"chat template, line 1: .*no_such"):
        ChatTemplate("{{ 1 | no_such }}")
