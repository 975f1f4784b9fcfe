"""The programs that a shell script names, read from its text without running it.

A word counts where a command begins. Words with a variable in them are unknown and left out; so are
built-in commands, keywords and the script's own functions.
"""

import re
import shutil

_KEYWORDS = {*"!{}", "if", "then", "else", "elif", "fi", "do", "done", "while", "until", "time"}
_KEYWORDS |= {"case", "esac", "exec", "command"}
_DATA = {"for", "case", "function", "select"}  # what follows is no command
_RUN_ANOTHER = {"nice", "env", "xargs", "nohup"}
_BUILT_IN = {
    *(".", ":", "[", "[[", "break", "cd", "continue", "echo", "eval", "exit", "export", "false"),
    *(
        "kill",
        "local",
        "mapfile",
        "printf",
        "pwd",
        "read",
        "return",
        "set",
        "shift",
        "source",
        "test",
        "trap",
    ),
    *("true", "type", "ulimit", "umask", "unset", "wait"),
}
_WORD = re.compile(r"[\w./+-]+")


def commands(text: str) -> set[str]:
    """The programs that it may start."""
    text = _without_heredocs(text.replace("\\\n", " "))
    own = set(re.findall(r"^\s*([\w-]+)\s*\(\)", text, re.MULTILINE))
    found: set[str] = set()
    _scan(text, 0, "", found)
    return {word for word in found if word not in own | _BUILT_IN and _WORD.fullmatch(word)}


def unknown(text: str) -> set[str]:
    """Of these, the ones without a path that this machine does not have."""
    return {word for word in commands(text) if "/" not in word and not shutil.which(word)}


def _without_heredocs(text: str) -> str:
    return re.sub(
        r"(<<-?\s*'?(\w+)'?[^\n]*\n).*?^\s*\2$", r"\1", text, flags=re.DOTALL | re.MULTILINE
    )


def _scan(text: str, at: int, close: str, found: set[str]) -> int:
    """Read commands until ``close``; the place behind it."""
    word, begins, quoted = "", True, False

    def end_word() -> None:
        nonlocal word, begins, quoted
        if (word or quoted) and begins:
            if word in _DATA:
                begins = False
            elif not (word in _KEYWORDS or quoted or re.match(r"\w+\+?=|-|\d*[<>]", word)):
                found.add(word)
                begins = word in _RUN_ANOTHER
            elif quoted and "=" not in word:
                begins = False
        word, quoted = "", False

    while at < len(text):
        char = text[at]
        if char == "\\":
            word += text[at + 1 : at + 2]
            at += 2
            continue
        if char == "'":
            at = text.find("'", at + 1) + 1 or len(text)
            quoted = True
            continue
        if char == '"':
            at = _quoted(text, at + 1, found)
            quoted = True
            continue
        if text.startswith("$((", at):
            at = text.find("))", at) + 2
            word += "$"
            continue
        if text.startswith(("$(", "<(", ">("), at):
            at = _scan(text, at + 2, ")", found)
            word, quoted = word + "$", True
            continue
        if text.startswith("${", at):
            at = text.find("}", at) + 1 or len(text)
            word, quoted = word + "$", True
            continue
        if char == "#" and not word:
            at = text.find("\n", at) if "\n" in text[at:] else len(text)
            continue
        if char == "(" and word.endswith("="):
            at = text.find(")", at) + 1 or len(text)  # an array
            word = "array="
            continue
        if char == close:
            end_word()
            return at + 1
        if char in " \t":
            end_word()
        elif char in "\n;&|(){":
            if char == "&" and word.endswith(">"):
                word += char
            else:
                end_word()
                begins = True
        else:
            word += char
        at += 1
    end_word()
    return at


def _quoted(text: str, at: int, found: set[str]) -> int:
    """The end of a string in double quotes, whose $(...) hold commands."""
    while at < len(text) and text[at] != '"':
        if text[at] == "\\":
            at += 2
        elif text.startswith("$(", at) and not text.startswith("$((", at):
            at = _scan(text, at + 2, ")", found)
        else:
            at += 1
    return at + 1
