"""The grammar of Modelfiles: what is read, what is refused and where, and that what is written is read again."""

from __future__ import annotations

import codecs

import pytest

from localllm.errors import InvalidRequest
from localllm.store.modelfile import Instruction, decode, parse, quoted

BAD_COMMAND = (
    'command must be one of "from", "license", "template", "system", "adapter", "draft", "renderer", "parser", '
    '"parameter", "message", or "requires"'
)


def read(text: str) -> list[tuple[str, ...]]:
    """Name, key if there is one, value."""
    return [(i.name, *([i.key] if i.key else []), i.value) for i in parse(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("FROM llama3", [("from", "llama3")]),
        ("from llama3\n", [("from", "llama3")]),
        ("  \t FrOm   a b  \n", [("from", "a b")]),
        ('FROM "./my model.gguf"', [("from", "./my model.gguf")]),
        ("FROM m\r\nSYSTEM hi\r\n", [("from", "m"), ("system", "hi")]),
        ("SYSTEM late\nFROM m", [("system", "late"), ("from", "m")]),
        ("# first\n  # second\n\nFROM m # no comment", [("from", "m # no comment")]),
        ("FROM m\nSYSTEM # no comment either", [("from", "m"), ("system", "# no comment either")]),
        ('FROM m\nSYSTEM """one\ntwo"""\n', [("from", "m"), ("system", "one\ntwo")]),
        ('FROM m\nSYSTEM """\n  one  \n"""\n', [("from", "m"), ("system", "\n  one  \n")]),
        ('FROM m\nSYSTEM """one"""  \nSYSTEM two', [("from", "m"), ("system", "one"), ("system", "two")]),
        ('FROM m\nSYSTEM """a "quoted" word"""', [("from", "m"), ("system", 'a "quoted" word')]),
        ('FROM m\nSYSTEM "one\ntwo"', [("from", "m"), ("system", "one\ntwo")]),
        ('FROM m\nSYSTEM "a" b "c"', [("from", "m"), ("system", 'a" b "c')]),
        ('FROM m\nSYSTEM "a" b\nc"', [("from", "m"), ("system", 'a" b\nc')]),
        ("FROM m\nSYSTEM 'single'", [("from", "m"), ("system", "'single'")]),
        ('FROM m\nSYSTEM "no \\" escape\\n"', [("from", "m"), ("system", 'no \\" escape\\n')]),
        ('FROM m\nSYSTEM ""', [("from", "m"), ("system", "")]),
        ('FROM m\nSYSTEM """"""', [("from", "m"), ("system", "")]),
        ("FROM m\nSYSTEM ", [("from", "m"), ("system", "")]),
        ("FROM m\nSYSTEM \nLICENSE x", [("from", "m"), ("system", ""), ("license", "x")]),
        ("FROM m\nPARAMETER stop <|eot|>", [("from", "m"), ("parameter", "stop", "<|eot|>")]),
        ("FROM m\nPARAMETER   stop   a  b ", [("from", "m"), ("parameter", "stop", "a  b")]),
        ('FROM m\nPARAMETER stop " a"', [("from", "m"), ("parameter", "stop", " a")]),
        ("FROM m\nMESSAGE user hi: there", [("from", "m"), ("message", "user", "hi: there")]),
        ('FROM m\nMESSAGE assistant """a\nb"""', [("from", "m"), ("message", "assistant", "a\nb")]),
        ("FROM a\nFROM b", [("from", "a"), ("from", "b")]),
        ("FROM m\nSYSTEM a\x00b\x1b\u200dc\u00a0d", [("from", "m"), ("system", "abcd")]),
        ("FROM m\nSYSTEM grüße 日本 🙂", [("from", "m"), ("system", "grüße 日本 🙂")]),
        ("FROM m\nRENDERER r\nPARSER p\nREQUIRES 0.1.2\nDRAFT d\nADAPTER a\nTEMPLATE {{ .Prompt }}\nLICENSE MIT",
         [("from", "m"), ("renderer", "r"), ("parser", "p"), ("requires", "0.1.2"), ("draft", "d"), ("adapter", "a"),
          ("template", "{{ .Prompt }}"), ("license", "MIT")]),
    ],
)  # fmt: skip
def test_what_is_read(text: str, expected: list[tuple[str, ...]]) -> None:
    assert read(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no FROM line"),
        ("# only a comment", "no FROM line"),
        ("SYSTEM hi\n", "no FROM line"),
        ("\nFROM m\nBADCOMMAND a b\n", f"(line 3): {BAD_COMMAND}"),
        ("FROM m\r\nBADCOMMAND a b\r\n", f"(line 2): {BAD_COMMAND}"),
        ('FROM m\nSYSTEM """a\nb\n"""\nBAD x', f"(line 5): {BAD_COMMAND}"),
        ("FROM\nSYSTEM x", f"(line 1): {BAD_COMMAND}"),
        ("FROM: m", f"(line 1): {BAD_COMMAND}"),
        ("<html>", f"(line 1): {BAD_COMMAND}"),
        ("FROM", "unexpected EOF"),
        ("FROM m\nPARAMETER stop", "unexpected EOF"),
        ("FROM m\nPARAMETER stop\nSYSTEM x", "unexpected EOF: stop"),
        ("FROM m\nPARAMETER top-k 3", "unexpected EOF: top"),
        ("FROM m\nMESSAGE user\nSYSTEM x", "unexpected EOF: user"),
        ("FROM m\nMESSAGE tool x", '(line 2): message role must be one of "system", "user", or "assistant"'),
        ("FROM m\nMESSAGE User x", '(line 2): message role must be one of "system", "user", or "assistant"'),
        ('FROM m\nSYSTEM """a\nb', "unexpected EOF"),
        ('FROM m\nSYSTEM """a\nb"', "unexpected EOF"),
        ('FROM m\nSYSTEM "a', "unexpected EOF"),
        ('FROM m\nSYSTEM "', "unexpected EOF"),
        ('FROM m\nSYSTEM """', "unexpected EOF"),
        ('FROM m\nSYSTEM """a""', "unexpected EOF"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(text)
    assert caught.value.message == message


def test_an_unclosed_value_is_told_where_it_began() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse('FROM m\nSYSTEM """a\nb\nc')
    assert "line 2" in caught.value.hint


@pytest.mark.parametrize(
    "data",
    [
        "FROM m\nSYSTEM grüße".encode(),
        codecs.BOM_UTF8 + "FROM m\nSYSTEM grüße".encode(),
        "FROM m\r\nSYSTEM grüße".encode("utf-16"),
        codecs.BOM_UTF16_LE + "FROM m\nSYSTEM grüße".encode("utf-16-le"),
        codecs.BOM_UTF16_BE + "FROM m\nSYSTEM grüße".encode("utf-16-be"),
    ],
)
def test_encodings(data: bytes) -> None:
    assert read(decode(data)) == [("from", "m"), ("system", "grüße")]


def test_bytes_that_are_no_text_do_not_stop_the_reading() -> None:
    assert read(decode(b"FROM m\nSYSTEM a\xff")) == [("from", "m"), ("system", "a\ufffd")]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain", "plain"),
        ("<|eot|>", "<|eot|>"),
        ("two words", "two words"),
        ('say "x"', 'say "x"'),
        (" lead", '" lead"'),
        ("trail ", '"trail "'),
        ("a\nb", '"a\nb"'),
        ('a\n"b"', '"""a\n"b""""'),
        ('"', '"""""""'),
    ],
)
def test_quotes_only_where_they_are_needed(value: str, text: str) -> None:
    assert quoted(value) == text


@pytest.mark.parametrize(
    "value",
    ["", "a", '"', '""', '"a', '"a"', 'a"', " ", "\t", "\n", "\na", "a\n", "a\r\nb", '"\n"', 'x "y" z\n', "# a",
     "a  b", "'", '{{ if .System }}{{ .System }}\n"{{ end }}"'],
)  # fmt: skip
def test_what_is_written_is_read_again(value: str) -> None:
    lines = [
        Instruction("from", "m", line=1),
        Instruction("system", value),
        Instruction("parameter", value, "stop"),
        Instruction("message", value, "user"),
        Instruction("license", "end"),
    ]
    text = "\n".join(line.render() for line in lines) + "\n"
    again = parse(text)
    assert [(i.name, i.key, i.value) for i in again] == [(i.name, i.key, i.value) for i in lines]
    assert "\n".join(line.render() for line in again) + "\n" == text


def test_a_long_quoted_value_takes_no_time_to_speak_of() -> None:
    licence = 'All "rights" reserved.\n' * 50_000
    assert parse(f'FROM m\nLICENSE """{licence}"""')[1].value == licence
