"""Templates that make much of little by ways that no counter of loops sees: each is refused soon.

Sizes are such that a hole costs seconds or hundreds of megabytes here, not the machine.
"""

import time

import pytest

from kog_triton.errors import ModelError, RequestError
from kog_triton.text import chat, sandbox
from kog_triton.text.growth import MAX_CHARS, check_made

LONG = "'a' * 60000"
TWICE = "{% set n = namespace(l=[1], m=[1]) %}{% for i in range(20) %}"
TWICE += "{% set n.l = A %}{% set n.m = B %}{% endfor %}{{ n.l == n.m }}"
BIG = "'a' * 9000000"
REFUSED = {
    # a width behind a name, a fill character, other digits, or many times
    "width behind a name": "{{ ('%(a)90000000d' % {'a': 1})|length }}",
    "width behind a name, filter": "{{ '%(a)90000000d'|format(a=1)|length }}",
    "width behind a fill": "{{ '{0:a>90000000}'.format(1)|length }}",
    "width in other digits": "{{ '{:>٩٩٩٩٩٩٩٩}'.format(1)|length }}",
    "format_map": "{{ '{a:b>90000000}'.format_map({'a': 1})|length }}",
    "many widths": "{{ ('{0:9999}' * 9000).format(1)|length }}",
    "precision": "{{ ('%(a).90000000f' % {'a': 1})|length }}",
    # searches from the end compare at every place
    "rfind": f"{{{{ ({LONG}).rfind('ab' ~ 'a' * 6000) }}}}",
    "rsplit by name": f"{{{{ ({LONG}).rsplit(sep='ab' ~ 'a' * 6000)|length }}}}",
    "strip": f"{{{{ ({LONG}).strip('b' * 6000 ~ 'a') }}}}",
    "trim": f"{{{{ ({LONG})|trim('b' * 6000 ~ 'a') }}}}",
    # division is quadratic, and neither // nor a test was looked at
    "digits": "{{ ('f' * 200000)|int(0, 16) // (('f' * 100000)|int(0, 16)) }}",
    "divisibleby": "{{ ('f' * 200000)|int(0, 16) is divisibleby(('f' * 100000)|int(0, 16)) }}",
    "from_bytes": "{{ (0).from_bytes([255] * 99999, 'big') // 3 }}",
    # one list in a list twice, without a display that holds two
    "shared by +": TWICE.replace("A", "[n.l] + [n.l]").replace("B", "[n.m] + [n.m]"),
    "shared by *": TWICE.replace("A", "[n.l] * 2").replace("B", "[n.m] * 2"),
    "shared by keys": TWICE.replace("A", "{}.fromkeys([1, 2], n.l)").replace("B", "1"),
    "shared by map": TWICE.replace("A", "[1, 2]|map(attribute='q', default=n.l)|list").replace(
        "B", "[1, 2]|map(attribute='q', default=n.m)|list"
    ),
    "one text many times": f"{{{{ [{BIG} ~ 'x'] * 90 == [{BIG} ~ 'x'] * 90 }}}}",
    "nested": "{% set n = namespace(l=()) %}{% for i in range(9999) %}{% set n.l = (n.l,) %}"
    "{% endfor %}{{ {n.l: 1}|length }}",
    "wide letters": "{% set n = namespace(l=none) %}{% for i in range(50) %}"
    "{% set n.l = namespace(x=('😀' ~ i) * 4000000, y=n.l) %}{% endfor %}",
    # work for each item, in one call
    "sort": "{{ ('ab' * 900000)|sort|length }}",
    "batch": "{{ ('ab' * 900000)|batch(1)|list|length }}",
    "sum": "{{ ([1] * 900000)|sum }}",
    "join": "{{ ','.join('a' * 900000)|length }}",
    "arguments": "{{ cycler(*('a' * 900000)) }}",
    # named arguments in another order
    "replace": "{{ ('a' * 40000)|replace(new='x' * 2000, old='a')|length }}",
    "join by name": "{{ ([{}] * 9000)|join(attribute='x', d='y' * 9000)|length }}",
    # errors that print what was given
    "raise": f"{{{{ raise_exception([{BIG}] * 20) }}}}",
    "no such key": f"{{{{ ({{}}[({BIG},) * 20]).x }}}}",
    "no such item": f"{{{{ [].index([{BIG}] * 20) }}}}",
    "no such filter": f"{{{{ [1]|map(({BIG},) * 20)|list }}}}",
    "is lower": f"{{{{ ([{BIG}] * 20) is lower }}}}",
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_operation_that_makes_much_of_little_is_refused(name):
    started = time.thread_time()  # not by the wall: other processes may hold the CPU
    with pytest.raises(RequestError, match="refused: ") as error:
        chat.render(REFUSED[name], {"messages": []}, True)
    assert time.thread_time() - started < 2
    assert len(str(error.value)) < 300 and len(str(error.value).splitlines()) == 1


LIST = "{% set b = [1] * 100000 %}"
SLOW = {
    "condition of a loop": LIST + "{% for x in range(9999) if 0 in b %}{% endfor %}",
    "test in a filter": LIST + "{{ range(9999)|select('in', b)|list }}",
    "comparisons in a row": LIST + "{% if 0 in b %}{% endif %}" * 2000,
    "many attributes": "{{ ([{}] * 99999)|sort(attribute='a,' * 100)|length }}",
}


@pytest.mark.parametrize("name", SLOW)
def test_the_clock_is_looked_at_wherever_time_can_go(name, monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.5)
    chat._compile(SLOW[name])
    started = time.thread_time()  # not by the wall: other processes may hold the CPU
    with pytest.raises(RequestError, match=r"it took more than 0\.5 s"):
        chat.render(SLOW[name], {"messages": []}, True)
    assert time.thread_time() - started < 2


def test_the_worst_templates_of_the_allowed_length_compile_in_time():
    compared = "{{ a" + "<a" * 32_000 + " }}"
    assigned = "".join(f"{{%if a%}}{{%set a{i}=1%}}{{%endif%}}" for i in range(1900))
    for source in (compared, assigned):
        assert chat.MAX_TEMPLATE_CHARS * 0.9 < len(source) <= chat.MAX_TEMPLATE_CHARS
        started = time.process_time()
        chat._compile(source)
        assert time.process_time() - started < sandbox.MAX_SECONDS


def test_a_template_beyond_the_allowed_length_is_the_models_error(tmp_path):
    for length, fits in ((chat.MAX_TEMPLATE_CHARS, True), (chat.MAX_TEMPLATE_CHARS + 1, False)):
        config = {"chat_template": "x" * length}
        if fits:
            assert chat.load_templates(tmp_path, config)["default"]
        else:
            with pytest.raises(ModelError, match="longer than 65536"):
                chat.load_templates(tmp_path, config)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ '%s-%05d|%(x)s'|replace('|%(x)s', '')|format('a', 3) }}", "a-00003"),
        ("{{ '%(a)s is %(b).2f' % {'a': 'pi', 'b': 3.14159} }}", "pi is 3.14"),
        ("{{ '{:>5}|{:x<4}'.format('ab', 1) }}", "   ab|1xxx"),
        ("{{ m.rsplit('</think>', 1)[-1].strip('\n ').rfind('b') }}", "1"),
        ("{{ m|trim|replace('think', 'thought')|length }}", "24"),
        ("{% for x in [1, 2, 3] if x is odd and x in [3, 4] %}{{ loop.index }}{{ x }}{% endfor %}", "13"),
        ("{{ [[1, 'a'], [2, 'b']] + [[3, 'c']] }}", "[[1, 'a'], [2, 'b'], [3, 'c']]"),
        ("{{ ([{'n': 2}, {'n': 1}]|sort(attribute='n')|map(attribute='n')|list) }}", "[1, 2]"),
        ("{{ 7 // 2 }}{{ '0x1f'|int(base=16) }}{{ (m, 1)|length }}", "3312"),
    ],
)  # fmt: skip
def test_what_templates_do_still_works(source, text):
    assert chat.render(source, {"m": "<think>x</think>\n ab "}, True) == text


def test_what_a_template_says_does_not_drive_a_terminal():
    with pytest.raises(RequestError, match=r"refused: .\[2Jroles") as error:
        chat.render("{{ raise_exception('\x1b[2Jroles\nmust alternate') }}", {}, True)
    assert str(error.value).isprintable()


def test_what_is_made_may_be_as_large_as_allowed():
    check_made(["x" * (MAX_CHARS // 2)] * 2)
    with pytest.raises(Exception, match="more than 16777216 characters"):
        check_made(["x" * (MAX_CHARS // 2)] * 3)
