"""The syntax of a shell script, as far as launch scripts use it: text to a tree of commands. Nothing is executed."""

import re
from dataclasses import dataclass, field

from megajax.errors import InputError, shown

MAX_DEPTH = 40  # of blocks in blocks, of quotes in substitutions
SHELLS = tuple(folder + name for folder in ("", "/bin/", "/usr/bin/") for name in ("bash", "sh", "zsh"))
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[\w+\])?(\+?)=")
_OPERATORS = (";;&", ";;", ";&", "&&", "||", "|", "&", ";", "\n", "(", ")")
_ENDS_OF_A_CASE = (";;", ";&", ";;&")
_CLOSING = {"(": ")", "{": "}"}


@dataclass(frozen=True)
class Word:
    """A word as it is written, with its quotes; of an array's assignment also the words in its brackets."""

    raw: str
    line: int
    items: tuple["Word", ...] | None = None


@dataclass(frozen=True)
class Operator:
    """An operator or the end of a line."""

    text: str
    line: int


@dataclass(frozen=True)
class HereDocument:
    """A text that ends at a line `end`; `shell`: the index among the tokens of the shell that reads it, if one does."""

    end: str
    is_quoted: bool
    shell: int | None


@dataclass
class Simple:
    """A command with its words."""

    words: list[Word]
    line: int


@dataclass
class CommandList:
    """Consecutive commands; each with the operator before it: "", "&&", "||" or "|"."""

    commands: list[tuple[str, "Command"]] = field(default_factory=list)


@dataclass
class If:
    """Conditions with their blocks, the last perhaps without a condition."""

    branches: list[tuple[CommandList | None, CommandList]]
    line: int


@dataclass
class Case:
    """A word, and blocks with the patterns that it may match, each with its end: ";;", ";&", ";;&" or none."""

    word: Word
    branches: list[tuple[list[Word], CommandList, str]]
    line: int


@dataclass
class For:
    """A block for each of some words; without words it is a loop that is not read."""

    name: str
    words: list[Word] | None
    body: CommandList
    line: int


@dataclass
class While:
    """A block as long as a condition holds, or until it does."""

    condition: CommandList
    body: CommandList
    line: int
    is_until: bool


@dataclass
class Function:
    """The definition of a function."""

    name: str
    body: CommandList


Command = Simple | CommandList | If | Case | For | While | Function


