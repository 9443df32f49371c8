"""The loader under attack: damaged files and hostile templates, by the ten thousand.

    python -m tests.fuzz --target all --cases 2000 --seed 1       seeded mutation
    python -m tests.fuzz --target chat --engine atheris           guided by coverage, if installed

The property: a typed error of one line or a correct load, within time and memory. See RECORD.md.
"""
