"""Chat templates to damage, pieces to damage them with, and templates grown from a small grammar.

The pieces are what makes much of little, recurses, reaches for Python's insides or misuses a name.
"""

from random import Random

SEEDS = [
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "{{ bos_token }}{% for m in messages if m['role'] != 'system' %}[{{ m['content']|trim }}]"
    "{% else %}none{% endfor %}{{ eos_token }}",
    "{%- set ns = namespace(last='', seen=[]) -%}{%- for m in messages -%}"
    "{%- set ns.last = ns.last ~ m.content -%}{%- endfor -%}{{ ns.last[-20:] }}",
    "{% macro show(t) %}{% if t is mapping %}{% for k, v in t.items() %}{{ k }}={{ show(v) }};"
    "{% endfor %}{% else %}{{ t }}{% endif %}{% endmacro %}"
    "{% for t in tools or [] %}{{ show(t) }}{% endfor %}{{ show(messages[0]) }}",
    "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}{{ messages | tojson }}",
    "{% if messages[0].role != 'user' %}{{ raise_exception('first a user') }}{% endif %}"
    "{{ strftime_now('%d %b %Y') }}{{ messages|selectattr('role', 'equalto', 'user')|list|length }}",
    "{% for d in documents or [] %}{{ loop.index }} {{ d.title|upper }}: {{ d.text|wordwrap(20) }}"
    "{{ loop.cycle('a', 'b') }}{% break %}{% endfor %}{{ '%s %5d' % ('a', 3) }}",
    "{% generation %}{{ messages|map(attribute='content')|join(', ') }}{% endgeneration %}"
    "{% set x %}{{ '{:>8}'.format('x') }}{% endset %}{{ x|indent(4) }}{{ messages|groupby('role') }}",
    "{% filter upper %}{% for c in messages[0].content.split(' ')|batch(3, '') %}{{ c|join('-') }}"
    "{% endfor %}{% endfilter %}{% call(a) loop_it() %}{{ a }}{% endcall %}",
]

NAMES = ["messages", "tools", "documents", "m", "ns", "loop", "x", "bos_token", "self", "dict"]
NAMES += ["range", "namespace", "cycler", "joiner", "strftime_now", "raise_exception", "caller"]
VALUES = ["0", "1", "-1", "3", "7.5", "10 ** 9", "100000", "''", "'a'", "'ab' * 9", "[]", "[1, 2]"]
VALUES += ["{}", "{'a': 1}", "none", "true", "range(9)", "range(99999)", "messages[0].content"]
VALUES += ["'%s'", "'{0.__class__}'", "'x' * 16000000", "'\\ud800'", "'\\n' * 1000", "'%*d'"]
VALUES += ["'%(role)90000000d'", "'{0:a>90000000}'", "'f' * 200000", "[1] * 200000", "(1, 2) * 9"]
FILTERS = "abs attr('role') batch(2) capitalize center(40) count d('x') default('y', true) dictsort"
FILTERS += " e escape filesizeformat first float forceescape format(1, 2) groupby('role') indent(9)"
FILTERS += " int int(0, 99) items join('xx') last length list lower map('upper')"
FILTERS += " map(attribute='content') max min pprint random reject replace('a', 'bb') reverse"
FILTERS += (
    " round(2) safe select slice(3) slice(0) sort sort(true) string striptags sum sum(start=[])"
)
FILTERS += " title tojson tojson(indent=9000) trim truncate(5) unique upper urlencode urlize"
FILTERS += " int(0,16) trim('ab') replace(new='bb',old='a') join(attribute='role',d='xx')"
FILTERS += " map(attribute='q',default=messages)|list select('in',messages) sort(attribute='a,a,a')"
FILTERS += " wordcount wordwrap(1) xmlattr rejectattr('role', 'eq', 'x') batch(0) join(messages)"
METHODS = "upper() split('') split() replace('', 'aaaa') join(messages) format(1) items() keys()"
METHODS += " center(99999) ljust(9999) encode() __class__ mro() append(1) pop() get('role') role"
METHODS += " content splitlines() zfill(99) expandtabs(9999) isdigit() count('') partition('a')"
METHODS += " title() strip('ab') startswith(1) find(none) format_map(messages[0]) next() index0"
METHODS += " rfind('ab') rsplit('a') rpartition('b') index(messages) fromkeys([1,2],messages)"
METHODS += " from_bytes([255]*99999,'big') __add__"
METHODS += " real as_integer_ratio() bit_length() copy() update({}) setdefault(1) update(a=1)"
OPERATORS = ["+", "-", "*", "/", "//", "%", "**", "~", "==", "<", "in", "and", "or", "is not"]
TESTS = (
    "defined string mapping iterable number sameas(1) divisibleby(0) odd in([1]) callable filter"
)
PIECES = [
    "{% for i in range(99999) %}",
    "{% for a in messages %}{% for b in messages %}",
    "{% for x in x recursive %}{{ loop(x) }}{% endfor %}",
    "{% endfor %}",
    "{% if true %}",
    "{% endif %}",
    "{% set x = [x, x] %}",
    "{% set x = x ~ x %}",
    "{% set ns.x = ns.x + ns.x %}",
    "{% set ns = namespace(x='ab', l=[]) %}",
    "{% set ns.l = ns.l + ['y' * 1000000 ~ loop.index] %}",
    "{% set ns.l = [ns.l] + [ns.l] %}",
    "{% set ns.l = [ns.l] * 2 %}",
    "{% for x in range(99999) if x in ns.l %}",
    "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "{% macro g() %}{{ caller() }}{{ varargs }}{{ kwargs }}{% endmacro %}",
    "{% call g() %}x{% endcall %}",
    "{% include 'x' %}",
    "{% import 'x' as y %}",
    "{% extends 'x' %}",
    "{% block b %}{{ super() }}{% endblock %}",
    "{{ self.b() }}",
    "{% raw %}{{ x }}{% endraw %}",
    "{% break %}",
    "{% continue %}",
    "{% do x %}",
    "{% with a = 1 %}{% endwith %}",
    "{% autoescape true %}{{ '<' }}{% endautoescape %}",
    "{{ messages.__class__.__mro__ }}",
    "{{ ''.join(['a' * 999999] * 99) }}",
    "{{ cycler('a').next.__globals__ }}",
    "{{ 9 ** 999999999 }}",
    "{{ " + "(" * 150 + "1" + ")" * 150 + " }}",
    "{{ " + "-" * 2000 + "1 }}",
    "{{ x" + "|upper" * 300 + " }}",
    "{{ " + " ~ ".join(["'a'"] * 300) + " }}",
    "{{ 1" + " + 1" * 1500 + " }}",
    "{{ " + "[" * 220 + "]" * 220 + " }}",
    "{% if 1 %}" * 110 + "{% endif %}" * 110,
    "{% for i in [1] %}" * 25 + "{% endfor %}" * 25,
    "{{ 'a'|center(9999)" + "|replace('a', 'aa')" * 20 + " }}",
    "{{ '9' * 5000 | int }}",
    "{{ ('9' * 5000) | int }}",
    "{{ 1e999 | int }}",
    "{# ",
    "#}",
    "{{",
    "}}",
    "{%",
    "%}",
    "{%-",
    "-%}",
    "\n",
    "'",
    '"',
    "\\",
    "\x00",
    "\ud800",
    "|tojson",
    ".x",
    "[0]",
    "[::-1]",
    "[1:'a']",
    "()",
    "(*messages)",
    "(**messages[0])",
    *(f"{{{{ {v} }}}}" for v in VALUES),
    *(f"|{f}" for f in FILTERS.split(" ")),
    *(f".{m}" for m in METHODS.split(" ")),
    *(f" {o} " for o in OPERATORS),
]