class _Lexer:
    """Cuts a script into words and operators."""

    def __init__(self, text: str, file: str, line: int = 1):
        self.text, self.file, self.at, self.line = text, file, 0, line
        self.heredocs: list[HereDocument] = []

    def fail(self, problem: str, line: int, cure: str = "close it") -> InputError:
        return InputError(f"{problem} ({self.file}, line {line}): {cure}.")

    def tokens(self) -> list[Word | Operator]:
        found: list[Word | Operator] = []
        drops = False  # the next word is the file of a redirection
        while self.at < len(self.text):
            if self._skip_blanks():
                continue
            rest = self.text[self.at : self.at + 3]
            if redirection := re.match(r"\d*(?:&>>?|<<<|<<-?|[<>]+[&|]?)", self.text[self.at : self.at + 8]):
                if redirection[0] in ("<<", "<<-"):
                    self.at += len(redirection[0])
                    while self.at < len(self.text) and self._skip_blanks():
                        pass
                    end = re.sub(r"[\"'\\]", "", word := self.word().raw)
                    self.heredocs.append(HereDocument(end, end != word, _shell_of(found)))
                    continue
                if not self.text.startswith(("<(", ">("), self.at):
                    self.at += len(redirection[0])
                    drops = True
                    continue
            operator = next((each for each in _OPERATORS if rest.startswith(each)), None)
            if operator:
                found.append(Operator(operator, self.line))
                self.at += len(operator)
                drops = False
                if operator == "\n":
                    self.line += 1
                    self._read_heredocs(found)
                continue
            word = self.word()
            if not drops:
                found.append(word)
            drops = False
        return found

    def _skip_blanks(self) -> bool:
        """Skip a blank, a continued line or a comment; whether there was one."""
        text, at = self.text, self.at
        if text[at] in " \t\r":
            self.at += 1
        elif text.startswith("\\\n", at):
            self.at, self.line = at + 2, self.line + 1
        elif text[at] == "#" and (at == 0 or text[at - 1] in " \t\n;&|()"):
            end = text.find("\n", at)
            self.at = len(text) if end < 0 else end
        else:
            return False
        return True

    def _read_heredocs(self, found: list[Word | Operator]) -> None:
        """Go over the here-documents that begin here; one that a shell reads becomes its `-c TEXT`."""
        added = 0  # words, before those of the next document
        for document in self.heredocs:
            first, line, last = self.at, self.line, len(self.text)
            while self.at < len(self.text):
                stop = self.text.find("\n", self.at)
                stop = len(self.text) if stop < 0 else stop
                ended, start = self.text[self.at : stop].strip() == document.end, self.at
                self.at, self.line = stop + 1, self.line + 1
                if ended:
                    last = start
                    break
            if document.shell is not None:
                text, at = "\n" + self.text[first:last], document.shell + 1 + added
                line -= 1  # that of the first line break
                found[at:at] = [Word("-c", line), Word(_quoted(text, document.is_quoted), line)]
                added += 2
        self.heredocs = []

    def word(self) -> Word:
        start, line, text = self.at, self.line, self.text
        while self.at < len(text) and text[self.at] not in " \t\r\n;&|()<>":
            self._piece(0)
            assigned = text[start : self.at]
            if self.at < len(text) and text[self.at] == "(" and assigned.endswith("="):
                if ASSIGNMENT.fullmatch(assigned):
                    return self._array(assigned, line)
        if text.startswith(("<(", ">("), start):
            self.at += 1
            self._balanced("(", 0)
        if self.at == start:
            found = shown(text[start : start + 1]) or "the end of the script"
            raise self.fail(f"{found} is not read here", line, "write the launch line by itself")
        return Word(_unfolded(text[start : self.at]), line)

    def _array(self, assigned: str, line: int) -> Word:
        self.at += 1
        items = []
        while self.at < len(self.text):
            if self._skip_blanks():
                continue
            character = self.text[self.at]
            if character == "\n":
                self.at, self.line = self.at + 1, self.line + 1
            elif character == ")":
                self.at += 1
                return Word(assigned, line, tuple(items))
            else:
                items.append(self.word())
        raise self.fail(f"the array {assigned}( has no end", line)

    def _piece(self, depth: int) -> None:
        """Go over a character with what belongs to it: a quoted text, a substitution."""
        if depth > MAX_DEPTH:
            raise self.fail("quotes and substitutions are nested too deeply", self.line, "simplify the line")
        text, at, character = self.text, self.at, self.text[self.at]
        if character == "\\":
            self.line += text.startswith("\n", at + 1)
            self.at = min(at + 2, len(text))
        elif character in "'`":
            self._until(character)
        elif character == '"':
            self._quoted(depth)
        elif character == "$" and text[at + 1 : at + 2] in ("(", "{"):
            self.at += 1
            self._balanced(text[at + 1], depth)
        elif character == "$" and text[at + 1 : at + 2] == "'":
            closed = re.compile(r"(?:\\.|[^'\\])*'", re.DOTALL).match(text, at + 2)
            if closed is None:
                raise self.fail("the quote $' is not closed", self.line)
            self.line += text.count("\n", at, closed.end())
            self.at = closed.end()
        else:
            self.line += character == "\n"
            self.at += 1

    def _until(self, quote: str) -> None:
        end = self.text.find(quote, self.at + 1)
        if end < 0:
            raise self.fail(f"the quote {quote} is not closed", self.line)
        self.line += self.text.count("\n", self.at, end)
        self.at = end + 1

    def _quoted(self, depth: int) -> None:
        line = self.line
        self.at += 1
        while self.at < len(self.text) and self.text[self.at] != '"':
            if self.text.startswith(("'", "$'"), self.at):  # no quotes here
                self.at += 1
            else:
                self._piece(depth + 1)
        if self.at >= len(self.text):
            raise self.fail('the quote " is not closed', line)
        self.at += 1

    def _balanced(self, opening: str, depth: int) -> None:
        line, closing, level = self.line, _CLOSING[opening], 1
        self.at += 1
        while self.at < len(self.text) and level:
            character = self.text[self.at]
            if character in (opening, closing):
                level += 1 if character == opening else -1
                self.at += 1
            else:
                self._piece(depth + 1)
        if level:
            raise self.fail(f"${opening} is not closed", line)


