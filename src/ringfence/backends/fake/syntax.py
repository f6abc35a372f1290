"""The grammar of the fake's small `sh`: text to a tree of commands.

Simple commands, quotes, `$name`, `${name}`, `$?`, `$$`, `$!`, redirections, `;`, `&`, `&&`,
`||`, `!`, `|`, `( )`, `{ }`, `if`, `while` and `until`. No globs, no `$( )`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_OPERATORS = ("&&", "||", ">>", ";", "&", "|", "(", ")", "<", ">", "\n")
_REDIRECTIONS = [fd + op for fd in ("", "0", "1", "2") for op in ("<", ">", ">>")]
_BLANK = " \t"
_NAME = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_")
_RESERVED = {"then", "else", "fi", "do", "done", "}"}


@dataclass
class Piece:
    """Part of a word: text, or the name of a variable; quoted pieces are never split."""

    text: str
    is_variable: bool = False
    is_quoted: bool = False


Word = list[Piece]


@dataclass
class Redirect:
    """`fd` goes to the file `word`, or to another fd where the operator ends in `&`."""

    fd: int
    operator: str
    word: Word


@dataclass
class Simple:
    """`NAME=value command argument <file >file`."""

    assigned: list[tuple[str, Word]] = field(default_factory=list)
    words: list[Word] = field(default_factory=list)
    redirects: list[Redirect] = field(default_factory=list)


@dataclass
class Group:
    """`( body )` or, in the same process, `{ body; }`."""

    body: Command
    is_subshell: bool
    redirects: list[Redirect] = field(default_factory=list)


@dataclass
class Loop:
    """`while test; do body; done`, or `until`."""

    test: Command
    body: Command
    wanted: bool


@dataclass
class If:
    """`if test; then body; else otherwise; fi`."""

    test: Command
    body: Command
    otherwise: Command | None


@dataclass
class Pipeline:
    """`! first | second`."""

    parts: list[Command]
    is_negated: bool


@dataclass
class AndOr:
    """`left && right`, `left || right`."""

    left: Command
    operator: str
    right: Command


@dataclass
class Sequence:
    """Commands one after the other; a true flag starts that one in the background."""

    parts: list[tuple[Command, bool]]


Command = Simple | Group | Loop | If | Pipeline | AndOr | Sequence


class ScriptError(ValueError):
    """The script is not in the grammar above."""


class Lexer:
    """Tokens: an operator as str, or a word."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def tokens(self) -> list[str | Word]:
        """All of them."""
        found: list[str | Word] = []
        while self._skip_blanks():
            operator = self._operator()
            self._at += len(operator)
            found.append(operator or self._word())
        return found

    def _operator(self) -> str:
        """The operator that starts here, with the fd of `2>` in front of it, or ""."""
        rest = self._text[self._at : self._at + 3]
        fd = rest[0] if rest[0] in "012" and rest[1:2] in ("<", ">") and rest[1:] else ""
        return fd + next((op for op in _OPERATORS if rest[len(fd) :].startswith(op)), "")

    def _skip_blanks(self) -> bool:
        while self._at < len(self._text) and self._text[self._at] in _BLANK:
            self._at += 1
        if self._text.startswith("#", self._at):
            end = self._text.find("\n", self._at)
            self._at = len(self._text) if end < 0 else end
        return self._at < len(self._text)

    def _word(self) -> Word:
        word: Word = []
        while self._at < len(self._text):
            char = self._text[self._at]
            if char in _BLANK or char in "\n;&|()<>":
                break
            if char == "'":
                end = self._text.find("'", self._at + 1)
                if end < 0:
                    raise ScriptError("unterminated quoted string")
                word.append(Piece(self._text[self._at + 1 : end], is_quoted=True))
                self._at = end + 1
            elif char == '"':
                self._at += 1
                self._double_quoted(word)
            else:
                word.append(self._piece(quoted=False))
        return word

    def _double_quoted(self, word: Word) -> None:
        word.append(Piece("", is_quoted=True))
        while not self._text.startswith('"', self._at):
            if self._at >= len(self._text):
                raise ScriptError("unterminated quoted string")
            word.append(self._piece(quoted=True))
        self._at += 1

    def _piece(self, *, quoted: bool) -> Piece:
        char = self._text[self._at]
        self._at += 1
        if char == "\\" and self._at < len(self._text):
            following = self._text[self._at]
            if quoted and following not in '$`"\\\n':
                return Piece(char, is_quoted=True)
            self._at += 1
            return Piece(following if following != "\n" else "", is_quoted=True)
        if char == "$":
            return self._variable(quoted=quoted)
        return Piece(char, is_quoted=quoted)

    def _variable(self, *, quoted: bool) -> Piece:
        rest = self._text[self._at :]
        if rest.startswith("("):
            raise ScriptError("$( ) is not in this small shell")
        if rest.startswith("{"):
            name = rest[1:].partition("}")[0]
            self._at += len(name) + 2
        elif rest[:1] in ("?", "$", "!", "#", "@") and rest:
            name = rest[0]
            self._at += 1
        else:
            name = "".join(self._name_chars(rest))
            self._at += len(name)
        return Piece(name, is_variable=True, is_quoted=quoted) if name else Piece("$")

    @staticmethod
    def _name_chars(text: str) -> list[str]:
        kept = []
        for char in text:
            if char not in _NAME:
                break
            kept.append(char)
        return kept