def build(draw: Random, depth: int = 3) -> str:
    """A template of the grammar: often valid, mostly senseless."""
    return "".join(_statement(draw, depth) for _ in range(draw.randint(1, 5)))


def _statement(draw: Random, depth: int) -> str:
    if depth == 0:
        return f"{{{{ {_value(draw, 2)} }}}}"
    body = build(draw, depth - 1)
    value, name = _value(draw, 2), draw.choice(NAMES)
    return draw.choice(
        (
            f"{{{{ {value} }}}}",
            f"{{% set {name} = {value} %}}",
            f"{{% set {name} %}}{body}{{% endset %}}",
            f"{{% for {name} in {value} %}}{body}{{% endfor %}}",
            f"{{% for {name} in {value} recursive %}}{{{{ loop({name}) }}}}{{% endfor %}}",
            f"{{% if {value} is {draw.choice(TESTS.split(' '))} %}}{body}{{% endif %}}",
            f"{{% macro {name}(a, b={value}) %}}{body}{{% endmacro %}}{{{{ {name}(1) }}}}",
            f"{{% filter {draw.choice(FILTERS.split(' '))} %}}{body}{{% endfilter %}}",
            f"{{% set ns = namespace(x={value}) %}}{{% set ns.x = {value} %}}{body}",
            f"{{% call {name}({value}) %}}{body}{{% endcall %}}",
            draw.choice(PIECES),
        )
    )


def _value(draw: Random, depth: int) -> str:
    if depth == 0:
        return draw.choice(draw.choice((NAMES, VALUES)))
    a, b = _value(draw, depth - 1), _value(draw, depth - 1)
    return draw.choice(
        (
            a,
            f"({a} {draw.choice(OPERATORS)} {b})",
            f"{a}|{draw.choice(FILTERS.split(' '))}",
            f"({a}).{draw.choice(METHODS.split(' '))}",
            f"{a}[{b}]",
            f"{a}[{b}:]",
            f"{draw.choice(NAMES)}({b})",
            f"({a} if {b} else {a})",
            f"[{a}, {b}]",
            f"{{'k': {a}, 'v': {b}}}",
        )
    )