def _unfolded(text: str) -> str:
    """A word without the breaks of continued lines."""
    return re.sub(r"\\.", lambda found: "" if found[0] == "\\\n" else found[0], text, flags=re.DOTALL)


def _quoted(text: str, is_literal: bool) -> str:
    """A here-document as a word: in it quotes are characters, and of escapes that of a quote is none."""
    if is_literal:
        return "'" + text.replace("'", "'\\''") + "'"
    escaped = {'"': r"\"", r"\"": r"\\\""}
    return '"' + re.sub(r"\\.|\"", lambda found: escaped.get(found[0], found[0]), text, flags=re.DOTALL) + '"'


def _shell_of(tokens: list[Word | Operator]) -> int | None:
    """The index of the shell that is the newest command, perhaps behind srun, with options only; sbatch gets one."""
    start = next((at + 1 for at in reversed(range(len(tokens))) if isinstance(tokens[at], Operator)), 0)
    words = [word.raw for word in tokens[start:] if isinstance(word, Word)]
    if words and words[0].rpartition("/")[2] == "sbatch":  # the document is its script
        tokens.append(Word(SHELLS[0], tokens[-1].line))
        return len(tokens) - 1
    while words and re.fullmatch(r"-[a-bd-z]+", words[-1]):
        words.pop()
    return start + len(words) - 1 if words and words[-1] in SHELLS else None