class Parser:
    """Recursive descent over the tokens."""

    def __init__(self, text: str) -> None:
        self._tokens = Lexer(text).tokens()
        self._at = 0

    def parse(self) -> Sequence:
        """The whole script."""
        script = self._sequence()
        if self._at < len(self._tokens):
            raise ScriptError(f"unexpected {self._keyword() or self._peek()!r}")
        return script

    def _peek(self) -> str | Word | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _keyword(self) -> str:
        """The next token as a plain unquoted word or operator, else ""."""
        token = self._peek()
        if isinstance(token, list):
            plain = not any(piece.is_quoted or piece.is_variable for piece in token)
            return "".join(piece.text for piece in token) if plain else ""
        return token or ""

    def _accept(self, *wanted: str) -> str:
        found = self._keyword()
        if found in wanted and found:
            self._at += 1
            return found
        return ""

    def _expect(self, wanted: str) -> None:
        if not self._accept(wanted):
            raise ScriptError(f"{wanted!r} expected, not {self._keyword()!r}")

    def _sequence(self) -> Sequence:
        parts: list[tuple[Command, bool]] = []
        while True:
            while self._accept(";", "\n"):
                pass
            if self._peek() is None or self._keyword() in _RESERVED or self._keyword() == ")":
                return Sequence(parts)
            command = self._and_or()
            ended = self._accept("&", ";", "\n")
            parts.append((command, ended == "&"))
            if not ended:
                return Sequence(parts)

    def _and_or(self) -> Command:
        left: Command = self._pipeline()
        while operator := self._accept("&&", "||"):
            while self._accept("\n"):
                pass
            left = AndOr(left, operator, self._pipeline())
        return left

    def _pipeline(self) -> Command:
        negated = bool(self._accept("!"))
        parts = [self._command()]
        while self._accept("|"):
            parts.append(self._command())
        return Pipeline(parts, negated) if negated or len(parts) > 1 else parts[0]

    def _command(self) -> Command:
        if opener := self._accept("(", "{"):
            body = self._sequence()
            self._expect(")" if opener == "(" else "}")
            return Group(body, opener == "(", self._redirects())
        if word := self._accept("while", "until"):
            return self._loop(wanted=word == "while")
        if self._accept("if"):
            return self._if()
        return self._simple()

    def _loop(self, *, wanted: bool) -> Loop:
        test = self._sequence()
        self._expect("do")
        body = self._sequence()
        self._expect("done")
        return Loop(test, body, wanted)

    def _if(self) -> If:
        test = self._sequence()
        self._expect("then")
        body = self._sequence()
        otherwise = self._sequence() if self._accept("else") else None
        self._expect("fi")
        return If(test, body, otherwise)

    def _simple(self) -> Simple:
        command = Simple()
        while True:
            command.redirects += self._redirects()
            token = self._peek()
            if not isinstance(token, list):
                break
            self._at += 1
            name, value = _assignment(token)
            if name and not command.words:
                command.assigned.append((name, value))
            else:
                command.words.append(token)
        if not (command.words or command.assigned or command.redirects):
            raise ScriptError(f"unexpected {self._keyword()!r}")
        return command

    def _redirects(self) -> list[Redirect]:
        found: list[Redirect] = []
        while True:
            operator = self._accept(*_REDIRECTIONS)
            if not operator:
                return found
            bare = operator.lstrip("012")
            fd = int(operator[0]) if bare != operator else 0 if bare == "<" else 1
            bare += self._accept("&")  # `>&2` is read as `>`, `&`, `2`
            word = self._peek()
            if not isinstance(word, list):
                raise ScriptError(f"a file name expected after {bare}")
            self._at += 1
            found.append(Redirect(fd, bare, word))


def _assignment(word: Word) -> tuple[str, Word]:
    """The name and value of `NAME=value`, or two empties."""
    plain = 0
    while plain < len(word) and not (word[plain].is_quoted or word[plain].is_variable):
        if word[plain].text == "=":
            name = "".join(piece.text for piece in word[:plain])
            return (name, word[plain + 1 :]) if name and not name[0].isdigit() else ("", [])
        if not _NAME.issuperset(word[plain].text):
            break
        plain += 1
    return "", []
