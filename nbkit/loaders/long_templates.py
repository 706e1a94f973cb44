"""Wordings, keys and line formats of the long-prompt tasks; the two splits share none of them.

A wording is (statement, question). Questions end so that the next token carries content: a space that belongs before a number is part of the
question, one that belongs before a word is part of the answer.
"""

from __future__ import annotations

SPLITS = ("calibration", "held-out")

KEYS: dict[str, tuple[str, ...]] = {
    "calibration": (
        "cat", "dog", "horse", "cow", "bird", "fish", "lion", "bear", "wolf", "sheep", "tiger", "mouse", "rabbit", "duck", "goat", "monkey",
    ),
    "held-out": (
        "teacher", "doctor", "baker", "driver", "farmer", "painter", "singer", "writer", "lawyer", "soldier", "actor", "nurse", "judge", "sailor",
        "hunter", "miner",
    ),
}
OPTIONS: dict[str, tuple[str, ...]] = {
    "calibration": ("apple", "banana", "orange", "lemon", "cherry", "peach", "grape", "melon"),
    "held-out": ("silver", "copper", "iron", "gold", "steel", "glass", "paper", "wood"),
}

NEEDLE: dict[str, tuple[tuple[str, str], ...]] = {
    "calibration": (
        ("Remember: the password of the {key} is {value}.\n", "\n\nRemember: the password of the {key} is "),
        ("Note: the magic number of the {key} is {value}.\n", "\n\nNote: the magic number of the {key} is "),
    ),
    "held-out": (
        ("Important: the account number of the {key} is {value}.\n", "\n\nImportant: the account number of the {key} is "),
        ("The access code of the {key} is {value}.\n",
         "\n\nQuestion: What is the access code of the {key}?\nAnswer: The access code of the {key} is "),
    ),
}
# (statement of a value, statement that refers to another key, question)
TRACKING: dict[str, tuple[tuple[str, str, str], ...]] = {
    "calibration": (
        ("Remember: the password of the {key} is {value}.\n", "Remember: the {key} has the same password as the {other}.\n",
         "\n\nRemember: the password of the {key} is "),
        ("Note: the magic number of the {key} is {value}.\n", "Note: the {key} took over the magic number of the {other}.\n",
         "\n\nNote: the magic number of the {key} is "),
    ),
    "held-out": (
        ("Important: the account number of the {key} is {value}.\n", "Important: the {key} uses the account of the {other}.\n",
         "\n\nImportant: the account number of the {key} is "),
        ("The access code of the {key} is {value}.\n", "The {key} was given the access code of the {other}.\n",
         "\n\nThe access code of the {key} is "),
    ),
}
AGGREGATION: dict[str, tuple[tuple[str, str], ...]] = {
    "calibration": (
        ("Vote: {option}.\n", "\n\nThe option with the most votes is: Vote:"),
        ("Order: {option}.\n", "\n\nThe thing that was ordered most often is: Order:"),
    ),
    "held-out": (
        ("Ballot: {option}.\n", "\n\nThe choice on the most ballots is: Ballot:"),
        ("Delivery: {option}.\n", "\n\nThe thing that was delivered most often is: Delivery:"),
    ),
}
# (entry, question); the question is followed by the first word of the sentence that is asked for.
QA: dict[str, tuple[tuple[str, str], ...]] = {
    "calibration": (
        ("{name}: {text}\n", "\n\nQuestion: What does {name} do?\nAnswer:\n{name}: "),
        ("Function {name}. {text}\n", "\n\nQuestion: What is the purpose of the function {name}?\nFunction {name}. "),
    ),
    "held-out": (
        ("* `{name}` - {text}\n", "\n\nQ: Describe `{name}`.\n\n* `{name}` - "),
        ("def {name}: \"\"\"{text}\"\"\"\n", "\n\n# What does it do?\ndef {name}: \"\"\""),
    ),
}
TABLES: dict[str, tuple[str, ...]] = {"calibration": ("gapminder", "election"), "held-out": ("stocks", "tips")}
DELIMITERS: dict[str, tuple[str, ...]] = {"calibration": (",", " | "), "held-out": (";", ", ")}
LOGS: dict[str, tuple[str, ...]] = {
    "calibration": (
        "2024-03-{day:02d} {h:02d}:{m:02d}:{s:02d} INFO {module}: compiled {size} bytes in {ms} ms\n",
        "[{h:02d}:{m:02d}:{s:02d}] worker-{worker} {status} task={module} bytes={size} time={ms}ms\n",
    ),
    "held-out": (
        '10.0.{worker}.{ms} - - [{day:02d}/Mar/2024:{h:02d}:{m:02d}:{s:02d}] "GET /lib/{module} HTTP/1.1" {code} {size}\n',
        '{{"time": "{h:02d}:{m:02d}:{s:02d}", "level": "{status}", "module": "{module}", "size": {size}, "ms": {ms}}}\n',
    ),
}