class _Parser:
    """Puts words and operators into a tree."""

    def __init__(self, tokens: list[Word | Operator], file: str):
        self.tokens, self.file, self.at = tokens, file, 0

    def peek(self) -> Word | Operator | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def _is(self, *texts: str) -> bool:
        token = self.peek()
        return token is not None and (token.raw if isinstance(token, Word) else token.text) in texts

    def _take(self) -> Word | Operator:
        self.at += 1
        return self.tokens[self.at - 1]

    def expect(self, *texts: str, start: int) -> None:
        if not self._is(*texts):
            raise InputError(f"the block from line {start} has no {texts[0]} ({self.file}): complete it.")
        self.at += 1

    def block(self, *ends: str, depth: int = 0) -> CommandList:
        """Commands up to one of the words or operators `ends`, or of the script."""
        if depth > MAX_DEPTH:
            raise InputError(f"{self.file} has more than {MAX_DEPTH} blocks in each other: simplify it.")
        found, before = CommandList(), ""
        while (token := self.peek()) is not None and not self._is(*ends):
            if isinstance(token, Operator) and token.text != "(":
                self.at += 1
                before = token.text if token.text in ("&&", "||", "|") else before if token.text == "\n" else ""
                continue
            found.commands.append((before, self._command(depth)))
            before = ""
        return found

    def _command(self, depth: int) -> Command:
        token = self.peek()
        assert token is not None
        line = token.line
        if isinstance(token, Operator):
            return self._group("(", ")", line, depth)
        if token.raw == "{":
            return self._group("{", "}", line, depth)
        known = {"if": self._if, "case": self._case, "for": self._for, "while": self._while, "until": self._while}
        if token.raw in known:
            self.at += 1
            return known[token.raw](line, depth)
        if token.raw == "function" or self._defines():
            return self._function(line, depth)
        words: list[Word] = []
        while isinstance(word := self.peek(), Word):
            words.append(word)
            self.at += 1
            if word.raw == "[[" and len(words) == 1:
                self._until_brackets(words)
        return Simple(words, line)

    def _until_brackets(self, words: list[Word]) -> None:
        """The words of [[ ... ]], in which operators are words."""
        while (token := self.peek()) is not None and not self._is("\n", ";"):
            words.append(token if isinstance(token, Word) else Word(token.text, token.line))
            self.at += 1
            if words[-1].raw == "]]":
                return

    def _defines(self) -> bool:
        following = self.tokens[self.at + 1 : self.at + 3]
        return [token.text for token in following if isinstance(token, Operator)] == ["(", ")"]

    def _group(self, opening: str, closing: str, line: int, depth: int) -> CommandList:
        self.at += 1
        found = self.block(closing, depth=depth + 1)
        self.expect(closing, start=line)
        return found

    def _function(self, line: int, depth: int) -> Function:
        self.at += self._is("function")
        name = self._take() if self.peek() is not None else None
        if self._is("("):
            self.at += 2
        while self._is("\n"):
            self.at += 1
        if not self._is("{") or not isinstance(name, Word):
            raise InputError(f"the function from line {line} has no {{ ({self.file}): complete it.")
        return Function(name.raw, self._group("{", "}", line, depth))

    def _if(self, line: int, depth: int) -> If:
        branches: list[tuple[CommandList | None, CommandList]] = []
        while True:
            condition = self.block("then", depth=depth + 1)
            self.expect("then", start=line)
            branches.append((condition, self.block("elif", "else", "fi", depth=depth + 1)))
            if not self._is("elif"):
                break
            self.at += 1
        if self._is("else"):
            self.at += 1
            branches.append((None, self.block("fi", depth=depth + 1)))
        self.expect("fi", start=line)
        return If(branches, line)

    def _case(self, line: int, depth: int) -> Case:
        word = self._take() if self.peek() is not None else None
        while self._is("\n"):
            self.at += 1
        self.expect("in", start=line)
        branches: list[tuple[list[Word], CommandList, str]] = []
        while (token := self.peek()) is not None and not self._is("esac"):
            if self._is("\n", "(", ";"):
                self.at += 1
                continue
            patterns = []
            while (token := self.peek()) is not None and not self._is(")"):
                patterns += [token] if isinstance(token, Word) else []
                self.at += 1
            self.expect(")", start=line)
            body = self.block(*_ENDS_OF_A_CASE, "esac", depth=depth + 1)
            end = self._take() if self._is(*_ENDS_OF_A_CASE) else None
            branches.append((patterns, body, end.text if isinstance(end, Operator) else ""))
        self.expect("esac", start=line)
        if not isinstance(word, Word):
            raise InputError(f"the case from line {line} has no word ({self.file}): complete it.")
        return Case(word, branches, line)

    def _for(self, line: int, depth: int) -> For:
        name, words = self.peek(), None
        while (token := self.peek()) is not None and not self._is("do"):
            self.at += 1
            if isinstance(token, Word) and token.raw == "in":
                words = []
            elif isinstance(token, Word) and words is not None:
                words.append(token)
        self.expect("do", start=line)
        body = self.block("done", depth=depth + 1)
        self.expect("done", start=line)
        return For(name.raw if isinstance(name, Word) else "", words, body, line)

    def _while(self, line: int, depth: int) -> While:
        word, condition = self.tokens[self.at - 1], self.block("do", depth=depth + 1)
        self.expect("do", start=line)
        body = self.block("done", depth=depth + 1)
        self.expect("done", start=line)
        return While(condition, body, line, isinstance(word, Word) and word.raw == "until")


def end_of_piece(text: str, at: int, file: str, line: int) -> int:
    """The index behind the quoted text or the substitution that begins at `at`. `InputError` if it is not closed."""
    lexer = _Lexer(text, file, line)
    lexer.at = at
    lexer._piece(0)
    return lexer.at


def parse(text: str, file: str, line: int = 1) -> CommandList:
    """The commands of a script. `InputError` for one that has no end."""
    return _Parser(_Lexer(text, file, line).tokens(), file).block()
